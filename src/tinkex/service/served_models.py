"""The base models of a service: from a name to a running engine, loaded once, on first use or at start.

The event loop never waits for a load. A model that fails to load says why each time it is asked for. An
engine that is lost is replaced by a new one, a few times. `NAME:suffix` means NAME.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tinkex import models
from tinkex.config import keep_compiled
from tinkex.engine.facts import ModelFacts, describe
from tinkex.engine.protocol import (
    Command,
    Engine,
    EngineConfig,
    EngineError,
    EngineLost,
    PartitionedEngine,
    build_engine,
)
from tinkex.engine.token_bytes import token_bytes
from tinkex.errors import InvalidInputError, ModelError
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Refusal
from tinkex.store import atomic_directory, verify

log = logging.getLogger("tinkex.service")
R = TypeVar("R")
T = TypeVar("T")
MAX_LOSSES, LOSS_WINDOW = 3, 3600.0  # engines lost within so many seconds before a model is given up
_PATIENCE = 5.0  # seconds that an answer waits for the facts of a model
_unpacking = threading.Lock()  # a tokenizer that is inside a GGUF file: many may ask for it at once


async def execute(engine: Engine, command: Command[R]) -> R:
    """Submit a command to an engine's trainer, and wait for it without blocking the event loop."""
    return await asyncio.wrap_future(engine.trainer.submit(command))


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Call what may take minutes in a thread that does not keep the process from ending."""
    done: ThreadFuture[T] = ThreadFuture()

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name="tinkex-model", daemon=True).start()
    return await asyncio.wrap_future(done)


@dataclass(eq=False)
class ServedModel:
    """One base model: its name, where it is, and its engine once that is loaded."""

    name: str
    source: str
    _service: ServiceConfig
    _build: Callable[[EngineConfig], Engine]
    fetched: bool = False  # by its name at a hub or in the catalogue
    part: tuple[ServedModel, int] | None = None  # of this base model, the trainer with this index

    def __post_init__(self) -> None:
        # Adapters name their base model by its hub id; PEFT can load that, or the model's path.
        self._config = replace(
            self._service.engine, model=self.source, name=models.hub_name(self.name),
            placement=self._service.placements.get(self.name), tensor=self._service.tensor.get(self.name, 1),
        )  # fmt: skip
        # Those that runs are on: itself, or as many as the engine has trainers, each lost on its own.
        self.trainers: list[ServedModel] = [self]
        if self._config.placement is not None and self.part is None:
            self.trainers = [replace(self, part=(self, n)) for n in range(self._config.placement.trainers)]
        self.place = Path(self.source)  # of the files, once they are here
        self._loading: asyncio.Task[Engine] | None = None
        self.engine: Engine | None = None
        self._lost: Engine | None = None  # to be closed before a new one is built
        self.closing = False  # load no engine from now on; that the present one ends is expected
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)  # when engines were lost
        self._suspects: dict[str, int] = {}  # requests in hand at the last loss: at how many in a row
        self._given_up_until = 0.0
        self._why_lost = ""
        self._facts: asyncio.Task[ModelFacts | None] | None = None
        self._token_bytes: list[bytes] | None = None
        self._reading = asyncio.Lock()  # of the token bytes

    async def load(self) -> Engine:
        """The engine, loading it if it is not there."""
        if self.engine is not None:
            return self.engine
        if self.closing:
            raise Refusal(503, "the service is stopping")
        if time.monotonic() < self._given_up_until:
            raise Refusal(503, f"{self.trouble}; restart the server")
        if self._loading is None or self._loading.done():
            self._loading = asyncio.get_running_loop().create_task(self._load())
        return await asyncio.shield(self._loading)

    @property
    def loading(self) -> bool:
        return self._loading is not None and not self._loading.done()

    def lose_engine(self, why: str, engine: Engine | None, in_hand: Iterable[str] = ()) -> None:
        """This engine can do nothing any more: the next `load` builds a new one.

        `in_hand` are the requests that were being executed.
        """
        if self.engine is None or engine is not self.engine:
            return  # it was noticed before
        if self.closing:
            self.engine = None
            return
        log.error("%s was lost: %s", self.title, why)
        self._lost, self.engine, self._loading = self.engine, None, None
        self._why_lost = why
        self._count_loss(time.monotonic(), in_hand)
        for part in self.trainers if self.part is None else ():
            part.lose_engine(why, part.engine)

    def _count_loss(self, now: float, in_hand: Iterable[str]) -> None:
        """Give up for a while after some losses: in one process any, as its device is to blame.

        On a cluster processes and machines come and go; there, those with one and the same request in hand.
        """
        self._losses.append(now)
        self._suspects = {request: self._suspects.get(request, 0) + 1 for request in in_hand}
        if self._config.placement is not None:
            given_up = max(self._suspects.values(), default=0) >= MAX_LOSSES
        else:
            given_up = len(self._losses) == MAX_LOSSES and now - self._losses[0] < LOSS_WINDOW
        if given_up:
            self._given_up_until = now + LOSS_WINDOW

    @property
    def title(self) -> str:
        """What to call it in messages."""
        whose = f"the base model {self.name}"
        return f"the engine of {whose}" if self.part is None else f"trainer {self.part[1]} of {whose}"

    @property
    def was_loaded(self) -> bool:
        return self.engine is not None or bool(self._losses)

    @property
    def trouble(self) -> str:
        """Why it cannot work; "" if it can, for all that is known."""
        what, tried = self.title, self._loading
        if self.engine is not None:
            return "" if self.engine.heartbeat().alive else f"{what} has stopped"
        if tried is not None and tried.done() and not tried.cancelled() and (failed := tried.exception()):
            return str(failed)
        return f"{what} was lost: {self._why_lost}" if self._losses else ""

    async def _load(self) -> Engine:
        log.info("loading %s", self.name if self.name == self.source else f"{self.name} from {self.source}")
        try:
            if self.part is None:
                self.engine = await in_daemon_thread(self._build_here)
            else:
                self.engine = await self._load_part(*self.part)
        except Refusal:
            raise  # of the whole model
        except Exception as error:
            # A model that cannot be read is the caller's mistake, for whom it was named.
            is_users = isinstance(error, ModelError | InvalidInputError) or (
                isinstance(error, EngineError) and error.category == "user"
            )
            status = 422 if is_users else 503
            raise Refusal(status, f"the base model {self.name} could not be loaded: {error}") from error
        if plan := self.engine.heartbeat().memory:
            sizes = ", ".join(f"{use} {size / 2**20:.0f} MiB" for use, size in plan.items())
            log.info("%s is loaded; memory planned: %s", self.name, sizes)
        return self.engine

    async def _load_part(self, model: ServedModel, index: int) -> Engine:
        """One trainer of an engine that has several."""
        whole = await model.load()
        assert isinstance(whole, PartitionedEngine)

        def build() -> Engine:
            self._close_lost()
            return whole.partition(index)

        try:
            return await in_daemon_thread(build)
        except EngineLost as error:
            model.lose_engine(str(error), whole)
            raise

    def _close_lost(self) -> None:
        if (lost := self._lost) is not None:
            self._lost = None
            with contextlib.suppress(Exception):  # it was lost: what it can still free is a bonus
                lost.close()

    def _build_here(self) -> Engine:
        self._close_lost()  # its memory is needed by the next one
        if self._config.kind == "torch" and self._config.device != "cpu":
            compiled = keep_compiled(self._service.home)
            has_gpu = self._config.device != "auto" or shutil.which("nvidia-smi")
            if has_gpu and self._config.warm_up and not (compiled.is_dir() and any(compiled.iterdir())):
                log.info("kernels for a GPU are compiled now, for a minute or two, and kept in %s", compiled)
        config = replace(self._config, model=str(self._files()))
        with contextlib.suppress(Refusal, InvalidInputError, OSError):  # it may have none
            tokenizer = self.tokenizer_dir()
            config = replace(config, tokenizer=None if tokenizer is None else str(tokenizer))
        return self._build(config)

    def _files(self) -> Path:
        """Where its files are; they are downloaded first if need be, which may take minutes."""
        if self._config.kind == "torch" and not self.place.exists():
            downloads = self._service.models_directory or self._service.home / "models"
            self.place = models.obtain(self.source, downloads, offline=self._service.offline)
        return self.place

    def max_context(self) -> int | None:
        """Positions that the model reads at most: its engine knows, its configuration says before that."""
        if self.engine is not None:
            return self.engine.info.max_context
        try:
            config = json.loads((self.place / "config.json").read_text())
        except (OSError, ValueError):
            return self._config.max_context
        own = config.get("max_position_embeddings")
        return min((n for n in (own, self._config.max_context) if n is not None), default=None)

    async def facts(self) -> ModelFacts | None:
        """What it is, read from its files once; None if they are not here, cannot be read, or take long."""
        if self._config.kind != "torch" or not self.place.exists():
            return None
        if self._facts is None:
            self._facts = asyncio.get_running_loop().create_task(in_daemon_thread(self._describe))
        await asyncio.wait([self._facts], timeout=_PATIENCE)
        found = self._facts.result() if self._facts.done() else None
        return found if found is None or self.engine is None else replace(found, fits=True)

    def _describe(self) -> ModelFacts | None:
        try:
            return describe(replace(self._config, model=str(self.place)))
        except Exception as error:  # `load` reports why
            log.debug("nothing is known of %s: %s", self.name, error)
            return None

    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a sample, once the engine is there to say."""
        return frozenset() if self.engine is None else frozenset(self.engine.info.eos_ids)

    def tokenizer_dir(self) -> Path | None:
        """The directory of this model's tokenizer; None if it has none. Blocks, maybe for minutes."""
        try:
            path = self._files()
        except ModelError as error:
            raise Refusal(503, f"the tokenizer of {self.name} is not here: {error}") from error
        if path.suffix == ".gguf" and self._config.kind == "torch":
            path = self._unpacked(path)
        return path if (path / "tokenizer.json").is_file() or (path / "tokenizer.model").is_file() else None

    def _unpacked(self, file: Path) -> Path:
        place = self._service.home / "tokenizers" / f"{file.stem}-{int(file.stat().st_mtime)}"
        with _unpacking:
            if not place.exists():
                from tinkex.engine.torch.gguf import GgufModel
                from tinkex.engine.torch.gguf_tokenizer import write_tokenizer

                with atomic_directory(place) as part:
                    write_tokenizer(GgufModel(file), part)
            verify(place)
        return place

    async def token_bytes(self) -> list[bytes]:
        """The bytes of every token id, for texts of single tokens."""
        async with self._reading:  # the first requests come together, and it takes a second
            if self._token_bytes is None:
                source = await asyncio.to_thread(self.tokenizer_dir)
                if source is None:
                    raise Refusal(422, f"{self.name} has no tokenizer here")
                self._token_bytes = await asyncio.to_thread(token_bytes, source)
        return self._token_bytes


class ServedModels:
    """The base models of a service."""

    def __init__(self, config: ServiceConfig, build: Callable[[EngineConfig], Engine] = build_engine) -> None:
        self._config = config
        self._build = build
        self._models: dict[str, ServedModel] = {}
        for name, source in config.models.items():
            self._add(name, source)

    def _add(self, name: str, source: str, *, fetched: bool = False) -> ServedModel:
        model = self._models[name] = ServedModel(name, source, self._config, self._build, fetched)
        return model

    def find(self, name: str) -> ServedModel:
        """The base model called `name`; a suffix after a colon, which names a variant, is ignored."""
        if (model := self._models.get(name)) is not None:  # nearly always
            return model
        config, given = self._config, tuple(dict.fromkeys((name, name.partition(":")[0])))
        spellings = [spelling for one in given for spelling in models.spellings(one)]
        for spelling in spellings:
            if (model := self._models.get(spelling)) is not None:
                return model
        if (directory := config.models_directory) is not None:
            for spelling in spellings:
                if (place := models.local_files.named(directory, spelling)) is not None:
                    return self._add(spelling, str(place))
        for spelling in given if config.any_path else ():
            if (place := models.local_files.model_at(Path(spelling).expanduser())) is not None:
                full = str(place.resolve())
                return self._models.get(full) or self._add(full, full)
            if models.is_fetchable(spelling):
                return self._add(spelling, spelling, fetched=True)
        known = [*(models.CATALOGUE if config.any_path else ()), *(model.name for model in self)]
        raise Refusal(404, models.unknown_model(name, known, paths=config.any_path))

    def __iter__(self) -> Iterator[ServedModel]:
        """Those that were configured, found or fetched, or are here to be named."""
        for name, source in self._nameable():
            if not any(known in self._models for known in models.spellings(name)):
                self._add(name, str(source))
        listed = [model for model in self._models.values() if not model.fetched or model.engine is not None]
        return iter(sorted(listed, key=lambda model: model.fetched))

    def _nameable(self) -> Iterable[tuple[str, Path]]:
        place = self._config.models_directory
        if place is None:
            return ()
        # In embedded mode any model on the machine may be named, so the hub's cache counts too.
        return models.names(place) if self._config.any_path else models.local_files.names(place)

    def engines(self) -> list[Engine]:
        """Those that are loaded."""
        return [model.engine for model in self._models.values() if model.engine is not None]

    def _parts(self) -> Iterator[ServedModel]:
        """Every base model, and the trainers of those that have several."""
        for model in self._models.values():
            yield model
            yield from (part for part in model.trainers if part is not model)

    def begin_closing(self) -> None:
        """Load no engine from now on; the present ones are expected to end."""
        for model in self._parts():
            model.closing = True

    def trouble(self) -> str:
        """Why a base model cannot work: one that was loaded, or that this service is configured with."""
        served = [model for model in self._parts() if not model.fetched]
        found = (m.trouble for m in served if m.was_loaded or m.name in self._config.models)
        return next(filter(None, found), "")

    def has_failed(self, name: str) -> bool:
        """Was this base model asked for, and could not be loaded?"""
        model = self._models.get(name)
        return model is not None and model.engine is None and bool(model.trouble)

    async def load_all(self) -> None:
        await asyncio.gather(*(part.load() for model in self for part in model.trainers))

    async def close(self) -> None:
        self.begin_closing()
        for engine in self.engines():
            await in_daemon_thread(engine.close)
