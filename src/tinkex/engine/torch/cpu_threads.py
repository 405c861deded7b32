"""How many CPU threads compute: as many as there are cores that others leave idle.

Others are other processes, and this one's Python threads: a busy server's event loop takes a core as well.
OpenMP threads spin while they wait, so one too many slows a pass down many times over. OpenMP counts per
thread, so the computing thread sets the number. It keeps a team for every live thread that ever computed,
which costs time as well: only the engine's thread may keep one, and others compute inside `apart`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

_SECONDS = 3.0  # between two adjustments
_FIRST = 0.5  # before the first one: 50 clock ticks per core
SHARED = 1 << 22  # multiplications from which on a second thread saves more than a fifth of the time
_BUSY = 0.4  # of a core: others that use more keep it


class ComputeThreads:
    """Sets torch's thread count for the calling thread: now, and when `adjust` finds another load."""

    def __init__(self, given: int | None) -> None:
        self._fixed = given
        self.cores = usable_cores()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        self.count = given or threads_beside(load, self.cores)
        self._last, self._wait = self._used(), _FIRST
        torch.set_num_threads(self.count)

    def adjust(self) -> None:
        if self._fixed or time.monotonic() - self._last[0] < self._wait:
            return
        before, self._last, self._wait = self._last, self._used(), _SECONDS
        elapsed, everyone, own = (now - then for now, then in zip(self._last, before, strict=True))
        count = threads_beside((everyone - own) / elapsed, self.cores)
        if count != self.count:
            self.count = count
            torch.set_num_threads(count)

    def _used(self) -> tuple[float, float, float]:
        """The time, and CPU seconds used so far: by everyone on our cores, by this thread and OpenMP's."""
        own = time.process_time() - _of_other_python_threads()
        return time.monotonic(), _cpu_seconds() or own, own


@contextmanager
def shared(work: int, least: int) -> Iterator[None]:
    """Compute with one thread if `work` is below `least`: waiting helpers spin, and keep a core busy."""
    count = torch.get_num_threads()
    if count == 1 or work >= least:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def apart(function: Callable[[], T]) -> T:
    """Run `function` on a thread of its own, whose OpenMP team ends with it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="tinkex-apart", daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    result = done.result()
    thread.join()
    return result


def threads_beside(load: float, cores: int) -> int:
    """Our threads, if others keep `load` of the `cores` busy.

    >>> [threads_beside(load, 4) for load in (0.2, 0.7, 2.1, 9.0)]
    [4, 3, 2, 1]
    """
    return max(1, cores - int(load + 1 - _BUSY))


def usable_cores() -> int:
    """Cores this process may run on: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups, or "max"
        return cores


def _of_other_python_threads() -> float:
    """CPU seconds of this process's Python threads but this one; 0 where the system does not say."""
    ticks = 0
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            with suppress(OSError):  # it has just ended, or there is no /proc
                stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
                ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))  # user, system
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def _cpu_seconds() -> float | None:
    """CPU seconds used by all processes on the cores of our affinity; None where the system does not say."""
    try:
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        ticks = sum(sum(map(int, row[1:4])) for row in rows if row and row[0] in ours)  # user, nice, system
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
