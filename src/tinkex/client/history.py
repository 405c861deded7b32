"""A run's history as `RestClient.get_run_metrics` gives it: a list with a line of numbers for each step.

Promises: it is that list, and nothing else to whoever computes with it; at a prompt it is one line, in a
notebook a chart. Knows nothing of where it came from.
"""

from __future__ import annotations

from collections.abc import Sequence

CURVES = ("loss", "grad_norm", "learning_rate")  # what is drawn if nothing is named
_NOT_CURVES = ("step", "time", "seconds")


class History(list[dict[str, float]]):
    """The steps of a run: `step`, `time`, `seconds`, `loss` and whatever its passes and steps said."""

    def metrics(self) -> list[str]:
        """The names of what can be drawn."""
        return list(dict.fromkeys(name for line in self for name in line if name not in _NOT_CURVES))

    def curves(self, names: Sequence[str] = ()) -> dict[str, list[float]]:
        """Each metric's values, step by step; NaN where a step said nothing of it."""
        known = self.metrics()
        names = names or [name for name in CURVES if name in known]
        return {name: [line.get(name, float("nan")) for line in self] for name in names}

    def steps(self) -> list[float]:
        return [line["step"] for line in self]

    def __repr__(self) -> str:
        from tinkex.charts import number, sparkline

        count = f"{len(self)} step{'' if len(self) == 1 else 's'}"
        if not (losses := self.curves(["loss"])["loss"]) or "loss" not in self.metrics():
            return f"History({count})"
        return f"History({count}, loss {number(losses[0])} {sparkline(losses)} {number(losses[-1])})"

    def _repr_html_(self) -> str | None:
        """In a notebook: the curves."""
        from tinkex.svg import svg_chart

        if not self:
            return None  # what __repr__ says is enough
        return f'<div style="max-width: 800px">{svg_chart(self.curves(), x=self.steps())}</div>'
