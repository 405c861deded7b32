"""Compiles `step.c` once with the machine's C compiler and caches the library next to Python's bytecode.

The library's name is a hash of source, options and CPU features, so that no stale library is loaded.
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
_OPENMP = "-fopenmp"  # resolves to the OpenMP that torch has loaded, and shares its threads
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)  # a read-only installation

log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None without a compiler or if it fails: torch then computes the step."""
    return build(shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"))


def build(compiler: str | None) -> ctypes.CDLL | None:
    if compiler is None:
        log.info("no C compiler: decode steps on the CPU use torch operations")
        return None
    for directory in (_SOURCE.parent / "__pycache__", Path.home() / ".cache" / "tinkex"):
        try:
            return _signatures(ctypes.CDLL(str(_made(compiler, directory))))
        except (OSError, subprocess.SubprocessError) as error:
            if isinstance(error, OSError) and error.errno in _NOT_OURS:
                continue
            log.warning("decode steps on the CPU use torch operations: %s", error)
            return None
    return None


def _made(compiler: str, directory: Path) -> Path:
    parts = (_SOURCE.read_bytes(), compiler.encode(), " ".join(_OPTIONS).encode(), _cpu())
    target = directory / f"step.{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / target.name
        try:
            _compile(compiler, made, _OPENMP)
        except subprocess.CalledProcessError:  # no OpenMP: the step runs on one thread
            _compile(compiler, made)
        os.replace(made, target)  # another process may have compiled the same file
    return target


def _compile(compiler: str, target: Path, *more: str) -> None:
    command = [compiler, *_OPTIONS, *more, "-o", str(target), str(_SOURCE), "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def _cpu() -> bytes:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    except OSError:
        told = [platform.processor()]
    return f"{platform.system()} {platform.machine()} {told}".encode()


def _signatures(found: ctypes.CDLL) -> ctypes.CDLL:
    n, at = ctypes.c_int64, ctypes.c_void_p
    for function, arguments, result in (
        (found.packed_floats, (n, n), n),
        (found.scratch_floats, (at, n), n),
        (found.pack, (at, n, n, n, n, at), None),
        (found.decode, (at, at), None),
        (found.draw, (at, n, n, n, at, at, at, at), None),
    ):
        function.argtypes, function.restype = arguments, result
    return found
