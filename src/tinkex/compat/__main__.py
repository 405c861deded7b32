"""`python -m tinkex.compat SCRIPT.py …` or `-m MODULE …`: run a program with `tinker` resolved to tinkex."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tinkex.compat import install

USAGE = """usage: python -m tinkex.compat SCRIPT.py [ARGUMENTS]
       python -m tinkex.compat -m MODULE [ARGUMENTS]

Runs a program written for the official tinker package on tinkex: `import tinker` gives tinkex,
whether or not the official package is installed. With neither TINKER_API_KEY nor TINKER_BASE_URL set, it
trains and samples inside the process.
"""


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        sys.stdout.write(USAGE)
        sys.exit(0 if arguments and arguments[0] != "-m" else 2)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if not sys.flags.safe_path:
            sys.path.insert(0, "")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.is_file():
        sys.exit(f"python -m tinkex.compat: no such script: {script}")
    sys.argv = arguments
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


main(sys.argv[1:])
