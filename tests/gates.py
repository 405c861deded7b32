"""Gates that no linter has: `python -m tests.gates`, part of `make check`.

Every test can fail (it asserts something), the client stays light to import, and what `pip install tinkex`
brings stays small. Figures are compared with gates.json; `--record` writes them anew. What an import loads is
counted, since a count is the same everywhere; its CPU time has a wide margin and catches only landslides.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
RECORD = TESTS / "gates.json"
SLACK = 1.1  # versions of Python and of dependencies
CPU_SLACK = 3.0  # a ratio of two CPU times was 1.25 times itself on another machine

# Calls that fail a test by themselves: a result raises what went wrong, a wait says that it was in vain.
CHECKS = re.compile(r"^(raises|warns|fail|check|assert|expect|result|eventually|wait_for)")


def tests_without_assertion() -> Iterator[str]:
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        functions = {
            n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for name, function in functions.items():
            if name.startswith("test_") and not _asserts(function, functions, set()):
                yield f"{path.relative_to(TESTS.parent)}:{function.lineno}: {name} asserts nothing"


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


def import_cost(code: str) -> float:
    """Its CPU over that of `import asyncio, json, logging`: the machine's speed cancels out."""
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
    total = sum(p.stat().st_size for p in (TESTS.parent / "src").rglob("*.py"))
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


def main() -> int:
    problems = list(tests_without_assertion())
    client = "import tinkex; tinkex.ServiceClient"
    figures = {
        "package_modules": modules_loaded("import tinkex"),
        "package_cpu": round(import_cost("import tinkex"), 2),
        "client_modules": modules_loaded(client),
        "client_cpu": round(import_cost(client), 2),
        "installed_megabytes": round(installed_megabytes(), 1),
    }
    if "--record" in sys.argv:
        RECORD.write_text(json.dumps(figures, indent=2) + "\n")
    for name, recorded in json.loads(RECORD.read_text()).items():
        sys.stdout.write(f"{name}: {figures[name]} (recorded {recorded})\n")
        if figures[name] > (CPU_SLACK if name.endswith("_cpu") else SLACK) * recorded:
            problems.append(
                f"{name} grew from {recorded} to {figures[name]}: make it smaller, or --record it"
            )
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
