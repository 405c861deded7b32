"""Learning rates: sane defaults by model, and how they change over a run.

The default for supervised fine-tuning is the published rule for LoRA: 5e-5 · 10 · (2000 / hidden size)^p,
with p = 0.0775 for Qwen and 0.781 for Llama and others; it does not depend on the rank. Knows no client.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from tinkex.errors import InvalidInputError

Schedule = Literal["linear", "cosine", "constant"]
SCHEDULES: tuple[str, ...] = Schedule.__args__  # type: ignore[attr-defined]
# Of the rule's rate: preferences and rewards take smaller steps than examples.
SHARE = {"sft": 1.0, "dpo": 0.05, "grpo": 0.1, "distill": 0.2}


def learning_rate_at(
    step: int, steps: int, peak: float, schedule: Schedule = "linear", warmup: int = 0
) -> float:
    """The learning rate of step 0..steps-1: a linear warm-up, then a decay towards 0.

    >>> [learning_rate_at(step, 4, 1.0) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "constant":
        return peak
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "linear":
        return peak * (1 - done)
    raise InvalidInputError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")


def default_learning_rate(model: str, parameters: int | None, recipe: str) -> float:
    """The published LoRA rule for a model, times the recipe's share; 2e-4 if the size is not known.

    The hidden size is estimated from the number of parameters (given, or in the name: `8B`, `135M`).

    >>> f"{default_learning_rate('meta-llama/Llama-3.1-8B', None, 'sft'):.1e}"
    '2.9e-04'
    >>> f"{default_learning_rate('Qwen/Qwen3-8B', 8_190_000_000, 'sft'):.1e}"
    '4.7e-04'
    """
    size = parameters or parameters_in_name(model)
    if size is None:
        return 2e-4 * SHARE[recipe]
    hidden = 4096 * (size / 8e9) ** 0.42
    power = 0.0775 if "qwen" in model.lower() else 0.781
    return float(f"{5e-5 * 10 * (2000 / hidden) ** power * SHARE[recipe]:.2g}")


def parameters_in_name(model: str) -> int | None:
    """How many parameters a name speaks of.

    >>> [parameters_in_name(name) for name in ("SmolLM2-135M-Instruct", "Qwen3-30B-A3B", "mine")]
    [135000000, 30000000000, None]
    """
    found = re.search(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", model, re.IGNORECASE)
    return int(float(found[1]) * (1e9 if found[2] in "bB" else 1e6)) if found else None
