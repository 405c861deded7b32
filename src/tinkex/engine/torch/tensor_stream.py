"""Tensors read from safetensors files one at a time, and files that are written front to back and resumed.

Reads copy into private memory instead of mmap, so peak memory is bounded by the tensors in use. Output is
written to a temporary directory beside the target, can be resumed by another process, is guarded by a lock,
and is renamed when complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinkex import store
from tinkex.engine.request import user_error
from tinkex.files import try_lock

Progress = Callable[[int, int], None]  # bytes done, and in all
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U32": torch.uint32,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MARK_BYTES = 256 << 20  # written between two checkpoints from which a killed export is resumed
_MAX_HEADER = 100 << 20
_ABOUT = "export.json"


class Stored(NamedTuple):
    """Where a tensor is, and what it is like."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    nbytes: int

    def read(self) -> Tensor:
        buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.start)
            view, done = buffer.numpy().data, 0
            while done < self.nbytes:
                count = file.readinto(view[done : done + (64 << 20)])
                if not count:
                    raise user_error(f"{self.file} ends in the middle of a tensor; fetch it again")
                done += count
        return buffer.view(self.dtype).view(self.shape)

    def outline(self) -> Tensor:
        """Its shape and dtype, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def stored_tensors(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, in the order in which they lie there."""
    try:
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if not 0 < size <= _MAX_HEADER:
                raise ValueError(f"its header has {size} bytes")
            header: dict[str, Any] = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        length, found = os.path.getsize(file), {}
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            dtype, (start, end) = _DTYPES[about["dtype"]], about["data_offsets"]
            shape = tuple(int(n) for n in about["shape"])
            count = dtype.itemsize * int(torch.Size(shape).numel())
            if end - start != count or start < 0 or 8 + size + end > length:
                raise ValueError(f"{name} lies outside of it")
            found[name] = Stored(file, dtype, shape, 8 + size + start, count)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise user_error(f"{file} cannot be read as safetensors: {error}") from None


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], kind: str = "pt") -> bytes:
    """The beginning of a file with these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": kind}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def data_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


class ResumedFile:
    """A file whose beginning is `header`; what an earlier process wrote after it, up to its mark, is kept."""

    def __init__(self, path: Path, header: bytes) -> None:
        self._mark = path.with_name(f"{path.name}.done")
        self.position = self._kept(path, header)
        self._file = open(path, "r+b" if self.position else "wb")  # noqa: SIM115
        if self.position:
            self._file.truncate(self.position)
            self._file.seek(self.position)
        else:
            self._file.write(header)
            self.position = len(header)
        self._marked = self.position
        self.start = len(header)

    def _kept(self, path: Path, header: bytes) -> int:
        """How many bytes of an earlier process's are good; 0: none."""
        try:
            marked = int(self._mark.read_text())
            with open(path, "rb") as file:
                good = file.read(len(header)) == header and path.stat().st_size >= marked
        except (OSError, ValueError):
            return 0
        return marked if good and marked >= len(header) else 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.position += len(data)

    def end_tensor(self) -> None:
        """A tensor is complete: mark it now and then, once it is on the disk."""
        if self.position - self._marked >= _MARK_BYTES:
            self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._mark.write_text(str(self.position))
        self._marked = self.position

    def close(self, *, whole: bool) -> None:
        """`whole`: everything was written. What is not complete stays for the next process."""
        if whole:
            self._sync()
        self._file.close()

    @contextlib.contextmanager
    def writing(self) -> Generator[ResumedFile]:
        whole = False
        try:
            yield self
            whole = True
        finally:
            self.close(whole=whole)


@contextlib.contextmanager
def resumed_directory(
    out: Path, about: Mapping[str, Any], *, overwrite: bool = False, only: str = ""
) -> Generator[Path]:
    """A directory to write into, which becomes `out` on success and stays for the next try on failure.

    `about` says what is made: if an earlier process was making something else, its part is deleted.
    `only` names the one file of it that becomes `out` instead.
    """
    if out.exists() and not overwrite:
        raise user_error(f"{out} already exists; choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.partial")
    with _locked(out.with_name(f".{out.name}.lock"), out):
        text = json.dumps(about, sort_keys=True)
        with contextlib.suppress(OSError):
            if (part / _ABOUT).read_text() != text:
                shutil.rmtree(part, ignore_errors=True)
        part.mkdir(exist_ok=True)
        (part / _ABOUT).write_text(text)
        yield part
        for left in (part / _ABOUT, *part.glob("*.done"), part / store.CHECKSUMS):
            left.unlink(missing_ok=True)
        if only:
            os.replace(part / only, out)
            shutil.rmtree(part, ignore_errors=True)
            store.sync_path(out.parent)
            return
        store.add_checksums(part)
        store.sync_tree(part)
        if out.exists():
            replaced = out.with_name(f".{out.name}.old")
            shutil.rmtree(replaced, ignore_errors=True)
            out.rename(replaced)
            part.rename(out)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            part.rename(out)
        store.sync_path(out.parent)


@contextlib.contextmanager
def _locked(file: Path, out: Path) -> Iterator[None]:
    """One process at a time; the lock of a killed one is free."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(handle):
            raise user_error(f"another process is writing {out}; wait for it, or choose another name")
        yield
        file.unlink(missing_ok=True)
    finally:
        os.close(handle)


def fingerprint_of(files: Mapping[str, Path]) -> str:
    """What large files are, by their sizes, times and beginnings: enough to tell whether they changed."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        about = file.stat()
        with open(file, "rb") as opened:
            head = opened.read(1 << 16)
        digest.update(f"{name}\n{about.st_size}\n{about.st_mtime_ns}\n".encode() + head)
    return digest.hexdigest()
