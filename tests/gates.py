"""Checks that no linter has: `python -m tests.gates`, part of `make check`.

- Every test can fail: it asserts something. No test file imports another.
- One word, one thing: no two classes of one name under src/, and no module name used for two jobs.
- src/ stays small, the client stays light to import, and the base install stays small.
- Code and pages cite only documents that are in the repository.

Figures are compared with gates.json, and `--record` writes them anew. The number of modules that an import
loads is the same everywhere. CPU time is not: it has a wide margin and catches only large regressions.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "tinkex"
RECORD = TESTS / "gates.json"
SUFFIXES = {".py", ".pyi", ".c", ".h", ".proto"}  # of files that are read and counted
SLACK = 1.1  # versions of Python and of dependencies
CPU_SLACK = 3.0  # a ratio of two CPU times differed by a factor of 1.25 between two machines
SOURCE_LINES = 68_585  # lines under src/, generated files included; raised only with a feature

# Classes that may share a name: none. The list may only shrink.
SHARED_CLASS_NAMES: set[str] = set()

# Module names that occur more than once, and why that is one job each time. The list may only shrink.
SHARED_MODULE_NAMES = {
    "billing": "usage: the service's operations, the command",
    "checkpoints": "saved adapters: the values, the service's operations, the client's calls",
    "config": "settings: of the process, of the service, and those that a server sends to its clients",
    "data": "training examples: the values, and what makes them",
    "demo": "the package, and the command that runs it",
    "engine": "the package, and the engine that torch implements",
    "futures": "promised results: the values, and where the service keeps them",
    "losses": "losses: the table, and each engine's formulas",
    "models": "the package of named models, and the engine's package of architectures",
    "sampler": "the contract's Sampler, in each engine",
    "sampling": "the values, and the client of them",
    "serve": "the command, and what it starts",
    "service": "the package, its class, and the client of it",
    "sessions": "the values, and the service's operations",
    "trainer": "the contract's Trainer, in each engine",
    "training": "the values, and the client of them",
}

# Documents that are not in the repository, and numbered paragraphs of any.
OUTSIDE = re.compile(r"wire-protocol|client-behaviour|design(?:\.md)? §|\bspec/|§ ?\d|\bissue #?\d")

# Calls that fail a test by themselves: a result raises what went wrong, a wait fails when its time is up.
CHECKS = re.compile(r"^(raises|warns|fail|check|assert|expect|result|eventually|wait_for)")


# -- tests -------------------------------------------------------------------------------------------------


def tests_without_assertion() -> Iterator[str]:
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        functions = {
            n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for name, function in functions.items():
            if name.startswith("test_") and not _asserts(function, functions, set()):
                yield f"{path.relative_to(ROOT)}:{function.lineno}: {name} asserts nothing"


def _asserts(function: ast.AST, functions: dict[str, ast.AST], seen: set[str]) -> bool:
    """Does it assert, itself or through a function of the same file?"""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Try) and _is_narrow(node)):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            if CHECKS.match(name.lstrip("_")):
                return True
            if name in functions and name not in seen and _asserts(functions[name], functions, seen | {name}):
                return True
    return False


def _is_narrow(node: ast.Try) -> bool:
    """It lets certain errors pass, and no others."""
    names = [ast.unparse(handler.type) if handler.type else "" for handler in node.handlers]
    return bool(names) and not {"", "Exception", "BaseException"} & set(names)


def tests_that_import_tests() -> Iterator[str]:
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules: list[str] = []
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            if any(module.startswith("tests.") and ".test_" in module for module in modules):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: imports a test file; share a helper module"


# -- names, size, citations --------------------------------------------------------------------------------


def class_names_used_twice() -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    yield from _used_twice("class", places, SHARED_CLASS_NAMES)


def module_names_used_twice() -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for path in _sources():
        name = path.parent.name if path.name == "__init__.py" else path.stem
        if path != SOURCE / "__init__.py" and not name.startswith("__"):
            places[name].append(str(path.relative_to(SOURCE)))
    yield from _used_twice("module", places, SHARED_MODULE_NAMES.keys())


def _used_twice(kind: str, places: dict[str, list[str]], shared: Collection[str]) -> Iterator[str]:
    names = set(shared)
    for name, where in sorted(places.items()):
        if len(where) > 1 and name not in names:
            yield f"{kind} {name} is in {', '.join(where)}: one word, one thing"
    for name in sorted(names):
        if len(places.get(name, ())) < 2:
            yield f"{kind} {name} has one place now: take it off the list in {Path(__file__).name}"


def _sources() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if not path.name.endswith("_pb2.py")]


def too_many_lines() -> Iterator[str]:
    lines = sum(path.read_bytes().count(b"\n") for path in SOURCE.rglob("*") if path.suffix in SUFFIXES)
    sys.stdout.write(f"source_lines: {lines} (at most {SOURCE_LINES})\n")
    if lines > SOURCE_LINES:
        yield f"src/ has {lines} lines, more than {SOURCE_LINES}"


def citations_from_outside() -> Iterator[str]:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*")]
    code = [path for folder in ("src", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    for path in sorted([*pages, *code]):
        if path == Path(__file__) or path.suffix not in (".py", ".md"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := OUTSIDE.search(line):
                yield f"{path.relative_to(ROOT)}:{number}: cites {found[0]!r}, which is not in the repository"


# -- weight ------------------------------------------------------------------------------------------------


def import_cost(code: str) -> float:
    """CPU time over that of `import asyncio, json, logging`: the machine's speed cancels out."""
    return min(_cpu(code) for _ in range(5)) / min(_cpu("import asyncio, json, logging") for _ in range(5))


def modules_loaded(code: str) -> int:
    """How many modules an interpreter has after it, beyond those it starts with."""
    counted = f"import sys; n = len(sys.modules); {code}; print(len(sys.modules) - n)"
    return int(subprocess.check_output([sys.executable, "-c", counted], text=True))


def _cpu(code: str) -> float:
    timed = f"import time; t = time.process_time(); {code}; print(time.process_time() - t)"
    return float(subprocess.check_output([sys.executable, "-c", timed], text=True))


def installed_megabytes() -> float:
    """The package and everything that its base install brings, on disk."""
    names, seen = ["tinkex"], set()
    total = sum(p.stat().st_size for p in (ROOT / "src").rglob("*.py"))
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        if name != "tinkex":
            files = [f.locate() for f in distribution.files or [] if "__pycache__" not in str(f)]
            total += sum(Path(str(f)).stat().st_size for f in files if Path(str(f)).exists())
        names += [_name(need) for need in distribution.requires or [] if _needed(need)]
    return total / 1e6


def _name(requirement: str) -> str:
    return re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0].lower()


def _needed(requirement: str) -> bool:
    """Not an extra, and not for another Python."""
    try:
        importlib.metadata.distribution(_name(requirement))
    except importlib.metadata.PackageNotFoundError:
        return False
    return "extra ==" not in requirement


def grown_figures(*, record: bool) -> Iterator[str]:
    client = "import tinkex; tinkex.ServiceClient"
    figures = {
        "package_modules": modules_loaded("import tinkex"),
        "package_cpu": round(import_cost("import tinkex"), 2),
        "client_modules": modules_loaded(client),
        "client_cpu": round(import_cost(client), 2),
        "installed_megabytes": round(installed_megabytes(), 1),
    }
    if record:
        RECORD.write_text(json.dumps(figures, indent=2) + "\n")
    for name, recorded in json.loads(RECORD.read_text()).items():
        sys.stdout.write(f"{name}: {figures[name]} (recorded {recorded})\n")
        if figures[name] > (CPU_SLACK if name.endswith("_cpu") else SLACK) * recorded:
            yield f"{name} grew from {recorded} to {figures[name]}: make it smaller, or --record it"


def main() -> int:
    problems = [
        *tests_without_assertion(), *tests_that_import_tests(),
        *class_names_used_twice(), *module_names_used_twice(), *too_many_lines(), *citations_from_outside(),
        *grown_figures(record="--record" in sys.argv),
    ]  # fmt: skip
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
