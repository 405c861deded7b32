"""Run command lines one after another in this process, through the program's own entry point.

Argument: the program's name. Standard input: a JSON list of {"arguments", "stdin", "env"}. Each answer is a
line: its exit code and what it wrote. For {"walk": true} it is every command and its options, by `--help`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import warnings
from importlib.metadata import entry_points
from typing import Any

(PROGRAM,) = [e for e in entry_points(group="console_scripts") if e.name == sys.argv[1]]
START = PROGRAM.load()
warnings.simplefilter("ignore")


def run(arguments: list[str], stdin: str = "", env: dict[str, str] | None = None) -> dict[str, Any]:
    before, out, err = dict(os.environ), io.StringIO(), io.StringIO()
    os.environ.update(env or {})
    for name in [name for name, value in (env or {}).items() if value == ""]:
        del os.environ[name]
    sys.argv, sys.stdin = [PROGRAM.name, *arguments], io.StringIO(stdin)
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            START()
        except SystemExit as exit:
            code = exit.code or 0
    os.environ.clear()
    os.environ.update(before)
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def walk(path: list[str]) -> dict[str, list[str]]:
    """Every command below `path` with the options that its help shows."""
    shown = run([*path, "--help"])["stdout"]
    options, _, commands = shown.partition("\nCommands:\n")
    found = {" ".join(path): re.findall(r"(?m)^  (?:-\w, )?(--[\w-]+)", options)}
    for name in re.findall(r"(?m)^  ([a-z][\w-]*)", commands):
        found |= walk([*path, name])
    return found


said = sys.__stdout__
assert said is not None
for request in json.load(sys.stdin):
    print(json.dumps(walk([]) if "walk" in request else run(**request)), file=said, flush=True)
os._exit(0)  # official clients now and then abort while the interpreter takes their threads down
