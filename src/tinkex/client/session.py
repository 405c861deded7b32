"""A session: a client process's lease on a server, kept alive by heartbeats until it is finished.

Promises: opened on first use, once; finished by `close`, at exit, or when the last client that uses it is
garbage-collected.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import sys
import weakref
from contextlib import suppress
from typing import Literal

from tinkex._version import __version__
from tinkex.client import loop as background
from tinkex.client.future import start
from tinkex.client.polling import QueueStateObserver, QueueWatch
from tinkex.client.server_connection import ServerConnection
from tinkex.client.transport import QueueListener
from tinkex.errors import APITimeoutError, ExpiredError, NotFoundError, TinkerError
from tinkex.types.sessions import (
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishSuccess,
    CreateSessionRequest,
    FinishSessionRequest,
    SessionHeartbeatRequest,
)
from tinkex.wire import ops

log = logging.getLogger("tinkex")
_REASONS = {
    "success": ClientSessionFinishSuccess,
    "errored": ClientSessionFinishErrored,
    "interrupted": ClientSessionFinishInterrupted,
}
FinishReason = Literal["success", "errored", "interrupted"]
HEARTBEAT_WARNING = 120.0  # seconds without a successful heartbeat, before a warning and between two


class Lease:
    """An open session, on the background loop; without a reference to `Session`, which can be collected."""

    def __init__(self, connection: ServerConnection, session_id: str, *, owned: bool) -> None:
        self.connection = connection
        self.session_id = session_id
        self.owned = owned  # False: it was joined, and only its creator finishes it
        self.finished = False
        self._heartbeat = background.spawn(self._beat())
        _leases.add(self)

    async def _beat(self) -> None:
        now, interval = asyncio.get_running_loop().time, self.connection.timeouts.heartbeat_interval
        request = SessionHeartbeatRequest(session_id=self.session_id)
        last = warned = now()
        while not self.finished:
            await asyncio.sleep(interval)
            began = now()
            try:
                async with asyncio.timeout(interval):  # then the next is due
                    await self.connection.transport.call(ops.SESSION_HEARTBEAT, request)
                last = warned = began
            except ExpiredError:
                log.info("session %s has ended on the server", self.session_id)
                return
            except (TinkerError, TimeoutError) as error:
                if began - max(last, warned) > HEARTBEAT_WARNING:
                    warned, cause = began, str(error) or "no answer"
                    log.warning(
                        "session %s: no heartbeat for %.0f s: %s", self.session_id, began - last, cause
                    )

    def forget(self) -> None:
        """Stop without telling the server, which no longer has the session."""
        self.finished = True
        self._heartbeat.cancel()

    async def finish(self, reason: FinishReason, detail: str | None) -> None:
        """Finish the session on the server, and stop."""
        if self.finished:
            return
        self.forget()
        seconds, telemetry = self.connection.timeouts.close, self.connection.telemetry
        flushing = telemetry and background.spawn(telemetry.close(0.8 * seconds, ended=True))
        request = FinishSessionRequest(session_id=self.session_id, reason=_REASONS[reason](), detail=detail)
        try:
            if self.owned:
                async with asyncio.timeout(seconds):
                    await self.connection.transport.call(ops.FINISH_SESSION, request)
        except TimeoutError:
            message = f"session {self.session_id} could not be finished within {seconds:g} s"
            raise APITimeoutError(message=message) from None
        finally:
            if flushing is not None:
                await flushing


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


class Session:
    """The session that training and sampling clients share. Opens itself on first use.

    With a `session_id` it joins a session that another client opened.
    """

    def __init__(
        self,
        connection: ServerConnection,
        *,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        session_id: str | None = None,
        queue_observer: QueueStateObserver | None = None,
    ) -> None:
        self.connection = connection
        self._queue_observer = queue_observer
        self._request = CreateSessionRequest(  # built now, so that invalid arguments fail at once
            tags=list(connection.settings.tags),
            user_metadata={} if user_metadata is None else user_metadata,
            sdk_version=__version__,
            project_id=connection.settings.project_id if project_id is None else project_id,
            display_name=display_name,
        )
        self._joined = session_id
        self._opening: asyncio.Task[Lease] | None = None
        self.run_seq = itertools.count()
        self.sampling_seq = itertools.count()
        self.custom_loss_seq = itertools.count()

    def watch(self, what: str, *listeners: QueueListener) -> QueueWatch:
        """Follow the queue state of a run or a sampler; report it to tracing, telemetry and observers."""
        if self._queue_observer is not None:
            listeners = (*listeners, self._queue_observer.on_queue_state_change)
        return QueueWatch(what, *listeners, telemetry=self.connection.telemetry)

    @property
    def project_id(self) -> str | None:
        return self._request.project_id

    async def open(self) -> str:
        """The session's id; opens the session on first use."""
        self.connection.check_open()
        if self._opening is None or (self._opening.done() and self._lease is None):
            self._opening = asyncio.get_running_loop().create_task(self._open())
        return (await asyncio.shield(self._opening)).session_id

    async def _open(self) -> Lease:
        await self.connection.open()
        session_id = self._joined or await self._create()
        lease = Lease(self.connection, session_id, owned=self._joined is None)
        if self.connection.telemetry is not None:
            self.connection.telemetry.begin(session_id)
        finalizer = weakref.finalize(self, _abandon, lease)
        finalizer.atexit = False  # `_finish_all` finishes all of them at once
        return lease

    async def _create(self) -> str:
        reply = await self.connection.transport.call(ops.CREATE_SESSION, self._request)
        said = (reply.info_message, reply.warning_message, reply.error_message)
        for level, message in zip((logging.INFO, logging.WARNING, logging.ERROR), said, strict=True):
            if message:
                log.log(level, "%s", message)
        return reply.session_id

    @property
    def _lease(self) -> Lease | None:
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception() is not None:
            return None
        return opening.result()

    @property
    def session_id(self) -> str | None:
        return self._lease and self._lease.session_id

    async def alive(self) -> bool:
        """Does the server still have the session? If not, another is opened."""
        session_id = await self.open()
        try:
            request = SessionHeartbeatRequest(session_id=session_id)
            await self.connection.call(ops.SESSION_HEARTBEAT, request)
            return True
        except (ExpiredError, NotFoundError):
            if (lease := self._lease) is not None and lease.session_id == session_id:  # not replaced yet
                lease.forget()
                self._opening = None
            await self.open()
            return False

    async def close(self, reason: FinishReason = "success", detail: str | None = None) -> None:
        """Finish the session and close its connection; closing twice is not an error."""
        try:
            if self._opening is not None:
                with suppress(TinkerError, TimeoutError):  # then it never opened
                    async with asyncio.timeout(self.connection.timeouts.close):
                        await asyncio.shield(self._opening)
            if (lease := self._lease) is not None:
                await lease.finish(reason, detail)
        finally:
            await self.connection.close()


def _abandon(lease: Lease) -> None:
    """Finish a session whose last reference is gone; a RestClient may still use its connection."""

    async def finish() -> None:
        try:
            await lease.finish("success", None)
        except TinkerError as error:
            log.debug("session %s could not be finished: %s", lease.session_id, error)

    with suppress(TinkerError, RuntimeError):  # a forked child, or an exiting interpreter
        background.call_soon(lambda: background.spawn(finish()))


@atexit.register
def _finish_all() -> None:
    """At exit: finish all open sessions concurrently, for a few seconds at most."""
    leases = [lease for lease in _leases if not lease.finished]
    if not leases or not background.is_running_here():
        return
    reason: FinishReason = "success"
    if (error := getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)) is not None:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "errored"

    async def finish_all() -> None:
        await asyncio.gather(*(lease.finish(reason, None) for lease in leases), return_exceptions=True)
        await asyncio.gather(*(lease.connection.close() for lease in leases), return_exceptions=True)

    try:
        start(finish_all, "session finish").result(max(lease.connection.timeouts.close for lease in leases))
    except Exception as failure:
        log.debug("sessions could not be finished at exit: %s", failure)
