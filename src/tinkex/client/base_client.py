"""The base classes of clients: `BaseClient` of a server, `ModelClient` of a run or a sampler; shared checks.

Promises: a client made on its own sends nothing until its first call and opens no session; one made by a
ServiceClient uses that client's connection and leaves it open. Tokenizer files of a Tinkex server are
downloaded once, into the home directory; a server without such files (hosted Tinker) falls back to the hub.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from tinkex.client.future import APIFuture, check_timeout, completed, start
from tinkex.client.loop import in_own_thread
from tinkex.client.server_connection import ServerConnection, connect
from tinkex.client.session import Session
from tinkex.client.telemetry import Telemetry
from tinkex.client.transport import CallContext
from tinkex.client.twins import blocking
from tinkex.config import LOCAL
from tinkex.errors import APIStatusError, InvalidInputError, NotFoundError
from tinkex.store import DamagedError, add_checksums, verify
from tinkex.tokenizers import load_tokenizer, tokenizer_name
from tinkex.types.config import TOKENIZER_FILES, TokenizerFileRequest
from tinkex.wire import ops
from tinkex.wire.ops import Op

T = TypeVar("T")
Reply = TypeVar("Reply")

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the first line outside this package."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class BaseClient:
    """A client whose methods are single calls, each a future."""

    def __init__(
        self,
        connection: ServerConnection | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if connection is not None and (base_url is not None or api_key is not None):
            raise InvalidInputError(
                f"{type(self).__name__} takes a connection, or base_url and api_key, not both"
            )
        self._owns_connection = connection is None
        self._connection = connection or connect(base_url, api_key)

    def _submit(self, op: Op[Any, Reply], method: str = "", /, **fields: Any) -> APIFuture[Reply]:
        """Do an operation; `method` is the public one's name, if it is another than the operation's."""
        return self._connection.submit(op, _request(op, fields), CallContext(method or op.name))

    def _convert(self, op: Op[Any, Any], convert: Callable[[Any], T], /, **fields: Any) -> APIFuture[T]:
        request = _request(op, fields)

        async def call() -> T:
            return convert(await self._connection.call(op, request, CallContext(op.name)))

        return self._start(call, op.name)

    def _start(self, make: Callable[[], Coroutine[Any, Any, T]], method: str) -> APIFuture[T]:
        self._connection.check_open()
        return start(make, method)

    def get_telemetry(self) -> Telemetry | None:
        """Return what reports failures to the server; None unless telemetry is on."""
        return self._connection.telemetry

    def close(self) -> APIFuture[None]:
        """Close the connection, if this client made it."""
        if not self._owns_connection:
            return completed(None, "close")
        return start(self._connection.close, "close")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close().result(self._connection.timeouts.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close().result_async(self._connection.timeouts.close)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.base_url or LOCAL!r})"


def _request(op: Op[Any, Any], fields: dict[str, Any]) -> Any:
    """An operation's request; ids that go into the path of its URL are checked."""
    for name, may_have_slashes in op.placeholders.items():
        if not may_have_slashes:
            check_id(name, fields[name])
    return op.request(**fields)


class ModelClient(ABC):
    """A client of one model: a run's or a sampler's."""

    def __init__(self, session: Session) -> None:
        self.session = session  # internal, as `queue` of a run is
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
        try:
            verify(place)
            return place
        except DamagedError:  # it is a copy of the server's: take another
            shutil.rmtree(place, ignore_errors=True)
    files = start(lambda: _download(connection, base_model), "tokenizer").result()
    if not files:
        return None
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=".part-"))
    for name, body in files.items():
        (part / name).write_bytes(body)
    add_checksums(part)
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


# -- checks ----------------------------------------------------------------------------------------------


def check_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise InvalidInputError(f"{name} must be a string or None, got {value!r:.80}")


def check_ttl(seconds: int | None) -> int | None:
    """`seconds`, if it is a valid time to live; None: for ever."""
    if seconds is not None and (type(seconds) is not int or not 0 < seconds < 2**63):
        raise InvalidInputError(f"ttl_seconds must be a whole number from 1 on, or None, got {seconds!r}")
    return seconds


def check_id(name: str, value: str) -> str:
    """`value`, if it is an id that fits into the path of a URL."""
    if not isinstance(value, str) or not value or "/" in value:
        raise InvalidInputError(f"{name} must be an id without '/', as the server gave it, got {value!r}")
    return value
