"""Rewards of answers: your function, a regular expression, or a program; each with a time limit.

`module:function` is called as `function(text, row)` and returns a number; `regex:PATTERN` gives 1 where the
pattern is found; `program:COMMAND` reads {"text": …, "row": …} as JSON from stdin and prints a number. All
run in child processes: one that takes too long is killed, and its answer gets 0 and is counted.
"""

from __future__ import annotations

import json
import math
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinkex.errors import InvalidInputError

_WORKER = Path(__file__).with_name("reward_worker.py")
KINDS = "module:function, regex:PATTERN or program:COMMAND"


class Reward:
    """A reward by its spec. `timeouts` counts the answers that took too long."""

    def __init__(self, spec: str, seconds: float = 10.0) -> None:
        kind, _, rest = spec.partition(":")
        if not rest:
            raise InvalidInputError(f"a reward is {KINDS}, got {spec!r}")
        self._spec, self._seconds, self.timeouts = spec, seconds, 0
        self._worker: subprocess.Popen[bytes] | None = None
        self._score: Callable[[str, Mapping[str, Any]], float | None] = self._ask
        if kind == "program":
            self._program = shlex.split(rest)
            self._score = self._run
        else:
            self._ask("", {}, check_only=True)

    def __call__(self, text: str, row: Mapping[str, Any]) -> float:
        value = self._score(text, row)
        if value is None:
            self.timeouts += 1
            return 0.0
        if not math.isfinite(value):
            raise InvalidInputError(f"the reward {self._spec} gave {value}: rewards must be finite")
        return value

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def _ask(self, text: str, row: Mapping[str, Any], check_only: bool = False) -> float | None:
        """Let the worker compute it; None if it did not answer in time."""
        if self._worker is None or self._worker.poll() is not None:
            command = [sys.executable, str(_WORKER), self._spec]
            self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._worker.stdin is not None
        question = {"text": text, "row": dict(row), "check_only": check_only}
        self._worker.stdin.write(json.dumps(question, default=str).encode() + b"\n")
        self._worker.stdin.flush()
        line = self._line(self._worker, self._seconds + (60 if check_only else 0))  # it imports at first
        if line is None:
            self.close()
            return None
        answer = json.loads(line or b'{"error": "its process ended"}')
        if "error" in answer:
            raise InvalidInputError(f"the reward {self._spec}: {answer['error']}")
        return float(answer["reward"])

    def _line(self, worker: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        assert worker.stdout is not None
        until = time.monotonic() + seconds
        ready, _, _ = select.select([worker.stdout], [], [], max(0.0, until - time.monotonic()))
        return worker.stdout.readline() if ready else None

    def _run(self, text: str, row: Mapping[str, Any]) -> float | None:
        question = json.dumps({"text": text, "row": dict(row)}, default=str)
        try:
            done = subprocess.run(
                self._program, input=question, capture_output=True, text=True, timeout=self._seconds
            )
        except subprocess.TimeoutExpired:
            return None
        except FileNotFoundError:
            raise InvalidInputError(f"the reward {self._spec}: there is no such program") from None
        try:
            return float(done.stdout)
        except ValueError:
            shown = (done.stderr or done.stdout).strip()[-300:]
            raise InvalidInputError(
                f"the reward {self._spec} must print a number, exit code {done.returncode}: {shown}"
            ) from None
