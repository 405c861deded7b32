"""Connections to Postgres that notice when nobody answers, and the pool of them.

A network that drops packets, or a database that stands still, ends no connection: a statement would wait for
minutes. So a connection on which nothing comes for `silence` seconds is closed, and its statement fails as if
the connection had been lost. The database ends a client that stands still within a transaction, whose locks
others wait for. Importing this imports psycopg.
"""

from __future__ import annotations

import time
from typing import Any

from psycopg import Connection, OperationalError
from psycopg.abc import RV, PQGen
from psycopg_pool import ConnectionPool

Row = tuple[Any, ...]
CONNECTIONS = 6  # for a commit, a look at changes, a takeover, a renewal, upkeep, and one that is silent
# How a connection is opened, if its URL does not say otherwise. The kernel would keep a dead one for hours.
DEFAULTS = {
    "connect_timeout": 10, "keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 5,
    "keepalives_count": 3, "tcp_user_timeout": 15_000,
}  # fmt: skip


class AnsweredConnection(Connection[Row]):
    """A connection whose statements fail when nothing came for `silence` seconds."""

    silence = 15.0  # until its user says otherwise

    def wait(self, gen: PQGen[RV], *args: Any, **kwargs: Any) -> RV:
        return super().wait(self._answered(gen), *args, **kwargs)

    def _answered(self, gen: PQGen[RV]) -> PQGen[RV]:
        heard, ready = time.monotonic(), None
        try:
            while True:
                ready = yield gen.send(ready)  # type: ignore[arg-type]
                if ready:
                    heard = time.monotonic()
                elif time.monotonic() - heard > self.silence:
                    self.close()
                    raise OperationalError(f"the database has not answered for {self.silence:g} s")
        except StopIteration as end:
            return end.value


def _configure(connection: AnsweredConnection) -> None:
    connection.execute("SET statement_timeout = '60s'; SET idle_in_transaction_session_timeout = '3s'")


def pool(parameters: dict[str, Any]) -> ConnectionPool[AnsweredConnection]:
    """A pool, to be opened. After an outage it connects again within a second or two."""
    return ConnectionPool(
        connection_class=AnsweredConnection, kwargs=parameters | {"autocommit": True}, configure=_configure,
        min_size=1, max_size=CONNECTIONS, timeout=2.0, reconnect_timeout=1.0, open=False,
    )  # fmt: skip
