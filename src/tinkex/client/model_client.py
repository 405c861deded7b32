"""`ModelClient`: what a run's client and a sampler's have in common, above all their model's tokenizer.

Promises: tokenizer files of a Tinkex server are downloaded once, into the home directory, where a directory
is complete or absent; a server without such files (hosted Tinker, for example) falls back to the hub.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from tinkex.client.future import APIFuture, check_timeout, start
from tinkex.client.loop import in_own_thread
from tinkex.client.server_connection import ServerConnection
from tinkex.client.session import Session
from tinkex.client.telemetry import Telemetry
from tinkex.client.twins import blocking
from tinkex.errors import APIStatusError, NotFoundError
from tinkex.tokenizers import load_tokenizer, tokenizer_name
from tinkex.types.config import TOKENIZER_FILES, TokenizerFileRequest
from tinkex.wire import ops


class ModelClient(ABC):
    """A client of one model: a run's or a sampler's."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session.connection

    @abstractmethod
    async def _model(self) -> tuple[str, str | None]:
        """The base model's name and the tokenizer's id, if the server says one."""

    @blocking
    def get_tokenizer(self) -> APIFuture[Any]:
        """Load the base model's tokenizer, a transformers one; it is cached.

        `sampler.get_tokenizer().decode(tokens)`
        """
        return start(self._tokenizer, "tokenizer")

    # Not a coroutine function: programs that patch every coroutine function expect only the official ones.
    def get_tokenizer_async(self, *, timeout: float | None = None) -> Awaitable[Any]:
        """Like `get_tokenizer`, awaited."""
        check_timeout(timeout)
        return start(self._tokenizer, "tokenizer").result_async(timeout)

    async def _tokenizer(self) -> Any:
        base_model, tokenizer_id = await self._model()
        name = tokenizer_name(base_model, tokenizer_id)
        return await in_own_thread(
            lambda: load_tokenizer(name, fetch=lambda _: _fetch(self._connection, base_model))
        )

    def get_telemetry(self) -> Telemetry | None:
        """Return what reports failures to the server; None unless telemetry is on."""
        return self._connection.telemetry


def _fetch(connection: ServerConnection, base_model: str) -> Path | None:
    """The directory of the model's tokenizer files, downloaded if need be. Blocks."""
    server = hashlib.sha256(connection.base_url.encode()).hexdigest()[:16]
    place = connection.settings.home / "tokenizers" / server / base_model.replace("/", "--")
    if connection.base_url and place.is_dir():
        return place
    files = start(lambda: _download(connection, base_model), "tokenizer").result()
    if not files:
        return None
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=".part-"))
    for name, body in files.items():
        (part / name).write_bytes(body)
    try:
        os.replace(part, place)
    except OSError:  # another process stored it first
        shutil.rmtree(part, ignore_errors=True)
    return place


async def _download(connection: ServerConnection, base_model: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        request = TokenizerFileRequest(model_name=base_model, file=name)
        try:
            files[name] = await connection.call(ops.GET_TOKENIZER_FILE, request)
        except NotFoundError:
            if name == TOKENIZER_FILES[0]:
                return {}  # tokenizer.json is required
        except APIStatusError:
            if not connection.base_url:
                raise  # the error says why there is none
            return {}  # the server has no such operation
    return files
