"""The service: hop 4. One method per operation, found by the operation's name among the parts.

    Sessions · Runs · Samplers · Futures · Checkpoints · Accounts       over one Core

Promises: `call` answers, or raises Refusal; one home directory has one owner at a time; what was acknowledged
before a crash is there after it. Knows neither HTTP nor torch: the server and the embedded transport both
talk to it through `call`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tinkex.engine.protocol import Engine, EngineConfig, build_engine
from tinkex.errors import InvalidInputError, TinkerError
from tinkex.service.accounts import Accounts
from tinkex.service.barriers import Barriers
from tinkex.service.checkpoints import Checkpoints
from tinkex.service.config import ServiceConfig
from tinkex.service.core import Core
from tinkex.service.engines import Engines
from tinkex.service.ledger import Ledger, LedgerError
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.runs import Runs
from tinkex.service.samplers import Samplers
from tinkex.service.sessions import Sessions
from tinkex.types.futures import UntypedAPIFuture
from tinkex.wire.ops import OPS, Op

log = logging.getLogger("tinkex.service")
TICK = 5.0  # seconds between two rounds of upkeep


class Service:
    """Everything behind the wire's operations."""

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
        ledger = Ledger(self.config.home / "ledger.sqlite")
        self.core = Core(self.config, ledger, Engines(self.config, self._build))
        barriers = Barriers(self.core)
        self.sessions = Sessions(self.core)
        self.runs = Runs(self.core, barriers)
        self.samplers = Samplers(self.core)
        self.checkpoints = Checkpoints(self.core, barriers)
        self.accounts = Accounts(self.core)
        parts = (self.sessions, self.runs, self.samplers, self.checkpoints, self.accounts, self.core.futures)
        self._methods = {
            name: method
            for name in OPS
            if (method := next((m for part in parts if (m := getattr(part, name, None))), None)) is not None
        }
        if self.config.journal:
            self._take_up_runs()
        if self.config.preload:
            await self.core.engines.load_all()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up())
        self.ready = True

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

    def _take_up_runs(self) -> None:
        for row in self.core.ledger.runs_in_state("live"):
            try:
                self.runs.revive(row)
            except Exception as error:
                log.exception("run %s could not be restored", row.run_id, exc_info=error)
                self.core.ledger.update_run(row.run_id, corrupted=True, state="closed")

    async def stop(self) -> None:
        """Finish what is being executed, put runs on disk, and let go of the home."""
        self.ready = False
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        await self.samplers.stop()
        await self.runs.stop()
        self.core.flush()
        await self.core.engines.close()
        self.core.ledger.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- calls -------------------------------------------------------------------------------------------

    async def call(self, op: Op[Any, Any], request: Any, caller: Caller) -> Any:
        """Do one operation."""
        method = self._methods.get(op.name)
        if method is None:
            raise Refusal(404, f"this service does not offer {op.name}")
        try:
            return await method(request, caller)
        except InvalidInputError as error:
            raise Refusal(422, str(error)) from None
        except LedgerError as error:
            raise Refusal(503, str(error)) from error

    async def fail(
        self, op: Op[Any, Any], run_id: str, seq_id: int, message: str, caller: Caller
    ) -> UntypedAPIFuture:
        """Accept a run's request that could not be read, and fail its future: see Runs.fail."""
        return await self.runs.fail(op.name, run_id, seq_id, message, caller)

    # -- upkeep ------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                await self.tick()
            except Exception:
                log.exception("upkeep failed; trying again")

    async def tick(self) -> None:
        """One round: forget what expired, put on disk what lapsed, write down what was counted."""
        self.core.flush()
        self.runs.acknowledged(self.core.futures.expire(time.monotonic()))
        await self.checkpoints.expire()
        lapsed = set(self.sessions.lapsed())
        for run in self.runs.idle_runs(lapsed):
            if await self.runs.evict(run):
                log.info("run %s was put on disk: its session has not been heard of", run.id)
