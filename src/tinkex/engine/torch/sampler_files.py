"""Writes an adapter only for sampling, quickly: a save resolves when its files are on disk.

    adapter_model-00001-of-00023.safetensors …   the weights in the dtype in which the sampler computes
    adapter_config.json, tinkex.json, SHA256SUMS  as `adapter_files` writes them

So an adapter of a model in bf16 takes half of the bytes, and what is loaded again samples bitwise alike. A
file is copied from the device, written and synced by one thread and hashed by another, several files at once:
a single thread hashes about 2 GB a second. The trainer continues meanwhile. `adapter_files.load_adapter`
reads these directories too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tinkex import store
from tinkex.engine.protocol import EngineError, SaveAdapter
from tinkex.engine.torch import adapter_files as files
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.cpu_threads import usable_cores
from tinkex.engine.torch.device_copies import from_device
from tinkex.engine.torch.tensor_stream import safetensors_header

SHARD = 8 << 20  # bytes of a file, about
THREADS = 12  # at most


class SamplerCopy:
    """What one save writes: taken on the engine's thread at once, and written by any other."""

    def __init__(
        self, adapter: Adapter, base: files.BaseIdentity, dtype: torch.dtype, command: SaveAdapter
    ) -> None:
        self._adapter, self._base, self._command = adapter, base, command
        flat = adapter.flat_as(dtype)
        self._flat = flat.clone() if flat is adapter.flat else flat  # a copy in another dtype never changes
        self._step = adapter.step
        self._taken: torch.cuda.Event | None = None
        if flat.is_cuda:
            self._taken = torch.cuda.Event()
            self._taken.record(torch.cuda.current_stream(flat.device))

    def write(self) -> int:
        """Returns the bytes of the directory."""
        command = self._command
        options = {"overwrite": command.overwrite, "sync": command.sync}
        try:
            with files.new_directory(command.location, **options, sums=False) as part:
                files.write_json(part / files.CONFIG, files.peft_config(self._adapter, self._base))
                files.write_json(part / files.FACTS, files.facts_of(self._adapter, self._base, self._step))
                store.write_checksums(part, self._write_shards(part))
        except OSError as error:
            raise EngineError(f"SaveAdapter failed: {error}") from error
        return store.directory_bytes(command.location)

    def _write_shards(self, directory: Path) -> dict[str, str]:
        """The files' checksums by their names."""
        shards = _cut(files.named(self._adapter, self._flat))
        names = [files.shard_name(n + 1, len(shards)) for n in range(len(shards))]
        sums = _threads("write").map(self._write_shard, [directory / name for name in names], shards)
        return dict(zip(names, sums, strict=True))

    def _write_shard(self, path: Path, tensors: Mapping[str, Tensor]) -> str:
        flat = self._flat
        header = safetensors_header({name: (flat.dtype, tuple(view.shape)) for name, view in tensors.items()})
        data = memoryview(_bytes_of(list(tensors.values()), self._taken))
        summing = _threads("sum").submit(_sum, header, data)
        with open(path, "wb", buffering=0) as file:
            for part in (memoryview(header), data):
                while part:
                    part = part[file.write(part) :]
            if self._command.sync:
                os.fsync(file.fileno())
        return summing.result()


@cache
def _threads(kind: str) -> ThreadPoolExecutor:
    """Kept: starting them takes a millisecond. Files are hashed while they are written."""
    return ThreadPoolExecutor(min(THREADS, usable_cores()), f"tinkex-{kind}")


def _sum(header: bytes, data: memoryview) -> str:
    digest = hashlib.sha256(header)
    digest.update(data)
    return digest.hexdigest()


def _cut(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in groups of about SHARD bytes."""
    shards: list[dict[str, Tensor]] = []
    size = SHARD
    for name, view in tensors.items():
        if size >= SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = view
        size += view.nbytes
    return shards


def _bytes_of(views: list[Tensor], taken: torch.cuda.Event | None) -> bytes | memoryview:
    """The tensors' bytes end to end: laid out on their device, and copied through pinned memory."""
    if taken is None:
        return _joined(views).numpy().data
    device = views[0].device
    stream = torch.cuda.Stream(device)  # not the trainer's, which may have queued more
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_event(taken)
        return from_device(_joined(views))().data


def _joined(views: list[Tensor]) -> Tensor:
    return torch.cat([view.reshape(-1) for view in views]).view(torch.uint8)
