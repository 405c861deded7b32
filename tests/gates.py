"""Checks that no linter has: `python -m tests.gates`, part of `make check`.

- Every test can fail: it asserts something. No test file imports another.
- One word, one thing: no two classes of one name under src/, and no module name used for two jobs. Words of
  our own for what the field has a term for do not come back.
- Go-to-definition works: no callback is assigned to another object after its construction.
- What is defined is used, and the files that comments and docstrings name exist.
- src/ stays small, the client stays light to import, and the base install stays small.
- Code and pages cite only documents that are in the repository.

Figures are compared with gates.json, and `--record` writes them anew. The number of modules that an import
loads is the same everywhere. CPU time is not: it has a wide margin and catches only large regressions.
"""

from __future__ import annotations

import ast
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "tinkex"
RECORD = TESTS / "gates.json"
SUFFIXES = {".py", ".pyi", ".c", ".h", ".proto"}  # of files that are read and counted
SLACK = 1.1  # versions of Python and of dependencies
CPU_SLACK = 3.0  # a ratio of two CPU times differed by a factor of 1.25 between two machines
SOURCE_LINES = 70_240  # lines under src/, generated files included; raised only with a feature

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

# Words of our own, where the field has a term: CONTRIBUTING.md, "Plain words".
ODD_WORDS = re.compile(
    r"trainer's bits|put away|taken up|what is owed|word to forget"
    r"|\b(?:Story|Seats|Shelf|Errand|Lane|Door|Hold)\b"
)

# Callables that are assigned to an attribute of another object, as the interface of a library requires.
ASSIGNED_CALLABLES = {"service/ledger_schema.py: db.text_factory"}

# Names that only a library calls: methods that override its own, or that it finds by their names.
CALLED_BY_LIBRARIES = {
    "buffer_updated": "asyncio.BufferedProtocol", "get_buffer": "asyncio.BufferedProtocol",
    "capture_signals": "uvicorn.Server", "create_module": "importlib.abc.Loader",
    "format_commands": "click.Group", "list_commands": "click.Group", "on_header": "httptools",
}  # fmt: skip

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


def odd_words(texts: Mapping[str, str]) -> Iterator[str]:
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if found := ODD_WORDS.search(line):
                yield f"{name}:{number}: {found[0]!r} is a word of our own: write the field's term"


def callables_assigned_from_outside(sources: Mapping[str, str], allowed: Collection[str]) -> Iterator[str]:
    """Assignments of functions and methods to attributes of anything but self or cls."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    methods = {n.name for c in classes for n in c.body if isinstance(n, _FUNCTION) and not n.decorator_list}
    stored = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    anywhere = {n.name for n in nodes if isinstance(n, _FUNCTION)} - methods

    def is_callable(value: ast.expr | None, here: set[str]) -> bool:
        if isinstance(value, ast.Call):
            return ast.unparse(value.func).endswith("partial")
        if isinstance(value, ast.Attribute):
            return value.attr in methods - stored
        return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in anywhere & here)

    found = set[str]()
    for name, tree in trees.items():
        here = {n.name for n in ast.walk(tree) if isinstance(n, _FUNCTION | ast.alias)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_callable(node.value, here):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls"):
                        found.add(place := f"{name}: {ast.unparse(target)}")
                        if place not in allowed:
                            yield f"{name}:{node.lineno}: {ast.unparse(node)}: give it to the constructor"
    for place in sorted(set(allowed) - found):
        yield f"{place} is assigned no more: take it off the list in {Path(__file__).name}"


def names_never_used(sources: Mapping[str, str], others: Iterable[str]) -> Iterator[str]:
    """Functions, classes and constants whose name occurs nowhere else."""
    words = Counter(word for text in [*sources.values(), *others] for word in re.findall(r"\w+", text))
    defined: dict[str, list[str]] = defaultdict(list)
    for name, text in sources.items():
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, _FUNCTION | ast.ClassDef) and not _is_registered(node):
                defined[node.name].append(f"{name}:{node.lineno}")
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    constants = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
                    for constant in constants:
                        defined[constant].append(f"{name}:{node.lineno}")
    for name, places in sorted(defined.items()):
        if words[name] <= len(places) and name not in CALLED_BY_LIBRARIES and not name.startswith("__"):
            yield f"{places[0]}: {name} is used nowhere"


def _is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Does a decorator hand it to somebody, as a command, a validator or a callback?"""
    kept = (
        "property",
        "classmethod",
        "staticmethod",
        "dataclass",
        "cache",
        "override",
        "overload",
        "contextmanager",
    )
    return any(not any(word in ast.unparse(one) for word in kept) for one in node.decorator_list)


def files_that_are_not_there(sources: Mapping[str, str], files: Collection[str]) -> Iterator[str]:
    """Files that a comment or a docstring names, by the end of their path."""
    for name, text in sources.items():
        said = [(token.start[0], token.string) for token in _comments(text)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _FUNCTION | ast.ClassDef | ast.Module) and (doc := ast.get_docstring(node)):
                said.append((getattr(node, "lineno", 1), doc))
        for line, words in said:
            for cited in re.findall(r"[\w./-]*\w\.(?:py|md)\b", words):
                if not any(f"/{file}".endswith(f"/{cited}") for file in files):
                    yield f"{name}:{line}: names {cited}, which does not exist"


def _comments(text: str) -> Iterator[tokenize.TokenInfo]:
    return (
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    )


_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def texts_of(paths: Iterable[Path], root: Path = ROOT) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def problems_of_sources() -> Iterator[str]:
    """All checks that read the text of the tree."""
    folders = ("src", "tests", "docs", "examples", "bench", "deploy")
    suffixes = {*SUFFIXES, ".md", ".html", ".js", ".ipynb", ".yaml", ".toml"}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    paths += [path for path in ROOT.iterdir() if path.suffix in suffixes]
    everything, code = texts_of(paths), texts_of(_sources())
    shown = {n: text for n, text in everything.items() if n.startswith(("src/", "docs/"))}
    yield from odd_words(shown)
    wired = [path for folder in ("client", "server", "service") for path in (SOURCE / folder).rglob("*.py")]
    yield from callables_assigned_from_outside(texts_of(wired, SOURCE), ASSIGNED_CALLABLES)
    yield from names_never_used(code, (text for n, text in everything.items() if n not in code))
    yield from files_that_are_not_there(code, everything)


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
        *problems_of_sources(), *grown_figures(record="--record" in sys.argv),
    ]  # fmt: skip
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
