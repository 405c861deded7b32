"""The published adapters that an engine holds: loaded on first use, retired least recently used first.

An adapter in use is never retired, and one name always means one set of weights. The files belong to the
service; the engine only caches tensors.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from weakref import WeakKeyDictionary, ref

from tinkex.engine.protocol import Engine, EngineError, EngineLost, ExportedAdapter, Sampler
from tinkex.service.access import Access
from tinkex.service.home import Home
from tinkex.service.rows import SamplerRow
from tinkex.service.saved_files import SavedFiles
from tinkex.store import directory_bytes

MAX_ADAPTERS = 1024  # however small they are
SHARE = 0.5  # of the memory planned for adapters


class AdapterCaches:
    """One cache per sampler, which engines may share; the cache of a lost one goes with it."""

    def __init__(self, home: Home, files: SavedFiles, access: Access) -> None:
        self._home, self._files, self._access = home, files, access
        self._caches: WeakKeyDictionary[Sampler, AdapterCache] = WeakKeyDictionary()

    def of(self, engine: Engine) -> AdapterCache:
        sampler = engine.sampler
        if (cache := self._caches.get(sampler)) is None:
            budget = engine.heartbeat().memory.get("adapters", float("inf")) * SHARE
            cache = AdapterCache(sampler, budget, self._home, self._files, self._access)
            self._caches[sampler] = cache
        return cache


class AdapterCache:
    """The published adapters of one sampler, in `budget` bytes."""

    def __init__(
        self, sampler: Sampler, budget: float, home: Home, files: SavedFiles, access: Access
    ) -> None:
        self._ref = ref(sampler)  # weak, or the table above would keep a lost engine's memory
        self._budget = budget
        self._home, self._files, self._access = home, files, access
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes, least recently used first
        self._used = Counter[str]()
        self._lock = asyncio.Lock()

    @property
    def _sampler(self) -> Sampler:
        if (sampler := self._ref()) is None:
            raise EngineLost("the engine is gone")
        return sampler

    async def acquire(self, row: SamplerRow) -> None:
        """From now until `release`, the engine has this sampler's adapter."""
        if row.adapter is None:
            return
        self._used[row.adapter] += 1
        try:
            await self.add(row)
        except BaseException:
            self.release(row)
            raise

    def release(self, row: SamplerRow) -> None:
        if row.adapter is not None:
            self._used[row.adapter] -= 1
            if not self._used[row.adapter]:
                del self._used[row.adapter]

    async def add(self, row: SamplerRow, exported: ExportedAdapter | None = None) -> None:
        """Publish an adapter, from its directory or as a run has just exported it."""
        if row.adapter in self._sizes:
            self._sizes.move_to_end(row.adapter)
            return
        # Not cancelled with the sample that waits for it: what the engine holds must be known here.
        await asyncio.shield(asyncio.create_task(self._load(row, exported)))

    async def remove(self, adapter: str) -> None:
        if self._sizes.pop(adapter, None) is not None:
            await self._sampler.retire(adapter)

    async def _load(self, row: SamplerRow, exported: ExportedAdapter | None) -> None:
        assert row.adapter is not None
        assert row.adapter_dir is not None
        async with self._lock, self._home.locked(row.adapter_dir):
            if row.adapter in self._sizes:
                return
            if exported is not None:
                size = exported.nbytes
                await self._sampler.publish(row.adapter, exported)
            else:
                self._check(row)
                async with self._files.read(row.adapter_dir) as directory:
                    size = directory_bytes(directory)
                    await self._sampler.publish(row.adapter, str(directory))
            self._sizes[row.adapter] = size
            await self._make_room()

    async def _make_room(self) -> None:
        for adapter in [name for name in self._sizes if name not in self._used][:-1]:
            if len(self._sizes) <= MAX_ADAPTERS and sum(self._sizes.values()) <= self._budget:
                return
            if adapter in self._sizes and adapter not in self._used:  # still: retiring others took a while
                del self._sizes[adapter]
                await self._sampler.retire(adapter)

    def _check(self, row: SamplerRow) -> None:
        """Refuse an adapter that is no longer what the sampler was made from."""
        if row.model_path is not None:
            checkpoint = self._access.any_checkpoint(row.model_path)
            if checkpoint is None or adapter_name(row.model_path, checkpoint.created_at) != row.adapter:
                raise EngineError(
                    f"{row.model_path} was deleted or replaced since this sampler was made", "user"
                )


def adapter_name(path: str, created_at: float) -> str:
    """A checkpoint's name for the engine: one saved again under the same path is another adapter."""
    return f"{path}@{created_at:.6f}"
