"""`tinkex demo`: watch a model learn, on this machine, with no server and no key: also where there is one."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.numbers import Whole
from tinkex.cli.output import CONTEXT, how_called, note
from tinkex.cli.place import where
from tinkex.config import LOCAL, Settings
from tinkex.models import DEFAULT

if TYPE_CHECKING:
    from tinkex.demo.bookmark import Bookmark
    from tinkex.demo.screen import Screen

INTERRUPTED = 130  # as a shell says it of a process that Ctrl-C ended


@click.command(context_settings=CONTEXT)
@click.argument("act", type=click.Choice(["sft", "rl"]), default="sft", metavar="[sft|rl]")
@click.option("--model", default=DEFAULT, show_default=True, help="A base model: its name or its directory.")
@click.option("--steps", type=Whole(1), help="Training steps.  [default: 14, and 12 for rl]")
@click.option("--resume", is_flag=True, help="Go on where Ctrl-C stopped the last one.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the picture and the adapter.  [default: demo in TINKEX_HOME]",
)  # fmt: skip
def demo(act: str, model: str, steps: int | None, resume: bool, out: Path | None) -> None:
    """Fine-tune a small model on this machine's CPU, and see by program that it learned.

    sft (what runs if nothing is said) teaches it to talk like a pirate from 48 examples, in about a minute
    on two cores; rl teaches it five-word stories from a reward alone, in two. The model is fetched first if
    it is not here. Fails if the model did not learn.

    It always runs in this process, and costs nothing: TINKER_BASE_URL and keys are not used, and nothing is
    sent to a server. examples/sft.py and examples/rl.py train on the server that is set.
    """
    from tinkex.demo.bookmark import Bookmark
    from tinkex.demo.screen import Screen
    from tinkex.models import obtain

    settings = Settings.read()
    place = (out or settings.home / "demo").absolute()
    bookmark = Bookmark.read(place, act) if resume else None
    model = bookmark.model if bookmark else model
    before = ""
    if not settings.embedded:
        note(f"the demo runs on this machine, not {where()}, which other commands use")
        before = f"TINKER_BASE_URL={LOCAL} "
    screen = Screen(obtain(model, settings.home / "models", offline=settings.offline), how_called(), before)
    play = _fine_tune if act == "sft" else _reinforce
    learned = play(screen, model, place, steps, bookmark)
    if learned is None:
        again = ["demo", *(["rl"] if act == "rl" else []), "--resume", *(["--out", str(out)] if out else [])]
        screen.stopped(shlex.join(again))
        sys.exit(INTERRUPTED)
    sys.exit(0 if learned else 1)


def _fine_tune(
    screen: Screen, model: str, out: Path, steps: int | None, bookmark: Bookmark | None
) -> bool | None:
    from tinkex.demo import fine_tune, pirate

    task, plan = pirate.task(), fine_tune.Plan(model, out)
    screen.title(f"{model} learns to {task.goal}", f"LoRA of rank {plan.rank}")
    return fine_tune.demo(task, replace(plan, steps=steps or plan.steps), screen, bookmark)


def _reinforce(
    screen: Screen, model: str, out: Path, steps: int | None, bookmark: Bookmark | None
) -> bool | None:
    from tinkex.demo import reinforce, stories

    game, plan = stories.game(), reinforce.Plan(model, out)
    screen.title(f"{model} learns to {game.goal}", f"LoRA of rank {plan.rank}")
    return reinforce.demo(game, replace(plan, steps=steps or plan.steps), screen, bookmark)
