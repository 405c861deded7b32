"""What a demo prints: answers, progress, a curve, and how to use the adapter. In 80 columns.

In a terminal, progress is one line that changes; elsewhere it is a line for each step. This module does not
train.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from tinkex.charts import show_curves, sparkline
from tinkex.models.local_files import weights_of
from tinkex.recipes.progress import printable

WIDTH = 80


class Screen:
    """Prints a demo. `base` is the base model's directory, `program` how to call the command line here, and
    `prefix` the variables with which commands use this machine instead of a server."""

    def __init__(self, base: Path, program: str = "tinkex", prefix: str = "") -> None:
        self._base, self._program, self._prefix = base, program, prefix
        self._live = sys.stdout.isatty()
        self._steps, self._began = 0, 0.0
        self._values: list[float] = []

    def title(self, text: str, how: str) -> None:
        click.echo(click.style(text, bold=True))
        weights = weights_of(self._base)  # "" if they are as published
        click.echo(f"{how} on {weights or 'the weights'} in {self._base}")

    def heading(self, text: str) -> None:
        """Announce what comes next, before it is computed."""
        click.echo("\n" + click.style(text, bold=True))

    def answers(self, answers: Sequence[tuple[str, str, bool]], score: str, rule: str) -> None:
        """Questions, the answers to them, and whether they are right."""
        for question, text, right in answers:
            mark = click.style("✓", fg="green") if right else click.style("✗", fg="red")
            click.echo(f"  {mark} {question}\n      {_short(text, WIDTH - 6)}")
        click.echo(click.style(score, bold=True) + f"  (a program checks: {rule})")

    def samples(self, samples: Sequence[tuple[str, str, float]], score: str, rule: str) -> None:
        """Some samples (subject, text, reward), and the score of all that were drawn."""
        for subject, text, reward in samples:
            click.echo(f"  {reward:.1f}  {_short(f'{subject}: {text}', WIDTH - 7)}")
        click.echo(click.style(score, bold=True) + f"  (a program counts: {rule})")

    def begin(self, title: str, steps: int, taken: int) -> None:
        self.heading(title)
        if taken:
            click.echo(f"  continuing after step {taken}")
        self._steps, self._began, self._values = steps, time.monotonic(), []

    def step(self, step: int, name: str, value: float, tokens_per_second: float, said: str = "") -> None:
        """Show the progress after a step."""
        self._values.append(value)
        left = (time.monotonic() - self._began) / len(self._values) * (self._steps - step - 1)
        line = f"  step {step + 1:>2}/{self._steps}  {name} {value:.3f}  {tokens_per_second:4.0f} tokens/s"
        line += f"  {int(left) // 60}:{int(left) % 60:02} left"
        line += f"  {sparkline(self._values, 14)}" if self._live and not said else f"  {said}"
        line = _short(line.rstrip(), min(WIDTH, shutil.get_terminal_size().columns) if self._live else WIDTH)
        click.echo(f"\r\x1b[K{line}" if self._live else line, nl=not self._live or step + 1 == self._steps)

    def curve(self, name: str, values: Sequence[float], png: Path) -> None:
        self.heading(f"{name.capitalize()} at each step")
        show_curves(click.echo, {name: values}, png, height=8, title=f"tinkex demo: {name}")

    def adapter(self, path: str, directory: Path) -> None:
        self.heading("The adapter is yours")
        click.echo(f"  {directory}\n")
        click.echo("Load it with PEFT:\n")
        click.echo(f'  model = transformers.AutoModelForCausalLM.from_pretrained("{self._base}")')
        click.echo(f'  model = peft.PeftModel.from_pretrained(model, "{directory}")\n')
        tinkex = f"{self._prefix}{self._program}"
        click.echo(f"Talk to it, or plot the run:\n\n  {tinkex} chat {path}\n  {tinkex} run plot")

    def verdict(self, learned: bool, before_and_after: str) -> None:
        said, colour = ("It learned", "green") if learned else ("It did not learn", "red")
        said = click.style(said, colour, bold=True)
        click.echo(f"\n{said}{click.style(f': {before_and_after}.', bold=True)}")

    def stopped(self, again: str) -> None:
        click.echo(f"\nStopped. The training so far is saved; continue with: {self._program} {again}")


def _short(text: str, width: int) -> str:
    text = " ".join(printable(text).split("\n"))
    return text if len(text) <= width else f"{text[: width - 2]} …"
