"""Base models: from a name to a running engine, loaded once, on first use or at start.

Promises: the event loop never waits for a load; a model that fails to load says why each time it is asked
for; `NAME:suffix` is NAME; a name never leads out of the shelf of models. Knows engines by their protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tinkex import models
from tinkex.engine.protocol import Engine, EngineConfig, StopBytes, build_engine
from tinkex.errors import ModelError
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Refusal
from tinkex.service.threads import in_thread

log = logging.getLogger("tinkex.service")
_unpacking = threading.Lock()  # a tokenizer that is inside a GGUF file: many may ask for it at once


class BaseModel:
    """One base model: its name, where it is, and its engine once that is loaded."""

    def __init__(
        self,
        name: str,
        source: str,
        config: EngineConfig,
        build: Callable[[EngineConfig], Engine],
        tokenizers: Path,
        shelf: Path,
        offline: bool = False,
    ) -> None:
        self.name = name
        self.source = source
        # Adapters name their base model by its hub id; PEFT can load that, or the model's path.
        self._config = replace(config, model=source, name=models.hub_name(name))
        self._build = build
        self._offline = offline
        self._shelf = shelf  # where it is put if it has to be fetched
        self._tokenizers = tokenizers  # where those that are inside a GGUF file are unpacked
        self.place = Path(source)  # of the files, once they are here
        self._loading: asyncio.Task[Engine] | None = None
        self.engine: Engine | None = None
        self._token_bytes: list[bytes] | None = None
        self._reading = asyncio.Lock()  # them

    async def load(self) -> Engine:
        """The engine, loading it if it is not there."""
        if self.engine is not None:
            return self.engine
        if self._loading is None or self._loading.done():
            self._loading = asyncio.get_running_loop().create_task(self._load())
        return await asyncio.shield(self._loading)

    @property
    def loading(self) -> bool:
        return self._loading is not None and not self._loading.done()

    @property
    def trouble(self) -> str:
        """Why it cannot work; "" if it can, for all that is known."""
        if self.engine is not None:
            return "" if self.engine.working else f"the engine of the base model {self.name} has stopped"
        tried = self._loading
        failed = tried is not None and tried.done() and not tried.cancelled() and tried.exception()
        return str(failed) if failed else ""

    async def _load(self) -> Engine:
        log.info("loading %s", self.name if self.name == self.source else f"{self.name} from {self.source}")
        try:
            self.engine = await in_thread(self._build_here)
        except Exception as error:
            raise Refusal(503, f"the base model {self.name} could not be loaded: {error}") from error
        if plan := getattr(self.engine, "memory", None):
            sizes = ", ".join(f"{use} {size / 2**20:.0f} MiB" for use, size in plan.items())
            log.info("%s is loaded; memory planned: %s", self.name, sizes)
        return self.engine

    def _build_here(self) -> Engine:
        return self._build(replace(self._config, model=str(self._files())))

    def _files(self) -> Path:
        """Where its files are; they are fetched first if need be, which may take minutes."""
        if self._config.kind == "torch" and not self.place.exists():
            self.place = models.obtain(self.source, self._shelf, offline=self._offline)
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

    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a sample, once the engine is there to say."""
        return frozenset() if self.engine is None else frozenset(self.engine.info.eos_ids)

    def tokenizer_dir(self) -> Path | None:
        """The directory whose tokenizer is this model's; None if it has none of its own. Not for the loop."""
        try:
            path = self._files()
        except ModelError as error:
            raise Refusal(503, f"the tokenizer of {self.name} is not here: {error}") from error
        if path.suffix == ".gguf" and self._config.kind == "torch":
            path = self._unpacked(path)
        return path if (path / "tokenizer.json").is_file() or (path / "tokenizer.model").is_file() else None

    def _unpacked(self, file: Path) -> Path:
        place = self._tokenizers / f"{file.stem}-{int(file.stat().st_mtime)}"
        with _unpacking:
            if not place.exists():
                from tinkex.engine.torch.gguf import GgufModel
                from tinkex.engine.torch.gguf_tokenizer import write_tokenizer

                part = place.with_name(place.name + ".part")
                part.mkdir(parents=True, exist_ok=True)
                write_tokenizer(GgufModel(file), part)
                part.rename(place)
        return place

    async def stop_bytes(self, sequences: list[str]) -> StopBytes:
        """Stop strings as the engine checks them: over the bytes of each token."""
        async with self._reading:  # the first samples come together, and it takes a second
            if self._token_bytes is None:
                from tinkex.engine.token_bytes import token_bytes

                source = await asyncio.to_thread(self.tokenizer_dir)
                if source is None:
                    raise Refusal(
                        422, f"{self.name} has no tokenizer here, so it cannot stop at strings; stop at ids"
                    )
                self._token_bytes = await asyncio.to_thread(token_bytes, source)
        return StopBytes(tuple(s.encode() for s in sequences), self._token_bytes)


class Engines:
    """The base models of a service."""

    def __init__(self, config: ServiceConfig, build: Callable[[EngineConfig], Engine] = build_engine) -> None:
        self._config = config
        self._build = build
        self._models: dict[str, BaseModel] = {}
        self._fetched: dict[str, BaseModel] = {}  # by a name that leads to no file here, or did not at first
        for name, source in config.models.items():
            self._add(name, source)

    def _add(self, name: str, source: str) -> BaseModel:
        model = self._models[name] = self._make(name, source)
        return model

    def _make(self, name: str, source: str) -> BaseModel:
        config = self._config
        shelf = config.model_shelf or config.home / "models"
        return BaseModel(
            name, source, config.engine, self._build, config.home / "tokenizers", shelf, config.offline
        )

    def find(self, name: str) -> BaseModel:
        """The base model called `name`; what follows a colon is a variant of it that we do not tell apart."""
        if (model := self._models.get(name)) is not None:  # nearly always
            return model
        given = tuple(dict.fromkeys((name, name.partition(":")[0])))
        spellings = [spelling for one in given for spelling in models.spellings(one)]
        for spelling in spellings:
            if (model := self._models.get(spelling) or self._fetched.get(spelling)) is not None:
                return model
        for spelling in spellings:
            if (place := self._on_shelf(spelling)) is not None:
                return self._add(spelling, str(place))
        for spelling in given if self._config.any_path else ():
            if (place := models.local_files.model_at(Path(spelling).expanduser())) is not None:
                full = str(place.resolve())
                return self._models.get(full) or self._add(full, full)
            if models.is_fetchable(spelling):
                model = self._fetched[spelling] = self._make(spelling, spelling)
                return model
        raise Refusal(404, self._unknown(name))

    def _unknown(self, name: str) -> str:
        any_path, known = self._config.any_path, [model.name for model in self]
        return models.unknown_model(name, [*models.CATALOGUE, *known] if any_path else known, paths=any_path)

    def _on_shelf(self, name: str) -> Path | None:
        place = self._config.model_shelf
        return None if place is None else models.local_files.named(place, name)

    def __iter__(self) -> Iterator[BaseModel]:
        """Those that were configured, found or fetched, or are here to be named."""
        for name, source in self._nameable():
            if not any(known in self._models or known in self._fetched for known in models.spellings(name)):
                self._add(name, str(source))
        fetched = [model for model in self._fetched.values() if model.engine is not None]
        return iter([*self._models.values(), *fetched])

    def _nameable(self) -> Iterable[tuple[str, Path]]:
        place = self._config.model_shelf
        if place is None:
            return ()
        # In one's own process any model on the machine may be named, so the hub's cache counts too.
        return models.names(place) if self._config.any_path else models.local_files.names(place)

    def trouble(self) -> str:
        """Why a base model cannot work: one that is loaded, or that this server was told to have."""
        told = self._config.models
        found = (m.trouble for m in self._models.values() if m.engine is not None or m.name in told)
        return next(filter(None, found), "")

    async def load_all(self) -> None:
        await asyncio.gather(*(model.load() for model in self))

    async def close(self) -> None:
        for model in (*self._models.values(), *self._fetched.values()):
            if model.engine is not None:
                await in_thread(model.engine.close)
