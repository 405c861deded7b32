"""`tinkex auth`: the key that commands and scripts use, stored where the official command line stores it."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import CONTEXT, format_option, note, show_facts, show_json, text, wants_json
from tinkex.cli.place import base_url, connected, is_local, rest
from tinkex.config import HOSTED_URL, Settings, console_url

if TYPE_CHECKING:
    from tinkex.client.credential_store import CredentialStore
    from tinkex.types.config import ApiKeyResponse


@click.group(context_settings=CONTEXT)
def auth() -> None:
    """Log in and out; who am I?"""


def _store() -> CredentialStore:
    from tinkex.client.credential_store import CredentialStore

    return CredentialStore(Settings.read().credentials_file)


@auth.command("login", context_settings=CONTEXT)
@format_option
def login() -> None:
    """Check an API key, and store it on this machine. Commands and scripts find it there."""
    from tinkex.client.credential_store import StoredKey
    from tinkex.client.credentials import check_key
    from tinkex.wire import ops

    store = _store()
    if (known := store.default_key()) is not None:
        raise click.ClickException(
            f"{known.name or 'a key'} is stored already; `tinkex auth logout` removes it"
        )
    note(_where_keys_are_made())
    try:
        typed = click.prompt("Paste your API key", hide_input=True, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        note("")  # the question's line has no end yet
        raise click.ClickException("no key was given on stdin") from None
    key = check_key(typed, "what was pasted")
    owner: ApiKeyResponse = _ask(ops.GET_API_KEY, key)
    store.add(
        str(owner.key_id), StoredKey(key, owner.name, note=owner.note, details=owner.details.model_dump())
    )
    who = {"email": owner.details.user_details.email, "organization": owner.details.org_details.name}
    if wants_json():
        show_json({"key_name": owner.name, **who, "server": base_url(), "stored_in": str(store.path)})
        return
    click.echo(f"Logged in as {who['email']} ({who['organization']}); key {owner.name!r} is in {store.path}")
    if base_url() != HOSTED_URL:
        note(f"commands and scripts use it with TINKER_BASE_URL={base_url()}")


def _where_keys_are_made() -> str:
    url = base_url()
    if url == HOSTED_URL:
        page = f"keys?new_key=true&key_name=tinkex-{socket.gethostname()}"
        return f"Make an API key at {console_url(url, page)}"
    return f"A key for {url} is made on its machine: tinkex server keys add NAME"


def _ask(op: Any, key: str) -> Any:
    """What the server in use says to whoever has this key."""
    from tinkex.types.config import EmptyRequest

    with connected(key) as connection:
        return connection.submit(op, EmptyRequest()).result()


@auth.command("logout", context_settings=CONTEXT)
@format_option
def logout() -> None:
    """Remove the stored key. One made for this machine alone is deleted on the server too."""
    from tinkex.wire import ops

    store = _store()
    key_id, stored = store.default_id(), store.default_key()
    if key_id is None or stored is None:
        raise click.ClickException("no key is stored; `tinkex auth login` stores one")
    if deleted := stored.type == "generated":
        _ask(ops.DELETE_API_KEY, stored.key)
    store.remove(key_id)
    if wants_json():
        show_json({"key_name": stored.name, "deleted_on_server": deleted})
        return
    click.echo(
        f"Removed {stored.name!r} from {store.path}{'' if deleted else '; the key itself still works'}"
    )
    if not deleted:
        page, url = console_url(base_url(), f"keys/{key_id}"), base_url()
        how = (
            f"delete it at {page}"
            if url == HOSTED_URL
            else f"on the server, `tinkex server keys revoke {stored.name}`"
        )
        note(f"To end it: {how}")


@auth.command("status", context_settings=CONTEXT)
@format_option
def status() -> None:
    """Is there a key, and does the server take it? Exits with 1 if not."""
    from tinkex.auth import raise_if_tinker_not_accessible
    from tinkex.cli.advice import explain
    from tinkex.client.credentials import resolve
    from tinkex.errors import TinkerError

    source, reason = "none", _NOTHING_SET if is_local() else ""
    try:
        if not reason:
            source = resolve(Settings.read(), base_url=base_url()).source
            raise_if_tinker_not_accessible()
    except TinkerError as error:
        reason = explain(error)
    has_key, server = source != "none", None if is_local() else base_url()
    if wants_json():
        found = {"credentials_available": has_key, "tinker_accessible": not reason}
        show_json({**found, "source": source, "server": server, "error": reason or None})
    else:
        click.echo(f"Credentials available: {text(has_key)}{_SOURCES.get(source, '')}")
        click.echo(f"Tinker accessible: {text(not reason)}{f' ({server})' if server else ''}")
    if reason:
        raise click.ClickException(reason)


_NOTHING_SET = (
    "neither a key nor a server is set, so scripts run models in their own process; `tinkex auth login` "
    "stores a key for hosted Tinker, TINKER_BASE_URL names another server"
)
_SOURCES = {
    "environment": " (TINKER_API_KEY)",
    "command": " (TINKER_CREDENTIAL_CMD)",
    "store": " (stored by `auth login`)",
    "loopback": " (none is needed for this machine's own server)",
}


@auth.command("whoami", context_settings=CONTEXT)
@format_option
def whoami() -> None:
    """Show the user and the organisation of the key in use."""
    if is_local():
        raise click.ClickException(_NOTHING_SET)
    with rest() as client:
        who = client.whoami().result()
    if wants_json():
        show_json(who)
        return
    show_facts(f"On {base_url()}", {"Email": who.email, "User": who.user_urn, "Organisation": who.org_urn})
