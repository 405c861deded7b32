"""`RunWatch`: notices that the server has lost a run, even if nobody makes a call.

It polls the run's record and sends its session's heartbeat. Promises: a run is lost only if the server says
so after it has known the run; an unreachable or restarting server is asked again. The callback is called
once, before the run's next call raises RunLostError.
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
    """Checks one run every `every` seconds, until it is lost or `stop` is called."""

    def __init__(self, run: TrainingClient, every: float, tell: Callable[[RunLostError], object]) -> None:
        self._run, self._every, self._tell = run, every, tell
        self._session_id = run._session.session_id or ""  # of now: the client may open another one
        self._lock = threading.Lock()
        self._stopped = False
        self._known = False  # has the server ever had its record?
        self._lost: RunLostError | None = None
        self.ended = start(self._watch, "run_watch")  # resolves after the callback, or after `stop`

    def stop(self) -> RunLostError | None:
        """Stop; returns why the run is lost, if that was noticed (the callback has run, or is running)."""
        with self._lock:
            self._stopped = True
            if self._lost is None:
                self.ended.cancel()
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
        call, run_id = self._run._session.connection.call, self._run.model_id
        try:
            record = await call(ops.GET_TRAINING_RUN, GetTrainingRunRequest(training_run_id=run_id))
            self._known = True
            if record.corrupted:
                return "the server could not restore it"
        except NotFoundError:
            return "the server does not know it any more" if self._known else None
        except TinkerError:
            return None
        try:
            await call(ops.SESSION_HEARTBEAT, SessionHeartbeatRequest(session_id=self._session_id))
        except (ExpiredError, NotFoundError):
            return "its session has ended"
        except TinkerError:
            pass
        return None
