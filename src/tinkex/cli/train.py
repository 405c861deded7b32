"""`tinkex train sft|dpo|grpo|distill`: the recipes as commands. A config's fields are a command's options."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from tinkex.cli import INTERRUPTED
from tinkex.cli.output import Finite, Whole, note
from tinkex.recipes.distill import DistillConfig, train_distill
from tinkex.recipes.dpo import DpoConfig, train_dpo
from tinkex.recipes.grpo import GrpoConfig, train_grpo
from tinkex.recipes.progress import Progress
from tinkex.recipes.run_directory import Interrupted, Outcome
from tinkex.recipes.sft import SftConfig, train_sft


@dataclass(frozen=True)
class Recipe:
    """A recipe as a command."""

    name: str
    config: type[Any]
    train: Callable[..., Outcome | None]
    curves: tuple[str, ...]  # the metrics that are plotted
    about: str
    help: str


RECIPES = (
    Recipe(
        "sft", SftConfig, train_sft, ("loss", "eval_loss"), "Learn from examples.",
        """DATA is JSONL, JSON, Parquet, CSV, text or a hub dataset; rows are like one of

\b
{"messages": [{"role": "user", "content": …}, …]}
{"conversations": [{"from": "human", "value": …}, …]}    (ShareGPT)
{"instruction": …, "input": …, "output": …}              (Alpaca)
{"prompt": …, "completion": …}
{"text": …}

\b
tinkex train sft chats.jsonl --show-batch
tinkex train sft chats.jsonl --out runs/chats""",
    ),
    Recipe(
        "dpo", DpoConfig, train_dpo, ("loss", "accuracy", "eval_loss"), "Learn from preferences.",
        'DATA has rows like {"prompt": …, "chosen": …, "rejected": …}; all may be lists of messages.',
    ),
    Recipe(
        "grpo", GrpoConfig, train_grpo, ("reward", "entropy"), "Learn from rewards.",
        """DATA has prompts, {"prompt": …} or {"question": …}, and what else the reward
reads. Without DATA, --env names a built-in environment.

\b
tinkex train grpo --env arithmetic
tinkex train grpo asked.jsonl --reward grading:score   # score(text, row)
tinkex train grpo asked.jsonl --reward 'regex:^Yes'
tinkex train grpo asked.jsonl --reward 'program:python grade.py'""",
    ),
    Recipe(
        "distill", DistillConfig, train_distill, ("kl_teacher",), "Learn from a larger model.",
        "DATA has prompts, as for grpo. The student answers, and the teacher scores its tokens.",
    ),
)  # fmt: skip


@click.group()
def train() -> None:
    """Train an adapter from a file of examples, preferences or prompts.

    Runs go into a directory (--out); the same command again resumes a run that was stopped or killed.
    """


def _command(recipe: Recipe) -> click.Command:
    def start(**given: Any) -> None:
        _train(recipe, recipe.config(**given))

    text = f"{recipe.about}\n\n{recipe.help}"
    return click.Command(
        recipe.name, params=_options(recipe.config), callback=start, help=text, short_help=recipe.about
    )


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
    name, about = field.name.replace("_", "-"), field.metadata["help"]
    default = None if field.default is MISSING else field.default
    if hint is bool:
        given = f"--{name}/--no-{name}" if default else f"--{name}"
        return click.Option([given, field.name], is_flag=True, default=default, help=about)
    kinds = [each for each in get_args(hint) if each is not type(None)] or [hint]
    types: dict[Any, Any] = {int: Whole(0), float: Finite(0), str: str}
    kind = types.get(kinds[0]) or click.Choice(kinds)
    names = [*field.metadata.get("names", (f"--{name}",)), field.name]
    return click.Option(names, type=kind, default=default, show_default=bool(default), help=about)


def _train(recipe: Recipe, config: Any) -> None:
    progress = Progress()
    try:
        outcome = recipe.train(config, progress=progress)
    except Interrupted as stopped:
        note(f"{stopped}: {shlex.join(['tinkex', *sys.argv[1:]])}")
        sys.exit(INTERRUPTED)
    if outcome is None:
        return
    place = Path(outcome.directory)
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    progress.curves(rows, recipe.curves, place / "curves.png")
    _next(outcome)


def _next(outcome: Outcome) -> None:
    """What to do with the adapter."""
    run, base = shlex.quote(outcome.directory), shlex.quote(outcome.base_model)
    lines = {
        "adapter": outcome.adapter,
        "chat": f"tinkex chat {run}",
        "compare": f"tinkex eval {base} {run} --data FILE",
        "export": f"tinkex export {run} OUT --format gguf   (or peft, merged, mlx)",
        "serve": f"tinkex serve --model {base}; the adapter's path is the model's name at its /v1",
        "go on": f"tinkex train sft MORE --from {run}",
        "files": f"metrics.jsonl, samples.jsonl, curves.png in {run}",
    }
    click.echo()
    for name, line in lines.items():
        click.echo(f"{name:<9} {line}")


for each in RECIPES:
    train.add_command(_command(each))
