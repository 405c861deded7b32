"""`tinkex demo`: train a small model in this process, even if a server or a key is set."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import click

from tinkex.cli import INTERRUPTED
from tinkex.cli.output import Whole, note
from tinkex.cli.target import where
from tinkex.config import LOCAL, Settings
from tinkex.models import DEFAULT


@click.command()
@click.argument("kind", type=click.Choice(["sft", "rl"]), default="sft", metavar="[sft|rl]")
@click.option("--model", default=DEFAULT, show_default=True, help="A base model: its name or its directory.")
@click.option("--steps", type=Whole(1), help="Training steps.  [default: 14 for sft, 12 for rl]")
@click.option("-n", "--name", help="What lists and the console call the run.  [default: demo-sft or demo-rl]")
@click.option("--resume", is_flag=True, help="Continue where Ctrl-C stopped the last one.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the picture and the adapter.  [default: demo in TINKEX_HOME]",
)  # fmt: skip
def demo(kind: str, model: str, steps: int | None, name: str | None, resume: bool, out: Path | None) -> None:
    """Fine-tune a small model on this machine's CPU, and check by program that it learned.

    sft (the default) teaches it to talk like a pirate from 48 examples, in about a minute on two cores. rl
    teaches it to tell stories of five words from a reward alone, in two minutes. The model is fetched first
    if it is not here. Exits with 1 if the model did not learn.

    It runs in this process and costs nothing: TINKER_BASE_URL and keys are not used. examples/sft.py and
    examples/rl.py train on the server that is set.
    """
    from tinkex.demo import Bookmark
    from tinkex.demo.fine_tune import FineTune
    from tinkex.demo.reinforce import Reinforce
    from tinkex.demo.screen import Screen
    from tinkex.models import obtain

    settings = Settings.read()
    place = (out or settings.home / "demo").absolute()
    bookmark = Bookmark.read(place, kind) if resume else None
    model = bookmark.model if bookmark else model
    prefix = ""
    if not settings.embedded:
        note(f"the demo runs on this machine, not {where()}, which other commands use")
        prefix = f"TINKER_BASE_URL={LOCAL} "
    base = obtain(model, settings.home / "models", offline=settings.offline)
    chosen = FineTune if kind == "sft" else Reinforce
    lesson = chosen(model, place, steps=steps or chosen.steps, called=name or f"demo-{kind}")
    screen = Screen(base, _program_name(), prefix)
    note("`tinkex console`, in another terminal, shows its curves at http://127.0.0.1:8265")
    screen.title(f"{model} learns to {lesson.goal}", f"LoRA of rank {lesson.rank}")
    learned = lesson.play(screen, bookmark)
    if learned is None:
        again = ["demo", *(["rl"] if kind == "rl" else []), "--resume", *(["--out", str(out)] if out else [])]
        screen.stopped(shlex.join(again))
        sys.exit(INTERRUPTED)
    sys.exit(0 if learned else 1)


def _program_name() -> str:
    """How to call this command line from the user's shell, for lines to be copied."""
    own, known = Path(sys.executable).with_name("tinkex"), shutil.which("tinkex")
    if known is not None and Path(known).resolve() == own.resolve():
        return "tinkex"
    if not own.is_file():
        return f"{shlex.quote(sys.executable)} -m tinkex.cli"
    return shlex.quote(min(str(own), os.path.relpath(own), key=len))  # an environment that is not activated
