"""Watching a run: does the server still have it, though nobody makes a call?

A task on the client's own loop, no thread: now and then it asks for the run's record and beats its session's
heart. Promises: lost is only what the server itself says is lost, after it has known the run; one that cannot
be reached, or is about to restart, is asked again. What is told is told once, before the run's next call
raises RunLostError. Knows nothing of what is done about it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from tinkex.client.future import start
from tinkex.client.loop import in_own_thread
from tinkex.client.training import TrainingClient
from tinkex.errors import ExpiredError, NotFoundError, RunLostError, TinkerError
from tinkex.types.sessions import SessionHeartbeatRequest
from tinkex.types.training import GetTrainingRunRequest
from tinkex.wire import ops


class RunWatch:
    """Looks after one run every `every` seconds, until it is lost or `stop` is called."""

    def __init__(self, run: TrainingClient, every: float, tell: Callable[[RunLostError], object]) -> None:
        self._run, self._every, self._tell = run, every, tell
        self._session_id = run._session.session_id or ""  # that of now: the client may open another
        self._lock = threading.Lock()
        self._stopped = False
        self._known = False  # a server that never had its record cannot have lost it
        self._lost: RunLostError | None = None
        self.told = start(self._watch, "run_watch")  # done once a loss was told, or it was stopped

    def stop(self) -> RunLostError | None:
        """Look no longer; why the run is lost, if that has been noticed (and is told, or just being told)."""
        with self._lock:
            self._stopped = True
            if self._lost is None:
                self.told.cancel()
            return self._lost

    async def _watch(self) -> None:
        while (reason := await self._why_lost()) is None:
            await asyncio.sleep(self._every)
        with self._lock:
            if self._stopped:
                return
            self._lost = RunLostError(self._run.model_id, reason)
        await in_own_thread(self._tell, self._lost)
        self._run._lose(self._lost)

    async def _why_lost(self) -> str | None:
        connection, run_id = self._run._session.connection, self._run.model_id
        try:
            record = await connection.call(
                ops.GET_TRAINING_RUN, GetTrainingRunRequest(training_run_id=run_id)
            )
            self._known = True
            if record.corrupted:
                return "the server could not restore it"
        except NotFoundError:
            return "the server does not know it any more" if self._known else None
        except TinkerError:
            return None
        return await self._why_ended()

    async def _why_ended(self) -> str | None:
        request = SessionHeartbeatRequest(session_id=self._session_id)
        try:
            await self._run._session.connection.call(ops.SESSION_HEARTBEAT, request)
        except (ExpiredError, NotFoundError):
            return "its session has ended"
        except TinkerError:
            pass
        return None
