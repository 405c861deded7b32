"""`tinkex server`: a server's API keys, and tokens that share a run's weights.

The commands edit the home directory, whether or not a server runs there; a running one notices within
seconds. A key or a token is shown once.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.options import Finite, format_option
from tinkex.cli.output import note, plural, show, show_table
from tinkex.config import Settings

if TYPE_CHECKING:
    from tinkex.service.ledger import Ledger

_FIELDS = ("key_id", "name", "owner", "project_id", "created_at", "revoked_at", "note")


@click.group()
def server() -> None:
    """API keys of a server, and sharing of runs."""


@server.group()
def keys() -> None:
    """API keys: who may use a server, and as which user."""


def _default_home(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path:
    return (value or Settings.read().home).expanduser()


_home = click.option(
    "--home", type=click.Path(path_type=Path), callback=_default_home,
    help="The server's home directory.  [default: TINKEX_HOME, or ~/.tinkex]",
)  # fmt: skip


@contextmanager
def _ledger(home: Path) -> Generator[Ledger]:
    from tinkex.errors import TinkerError
    from tinkex.service.ledger import Ledger

    try:
        home.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(home / "ledger.sqlite")
    except (OSError, TinkerError) as error:
        raise click.ClickException(str(error)) from None
    try:
        yield ledger
    finally:
        ledger.close()


@keys.command("add")
@click.argument("name")
@click.option("--owner", help="The key's user; keys of one user share everything.  [default: NAME]")
@click.option("--project", help="The project that its sessions belong to.")
@click.option("--note", "about", default="", help="What it is for.")
@_home
def add(name: str, owner: str | None, project: str | None, about: str, home: Path) -> None:
    """Make a key called NAME, and print it. It cannot be shown again."""
    from tinkex.server.api_keys import hash_key, new_key

    key = new_key()
    with _ledger(home) as ledger:
        rows = ledger.keys()
        if any(row.name == name and row.revoked_at is None for row in rows):
            raise click.ClickException(
                f"there is a key called {name!r}; revoke it first, or use another name"
            )
        ledger.add_key(
            name=name, note=about, hash=hash_key(key), owner=owner or name, project_id=project,
            created_at=time.time(),
        )  # fmt: skip
    click.echo(key)
    note(f"Key {name!r} made; it is not stored and will not be shown again.")


@keys.command("list")
@_home
@format_option
def list_keys(home: Path) -> None:
    """List keys, without the keys themselves."""
    with _ledger(home) as ledger:
        found = ledger.keys()
    rows = [asdict(row) for row in found]
    cells = [
        [row["name"], row["key_id"], row["owner"], row["project_id"], _day(row["created_at"]),
         _day(row["revoked_at"]), row["note"]]
        for row in rows
    ]  # fmt: skip
    title = plural(len(rows), "key") if rows else "no keys yet"
    titles = ("Name", "Id", "Owner", "Project", "Made", "Revoked", "Note")
    listed = {"keys": [{name: row[name] for name in _FIELDS} for row in rows]}
    show(listed, lambda: show_table(title, titles, cells))


@keys.command("revoke")
@click.argument("key")
@_home
def revoke(key: str, home: Path) -> None:
    """Revoke a KEY, by its id or its name: it is refused from now on."""
    with _ledger(home) as ledger:
        rows = ledger.keys()
        live = [row for row in rows if row.revoked_at is None]
        found = [row for row in live if key in (str(row.key_id), row.name)]
        if not found:
            names = ", ".join(row.name for row in live) or "none"
            raise click.ClickException(f"no key has the id or name {key!r}; there are: {names}")
        if len(found) > 1:
            both = " and ".join(f"{row.name!r} (id {row.key_id})" for row in found)
            raise click.ClickException(
                f"{key} is one key's id and another's name: {both}; give the other name or the other id"
            )
        (row,) = found
        ledger.revoke_key(row.key_id, time.time())
    click.echo(f"Key {row.name!r} (id {row.key_id}) is revoked.")


@server.command()
@click.argument("run_id", metavar="RUN")
@click.option("--days", type=Finite(0, 36500, min_open=True), default=7.0, show_default=True)
@_home
def share(run_id: str, days: float, home: Path) -> None:
    """Print a token with which other users of this server may read the checkpoints of a RUN.

    They pass it as weights_access_token= to load_state and copy_weights, or in the header
    X-Tinker-Weights-Access-Token.
    """
    from tinkex.server.signing import WeightsTokens, home_secret

    with _ledger(home) as ledger:
        if ledger.run(run_id) is None:
            raise click.ClickException(f"there is no run {run_id!r} in this home")
    click.echo(WeightsTokens(home_secret(home)).issue(run_id, time.time() + days * 86400))


def _day(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
