"""What the parts of a service share: its settings, ledger, futures, base models, and where files live.

Promises: looking something up through here is also the check that it is the caller's. Knows no operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tinkex.errors import InvalidInputError
from tinkex.service.archive import Archives
from tinkex.service.config import ServiceConfig
from tinkex.service.engines import Engines
from tinkex.service.futures import Future, Futures
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, Refusal, not_found
from tinkex.service.rows import (
    AuditRow,
    CheckpointRow,
    RunRow,
    SamplerRow,
    Scope,
    SessionRow,
    UsageKind,
    UsageRow,
)
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

DISK_RESERVE = 64 * 1024 * 1024  # bytes kept free for the ledger and the journals
ASLEEP = 60.0  # seconds by which one clock must go ahead of the other, to say that the machine slept
DISK_LOOK = 1.0  # seconds for which a look at the disk is believed


class Core:
    """The shared state of a service."""

    def __init__(self, config: ServiceConfig, ledger: Ledger, engines: Engines) -> None:
        self.config = config
        self.ledger = ledger
        self.engines = engines
        self.futures = Futures(
            long_poll=config.long_poll, keep=config.keep_results, keep_delivered=config.keep_delivered
        )
        self.home = config.home
        self.archives = Archives(config.home)
        self.seen: dict[str, float] = {}  # when each session was heard of last
        self.awake_since = time.time()  # nobody could be heard of before
        self._clocks = time.time(), time.monotonic()
        self._usage: defaultdict[tuple[Any, ...], float] = defaultdict(float)
        self._heard: dict[str, float] = {}  # sessions and runs, since the ledger was told
        self._requested: dict[str, float] = {}
        self._samplers: dict[str, SamplerRow] = {}
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._disk: tuple[float, int] = (0.0, 0)  # when it was looked at, what was free
        self._used: tuple[float, int] = (0.0, 0)  # when the home was looked at, what it took
        # Makes a path below the home downloadable for a while, a directory as a tar; the server replaces it.
        self.link: Callable[[Caller, Path, float], str] = self._link_to_file
        # The run whose checkpoints a weights access token opens, if it is a good one; the server replaces it.
        self.opened_by: Callable[[str], str | None] = lambda token: None
        self.issues_tokens = False  # whether keys can be exchanged for JWTs; the server sets it

    # -- whose is it? ------------------------------------------------------------------------------------

    @staticmethod
    def scope(caller: Caller, access_scope: str = "owned") -> Scope:
        return Scope(caller.user, caller.project if access_scope == "accessible" else None)

    @staticmethod
    def _readable(row: Any, caller: Caller) -> bool:
        return row.owner == caller.user or (caller.project is not None and row.project_id == caller.project)

    @staticmethod
    def project(asked: str | None, caller: Caller) -> str | None:
        """The project that something new belongs to: a caller that has one can use no other."""
        if caller.project is not None and asked not in (None, caller.project):
            raise not_found(f"project {asked}")
        return asked or caller.project

    def session(self, session_id: str, caller: Caller, *, to_use: bool = False) -> SessionRow:
        row = self.ledger.session(session_id)
        if row is None or not (row.owner == caller.user or (not to_use and self._readable(row, caller))):
            raise not_found(f"session {session_id}")
        return row

    def active_session(self, session_id: str, caller: Caller) -> SessionRow:
        """A session of the caller's own that has not ended."""
        row = self.session(session_id, caller, to_use=True)
        if row.status["type"] != "active":
            raise Refusal(410, f"session {session_id} has ended")
        self.heard_of(session_id)
        return row

    def run(self, run_id: str, caller: Caller, *, to_use: bool = False) -> RunRow:
        row = self.ledger.run(run_id)
        if row is None or not (row.owner == caller.user or (not to_use and self._readable(row, caller))):
            raise not_found(f"run {run_id}")
        return row

    def sampler(self, sampler_id: str, caller: Caller) -> SamplerRow:
        row = self._samplers.get(sampler_id) or self.ledger.sampler(sampler_id)
        if row is None or row.owner != caller.user:
            raise not_found(f"sampler {sampler_id}")
        self._samplers[sampler_id] = row  # it never changes, and every sample asks for it
        return row

    def forget_sampler(self, sampler_id: str) -> None:
        self._samplers.pop(sampler_id, None)
        self.ledger.delete_sampler(sampler_id)

    def checkpoint(
        self, path: str, caller: Caller, *, to_change: bool = False, token: str | None = None
    ) -> CheckpointRow:
        """The checkpoint at a tinker:// path: the caller's own; to read, a published or opened one too."""
        row = self.any_checkpoint(path)
        token = token or caller.weights_token
        shared = not to_change and row is not None and (row.public or self._opens(token, row.run_id))
        if row is None or not (self._readable(row, caller) or shared):
            raise not_found(f"checkpoint {path}")
        if to_change:
            caller.must_own(row.owner, f"checkpoint {path}")
        return row

    def any_checkpoint(self, path: str) -> CheckpointRow | None:
        """The same, whoever asks."""
        try:
            parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        except InvalidInputError as error:
            raise Refusal(400, str(error)) from None
        row = self.ledger.checkpoint(parsed.training_run_id, *parsed.checkpoint_id.split("/"))
        expired = row is not None and row.expires_at is not None and row.expires_at <= time.time()
        return None if expired else row

    def _opens(self, token: str | None, run_id: str) -> bool:
        return token is not None and self.opened_by(token) == run_id

    # -- files -------------------------------------------------------------------------------------------

    def run_dir(self, run_id: str) -> Path:
        """`runs/<session>/train-<n>`: no colons, which some file systems do not take."""
        session_id, _, number = run_id.rpartition(":train:")
        return self.home / "runs" / session_id / f"train-{number}"

    def changing(self, directory: str) -> asyncio.Lock:
        """Held by whoever writes, removes or reads a checkpoint: its row and its files belong together."""
        if (lock := self._changing.get(directory)) is None:
            lock = self._changing[directory] = asyncio.Lock()
        return lock

    def relative(self, path: Path) -> str:
        return path.relative_to(self.home).as_posix()

    def check_disk(self, needed: int = 0) -> None:
        """Refuse what the disk has no room for."""
        looked, free = self._disk
        if needed or time.monotonic() - looked > DISK_LOOK:
            free = shutil.disk_usage(self.home).free
            self._disk = time.monotonic(), free
        if free < needed + DISK_RESERVE:
            raise Refusal(503, f"the server's disk is full ({free // 2**20} MiB left); nothing was lost")

    def _link_to_file(self, caller: Caller, path: Path, expires: float) -> str:
        """For a program of this machine; blocks while a directory is packed."""
        if path.is_dir():
            self.check_disk(_bytes_below(path))
            path = self.archives.pack(path)
        return path.absolute().as_uri()

    async def over_quota(self, more: int, *, lately: bool = False) -> str:
        """Why there is no room for `more` bytes; "" if there is. All that lies in the home counts.

        `lately`: a look of a moment ago will do, unless it says no.
        """
        quota = self.config.disk_quota
        if quota is None:
            return ""
        looked, used = self._used
        if not lately or used + more > quota or time.monotonic() - looked > DISK_LOOK:
            used = await asyncio.to_thread(_bytes_below, self.home)
            looked = time.monotonic()
        if used + more <= quota:
            self._used = looked, used + more
            return ""
        return (
            f"the server's files take {used} of the {quota} bytes allowed, {more} more do not fit; "
            "delete some checkpoints"
        )

    # -- records -----------------------------------------------------------------------------------------

    def promise(self, caller: Caller, outcome: Any) -> Future:
        """A future that is resolved already."""
        future = self.futures.create(caller.user)
        future.resolve(outcome)
        return future

    def audit(self, caller: Caller, event: str, **more: Any) -> None:
        self.ledger.add_audit(AuditRow(time.time(), caller.user, event, caller.project, **more))

    def look_at_clocks(self) -> None:
        """Notice that the machine slept: of the clocks, one goes on meanwhile, and the other does not."""
        (then, ticks), self._clocks = self._clocks, (time.time(), time.monotonic())
        if (self._clocks[0] - then) - (self._clocks[1] - ticks) > ASLEEP:
            self.awake_since = self._clocks[0]

    def heard_of(self, session_id: str, run_id: str | None = None) -> None:
        """Something came of this session; written down by `flush`."""
        now = time.time()
        self.seen[session_id] = self._heard[session_id] = now
        if run_id is not None:
            self._requested[run_id] = now

    def count(self, row: RunRow | SamplerRow, amounts: Mapping[UsageKind, float]) -> None:
        """Add to the usage of a run or sampler; written down by `flush`, every few seconds."""
        is_run = isinstance(row, RunRow)
        project, run_id = (row.project_id, row.run_id) if is_run else (None, _run_of(row.adapter_dir))
        whose = row.owner, project, row.session_id, run_id, row.base_model
        for kind, amount in amounts.items():
            if amount:
                self._usage[kind, whose] += amount

    def flush(self) -> None:
        """Write down what was counted and heard since the last time."""
        now, usage, heard, requested = time.time(), self._usage, self._heard, self._requested
        with self.ledger.transaction():
            self.ledger.add_usage(
                UsageRow(now, owner, kind, amount, project, session, run, model)
                for (kind, (owner, project, session, run, model)), amount in usage.items()
            )
            for session_id, at in heard.items():
                self.ledger.update_session(session_id, last_seen_at=at)
            for run_id, at in requested.items():
                self.ledger.update_run(run_id, last_request_at=at)
        self._usage, self._heard, self._requested = defaultdict(float), {}, {}


@lru_cache(maxsize=4096)
def _run_of(directory: str | None) -> str | None:
    """The run whose adapter lies there, as `Core.run_dir` places it."""
    if directory is None:
        return None
    _, session_id, run, *_ = directory.split("/")
    return f"{session_id}:train:{run.removeprefix('train-')}"


def _bytes_below(directory: Path) -> int:
    """What the files below take; those that go meanwhile do not count."""
    total = 0
    for place, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, file)).st_size
    return total
