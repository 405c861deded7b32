"""`tinkex server keys`, `tinkex server share`: who may use a server, and who may read a run's weights too.

Both work on a home, whether or not a server runs there, which takes notice within seconds. Knows the ledger's
table of keys; a key, and a token, is shown once.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.numbers import Finite
from tinkex.cli.output import Column, format_option, plural, show_json, show_table, wants_json
from tinkex.config import Settings

if TYPE_CHECKING:
    from tinkex.service.ledger import Ledger


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def server() -> None:
    """Look after a server."""


@server.group()
def keys() -> None:
    """API keys: who may use a server, and as whom."""


_home = click.option(
    "--home", type=click.Path(path_type=Path), help="The server's home directory (TINKEX_HOME, or ~/.tinkex)."
)


@contextmanager
def _ledger(home: Path | None) -> Generator[Ledger]:
    from tinkex.errors import TinkerError
    from tinkex.service.ledger import Ledger

    home = (home or Settings.read().home).expanduser()
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
@click.option("--owner", help="Whose the key is; keys of one owner share everything. (Its name.)")
@click.option("--project", help="The project that its sessions belong to.")
@click.option("--note", default="", help="What it is for.")
@_home
def add(name: str, owner: str | None, project: str | None, note: str, home: Path | None) -> None:
    """Make a key called NAME, and print it: this is the only time it can be seen."""
    from tinkex.server.api_keys import hash_key, new_key

    key = new_key()
    with _ledger(home) as ledger:
        rows = ledger.keys()
        if any(row.name == name and row.revoked_at is None for row in rows):
            raise click.ClickException(
                f"there is a key called {name!r}; revoke it first, or use another name"
            )
        ledger.add_key(
            name=name, note=note, hash=hash_key(key), owner=owner or name, project_id=project,
            created_at=time.time(),
        )  # fmt: skip
    click.echo(key)
    click.echo(f"Key {name!r} made; it is not stored and will not be shown again.", err=True)


@keys.command("list")
@_home
@format_option
def list_keys(home: Path | None) -> None:
    """Show the keys that there are; never the keys themselves."""
    with _ledger(home) as ledger:
        rows = ledger.keys()
    if wants_json():
        names = ("key_id", "name", "owner", "project_id", "created_at", "revoked_at", "note")
        show_json({"keys": [{name: getattr(row, name) for name in names} for row in rows]})
        return
    titles = ("Name", "Id", "Owner", "Project", "Made", "Revoked", "Note")
    cells = [
        [
            row.name,
            row.key_id,
            row.owner,
            row.project_id,
            _day(row.created_at),
            _day(row.revoked_at),
            row.note,
        ]
        for row in rows
    ]
    show_table(
        plural(len(rows), "key") if rows else "no keys yet", [Column(title) for title in titles], cells
    )


@keys.command("revoke")
@click.argument("key")
@_home
def revoke(key: str, home: Path | None) -> None:
    """Revoke a KEY, by its id or its name: it is refused from now on."""
    with _ledger(home) as ledger:
        rows = ledger.keys()
        live = [row for row in rows if row.revoked_at is None]
        meant = [row for row in live if key in (str(row.key_id), row.name)]
        if not meant:
            names = ", ".join(row.name for row in live) or "none"
            raise click.ClickException(f"no key has the id or name {key!r}; there are: {names}")
        if len(meant) > 1:
            both = " and ".join(f"{row.name!r} (id {row.key_id})" for row in meant)
            raise click.ClickException(
                f"{key} is one key's id and another's name: {both}; say the other name or the other id"
            )
        (row,) = meant
        ledger.revoke_key(row.key_id, time.time())
    click.echo(f"Key {row.name!r} (id {row.key_id}) is revoked.")


@server.command()
@click.argument("run_id", metavar="RUN")
@click.option("--days", type=Finite(0, 36500, min_open=True), default=7.0, show_default=True)
@_home
def share(run_id: str, days: float, home: Path | None) -> None:
    """Print a token with which other users of this server may read the checkpoints of a RUN.

    They give it as weights_access_token= to load_state and copy_weights, or in the header
    X-Tinker-Weights-Access-Token.
    """
    from tinkex.server.signing import WeightsTokens, home_secret

    with _ledger(home) as ledger:
        if ledger.run(run_id) is None:
            raise click.ClickException(f"there is no run {run_id!r} in this home")
    secret = home_secret((home or Settings.read().home).expanduser())
    click.echo(WeightsTokens(secret).issue(run_id, time.time() + days * 86400))


def _day(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
