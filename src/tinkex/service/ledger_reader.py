"""The ledger of a home that another process may be using: opened to be read, and never written."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tinkex.service import ledger_schema
from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import BUSY_SECONDS, LedgerError, whole_rows


class LedgerReader(Ledger):
    """Every look-up of a ledger. It brings nothing to this version, and what would write is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._wrote, self._wal = None, path.with_name(f"{path.name}-wal")
        if not path.exists():
            raise LedgerError(f"there is no {path}: nothing was trained in this home yet")
        uri = f"{path.absolute().as_uri()}?mode=ro"
        try:
            self._db = ledger_schema.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)
            seen, known = ledger_schema.version(self._db), len(ledger_schema.MIGRATIONS)
            self._is_whole = whole_rows(self._db)
        except sqlite3.Error as error:
            raise self._error(error) from error
        if seen != known:
            self._db.close()
            raise LedgerError(
                f"{path} was written by another version of Tinkex (schema {seen}, this one has {known}): "
                "`tinkex run list` brings an older one up to date; a newer one needs a newer Tinkex"
            )
