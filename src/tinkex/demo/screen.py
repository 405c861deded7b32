"""What a demo shows: answers, progress, a curve, and what to do with the adapter. In 80 columns.

In a terminal the progress is one line that changes; elsewhere it is a line for each step. Knows nothing of
training.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tinkex.charts import sparkline, terminal_chart, write_png
from tinkex.errors import TinkerError
from tinkex.models.local_files import weights_of

WIDTH = 80


@dataclass(frozen=True)
class Answer:
    question: str
    text: str
    good: bool


class Screen:
    """Prints a demo as it goes, for lines to be copied: `base` is the base model's directory, `tinkex` is how
    the command line is called here, and `before` what makes it stay on this machine, if it would not."""

    def __init__(self, base: Path, tinkex: str = "tinkex", before: str = "") -> None:
        self._base, self._tinkex, self._before = base, tinkex, before
        self._live = sys.stdout.isatty()
        self._steps, self._began = 0, 0.0
        self._seen: list[float] = []

    def title(self, text: str, how: str) -> None:
        click.echo(click.style(text, bold=True))
        weights = weights_of(self._base)  # what they are, where that must be said
        click.echo(f"{how} on {weights or 'the weights'} in {self._base}")

    def heading(self, text: str) -> None:
        """What comes next; said before it is computed, which may take a while."""
        click.echo("\n" + click.style(text, bold=True))

    def answers(self, answers: Sequence[Answer], rule: str) -> None:
        for answer in answers:
            mark = click.style("✓", fg="green") if answer.good else click.style("✗", fg="red")
            click.echo(f"  {mark} {answer.question}\n      {_short(answer.text, WIDTH - 6)}")
        good = sum(answer.good for answer in answers)
        click.echo(
            click.style(f"{good} of {len(answers)} right", bold=True) + f"  (a program checks: {rule})"
        )

    def stories(self, stories: Sequence[tuple[str, str, float]], mean: float, rule: str) -> None:
        """Samples (subject, text, reward), and the mean reward of these and their siblings."""
        for subject, text, reward in stories:
            click.echo(f"  {reward:.1f}  {_short(f'{subject}: {text}', WIDTH - 7)}")
        click.echo(click.style(f"mean reward {mean:.2f}", bold=True) + f"  (a program counts: {rule})")

    def begin(self, title: str, steps: int, taken: int) -> None:
        self.heading(title)
        if taken:
            click.echo(f"  going on after step {taken}")
        self._steps, self._began, self._seen = steps, time.monotonic(), []

    def step(self, step: int, name: str, value: float, tokens_per_second: float, said: str = "") -> None:
        """One step was taken, with this value of what is being watched."""
        self._seen.append(value)
        left = (time.monotonic() - self._began) / len(self._seen) * (self._steps - step - 1)
        line = f"  step {step + 1:>2}/{self._steps}  {name} {value:.3f}  {tokens_per_second:4.0f} tokens/s"
        line += f"  {int(left) // 60}:{int(left) % 60:02} left"
        line += f"  {sparkline(self._seen, 14)}" if self._live and not said else f"  {said}"
        line = _short(line.rstrip(), min(WIDTH, shutil.get_terminal_size().columns) if self._live else WIDTH)
        if self._live:
            click.echo(f"\r\x1b[K{line}", nl=step + 1 == self._steps)
        else:
            click.echo(line)

    def curve(self, name: str, values: Sequence[float], png: Path) -> None:
        self.heading(f"{name.capitalize()} at each step")
        click.echo(terminal_chart({name: values}, width=64, height=8))
        png.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_png(png, {name: values}, title=f"tinkex demo: {name}")
        except TinkerError as error:  # matplotlib is an optional extra
            click.echo(f"No picture was written. {error}")
        else:
            click.echo(f"As a picture: {png}")

    def adapter(self, path: str, directory: Path) -> None:
        self.heading("The adapter is yours")
        click.echo(f"  {directory}\n")
        click.echo("Two lines load it in PEFT:\n")
        click.echo(f'  model = transformers.AutoModelForCausalLM.from_pretrained("{self._base}")')
        click.echo(f'  model = peft.PeftModel.from_pretrained(model, "{directory}")\n')
        tinkex = f"{self._before}{self._tinkex}"
        click.echo(f"Talk to it, or see how it went:\n\n  {tinkex} chat {path}\n  {tinkex} run plot")

    def verdict(self, learned: bool, before_and_after: str) -> None:
        said, colour = ("It learned", "green") if learned else ("It did not learn", "red")
        click.echo(
            f"\n{click.style(said, fg=colour, bold=True)}{click.style(f': {before_and_after}.', bold=True)}"
        )

    def stopped(self, again: str) -> None:
        click.echo(f"\nStopped. What was learned so far is saved; go on with: {self._tinkex} {again}")


def _short(text: str, width: int) -> str:
    text = "".join(c if c.isprintable() else " " for c in text)  # a model may say what terminals obey
    return text if len(text) <= width else f"{text[: width - 2]} …"
