"""What a recipe shows: a live bar in a terminal, elsewhere a line for each step; plots at the end; a batch.

Text of a model cannot control the terminal. This module does not train and writes no other files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

import tinkex
from tinkex.charts import number, show_curves

_HIDDEN = ("step", "tokens", "seconds")  # not worth a place in the line
_SHORT = {"learning_rate": "lr", "tokens_per_second": "tok/s"}  # next to the bar, in 80 columns


class Progress:
    """Shows one training run on stdout; `quiet` shows nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live: Any = None
        self._task: Any = None
        self._steps, self._done, self._began = 0, 0, 0.0

    def note(self, text: str) -> None:
        if not self._quiet:
            if self._live is not None:
                self._live.console.print(printable(text), markup=False, highlight=False)
            else:
                click.echo(printable(text))

    def batch(self, tokenizer: Any, data: Sequence[tinkex.Datum]) -> None:
        """Show the tokens of datums, and which of them are learnt."""
        if not self._quiet:
            click.echo(batch_text(tokenizer, data))

    def begin(self, title: str, steps: int, done: int) -> None:
        """Training starts, or resumes after `done` steps."""
        self.note(title)
        if done:
            self.note(f"continuing after step {done} of {steps}")
        self._steps, self._done, self._began = steps, done, time.monotonic()
        if not self._quiet and sys.stdout.isatty():
            from rich import progress

            columns = (
                progress.TextColumn("training"), progress.BarColumn(bar_width=14),
                progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[said]}"),
            )  # fmt: skip
            self._live = progress.Progress(*columns)
            self._task = self._live.add_task("training", total=steps, completed=done, said="")
            self._live.start()

    def row(self, row: Mapping[str, float]) -> None:
        """The metrics of a step."""
        shown = {name: value for name, value in row.items() if name not in _HIDDEN}
        short = "  ".join(f"{_SHORT.get(name, name)} {number(value)}" for name, value in shown.items())
        said = "  ".join(f"{name} {number(value)}" for name, value in shown.items())
        step = int(row["step"])
        if self._live is not None:
            room = self._live.console.width - 34 - 2 * len(str(self._steps))  # what the other columns leave
            cut = short if len(short) <= room else f"{short[: room - 1]}…"  # else rich cuts the bar instead
            self._live.update(self._task, completed=step, said=cut)
        elif step > self._done and "loss" in row:
            left = (time.monotonic() - self._began) / (step - self._done) * (self._steps - step)
            self.note(f"step {step}/{self._steps}  {said}  {int(left) // 60}:{int(left) % 60:02} left")
        else:
            self.note(f"step {step}/{self._steps}  {said}")

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def curves(self, rows: Sequence[Mapping[str, float]], names: Sequence[str], png: Path) -> None:
        """Charts of the named metrics, in the terminal and as a picture."""
        series = {name: [row[name] for row in rows if name in row] for name in names}
        series = {name: values for name, values in series.items() if len(values) > 1}
        if not series:
            return
        self.note("")
        show_curves(self.note, series, png, height=7 * len(series))


def batch_text(tokenizer: Any, data: Sequence[tinkex.Datum]) -> str:
    """The tokens of datums, coloured by weight: what is learnt is green and in ⟦brackets⟧."""
    lines: list[str] = []
    for index, datum in enumerate(data):
        inputs = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
        tokens = [datum.model_input.to_ints()[0], *inputs["target_tokens"].tolist()]
        weights = [0.0, *inputs["weights"].tolist()]
        lines.append(click.style(f"datum {index}: {len(tokens)} tokens, {sum(weights):g} learnt", bold=True))
        pieces: list[str] = []
        for learnt, run in groupby(zip(tokens, weights, strict=True), key=lambda pair: pair[1] > 0):
            text = printable(tokenizer.decode([token for token, _ in run]))
            pieces.append(
                click.style(f"⟦{text}⟧", fg="green", bold=True) if learnt else click.style(text, dim=True)
            )
        lines.append("".join(pieces))
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text without characters that control a terminal.

    >>> printable("a\\x1b[2Jb\\n")
    'a [2Jb\\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t\u200d" else " " for c in text)  # which joins emoji
