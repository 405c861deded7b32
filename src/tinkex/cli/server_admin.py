"""`tinkex server`: a server's API keys, shared runs, and repair of its ledger.

The commands edit the home directory, or the shared database, whether or not a server runs there; a running
one notices within seconds. A key or a token is shown once.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.output import Finite, format_option, note, plural, show
from tinkex.config import Settings
from tinkex.store import read_location

if TYPE_CHECKING:
    from tinkex.service.ledger import Ledger


@click.group()
def server() -> None:
    """API keys of a server, sharing of runs, and repair."""


@server.group()
def keys() -> None:
    """API keys: who may use a server, and as which user."""


def _default_home(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path:
    return (value or Settings.read().home).expanduser()


_home = click.option(
    "--home", type=click.Path(path_type=Path), callback=_default_home,
    help="The server's home directory.  [default: TINKEX_HOME, or ~/.tinkex]",
)  # fmt: skip


_shared = click.option(
    "--ledger", "url", default="", envvar="TINKEX_LEDGER", metavar="URL",
    help="The Postgres database of servers that share one, instead of a home.",
)  # fmt: skip


def _ledger(home: Path, url: str) -> AbstractContextManager[Ledger]:
    from tinkex.service.ledger import Ledger

    if url:
        from tinkex.service.ledger_mirror import visiting

        return visiting(url)
    home.mkdir(0o700, parents=True, exist_ok=True)
    return closing(Ledger(home / "ledger.sqlite"))


@keys.command("add")
@click.argument("name")
@click.option("--owner", help="The key's user; keys of one user share everything.  [default: NAME]")
@click.option("--project", help="The project that its sessions belong to.")
@click.option("--note", "about", default="", help="What it is for.")
@click.option("--admin", is_flag=True, help="It sees the console's pages about everybody: keys, usage, disk.")
@_home
@_shared
def add(
    name: str, owner: str | None, project: str | None, about: str, admin: bool, home: Path, url: str
) -> None:
    """Make a key called NAME, and print it. It cannot be shown again."""
    from tinkex.server.api_keys import hash_key, new_key

    key = new_key()
    with _ledger(home, url) as ledger:
        known = ledger.keys()
        if any(row.name == name and row.revoked_at is None for row in known):
            raise click.ClickException(
                f"there is a key called {name!r}; revoke it first, or use another name"
            )
        ledger.add_key(
            name=name, note=about, hash=hash_key(key), owner=owner or name, project_id=project,
            created_at=time.time(), admin=admin,
        )  # fmt: skip
    click.echo(key)
    note(f"Key {name!r} made; it is not stored and will not be shown again.")


@keys.command("list")
@_home
@_shared
@format_option
def list_keys(home: Path, url: str) -> None:
    """List keys, without the keys themselves."""
    with _ledger(home, url) as ledger:
        found = ledger.keys()
    fields = [{name: value for name, value in asdict(row).items() if name != "hash"} for row in found]
    rows = [
        {"Name": row.name, "Id": row.key_id, "Owner": row.owner, "Project": row.project_id,
         "Made": _day(row.created_at), "Revoked": _day(row.revoked_at), "Note": row.note}
        for row in found
    ]  # fmt: skip
    show({"keys": fields}, plural(len(rows), "key") if rows else "no keys yet", rows)


def _day(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


@keys.command("revoke")
@click.argument("key")
@_home
@_shared
def revoke(key: str, home: Path, url: str) -> None:
    """Revoke a KEY, by its id or its name: it is refused from now on."""
    with _ledger(home, url) as ledger:
        known = ledger.keys()
        live = [row for row in known if row.revoked_at is None]
        match [row for row in live if key in (str(row.key_id), row.name)]:
            case []:
                names = ", ".join(row.name for row in live) or "none"
                raise click.ClickException(f"no key has the id or name {key!r}; there are: {names}")
            case [row]:
                ledger.revoke_key(row.key_id, time.time())
            case found:
                both = " and ".join(f"{row.name!r} (id {row.key_id})" for row in found)
                raise click.ClickException(
                    f"{key} is one key's id and another's name: {both}; give the other name or the other id"
                )
    click.echo(f"Key {row.name!r} (id {row.key_id}) is revoked.")


@server.command()
@click.option(
    "--owner", default="repaired", show_default=True,
    help="Whose the runs will be that only their directories tell of; in embedded mode: local.",
)  # fmt: skip
@click.option(
    "--store", default="", metavar="LOCATION",
    help="The server's --store, if it has one: s3://BUCKET/PREFIX, gs://…, az://…, or a directory.",
)  # fmt: skip
@_shared
@_home
def repair(owner: str, store: str, url: str, home: Path) -> None:
    """Rebuild a lost or damaged ledger, and say what is lost.

    It reads the old file, then the run directories, and the store if one is given. The old file is kept.
    With --ledger it adds to a Postgres database the rows that only the store has. Stop the servers first.
    `tinkex server keys add NAME --owner OWNER` makes a key for the runs that were found.
    """
    from tinkex.service.repair import repair as rebuild
    from tinkex.service.repair_store import repair_shared

    if url and not store:
        raise click.UsageError("--ledger needs --store: run directories of a shared ledger are nowhere else")
    location = read_location(store) if store else ""
    for line in repair_shared(url, location, owner) if url else rebuild(home, owner, location):
        click.echo(line)


@server.command()
@click.argument("run_id", metavar="RUN")
@click.option("--days", type=Finite(0, 36500, min_open=True), default=7.0, show_default=True)
@_home
@_shared
def share(run_id: str, days: float, home: Path, url: str) -> None:
    """Print a token with which other users of this server may read the checkpoints of a RUN.

    They pass it as weights_access_token= to load_state and copy_weights, or in the header
    X-Tinker-Weights-Access-Token.
    """
    from tinkex.server.signing import WeightsTokens, home_secret

    with _ledger(home, url) as ledger:
        if ledger.run(run_id) is None:
            raise click.ClickException(f"there is no run {run_id!r} in this {'ledger' if url else 'home'}")
    secret = _shared_secret(url) if url else home_secret(home)
    click.echo(WeightsTokens(secret).issue(run_id, time.time() + days * 86400))


def _shared_secret(url: str) -> bytes:
    from tinkex.service.ledger_postgres import SharedDatabase

    with closing(SharedDatabase(url)) as database:
        return database.secret()
