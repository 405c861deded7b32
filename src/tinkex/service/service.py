"""The service: hop 4. One method per operation, found by the operation's name among the parts.

    Sessions · Runs · Samplers · Futures · Checkpoints · Accounts · History       over one Core

Promises: `call` answers, or raises Refusal; one home directory has one owner at a time; what was acknowledged
before a crash is there after it. Knows neither HTTP nor torch: the server and the embedded transport both
talk to it through `call`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tinkex import tracing
from tinkex.engine.protocol import Engine, EngineConfig, build_engine
from tinkex.errors import InvalidInputError, TinkerError
from tinkex.service.accounts import Accounts
from tinkex.service.barriers import Barriers
from tinkex.service.checkpoints import Checkpoints
from tinkex.service.config import ServiceConfig
from tinkex.service.core import Core
from tinkex.service.engines import Engines
from tinkex.service.history import History
from tinkex.service.lanes import Lanes
from tinkex.service.ledger import Ledger, LedgerError
from tinkex.service.live import Live
from tinkex.service.records import JournalError
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.runs import Runs
from tinkex.service.samplers import Samplers
from tinkex.service.sessions import Sessions
from tinkex.types.futures import UntypedAPIFuture
from tinkex.wire.ops import OPS, Op

log = logging.getLogger("tinkex.service")
TICK = 5.0  # seconds between two rounds of upkeep
THOROUGH = 12  # every so many rounds, what takes longer is done too


class Service:
    """Everything behind the wire's operations."""

    core: Core  # with the parts below it, from `start` on

    def __init__(self, config: ServiceConfig, build: Callable[[EngineConfig], Engine] = build_engine) -> None:
        self.config = config
        self._build = build
        self._methods: dict[str, Callable[[Any, Caller], Awaitable[Any]]] = {}
        self._lock: int | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self.ready = False

    # -- life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the home, open the ledger, and take up what an earlier process left."""
        self._take_home()
        try:
            await asyncio.to_thread(self._clear_unfinished)
            self._open()
            await asyncio.to_thread(self.core.archives.sweep)
            if self.config.preload:  # first: if it fails, what is owed must wait for a better start
                await self.core.engines.load_all()
            await self._take_up_runs()
        except BaseException:
            if hasattr(self, "core"):
                self.core.ledger.close()
            self._leave_home()
            raise
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up())
        self.ready = True

    async def look(self) -> None:
        """Open the home beside whoever owns it: to list what is there and tidy up, not to compute."""
        self.config.home.mkdir(parents=True, exist_ok=True)
        self._open()
        self.ready = True

    def _open(self) -> None:
        config = self.config
        self.core = core = Core(config, Ledger(config.home / "ledger.sqlite"), Engines(config, self._build))
        barriers = Barriers(core)
        lanes = self._lanes = Lanes(config.home / "samples" if config.resume else None)
        self.live = Live(core, barriers)
        self.sessions = Sessions(core)
        self.runs = Runs(core, barriers, self.live)
        self.samplers = Samplers(core, lanes)
        self.checkpoints = Checkpoints(core, barriers, self.sessions)
        self.accounts = Accounts(core)
        self.history = History(core)
        barriers.publish = self.samplers.publish
        core.futures.elsewhere = self.runs.find_future
        core.futures.on_drop = self._dropped
        self.sessions.on_move = self.live.reread
        self.live.observers += [self.accounts.worked, self.history.worked]
        self.samplers.observers.append(self.accounts.sampled)
        parts = (
            self.sessions, self.runs, self.samplers, self.checkpoints, self.accounts, self.history,
            core.futures,
        )  # fmt: skip
        self._methods = {
            name: method
            for name in OPS
            if (method := next((m for part in parts if (m := getattr(part, name, None))), None)) is not None
        }

    def _dropped(self, request_ids: list[str]) -> None:
        self._lanes.fetched(request_ids)
        self.live.forget_results(request_ids)

    def _take_home(self) -> None:
        self.config.home.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.config.home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise TinkerError(
                f"{self.config.home} is in use by another process; end it, or use another home (TINKEX_HOME)"
            ) from None
        self._lock = lock

    def _clear_unfinished(self) -> None:
        """Remove what an earlier process was writing when it was killed: it never got its name.

        What was about to be replaced, as .NAME.NUMBER.old, gets its name back if nothing has it.
        """
        for replaced in self.config.home.glob("runs/*/*/*/.*.old"):
            place = replaced.with_name(replaced.name[1:].rsplit(".", 2)[0])
            if place.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(place)
        for pattern in ("runs/*/*/*/.*.tmp", "runs/*/*/*/.*.part", "runs/*/*/journal.deleted"):
            for unfinished in self.config.home.glob(pattern):
                shutil.rmtree(unfinished, ignore_errors=True)

    def _leave_home(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _take_up_runs(self) -> None:
        """Go on with what was accepted and not answered, and clean up after those who will not come back."""
        ledger = self.core.ledger
        if not self.config.resume:
            self.sessions.end_all()
        for row in ledger.runs_in_state("live", "evicted"):
            session = ledger.session(row.session_id)
            if session is None or session.status["type"] != "active":
                self.sessions.ended.add(row.session_id)
            elif row.state == "live" and not row.corrupted:
                await self.live.take_up(row)

    async def stop(self) -> None:
        """Finish what is being executed, put runs on disk, and let go of the home."""
        self.ready = False
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        await self.samplers.stop()
        await self.live.stop()
        self.core.flush()
        self._lanes.close()
        self.core.archives.clear()
        await self.core.engines.close()
        self.core.ledger.close()
        self._leave_home()

    # -- calls -------------------------------------------------------------------------------------------

    async def call(self, op: Op[Any, Any], request: Any, caller: Caller) -> Any:
        """Do one operation."""
        method = self._methods.get(op.name)
        if method is None:
            raise Refusal(404, f"this service does not offer {op.name}")
        try:
            if not tracing.is_on():
                return await method(request, caller)
            with tracing.span(f"service {op.name}", within=True):
                return await method(request, caller)
        except InvalidInputError as error:
            raise Refusal(422, str(error)) from None
        except (LedgerError, JournalError) as error:
            raise Refusal(503, str(error)) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise Refusal(503, f"the server's disk is full ({op.name}); nothing was lost") from error

    async def fail(
        self, op: Op[Any, Any], run_id: str, seq_id: int, message: str, caller: Caller
    ) -> UntypedAPIFuture:
        """Accept a run's request that cannot be read, and fail its future: a 4xx leaves clients stuck."""
        return await self.runs.fail(op.name, run_id, seq_id, message, caller)

    # -- upkeep ------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        for round in itertools.count(1):
            await asyncio.sleep(TICK)
            try:
                await self.tick(thorough=round % THOROUGH == 0)
            except Exception:
                log.exception("upkeep failed; trying again")

    async def tick(self, *, thorough: bool = True) -> None:
        """One round: forget what expired, put on disk what lapsed, clean up after what ended."""
        now = time.monotonic()
        self.core.look_at_clocks()
        self.core.flush()
        self.core.futures.expire(now)
        self._lanes.expire(now, self.config.keep_results)
        await self.checkpoints.expire()
        for run in self.live.idle_runs(self.sessions.lapsed()):
            if await self.live.put_away(run):
                log.info("run %s was put on disk: its session has not been heard of", run.id)
        if thorough:
            self.core.archives.sweep()
            self.accounts.count_storage()
            self.sessions.expire()
            for session_id in list(self.core.seen):
                await self.samplers.clean(session_id, ended=False)
        for session_id in list(self.sessions.ended):
            await self._clean_up(session_id)

    async def _clean_up(self, session_id: str) -> None:
        """After a session: its runs once they are done, its unnamed samplers, its trace."""
        open_runs = [r for r in self.core.ledger.runs_of_session(session_id) if r.state != "closed"]
        if all([await self.live.close(row) for row in open_runs]):
            await self.samplers.clean(session_id, ended=True)
            self.accounts.forget(session_id)
            self.sessions.ended.discard(session_id)
