"""The contract's sampler over several `SamplerActor`s: routing, adapters on first use, and retries.

A request whose sampler dies before it has answered is retried on another one, as soon as there is one. A
stream that has already yielded ends with EngineLost instead. Adapter files are checked on one sampler when
they are published; other samplers load an adapter on first use. Samplers that hold a run's previous adapter
prefetch its next one. A lock guards everything, so any event loop and any thread may call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, TaskCancelledError

from tinkex import store
from tinkex.engine.cluster.actors import BytesLost, Stored, StoredExport, StoredFiles, is_lost
from tinkex.engine.cluster.node_files import read_files
from tinkex.engine.cluster.remote_trainer import RemoteExport, settle
from tinkex.engine.cluster.routing import choose, route_key
from tinkex.engine.protocol import (
    EngineError,
    EngineLost,
    ExportedAdapter,
    Heartbeat,
    Location,
    SampledTokens,
    SampleWork,
)
from tinkex.engine.request import user_error
from tinkex.types.outputs import SampleResponse

MAX_REPEATS = 3  # of a request whose samplers died: it may be what kills them
CLOSED = "the engine was closed"


@dataclass(eq=False)
class RemoteSampler:
    """One sampler actor, as this process sees it."""

    number: int
    actor: Any
    beat: Heartbeat
    bundle: int | None = None  # its place in the placement group
    load: int = 0  # sequences under way
    alive: bool = True
    leaving: bool = False  # it gets no new requests
    # There, or on the way.
    adapters: dict[str, Future[None]] = field(default_factory=dict[str, "Future[None]"])


@dataclass(eq=False)
class _Waiting:
    """A request that no sampler has room for."""

    key: bytes
    size: int
    since: float
    turn: Future[RemoteSampler]


class SamplerLost(Exception):
    """The sampler that had a request is gone."""


class SamplerPool:
    """Samplers that serve one base model; `changed` is called when one was lost."""

    def __init__(self, capacity: int, changed: Callable[[], None]) -> None:
        self.capacity, self._changed = capacity, changed
        self.samplers: dict[int, RemoteSampler] = {}
        self._published: dict[str, Stored | Location] = {}
        self._publishing: dict[str, Future[None]] = {}  # those that no sampler has checked yet
        self._latest: dict[str, str] = {}  # by run, the last of its adapters that a trainer exported
        self._loading: set[asyncio.Task[None]] = set()  # adapters being prefetched
        self._retiring: dict[str, Stored | Location | None] = {}  # those that requests still use
        self._users = Counter[str]()  # requests in flight, by adapter
        self._unused: dict[str, list[Future[None]]] = {}  # calls of `retire`, waiting for the last of them
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.RLock()
        self.trouble = ""

    # -- the contract ------------------------------------------------------------------------------------

    async def sample(self, work: SampleWork) -> SampleResponse:
        for _ in range(MAX_REPEATS):
            with contextlib.suppress(SamplerLost):
                async with self._admitted(work) as sampler:
                    response = await self._call(sampler, sampler.actor.sample, work)
                    assert isinstance(response, SampleResponse)
                    return response
        raise EngineError(f"{MAX_REPEATS} samplers died while they had this request")

    async def stream(self, work: SampleWork) -> AsyncGenerator[SampledTokens | SampleResponse, None]:
        for _ in range(MAX_REPEATS):
            begun = False
            try:
                async with self._admitted(work) as sampler:
                    async with contextlib.aclosing(self._pieces(sampler, work)) as pieces:
                        async for piece in pieces:
                            begun = True
                            yield piece
                        return
            except SamplerLost as error:
                if begun:  # what was delivered cannot be taken back
                    raise EngineLost(self.trouble or str(error)) from error
        raise EngineError(f"{MAX_REPEATS} samplers died while they had this request")

    async def publish(self, name: str, source: Location | ExportedAdapter) -> None:
        self._check_open()
        with self._lock:
            begun = self._publishing.get(name)
            if begun is None and name in self._published:
                return
            if begun is None and isinstance(source, RemoteExport):  # of one of our trainers: it fits
                return self._publish_export(name, source.stored)
            done = begun or self._publishing.setdefault(name, Future())
        if begun is not None:
            await asyncio.shield(asyncio.wrap_future(done))
            return await self.publish(name, source)
        try:
            await self._publish_files(name, source)
        except BaseException:
            with self._lock:
                self._published.pop(name, None)
            raise
        finally:
            with self._lock:
                del self._publishing[name]
            done.set_result(None)

    async def _publish_files(self, name: str, source: Location | ExportedAdapter) -> None:
        stored = await asyncio.to_thread(_stored, source)
        with self._lock:
            self._published[name] = stored
        for _ in range(MAX_REPEATS):
            with contextlib.suppress(SamplerLost):
                async with self._taken(name.encode(), 0) as sampler:
                    return await self._have(sampler, name)
        raise EngineError(f"{MAX_REPEATS} samplers died while they loaded adapter {name!r}")

    def _publish_export(self, name: str, stored: StoredExport) -> None:
        with self._lock:
            self._published.setdefault(name, stored)
            before, self._latest[stored.run] = self._latest.get(stored.run), name
            following = [sampler for sampler in self.samplers.values() if before in sampler.adapters]
        for sampler in following:
            task = asyncio.get_running_loop().create_task(self._have_early(sampler, name))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)

    async def _have_early(self, sampler: RemoteSampler, name: str) -> None:
        with contextlib.suppress(EngineError, SamplerLost):  # the first request for it tries again
            await self._have(sampler, name)

    async def retire(self, name: str) -> None:
        self._check_open()
        unused: Future[None] = Future()
        with self._lock:
            source = self._published.pop(name, None)
            if isinstance(source, StoredExport) and self._latest.get(source.run) == name:
                del self._latest[source.run]
            if self._users[name]:
                self._retiring[name] = source
                self._unused.setdefault(name, []).append(unused)
            else:
                unused.set_result(None)
        await asyncio.wrap_future(unused)
        with self._lock:
            self._retiring.pop(name, None)
            having = [(s, loaded) for s in self.samplers.values() if (loaded := s.adapters.pop(name, None))]
        for sampler, loaded in having:
            with contextlib.suppress(EngineError, SamplerLost):
                await asyncio.wrap_future(loaded)
            with contextlib.suppress(SamplerLost):
                await self._call(sampler, sampler.actor.retire, name)

    # -- one request -------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _admitted(self, work: SampleWork):
        """A sampler with room for this request, which has its adapter."""
        with self._using(work.adapter):
            async with self._taken(route_key(work.adapter, work.prompt), work.num_samples) as sampler:
                if work.adapter is not None:
                    await self._have(sampler, work.adapter)
                yield sampler

    @contextlib.contextmanager
    def _using(self, name: str | None) -> Generator[None]:
        """While a request uses an adapter, `retire` waits."""
        if name is None:
            yield
            return
        with self._lock:
            if name not in self._published:
                raise user_error(f"there is no published adapter {name!r}")
            self._users[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._users[name] -= 1
                unused = [] if self._users[name] else self._unused.pop(name, [])
                if not self._users[name]:
                    del self._users[name]
            for waiting in unused:
                settle(waiting, None)

    @contextlib.asynccontextmanager
    async def _taken(self, key: bytes, size: int):
        sampler = await self._take(key, size)
        try:
            yield sampler
        finally:
            self._give_back(sampler, size)

    async def _take(self, key: bytes, size: int) -> RemoteSampler:
        with self._lock:
            self._check_open()
            if not self._waiting and (sampler := self._choose(key, size)) is not None:
                sampler.load += size
                return sampler
            waiting = _Waiting(key, size, time.monotonic(), Future())
            self._waiting.append(waiting)
        try:
            return await asyncio.wrap_future(waiting.turn)
        except asyncio.CancelledError:
            with self._lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
                    self._admit()  # others may have waited behind it
                elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
                    self._give_back(waiting.turn.result(), size)
            raise

    def _choose(self, key: bytes, size: int) -> RemoteSampler | None:
        loads = {n: s.load for n, s in self.samplers.items() if not s.leaving}
        number = choose(key, loads, size, self.capacity)
        return None if number is None else self.samplers[number]

    def _give_back(self, sampler: RemoteSampler, size: int) -> None:
        with self._lock:
            sampler.load -= size
            self._admit()

    def _admit(self) -> None:
        """Give those who wait a sampler, in order."""
        while self._waiting:
            first = self._waiting[0]
            sampler = self._choose(first.key, first.size)
            if sampler is None:
                return
            self._waiting.popleft()
            if first.turn.set_running_or_notify_cancel():
                sampler.load += first.size
                settle(first.turn, sampler)

    async def _have(self, sampler: RemoteSampler, name: str) -> None:
        """Have a published adapter on a sampler; the first to ask loads it."""
        with self._lock:
            source = self._published.get(name) or self._retiring.get(name)
            loaded = sampler.adapters.get(name)
            if source is None:
                raise user_error(f"there is no published adapter {name!r}")
            if begins := loaded is None:
                loaded = sampler.adapters[name] = Future()
        if begins:
            # Not cancelled with the first request: others may be waiting for it.
            loading = asyncio.get_running_loop().create_task(self._load(sampler, name, source, loaded))
            await asyncio.shield(loading)
        else:
            await asyncio.shield(asyncio.wrap_future(loaded))

    async def _load(
        self, sampler: RemoteSampler, name: str, source: Stored | Location, loaded: Future[None]
    ) -> None:
        try:
            try:
                await self._call(sampler, sampler.actor.publish, name, source)
            except BytesLost as lost:
                if not isinstance(source, StoredExport) or source.saved is None:
                    raise
                try:
                    source = await asyncio.to_thread(_stored, source.saved)
                except FileNotFoundError:  # its save ended with the process that had the bytes
                    raise lost from None
                with self._lock:
                    for known in (self._published, self._retiring):
                        if name in known:
                            known[name] = source
                await self._call(sampler, sampler.actor.publish, name, source)
        except BaseException as error:
            with self._lock:
                sampler.adapters.pop(name, None)
            settle(loaded, error)
            raise
        settle(loaded, None)

    async def _call(self, sampler: RemoteSampler, method: Any, *arguments: Any) -> Any:
        """Call an actor; EngineError as it says, SamplerLost if it is gone. Cancelled with the caller."""
        reference = None
        try:
            reference = method.remote(*arguments)
            value = await reference
        except asyncio.CancelledError:
            if reference is not None:
                _cancel(reference)
            raise
        except RayError as error:
            raise self._gone(sampler, error) from error
        if is_lost(value):
            raise self._gone(sampler, value)
        if isinstance(value, EngineError):
            raise value
        return value

    async def _pieces(
        self, sampler: RemoteSampler, work: SampleWork
    ) -> AsyncGenerator[SampledTokens | SampleResponse, None]:
        generator = sampler.actor.stream.options(num_returns="streaming").remote(work)
        ended = False
        try:
            async for reference in generator:
                for piece in await reference:
                    if is_lost(piece):
                        raise self._gone(sampler, piece)
                    if isinstance(piece, EngineError):
                        raise piece
                    ended = not isinstance(piece, SampledTokens)
                    yield piece
        except RayError as error:
            raise self._gone(sampler, error) from error
        finally:
            if not ended:
                _cancel(generator)

    def _gone(self, sampler: RemoteSampler, error: BaseException) -> Exception:
        """What to raise: EngineLost if the pool is closed, else SamplerLost, and the request is retried."""
        if self.trouble:
            return EngineLost(self.trouble)
        if not isinstance(error, TaskCancelledError):
            self.lose(sampler)
        return SamplerLost(f"sampler {sampler.number} is gone ({type(error).__name__})")

    # -- the samplers ------------------------------------------------------------------------------------

    def add(self, sampler: RemoteSampler) -> None:
        with self._lock:
            self._check_open()
            self.samplers[sampler.number] = sampler
            self._admit()

    def lose(self, sampler: RemoteSampler) -> None:
        """Remove and kill a sampler that is dead or no longer wanted."""
        with self._lock:
            if not sampler.alive:
                return
            sampler.alive = False
            self.samplers.pop(sampler.number, None)
        with contextlib.suppress(RayError):
            ray.kill(sampler.actor)
        self._changed()

    def spare(self) -> RemoteSampler | None:
        """The least loaded sampler, which gets no new requests from now on."""
        with self._lock:
            staying = [s for s in self.samplers.values() if not s.leaving and s.bundle is None]
            if not staying:
                return None
            chosen = min(staying, key=lambda s: (s.load, -s.number))
            chosen.leaving = True
            return chosen

    def in_flight(self) -> tuple[int, float]:
        """Sequences under way or waiting; seconds that the next one has waited."""
        with self._lock:
            waited = time.monotonic() - self._waiting[0].since if self._waiting else 0.0
            return sum(s.load for s in self.samplers.values()) + sum(w.size for w in self._waiting), waited

    def heartbeat(self) -> Heartbeat:
        with self._lock:
            samplers = list(self.samplers.values())
            waiting = sum(waiting.size for waiting in self._waiting)
        stats: dict[str, float] = {"samplers": len(samplers)}
        for sampler in samplers:
            for name, value in sampler.beat.stats.items():
                stats[name] = stats.get(name, 0.0) + value
        stats["sequences_running"] = sum(sampler.load for sampler in samplers)
        stats["sequences_waiting"] = waiting
        stats["adapters_published"] = len(self._published)
        memory = samplers[0].beat.memory if samplers else {}
        return Heartbeat(not self.trouble, self.trouble, stats, memory)

    def close(self, why: str = CLOSED) -> None:
        """Fail what is pending and what comes after with EngineLost."""
        with self._lock:
            if self.trouble:
                return
            self.trouble = why
            samplers, self.samplers = list(self.samplers.values()), {}
            waiting, self._waiting = list(self._waiting), deque()
        for one in waiting:
            settle(one.turn, EngineLost(why))
        for one in itertools.chain(*self._unused.values()):
            settle(one, EngineLost(why))
        for sampler in samplers:
            sampler.alive = False
            with contextlib.suppress(RayError):
                ray.kill(sampler.actor)

    def _check_open(self) -> None:
        if self.trouble:
            raise EngineLost(self.trouble)


def _stored(source: Location | ExportedAdapter) -> Stored | Location:
    """What samplers of any node can read: files may be gone when the second of them needs them."""
    if not isinstance(source, str):  # an export that came from another process
        return StoredExport([ray.put(source)], source.lora, source.nbytes, None)
    if not store.is_remote(source) and not Path(source).is_dir():
        return source  # a sampler says what is wrong with it
    with store.local_copy(source) as directory:
        return StoredFiles([ray.put(read_files(directory))], directory.name)


def _cancel(reference: Any) -> None:
    with contextlib.suppress(RayError, ValueError, TypeError):
        ray.cancel(reference, recursive=False)
