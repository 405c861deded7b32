"""Group commit of a server that shares its ledger and its store with others.

Like group_commit.py for a shared ledger. A round writes one object with the journals' appends and commits one
Postgres transaction. Both fail once another server has taken over; `on_lost` then reports it. A short outage
is waited for; a longer one is reported in the same way. The local files are working copies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tinkex.service.commit_log import GONE, CommitLog, Piece, SealedError
from tinkex.service.group_commit import GroupCommit
from tinkex.service.ledger_file import LedgerError
from tinkex.service.ledger_postgres import SharedDatabase, Statement, fenced

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
        """A deleted file's name is free once the log says that it was deleted."""
        return path in self._sent

    def _has_work(self) -> bool:
        return bool(self._unsynced or self._statements)

    def _take(self) -> Callable[[], None]:
        paths, self._unsynced = self._unsynced, set()
        return lambda: self._share(paths)

    # -- on a thread -------------------------------------------------------------------------------------

    def _share(self, paths: set[Path]) -> None:
        """Rows first: a save without its outcome is repeated; an outcome without its row would be told."""
        try:
            pieces = [piece for path in sorted(paths) for piece in self._pieces(path)]
            pieces.sort(key=lambda piece: piece.at == GONE)  # what replaces a file is there before its end
            with self._lock:  # after the files were read: with the rows of all that they speak of
                statements, self._statements = self._statements, []
            if statements:
                self._database.ship(self._server, self._batch + 1, statements)
                self._batch += 1
            if pieces:
                self._commits.append(pieces)
                self._trim()
        except Exception as error:
            why = fenced(self._server) if isinstance(error, SealedError) else str(error)
            self._on_lost(why)
            raise LedgerError(why) from error

    def _pieces(self, path: Path, begin: int | None = None) -> list[Piece]:
        """The bytes of a file that are not in the log yet; of a deleted directory, the end of its files."""
        if path.is_dir():
            return []
        sent = self._sent.get(path, 0) if begin is None else begin
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if begin is not None:  # rows of what was written since may not be in the database yet
                    size = min(size, self._sent.get(path, 0))
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
            self._commits.begin_anew(piece for path in paths for piece in self._pieces(path, 0))

    def close(self) -> None:
        self._end_rounds()
        self._threads.shutdown()
