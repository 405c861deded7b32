"""`tinkex auth`: the API key that commands and scripts use, stored where the official CLI stores it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import click

from tinkex.cli.output import answered, format_option, note, show, text
from tinkex.cli.target import base_url, call, explain, is_local, rest
from tinkex.config import HOSTED_URL, Settings, console_url

if TYPE_CHECKING:
    from tinkex.client.credentials import CredentialStore
    from tinkex.types.config import ApiKeyResponse

_NOTHING_SET = (
    "neither a key nor a server is set, so scripts run models in their own process; `tinkex auth login` "
    "stores a key for hosted Tinker, TINKER_BASE_URL names another server"
)
_SOURCES = {
    "environment": " (TINKER_API_KEY)",
    "command": " (TINKER_CREDENTIAL_CMD)",
    "store": " (stored by `auth login`)",
    "loopback": " (a server on this machine needs none)",
}


@click.group()
def auth() -> None:
    """Log in and out, and show who you are."""


def _store() -> CredentialStore:
    from tinkex.client.credentials import CredentialStore

    return CredentialStore(Settings.read().credentials_file)


@auth.command("login")
@format_option
def login() -> None:
    """Check an API key, and store it on this machine. Commands and scripts find it there."""
    from tinkex.client.credentials import StoredKey, check_key
    from tinkex.wire import ops

    store, server = _store(), base_url()
    if (known := store.default_key()) is not None:
        raise click.ClickException(
            f"{known.name or 'a key'} is stored already; `tinkex auth logout` removes it"
        )
    if server == HOSTED_URL:
        page = f"keys?new_key=true&key_name=tinkex-{socket.gethostname()}"
        note(f"Make an API key at {console_url(server, page)}")
    else:
        note(f"A key for {server} is made on its machine: tinkex server keys add NAME")
    with answered("no key was given on stdin"):
        typed = click.prompt("Paste your API key", hide_input=True, err=True)
    key = check_key(typed, "what was pasted")
    owner: ApiKeyResponse = call(ops.GET_API_KEY, key)
    details = owner.details
    store.add(str(owner.key_id), StoredKey(key, owner.name, note=owner.note, details=details.model_dump()))
    who = {"email": details.user_details.email, "organization": details.org_details.name}
    show(
        {"key_name": owner.name, **who, "server": server, "stored_in": str(store.path)},
        f"Logged in as {who['email']} ({who['organization']}); key {owner.name!r} is in {store.path}",
    )
    if server != HOSTED_URL:
        note(f"commands and scripts use it with TINKER_BASE_URL={server}")


@auth.command("logout")
@format_option
def logout() -> None:
    """Remove the stored key. A key that login made is deleted on the server too."""
    from tinkex.wire import ops

    store = _store()
    key_id, stored = store.default_id(), store.default_key()
    if key_id is None or stored is None:
        raise click.ClickException("no key is stored; `tinkex auth login` stores one")
    if deleted := stored.type == "generated":
        call(ops.DELETE_API_KEY, stored.key)
    store.remove(key_id)
    still = "" if deleted else "; the key itself still works"
    show(
        {"key_name": stored.name, "deleted_on_server": deleted},
        f"Removed {stored.name!r} from {store.path}{still}",
    )
    if not deleted and base_url() == HOSTED_URL:
        note(f"To revoke it: delete it at {console_url(base_url(), f'keys/{key_id}')}")
    elif not deleted:
        note(f"To revoke it: on the server, `tinkex server keys revoke {stored.name}`")


@auth.command("status")
@format_option
def status() -> None:
    """Is there a key, and does the server accept it? Exits with 1 if not."""
    from tinkex.auth import raise_if_tinker_not_accessible
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
    fields = {"credentials_available": has_key, "tinker_accessible": not reason, "source": source}
    show(
        {**fields, "server": server, "error": reason or None},
        f"Credentials available: {text(has_key)}{_SOURCES.get(source, '')}\n"
        f"Tinker accessible: {text(not reason)}{f' ({server})' if server else ''}",
    )
    if reason:
        raise click.ClickException(reason)


@auth.command("whoami")
@format_option
def whoami() -> None:
    """Show the user and the organisation of the key in use."""
    if is_local():
        raise click.ClickException(_NOTHING_SET)
    with rest() as client:
        who = client.whoami().result()
    show(who, f"On {base_url()}", {"Email": who.email, "User": who.user_urn, "Organisation": who.org_urn})
