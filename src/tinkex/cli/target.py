"""Which server a command uses: the one that is set or, without a key and a server, this machine's home.

The rule is that of ServiceClient, so a command and a script see the same runs. The home may be in use by
another process at the same time; no model is loaded. `explain` turns an error into one line with advice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import answered, bar, note, plural, show, wants_json
from tinkex.config import HOSTED_URL, LOCAL, Settings, normalize_url

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.client.server_connection import ServerConnection


def is_local() -> bool:
    return Settings.read().embedded


def base_url() -> str:
    """The server in use; if none is set, hosted Tinker's."""
    chosen = Settings.read().base_url
    return normalize_url(chosen if chosen and chosen != LOCAL else HOSTED_URL)


def where() -> str:
    """The target in words, for titles: "on https://…" or "in ~/.tinkex"."""
    return f"in {Settings.read().home}" if is_local() else f"on {base_url()}"


@contextmanager
def connected(api_key: str | None = None) -> Generator[ServerConnection]:
    """A connection to the target; with `api_key` instead of the key in use, if it is given."""
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


def call(op: Any, api_key: str | None = None) -> Any:
    """The result of an operation without arguments."""
    from tinkex.types.config import EmptyRequest

    with connected(api_key) as connection:
        return connection.submit(op, EmptyRequest()).result()


def delete_each(
    noun: str, lines: Mapping[str, str], key: str, delete: Callable[[str], Any], yes: bool
) -> None:
    """Delete things by their ids, asking first unless `yes`; `lines` describe them. A failure ends none."""
    from tinkex.errors import TinkerError

    wanted, failed = list(lines), list[dict[str, str]]()
    if wanted and not yes:
        note(
            "\n".join([f"These {noun}s will be deleted for good:", *(f"  {line}" for line in lines.values())])
        )
        with answered("nobody answered; --yes deletes without asking"):
            wanted = wanted if click.confirm(f"Delete {plural(len(wanted), noun)}?", err=True) else []
    with bar("Deleting") as report:
        for count, one in enumerate(wanted, 1):
            try:
                delete(one).result()
            except TinkerError as error:
                failed.append({key: one, "error": error_message(error)})
            report(count, len(wanted))
    deleted = len(wanted) - len(failed)
    if deleted or not failed or wants_json():
        show({"deleted_count": deleted, "failed": failed}, f"deleted {plural(deleted, noun)}")
    if failed:
        raise click.ClickException("; ".join(dict.fromkeys(one["error"] for one in failed)))


def explain(error: Exception) -> str:
    """What went wrong, and what can be done about it."""
    message, advice = error_message(error).rstrip(". "), _advice(error)
    return f"{message}; {advice}" if advice else message


def error_message(error: Exception) -> str:
    """The message for a person; of an HTTP error, the server's own words."""
    from tinkex.errors import APIStatusError

    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, APIStatusError) and error.status_code < 500 and isinstance(error.body, dict):
        return str(error.body.get("detail") or error)
    return str(error) or type(error).__name__


def _advice(error: Exception) -> str:
    from tinkex import errors

    match error:
        case errors.CredentialError() | errors.AuthenticationError():
            return "`tinkex auth login` checks and stores a key"
        case errors.PermissionDeniedError():
            return "another key may be allowed to: `tinkex auth status` shows which is in use"
        case errors.NotFoundError() if not is_local():
            return f"is {base_url()} the right server, and the key in use the right one?"
        case errors.APIConnectionError():
            return "is TINKER_BASE_URL right, and is the server running?"
        case errors.InternalServerError() if not is_local():
            return "the server's log says why"
        case _:
            return ""
