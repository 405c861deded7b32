"""Telemetry: events about sessions, failures and pauses that a client sends to its server, if it is on.

Promises: off by default; no call waits for it or fails because of it; at most CAPACITY events are queued, the
oldest are dropped first and counted. Events are redacted when they are made: an exception's type, status and
our own line numbers, but not its message; numbers and plain names, but no other text. So no key, header,
prompt or token is ever sent. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import platform
import re
import time
import traceback
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tinkex._version import __version__
from tinkex.client import loop as background
from tinkex.client.redaction import REDACTED
from tinkex.errors import APIStatusError, RequestFailedError, TinkerError, is_user_error
from tinkex.types.base import AnyJson
from tinkex.types.reports import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    Severity,
    TelemetryEvent,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
)

log = logging.getLogger("tinkex")

CAPACITY = 1000  # events queued
BATCH = 100  # events in one request
FLUSH_EVERY = 10.0  # seconds, unless an event is urgent
SEND_TIMEOUT = 5.0
ATTEMPTS = 3  # for one batch, before it is dropped
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # the only strings that are sent,
_CREDENTIAL = re.compile("tml-|eyJ", re.I)  # unless they contain this
_PACKAGE = Path(__file__).resolve().parents[1]

Send = Callable[[TelemetrySendRequest], Awaitable[object]]


class Telemetry:
    """The events of one connection. Thread-safe. A string is sent only if `allowed(name, value)` agrees."""

    def __init__(self, send: Send, allowed: Callable[[str, str], bool] = lambda name, value: True) -> None:
        self._send, self._allowed = send, allowed
        self._session_id, self._began = f"sessionless-{uuid.uuid4()}", time.monotonic()
        self._index = itertools.count()
        self._queue: deque[TelemetryEvent] = deque(maxlen=CAPACITY)
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.sent = 0  # events
        self.dropped = 0

    def log(
        self, event_name: str, event_data: Mapping[str, Any] | None = None, severity: Severity = "INFO"
    ) -> bool:
        """Send an event of your own, of numbers and plain names; False if telemetry is closed."""
        name = event_name if self._is_plain("", event_name) else REDACTED
        data = self._redacted("", event_data or {})
        return self._add(GenericEvent, severity, event_name=name, event_data=data)

    def log_exception(
        self, exception: BaseException, severity: Severity = "ERROR", *, during: str = ""
    ) -> bool:
        """Send a failure, at once; a user's mistake is a warning."""
        what = _described(exception, during)
        if is_user_error(exception):
            return self._add(GenericEvent, "WARNING", event_name="user_error", event_data=what, urgent=True)
        message = " ".join(f"{key}={value}" for key, value in what.items() if key != "error_type")
        return self._add(
            UnhandledExceptionEvent, severity, error_message=message, error_type=what["error_type"],
            traceback=_our_lines(exception), urgent=True,
        )  # fmt: skip

    def flush(self) -> None:
        """Send the queued events, in the background."""
        self._on_loop(self._wake, True)

    def _add(
        self, kind: Callable[..., TelemetryEvent], severity: Severity, *, urgent: bool = False, **fields: Any
    ) -> bool:
        if self._closed:
            return False
        event = kind(
            event_id=str(uuid.uuid4()), event_session_index=next(self._index), severity=severity,
            timestamp=datetime.now(UTC), **fields,
        )  # fmt: skip
        return self._on_loop(self._put, event, urgent)

    def _redacted(self, name: str, value: AnyJson | Mapping[str, Any]) -> Any:
        if isinstance(value, Mapping):
            return {
                key if self._is_plain("", key) else REDACTED: self._redacted(str(key), item)
                for key, item in value.items()
            }
        is_number = value is None or isinstance(value, bool | int | float)
        return value if is_number or self._is_plain(name, value) else REDACTED

    def _is_plain(self, name: str, value: Any) -> bool:
        is_name = isinstance(value, str) and _PLAIN_NAME.fullmatch(value) and not _CREDENTIAL.search(value)
        return bool(is_name) and self._allowed(name, value)

    def begin(self, session_id: str) -> None:
        """A session was opened: later events belong to it."""
        self._session_id, self._began = session_id, time.monotonic()
        self._add(SessionStartEvent, "INFO")

    async def close(self, within: float, *, ended: bool = False) -> None:
        """Send the queued events within `within` seconds, and accept no more. Call on the loop."""
        if self._closed:
            return
        if ended:
            duration = str(timedelta(seconds=time.monotonic() - self._began))
            self._add(SessionEndEvent, "INFO", duration=duration)
            await asyncio.sleep(0)  # events are put into the queue by callbacks of the loop
        self._closed = True
        self._wake(True)
        if (task := self._task) is not None:
            await asyncio.wait([task], timeout=within)
            task.cancel()
        self.dropped += len(self._queue)
        self._queue.clear()

    def _on_loop(self, function: Callable[..., object], *args: Any) -> bool:
        try:
            background.call_soon(function, *args)
        except (TinkerError, RuntimeError):
            return False  # a forked child, or an exiting interpreter
        return True

    def _put(self, event: TelemetryEvent, urgent: bool) -> None:
        if self._closed:
            self.dropped += 1
            return
        self.dropped += len(self._queue) == self._queue.maxlen
        self._queue.append(event)
        self._wake(urgent or len(self._queue) >= BATCH)

    def _wake(self, urgent: bool) -> None:
        if urgent:
            self._urgent.set()
        if self._task is None and self._queue:
            self._task = background.spawn(self._drain())

    async def _drain(self) -> None:
        """Send until the queue is empty; there is no task while it is."""
        try:
            while self._queue:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_EVERY):
                        await self._urgent.wait()
                self._urgent.clear()
                while self._queue:
                    await self._send_batch()
        finally:
            self._task = None

    async def _send_batch(self) -> None:
        events = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        request = TelemetrySendRequest(
            events=list(events), platform=platform.system(), sdk_version=__version__,
            session_id=self._session_id, process_uuid=_process_uuid(os.getpid()),
        )  # fmt: skip
        for attempt in range(ATTEMPTS):
            try:
                async with asyncio.timeout(SEND_TIMEOUT):
                    await self._send(request)
                self.sent += len(events)
                return
            except (TinkerError, TimeoutError) as error:
                log.debug("telemetry could not be sent: %s", type(error).__name__)
                if attempt + 1 < ATTEMPTS:
                    await asyncio.sleep(2.0**attempt)
        self.dropped += len(events)


@functools.cache
def _process_uuid(pid: int) -> str:  # a forked child is another process
    return str(uuid.uuid4())


def _described(error: BaseException, during: str) -> dict[str, Any]:
    """An error without its message: its type, the operation, and its status or category."""
    ours = type(error).__module__.partition(".")[0] in ("tinkex", "builtins", "asyncio")
    what: dict[str, Any] = {"error_type": type(error).__name__ if ours else "Exception"}
    if during:
        what["during"] = during
    if isinstance(error, APIStatusError):
        what["status"] = error.status_code
    if isinstance(error, RequestFailedError):
        what["category"] = str(error.category)
    return what


def _our_lines(error: BaseException) -> str | None:
    """The traceback's lines in this package, without their code."""
    frames = [(Path(f.filename), f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    ours = [frame for frame in frames if frame[0].is_relative_to(_PACKAGE)]
    return "\n".join(f"{p.relative_to(_PACKAGE).as_posix()}:{line} in {at}" for p, line, at in ours) or None
