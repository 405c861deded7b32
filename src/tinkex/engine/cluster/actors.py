"""What runs on the nodes of a cluster: a Ray actor with an engine, used either as trainer or as sampler.

An engine's error is returned as a value, so that any exception of a call means that the actor is gone. The
bytes of an exported adapter stay in Ray's object store, which brings them to each node once. Knows neither
the routing nor the other actors.
"""

from __future__ import annotations

import asyncio
import platform
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from tinkex.engine.cluster.node_files import Files, read_files, this_node, write_files
from tinkex.engine.gpus import Gpus
from tinkex.engine.protocol import (
    Command,
    Engine,
    EngineConfig,
    EngineError,
    EngineLost,
    ExportAdapter,
    FinishPasses,
    ForwardBackward,
    Heartbeat,
    LoadAdapter,
    Location,
    ModelInfo,
    OptimStep,
    Pass,
    SampledTokens,
    SampleWork,
    SaveAdapter,
    SharedPasses,
)
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import LoraConfig

BuildEngine = Callable[[EngineConfig], Engine]
Piece = SampledTokens | SampleResponse | EngineError


@dataclass(frozen=True)
class StoredExport:
    """An exported adapter in Ray's object store; `refs` holds one reference, which Ray leaves as it is."""

    refs: list[Any]
    lora: LoraConfig
    nbytes: int
    saved: Location | None
    run: str = ""  # whose adapter it was


@dataclass(frozen=True)
class StoredFiles:
    """A saved adapter's files in Ray's object store (`node_files.Files`); `name` is its directory's."""

    refs: list[Any]
    name: str


Stored = StoredExport | StoredFiles


class BytesLost(EngineError):
    """What was published went with the process that had put it into the object store."""


def _as_error(error: Exception) -> EngineError:
    """What an actor returns instead of raising."""
    return error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")


def _elsewhere(result: Any, there: str, location: Location) -> Any:
    """An error that names the place that its command named."""
    if not isinstance(result, EngineError) or isinstance(result, EngineLost):
        return result
    return EngineError(result.message.replace(there, location), result.category)


class EngineActor:
    """An engine in its own process; the actor exists before the engine is built."""

    def __init__(self, config: EngineConfig, build: BuildEngine) -> None:
        self._engine: Any = None
        self._building = ThreadPoolExecutor(1).submit(build, config)
        self._gpus = Gpus()
        self._reading: asyncio.Task[Any] | None = None

    async def describe(self) -> tuple[ModelInfo, Heartbeat, str] | EngineError:
        """The engine's model, its state, and its node, once it is built."""
        try:
            self._engine = await asyncio.wrap_future(self._building)
        except Exception as error:  # as a value: Ray would hide the category
            return _as_error(error)
        return self._engine.info, await self.beat(), this_node()

    async def beat(self) -> Heartbeat:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._gpus.read())
        await asyncio.wait([self._reading], timeout=10.0)  # an nvidia-smi that hangs is no silence of ours
        return self._report()

    def _report(self) -> Heartbeat:
        return replace(self._engine.heartbeat(), node=platform.node(), gpus=tuple(self._gpus.last))


class TrainerActor(EngineActor):
    """Executes one command at a time: the caller sends the next when it has the last one's result."""

    def __init__(self, config: EngineConfig, build: BuildEngine) -> None:
        super().__init__(config, build)
        self._store: Any = None
        self._group: Any = None  # with the trainer's other processes

    async def meet(self) -> tuple[str, int]:
        """Where the trainer's processes find each other: in this one, the first."""
        from tinkex.engine.cluster.gradient_group import host_store

        self._store, address = host_store(ray.util.get_node_ip_address())
        return address

    async def join(self, rank: int, count: int, address: tuple[str, int], gpus: bool) -> EngineError | None:
        """Form a group with the others, who do it now too."""
        from tinkex.engine.cluster.gradient_group import GradientGroup, store_at

        here = ray.util.get_node_ip_address()
        try:
            store = self._store or await asyncio.to_thread(store_at, address)
            self._group = await asyncio.to_thread(GradientGroup, rank, count, store, here, gpus=gpus)
        except Exception as error:
            return _as_error(error)
        return None

    async def execute(self, command: Command[Any]) -> tuple[Any, Heartbeat]:
        if self._group and isinstance(command, OptimStep):
            command = replace(command, total=self._group.total)
        try:
            result = await asyncio.wrap_future(self._engine.trainer.submit(command))
            if isinstance(command, ExportAdapter):
                result = StoredExport(
                    [ray.put(result)], result.lora, result.nbytes, command.saved, command.run
                )
        except Exception as error:
            result = _as_error(error)
        return result, self._report()

    async def execute_all(self, commands: Sequence[Command[Any]]) -> tuple[list[Any], Heartbeat]:
        """Short commands in one call: they are submitted in order, and their results come together."""
        done = await asyncio.gather(*map(self.execute, commands))
        return [result for result, _ in done], done[-1][1]

    # On a node that does not see the server's disk.

    async def save(self, command: SaveAdapter) -> tuple[Any, Heartbeat]:
        """The files, in the object store; `command.location` is not touched."""
        with tempfile.TemporaryDirectory(prefix="tinkex-") as place:
            there = Path(place, "adapter")
            result, beat = await self.execute(replace(command, location=str(there), sync=False))
            if not isinstance(result, EngineError):
                return [ray.put(await asyncio.to_thread(read_files, there))], beat
            return _elsewhere(result, str(there), command.location), beat

    async def load(self, command: LoadAdapter, files: Files) -> tuple[Any, Heartbeat]:
        with tempfile.TemporaryDirectory(prefix="tinkex-") as place:
            there = Path(place, Path(command.location).name)
            await asyncio.to_thread(write_files, files, there)
            result, beat = await self.execute(replace(command, location=str(there)))
            return _elsewhere(result, str(there), command.location), beat

    # Large values are separate arguments: Ray sends each to a node once.

    async def begin(self, passes: tuple[Pass, ...], share: tuple[int, int]) -> tuple[Any, Heartbeat]:
        return await self.execute(ForwardBackward(passes, share))

    async def finish(
        self, ticket: str, shares: tuple[SharedPasses, ...], wanted: bool
    ) -> tuple[Any, Heartbeat]:
        result, beat = await self.execute(FinishPasses(ticket, shares))
        return result if wanted or isinstance(result, EngineError) else None, beat


class SamplerActor(EngineActor):
    """Serves many requests at once."""

    async def sample(self, work: SampleWork) -> SampleResponse | EngineError:
        try:
            return await self._engine.sampler.sample(work)
        except Exception as error:
            return _as_error(error)

    async def stream(self, work: SampleWork) -> AsyncGenerator[list[Piece], None]:
        """Pieces as they come: those that came while the last ones were sent go together."""
        pieces: list[Piece] = []
        ready = asyncio.Event()

        async def draw() -> None:
            try:
                async with aclosing(self._engine.sampler.stream(work)) as drawn:
                    async for piece in drawn:
                        pieces.append(piece)
                        ready.set()
            except Exception as error:
                pieces.append(_as_error(error))
                ready.set()

        drawing = asyncio.get_running_loop().create_task(draw())
        try:
            ended = False
            while not ended:
                await ready.wait()
                ready.clear()
                sent, pieces[:] = list(pieces), []
                ended = not isinstance(sent[-1], SampledTokens)
                yield sent
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

    async def publish(self, name: str, source: Stored | Location) -> EngineError | None:
        try:
            if isinstance(source, str):
                await self._engine.sampler.publish(name, source)
            else:
                await self._publish(name, source)
        except Exception as error:
            return _as_error(error)
        return None

    async def _publish(self, name: str, source: Stored) -> None:
        """Publish what this node's object store has, or brings here once for all actors of the node."""
        try:
            value = await source.refs[0]
        except RayError as error:
            raise BytesLost(f"adapter {name!r} was lost with the process that stored it: {error}") from error
        if isinstance(source, StoredExport):
            return await self._engine.sampler.publish(name, value)
        with tempfile.TemporaryDirectory(prefix="tinkex-") as place:
            directory = Path(place, source.name)
            await asyncio.to_thread(write_files, value, directory)
            await self._engine.sampler.publish(name, str(directory))

    async def retire(self, name: str) -> EngineError | None:
        try:
            await self._engine.sampler.retire(name)
        except Exception as error:
            return _as_error(error)
        return None


def is_lost(value: Any) -> bool:
    """Does an actor say that its engine can do nothing any more?"""
    return isinstance(value, EngineLost)
