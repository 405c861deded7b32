"""Which published adapters an engine holds: loaded when a sample needs one, let go when others need the room.

Promises: an adapter in use is never let go; under one name there is always one set of weights. The files and
their owners are the service's; the engine only caches tensors.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from pathlib import Path

from tinkex.engine.protocol import Engine, EngineError, ExportAdapter, ExportedAdapter, Location
from tinkex.service.core import Core
from tinkex.service.rows import SamplerRow

MOST = 64  # adapters, however small they are
SHARE = 0.5  # of the memory planned for adapters


class Published:
    """The published adapters of one base model's engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes, least recently used first
        self._used = Counter[str]()
        self._lock = asyncio.Lock()

    async def take(self, engine: Engine, row: SamplerRow) -> None:
        """From now until `leave`, the engine has this sampler's adapter."""
        if row.adapter is None:
            return
        self._used[row.adapter] += 1
        try:
            await self._ensure(engine, row)
        except BaseException:
            self.leave(row)
            raise

    def leave(self, row: SamplerRow) -> None:
        if row.adapter is not None:
            self._used[row.adapter] -= 1
            if not self._used[row.adapter]:
                del self._used[row.adapter]

    async def add(self, engine: Engine, row: SamplerRow, run: str) -> None:
        """Take a live run's adapter as it is now."""
        await self._ensure(engine, row, run)

    async def remove(self, engine: Engine, adapter: str) -> None:
        if self._sizes.pop(adapter, None) is not None:
            await engine.sampler.retire(adapter)

    async def _ensure(self, engine: Engine, row: SamplerRow, run: str | None = None) -> None:
        assert row.adapter is not None
        if row.adapter in self._sizes:
            self._sizes.move_to_end(row.adapter)
            return
        # Not given up with whoever waits for it: what the engine holds must be known here.
        await asyncio.shield(asyncio.create_task(self._load(engine, row, run)))

    async def _load(self, engine: Engine, row: SamplerRow, run: str | None) -> None:
        assert row.adapter is not None
        assert row.adapter_dir is not None
        async with self._lock, self._core.changing(row.adapter_dir):
            if row.adapter in self._sizes:
                return
            if run is None:
                source: Location | ExportedAdapter = str(self._directory(row))
            else:
                source = await asyncio.wrap_future(engine.trainer.submit(ExportAdapter(run)))
            await engine.sampler.publish(row.adapter, source)
            self._sizes[row.adapter] = _size(self._core.home / row.adapter_dir)
            await self._make_room(engine)

    async def _make_room(self, engine: Engine) -> None:
        budget = getattr(engine, "memory", {}).get("adapters", float("inf")) * SHARE
        for adapter in [name for name in self._sizes if name not in self._used][:-1]:
            if len(self._sizes) <= MOST and sum(self._sizes.values()) <= budget:
                return
            if adapter in self._sizes and adapter not in self._used:  # still: others had their turn meanwhile
                del self._sizes[adapter]
                await engine.sampler.retire(adapter)

    def _directory(self, row: SamplerRow) -> Path:
        """Where the adapter is, if it is still what the sampler was made from."""
        assert row.adapter_dir is not None
        if row.model_path is not None:
            checkpoint = self._core.any_checkpoint(row.model_path)
            if checkpoint is None or name_of(row.model_path, checkpoint.created_at) != row.adapter:
                raise EngineError(
                    f"{row.model_path} was deleted or replaced since this sampler was made", "user"
                )
        return self._core.home / row.adapter_dir


def name_of(path: str, created_at: float) -> str:
    """A checkpoint's name for the engine: one saved anew under the same path is another adapter."""
    return f"{path}@{created_at:.6f}"


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
