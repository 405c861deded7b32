"""`step.c` as a library: compiled once by the machine's own C compiler, kept beside Python's own bytecode.

A machine without a compiler, or one on which it fails, gets None and computes by torch's operations. The
library is named after all that it was made from (source, options, the CPU's features), so nothing stale is
ever loaded. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("step.c")
_OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_OPENMP = "-fopenmp"  # its calls go to the OpenMP that torch has loaded, and its threads
_SECONDS = 120.0
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)  # an installation that others may only read

log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled step; None where there is none."""
    return build(shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"))


def build(compiler: str | None) -> ctypes.CDLL | None:
    """The library as `compiler` makes it, or has made it before."""
    if compiler is None:
        log.info("no C compiler: decoding steps on the CPU are made of torch's operations")
        return None
    for directory in (_SOURCE.parent / "__pycache__", Path.home() / ".cache" / "tinkex"):
        try:
            return _signatures(ctypes.CDLL(str(_made(compiler, directory))))
        except (OSError, subprocess.SubprocessError) as error:
            if isinstance(error, OSError) and error.errno in _NOT_OURS:
                continue
            log.warning("decoding steps on the CPU are made of torch's operations: %s", error)
            return None
    return None


def _made(compiler: str, directory: Path) -> Path:
    """The library's file, compiled now if it is not there yet."""
    parts = (_SOURCE.read_bytes(), compiler.encode(), " ".join(_OPTIONS).encode(), _cpu())
    target = directory / f"step.{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / target.name
        try:
            _compile(compiler, made, _OPENMP)
        except subprocess.CalledProcessError:  # a compiler without OpenMP: the step runs on one thread
            _compile(compiler, made)
        os.replace(made, target)  # whoever compiled it meanwhile made the same
    return target


def _compile(compiler: str, target: Path, *more: str) -> None:
    command = [compiler, *_OPTIONS, *more, "-o", str(target), str(_SOURCE), "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)


def _cpu() -> bytes:
    """What `-march=native` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    except OSError:
        told = [platform.processor()]
    return f"{platform.system()} {platform.machine()} {told}".encode()


def _signatures(found: ctypes.CDLL) -> ctypes.CDLL:
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    found.packed_floats.argtypes, found.packed_floats.restype = (number, number), number
    found.scratch_floats.argtypes, found.scratch_floats.restype = (pointer, number), number
    found.pack.argtypes, found.pack.restype = (pointer, number, number, number, number, pointer), None
    found.decode.argtypes, found.decode.restype = (pointer, pointer), None
    found.draw.argtypes = (pointer, number, number, number, pointer, pointer, pointer, pointer)
    found.draw.restype = None
    return found
