"""Where a command's calls go: to the server in use or, with neither a key nor a server set, to the home of
this machine, whoever uses it at the moment.

Promises: the same rule as ServiceClient's, so that a command sees what a script beside it sees; nothing is
computed here and no model is loaded. Knows no command.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tinkex.config import HOSTED_URL, LOCAL, Settings, normalize_url

if TYPE_CHECKING:
    from tinkex.client.admin import AdminClient
    from tinkex.client.rest import RestClient
    from tinkex.client.server_connection import ServerConnection


def is_local() -> bool:
    return Settings.read().embedded


def base_url() -> str:
    """The server in use; where none is, the one that would be."""
    chosen = Settings.read().base_url
    return normalize_url(chosen if chosen and chosen != LOCAL else HOSTED_URL)


def where() -> str:
    """The place, in words."""
    return f"in {Settings.read().home}" if is_local() else f"on {base_url()}"


@contextmanager
def connected(api_key: str | None = None) -> Generator[ServerConnection]:
    """The way there; with a key that is not the one in use, if it is given."""
    from tinkex.client.future import start
    from tinkex.client.server_connection import connect

    settings = Settings.read()
    if settings.embedded and api_key is None:
        from tinkex.local import look

        connection = look(settings)
    else:
        connection = connect(api_key=api_key, settings=settings)
    try:
        yield connection
    finally:
        start(connection.close, "close").result(connection.timeouts.close)


@contextmanager
def rest() -> Generator[RestClient]:
    from tinkex.client.rest import RestClient

    with connected() as connection:
        yield RestClient(connection)


@contextmanager
def admin() -> Generator[AdminClient]:
    from tinkex.client.admin import AdminClient

    with connected() as connection:
        yield AdminClient(connection)
