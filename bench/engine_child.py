"""One side of one measure of the engine benchmark, in a process of its own.

Started by bench/engine.py with a task as JSON; warms up, says so, and then does one timed round for every
line it reads, answering with that round's figures as JSON. What is timed is in bench/ours.py and
bench/peers.py, which never meet in one process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Figures = dict[str, float]
Round = Callable[[int], Figures]  # given a round's number, which seeds its data


@dataclass(frozen=True)
class Task:
    """What one child does. `lengths` are those of a round's sequences, or of its prompts."""

    measure: str
    side: str  # "ours", "peer" or "machine"
    way: str
    shape: str
    model: str
    device: str
    threads: int  # 0: the engine chooses
    vocab: int
    lengths: list[int]
    new_tokens: int = 0
    adapters: int = 1
    rank: int = 32
    warmups: int = 2

    def sequences(self, turn: int) -> list[np.ndarray]:
        """A round's token ids: the same on both sides, and others in every round, so that no cache helps."""
        draw = np.random.default_rng([turn, len(self.lengths)])
        return [draw.integers(3, self.vocab, n).astype(np.int32) for n in self.lengths]


class Timer:
    """Wall and CPU seconds of a `with` block; on CUDA, until the device is done."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def __enter__(self) -> Timer:
        self._wait()
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._start[0]
        self.cpu = time.process_time() - self._start[1]

    def _wait(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize()

    def figures(self, tokens: int, **more: float) -> Figures:
        return {"tokens": tokens, "seconds": self.seconds, "cpu": self.cpu} | more


class PeakMemory:
    """The most bytes this process, or its CUDA device, held since this was made, less what it held then."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
        else:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak is now what is resident now
            self._base = _status("VmRSS")

    def figures(self) -> Figures:
        if self._cuda:
            import torch

            return {"bytes": torch.cuda.max_memory_allocated() - self._base}
        return {"bytes": _status("VmHWM") - self._base}


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))


def ceilings(task: Task) -> Round:
    """What the machine does at best: FLOP/s of a large product, bytes/s of a copy (read and written)."""
    import torch

    torch.set_num_threads(task.threads)
    cuda = task.device == "cuda"
    n, megabytes = (8192, 4096) if cuda else (1536, 256)
    a = torch.randn(n, n, device=task.device, dtype=torch.bfloat16 if cuda else torch.float32)
    source = torch.ones(megabytes << 20, dtype=torch.uint8, device=task.device)
    target = torch.empty_like(source)

    def best(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(40):  # many, so that on a busy machine one of them is alone
            with Timer(task.device) as timer:
                work()
            seconds.append(timer.seconds)
        return min(seconds)

    def one(turn: int) -> Figures:
        product, copy = best(lambda: a @ a), best(lambda: target.copy_(source))
        return {"flops": 2 * n**3 / product, "bandwidth": 2 * source.nbytes / copy}

    return one


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    if task.side == "machine":
        one = ceilings(task)
    elif task.side == "ours":
        import ours

        one = ours.MEASURES[task.measure](task)
    else:
        import peers

        one = peers.MEASURES[task.measure](task)
    if task.measure != "memory":
        for turn in range(task.warmups):
            one(turn + 1000)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(one(int(line))), flush=True)


if __name__ == "__main__":
    main()
