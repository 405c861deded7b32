"""The process that writes an export for a server: `python -m tinkex.export_process`.

The first line of its standard input is JSON: what to write, as `export_adapter` takes it. It ends when its
input ends. Each line of its standard output is JSON: how many bytes of how many are done, or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tinkex.errors import InvalidInputError, ModelError
from tinkex.exports import ExportOptions, export_adapter

PAUSE = 0.3  # seconds between two lines of progress


def main() -> None:
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(10)  # a server's requests come first
    said, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not ours
    latest = 0.0

    def tell(**line: Any) -> None:
        said.write(f"{json.dumps(line)}\n")
        said.flush()

    def progress(done: int, total: int | None) -> None:
        nonlocal latest
        if (now := time.monotonic()) - latest >= PAUSE:
            latest = now
            tell(done=done, total=total)

    try:
        options = ExportOptions(given["format"], quantize=given["quantize"])
        export_adapter(
            Path(given["adapter"]), Path(given["out"]), options, base=given["base"],
            base_name=given["base_name"], progress=progress,
        )  # fmt: skip
    except (InvalidInputError, ModelError) as error:
        tell(problem=str(error))
    except Exception as error:
        tell(problem=f"{type(error).__name__}: {error}")
    else:
        tell(written=True)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
