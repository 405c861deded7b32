"""This server among those that share one ledger (Postgres) and one store.

Every session belongs to one server, and only that one writes for it. A server holds a lease: it renews it in
the shared database, and owns its sessions as long as it does. When a lease has run out, another server fences
it, seals its log and copies its files; then it owns the sessions, and resumes their runs. A request for a
session of another server raises `Elsewhere`. No clock but the database's is compared. Knows nothing of HTTP,
or of what runs do.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from tinkex.errors import InvalidInputError
from tinkex.service import commit_log
from tinkex.service.commit_log import CommitLog
from tinkex.service.config import ServiceConfig
from tinkex.service.futures import SAMPLES
from tinkex.service.home import Home
from tinkex.service.ledger_mirror import MirroredLedger
from tinkex.service.ledger_postgres import Fenced, SharedDatabase
from tinkex.service.refusal import Refusal
from tinkex.service.runs.segments import JournalError
from tinkex.service.shared_commit import SharedCommit
from tinkex.store import LocationExistsError, create_file, join, read_file
from tinkex.wire.ops import Op

log = logging.getLogger("tinkex.service")
TICK = 1.0  # seconds between two looks at the other servers
STALE = 1800.0  # seconds after which a copy of the ledger that followed nothing is read anew
WORK = "server-"  # directories in the home: what a server works on
# Operations on a session that its owner answers without asking the database: only it writes there.
_OWN = {
    "forward", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler",
    "save_weights_external", "sample", "stream_sample", "session_heartbeat", "retrieve_future",
    "retrieve_futures", "cancel_future",
}  # fmt: skip
Adopt = Callable[[list[str], list[Path]], Awaitable[None]]


class Elsewhere(Refusal):
    """Another server owns the session; `url` is where it listens."""

    def __init__(self, url: str) -> None:
        super().__init__(503, "another server owns this session: ask again in a moment")
        self.url = url


class _Restored(NamedTuple):
    """What an ended server has left: its runs' files, and the list of its unfetched samples."""

    written: set[Path]
    samples: Path


class Peers:
    """One server's part. `stop` ends its lease; `lost` is set, with the reason, when others have ended it."""

    def __init__(self, config: ServiceConfig, url: str) -> None:
        assert config.ledger is not None
        if config.store is None:
            raise InvalidInputError(
                "--ledger postgresql://… needs --store: where other servers find journals and adapters"
            )
        self.server, self.url = uuid.uuid4().hex[:12], url
        self.store, self._lease = config.store, config.lease
        self.lost = asyncio.Event()
        self.why_lost = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._home, self.directory = config.home, config.home / f"{WORK}{self.server}"
        self.directory.mkdir(0o700, parents=True)
        self.database = SharedDatabase(config.ledger)
        self._check_store()
        commits = CommitLog(config.store, self.server, sync=config.durability == "power")
        self.commit = SharedCommit(self.directory, commits, self.database, self.server, self._lose)
        self.ledger = MirroredLedger(self.directory, self.server, self.commit.statements)
        self._load()
        self._locked = Home(config.home)
        self._live: dict[str, str] = {}
        self._pulling: asyncio.Task[None] | None = None
        self._next_pull: asyncio.Task[None] | None = None
        self._renewing = ThreadPoolExecutor(1, "lease")  # nothing else may keep it from its time
        self._asked = self._fences_from = 0.0  # since when a renewal fails; when to fence again
        self._restored: dict[str, _Restored | None] = {}  # of ended servers, until they are forgotten
        self._tasks: list[asyncio.Task[None]] = []

    def _check_store(self) -> None:
        """One database, one store: a server with another one would find no files."""
        mark, name = join(self.store, "tinkex-store"), uuid.uuid4().hex
        with suppress(LocationExistsError):
            create_file(mark, name.encode())
        name = read_file(mark).decode()
        if (known := self.database.keep("store", name)) != name:
            raise InvalidInputError(
                f"{self.database.name} belongs to another store than {self.store}: give all servers of one "
                f"database the same --store (it has the mark {known})"
            )

    def _load(self) -> None:
        rows, self._since = self.database.load()
        self.ledger.fill(rows)
        self._loaded = time.monotonic()

    # -- life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Become a server, after one that this home had before."""
        self._loop = asyncio.get_running_loop()
        self._locked.lock()
        for old in self._home.glob(f"{WORK}*"):
            if old != self.directory:
                await asyncio.to_thread(shutil.rmtree, old, True)
        mark = self._home / "server"
        before = mark.read_text() if mark.exists() else ""
        if time.monotonic() - self._loaded > STALE:  # models were loaded; changes may have been dropped
            self._load()  # before the registration: it may take longer than a lease
        until = time.monotonic() + self._lease + TICK  # one that ended here without its home is gone by then
        while not await asyncio.to_thread(self.database.register, self.server, self.url, self._lease, before):
            if time.monotonic() > until:
                raise InvalidInputError(
                    f"another server is at {self.url}: say by --peer-url where the others reach this one"
                )
            await asyncio.sleep(TICK)
        mark.write_text(self.server)
        await self._renew()
        self._tasks.append(self._loop.create_task(self._keep_lease()))

    def keep(self, adopt: Adopt) -> None:
        """From now on follow the others, and take over from servers that have ended."""
        self._tasks.append(asyncio.get_running_loop().create_task(self._follow(adopt)))

    async def _keep_lease(self) -> None:
        while not self.lost.is_set():
            await asyncio.sleep(min(TICK, self._lease / 3))
            try:
                await self._renew()
            except Fenced as error:
                return self._lose(str(error))
            except Exception:
                log.exception("the lease of this server was not renewed; trying again")

    async def _follow(self, adopt: Adopt) -> None:
        while not self.lost.is_set():
            await asyncio.sleep(min(TICK, self._lease / 3))
            try:
                await self.refresh()
                await self.commit.synced()  # what nobody waits for
                await self.take_over(adopt)
            except Fenced as error:
                return self._lose(str(error))
            except Refusal:
                return  # of the commit, which has told why
            except Exception:
                log.exception("the other servers were not followed; trying again")

    async def _renew(self) -> None:
        self._asked, loop = self._asked or time.monotonic(), asyncio.get_running_loop()
        live = await loop.run_in_executor(self._renewing, self.database.renew, self.server, self._lease)
        self._live, now = {peer.server: peer.url for peer in live}, time.monotonic()
        if now - self._asked > self._lease / 2:  # the database was away: the others get the time to renew
            self._fences_from = now + self._lease
        self._asked = 0.0

    async def stop(self) -> None:
        """End the lease, everything being on the log: others go on at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._renewing.shutdown)  # no renewal comes after the end
        if not self.lost.is_set():
            with suppress(Refusal):
                await self.commit.synced()
                await asyncio.to_thread(self.database.expire, self.server)

    def close(self) -> None:
        self.database.close()
        self._locked.unlock()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _lose(self, why: str) -> None:
        """On any thread: nothing that this process says counts any more."""
        self.why_lost = self.why_lost or why
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.lost.set)

    # -- what others write -------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Know everything that any server had acknowledged before this was called."""
        if self._next_pull is None:
            self._next_pull = asyncio.get_running_loop().create_task(self._pull(self._pulling))
        await asyncio.shield(self._next_pull)

    async def _pull(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._pulling, self._next_pull = self._next_pull, None
        changes, since = await asyncio.to_thread(self.database.changes, self.server, self._since)
        self.ledger.apply(changes)
        self._since = since

    # -- whose session -----------------------------------------------------------------------------------

    def owns(self, session_id: str) -> bool:
        lease = self.ledger.lease(session_id)
        return lease is not None and lease.server == self.server

    @property
    def leads(self) -> bool:
        """Does this server do what must be done once for all of them?"""
        return not self._live or self.server == min(self._live)

    async def check(self, op: Op[Any, Any], request: Any) -> None:
        """Before an operation: Elsewhere if another server must do it, else have its rows here."""
        await self.check_session(session_of(request), request, fresh=op.name not in _OWN)

    async def check_session(self, session_id: str, request: Any = None, *, fresh: bool) -> None:
        if self.lost.is_set():
            raise Refusal(503, self.why_lost)
        if fresh:
            await self.refresh()
        if not session_id:
            return self._check_future(request)
        if self.owns(session_id):
            return
        if not fresh:
            await self.refresh()
        lease = self.ledger.lease(session_id)
        if lease is None or lease.server == self.server:
            return  # there is no such session, or it was taken over just now
        if (url := self._live.get(lease.server)) is None:
            raise Refusal(503, "the server of this session is gone: another one takes over in a moment")
        raise Elsewhere(url)

    def _check_future(self, request: Any) -> None:
        """A sample's request id begins with the server that has it."""
        server = str(_fields(request).get("request_id", "")).partition("-")[0]
        if server != self.server and (url := self._live.get(server)) is not None:
            raise Elsewhere(url)

    # -- taking over -------------------------------------------------------------------------------------

    async def take_over(self, adopt: Adopt) -> None:
        """Go on with the sessions of servers whose leases have run out.

        They are theirs, and nobody opens them, until this server's own log has all that was acknowledged.
        What fails is tried again by the next call.
        """
        if time.monotonic() < self._fences_from:
            return
        ended = await asyncio.to_thread(self.database.fence, self.server)
        for name in ended:  # in order: one may have had the files of those before it
            if name not in self._restored:
                log.warning("taking over from %s", name)
                self._restored[name] = await asyncio.to_thread(self._restore, name)
        here = {name: found for name in ended if (found := self._restored[name]) is not None}
        if not here:
            return
        written = {path for found in here.values() for path in found.written}
        for path in written:
            self.commit.wrote(path)
        await self.commit.synced()
        await asyncio.to_thread(self.database.take_over, self.server, list(here))
        await self.refresh()
        sessions = {path.relative_to(self.directory).parts[1] for path in written}
        samples = [found.samples for found in here.values()]
        await adopt(sorted(session for session in sessions if self.owns(session)), samples)
        for name in here:
            await asyncio.to_thread(commit_log.forget, self.store, name)
            await asyncio.to_thread(self.database.forget, name)
            del self._restored[name]

    def _restore(self, ended: str) -> _Restored | None:
        """Have the files of a server here, as its log has them; once, for they are in use from then on."""
        try:
            pieces = commit_log.seal(self.store, ended, self.server)
        except JournalError as error:
            log.error("the sessions of %s cannot be taken over before its log is repaired: %s", ended, error)
            return None
        place = self.directory / "taken" / ended
        commit_log.write_pieces(place, [piece for piece in pieces if piece.path == SAMPLES])
        kept = [piece for piece in pieces if piece.path.startswith("runs/")]
        return _Restored(commit_log.write_pieces(self.directory, kept), place / SAMPLES)


_NAMES = ("session_id", "model_id", "training_run_id", "sampling_session_id", "sampler_id", "request_id")


def session_of(request: Any) -> str:
    """The session that a request is about; "" if it is about none."""
    fields = _fields(request)
    if "target" in fields:
        fields = _fields(fields["target"])
    for name in _NAMES:
        if value := fields.get(name):
            session, found, _ = str(value).partition(":")
            if found or name == "session_id":
                return session
    return ""


def _fields(request: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", request.__dict__)
