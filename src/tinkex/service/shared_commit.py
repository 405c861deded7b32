"""Group commit of a server that shares its ledger and its store with others.

As in group_commit.py, what everybody has written since the last round becomes durable together, before
anybody is told. Here that means: the appended bytes of journals are an object of this server's log in the
store, and the ledger's statements are a transaction of the shared database. Both refuse a server that was
taken over. A short outage is waited for; after a longer one, or when it was taken over, a server promises
nothing any more (`on_lost`). The local files are working copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tinkex.service.commit_log import GONE, CommitLog, Piece, SealedError
from tinkex.service.group_commit import GroupCommit
from tinkex.service.ledger_file import LedgerError
from tinkex.service.ledger_postgres import PATIENCE, SharedDatabase, Statement, fenced
from tinkex.store import StoreError

LOG_BYTES = 64 << 20  # of the log, beyond twice what is still needed, before it begins anew


class SharedCommit(GroupCommit):
    """The rounds of one server. `on_lost` is called, on a thread, with why it can write no more."""

    def __init__(
        self, home: Path, commits: CommitLog, database: SharedDatabase, server: str,
        on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(home, power=True)
        self._commits, self._database, self._server = commits, database, server
        self._on_lost = on_lost
        self._statements: list[Statement] = []
        self._batch = 0  # the number of the last transaction
        self._sent: dict[Path, int] = {}  # bytes of each file that are in the log

    def statements(self, statements: list[Statement]) -> None:
        """These were executed on the mirror of the ledger."""
        with self._lock:
            self._statements += statements

    def appended(self, path: Path, at: int, data: bytes) -> None:
        self.wrote(path)

    def names(self, path: Path) -> bool:
        return False

    def _has_work(self) -> bool:
        return bool(self._unsynced or self._statements)

    def _take(self) -> Callable[[], None]:
        paths, self._unsynced = self._unsynced, set()
        statements, self._statements = self._statements, []
        return lambda: self._share(paths, statements)

    # -- on a thread -------------------------------------------------------------------------------------

    def _share(self, paths: set[Path], statements: list[Statement]) -> None:
        try:
            shipping = self._threads.submit(self._ship, statements)
            try:
                self._append_to_log(paths)
            finally:
                shipping.result()
        except Exception as error:
            why = fenced(self._server) if isinstance(error, SealedError) else str(error)
            self._on_lost(why)
            raise LedgerError(why) from error

    def _append_to_log(self, paths: set[Path]) -> None:
        if pieces := [piece for path in sorted(paths) for piece in self._pieces(path)]:
            until = time.monotonic() + PATIENCE
            while True:
                try:
                    self._commits.append(pieces)
                    break
                except StoreError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.5)
            self._trim()

    def _ship(self, statements: list[Statement]) -> None:
        if statements:
            self._database.ship(self._server, self._batch + 1, statements)
            self._batch += 1

    def _pieces(self, path: Path, begin: int | None = None) -> list[Piece]:
        """The bytes of a file that are not in the log yet; of a deleted directory, the end of its files."""
        if path.is_dir():
            return []
        sent = self._sent.get(path, 0) if begin is None else begin
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                sent = 0 if size < sent else sent  # it was written anew
                file.seek(sent)
                data = file.read(size - sent)
        except FileNotFoundError:
            gone = [one for one in self._sent if one == path or path in one.parents]
            for one in gone:
                del self._sent[one]
            return [Piece(self._relative(one), GONE, b"") for one in gone]
        self._sent[path] = sent + len(data)
        return [Piece(self._relative(path), sent, data)] if data or begin is not None else []

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._home).as_posix()

    def _trim(self) -> None:
        """Begin the log anew with what still exists, once most of it is of no use."""
        if self._commits.size < LOG_BYTES:
            return
        sizes = [path.stat().st_size for path in self._sent if path.exists()]
        if self._commits.size > LOG_BYTES + 2 * sum(sizes):
            paths = sorted(self._sent)
            self._commits.begin_anew([piece for path in paths for piece in self._pieces(path, 0)])

    def close(self) -> None:
        self._end_rounds()
        self._threads.shutdown()
