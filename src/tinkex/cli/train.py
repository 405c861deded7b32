"""`tinkex train sft|dpo|grpo|distill`: the recipes as commands. A config's fields are a command's options."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from tinkex.cli import INTERRUPTED
from tinkex.cli.output import Finite, Integer, note
from tinkex.recipes.conversations import FORMATS

# name -> module, config, function, the metrics to plot, and a line of help
RECIPES: dict[str, tuple[str, str, str, tuple[str, ...], str]] = {
    "sft": ("sft", "SftConfig", "train_sft", ("loss", "eval_loss"), "Learn from examples."),
}

_FORMATS = "\n".join(["\b", *FORMATS.splitlines()])
HELP = {
    "sft": f"DATA is JSONL, JSON, Parquet, CSV, text or a hub dataset, with rows like these:\n\n{_FORMATS}",
}


def _options(kind: type[Any]) -> list[click.Parameter]:
    """The parameters of a command, from the fields of a config."""
    hints = get_type_hints(kind)
    shown = [each for each in fields(kind) if not each.metadata.get("hidden")]
    positional = [each for each in shown if each.metadata.get("argument")]
    return [
        *(_argument(each) for each in positional),
        *(_option(each, hints[each.name]) for each in shown if each not in positional),
    ]


def _argument(field: Field[Any]) -> click.Parameter:
    return click.Argument([field.name], required=field.default == "", default=field.default or None)


def _option(field: Field[Any], hint: Any) -> click.Parameter:
    name = field.name.replace("_", "-")
    default = None if field.default is MISSING else field.default
    names = [*field.metadata.get("names", (f"--{name}",)), field.name]
    choices = [each for each in get_args(hint) if each is not type(None)]
    if hint is bool:
        given = [f"--{name}/--no-{name}" if default else f"--{name}", field.name]
        return click.Option(given, is_flag=True, default=default, help=field.metadata["help"])
    kind: Any = choices[0] if choices and isinstance(choices[0], type) else hint
    if choices and all(isinstance(each, str) for each in choices):
        kind = click.Choice(choices)
    types: dict[Any, Any] = {int: Integer(), float: Finite(), str: str}
    return click.Option(
        names, type=types.get(kind, kind), default=default, show_default=default is not None,
        help=field.metadata["help"],
    )  # fmt: skip


def _command(name: str) -> click.Command:
    module, config_name, function_name, curves, about = RECIPES[name]
    recipe = import_module(f"tinkex.recipes.{module}")
    kind, function = vars(recipe)[config_name], vars(recipe)[function_name]

    def train(**given: Any) -> None:
        _train(name, kind(**given), function, curves)

    text = f"{about}\n\n{HELP[name]}"
    return click.Command(name, params=_options(kind), callback=train, help=text, short_help=about)


def _train(name: str, config: Any, function: Callable[..., Any], curves: tuple[str, ...]) -> None:
    from tinkex.recipes.progress import Progress
    from tinkex.recipes.run_directory import Interrupted

    progress = Progress()
    try:
        outcome = function(config, progress=progress)
    except Interrupted as stopped:
        note(f"{stopped}: {shlex.join(['tinkex', *sys.argv[1:]])}")
        sys.exit(INTERRUPTED)
    if outcome is None:
        return
    place = Path(outcome.directory)
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    progress.curves(rows, curves, place / "curves.png")
    _next(outcome)


def _next(outcome: Any) -> None:
    """What to do with the adapter."""
    click.echo(f"\nadapter: {outcome.adapter}")
    click.echo(f"chat:    tinkex chat {outcome.adapter}")
    click.echo("serve:   tinkex serve   (then TINKER_BASE_URL, and the adapter by its path)")
    click.echo(f"compare: tinkex eval DATA {outcome.base_model} {outcome.adapter}")
    click.echo(f"train on: tinkex train … --from {outcome.state}")
    click.echo(f"metrics, samples, settings: {outcome.directory}")


class _Recipes(click.Group):
    """A group whose commands are the rows of RECIPES, imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(RECIPES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in RECIPES else None


@click.group("train", cls=_Recipes)
def train() -> None:
    """Train an adapter from a file of examples, preferences or prompts.

    Runs go into a directory (--out); the same command again resumes a run that was stopped or killed.
    """
