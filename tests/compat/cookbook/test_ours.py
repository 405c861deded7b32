"""The same recipes with our SDK under the name `tinker`, served and embedded: the same numbers.

Where chance has a part, what is asked is what is asked on the official SDK; where it has none (supervised,
preferences, greedy sampling), every number of every step is the official one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.compat.cookbook.checks import (
    ARCHIVES,
    PRINTS,
    check_distillation,
    check_guess_number,
    check_math_rl,
    check_rl_loop,
    check_shorter,
    follow,
)
from tests.compat.cookbook.kitchen import EMBEDDED, Kitchen, Run

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Recipe:
    """A recipe without chance, started from given weights; `resumes` where it has no option for them."""

    name: str
    model: str
    rank: int
    renderer: str
    options: dict[str, Any]
    series: tuple[str, ...]
    resumes: bool = False

    def cook(self, where: Kitchen) -> Run:
        """Run it from an adapter whose seed is known."""
        given = (self.model, str(self.rank), self.renderer)
        start = where.run(where.runs, str(PROGRAMS / "start.py"), *given).said.split()[-1]
        name = f"same-{self.name}-{where.way}"
        if self.name.endswith(".py"):
            return where.run(where.runs / name, str(PROGRAMS / self.name), str(where.runs / name), start)
        options = {k: v.format(hub=where.hub) if isinstance(v, str) else v for k, v in self.options.items()}
        if not self.resumes:
            return where.cook(self.name, name, load_checkpoint_path=start, **options)
        record = {"name": "start", "batch": 0, "state_path": start}
        (where.runs / name).mkdir()
        (where.runs / name / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")
        return where.cook(self.name, name, **options)


BASE, INSTRUCT = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3-8B"
SAME = {
    "sl_loop": Recipe(
        "recipes.sl_loop", BASE, 8, "role_colon",
        {"batch_size": 16, "max_steps": 4, "learning_rate": 5e-3, "save_every": 0},
        ("train_mean_nll", "train_mean_bpb"), resumes=True,
    ),
    "sl_basic": Recipe(
        "recipes.sl_basic", BASE, 8, "role_colon",
        {"lora_rank": 8, "max_steps": 4, "learning_rate": 5e-3, "eval_every": 2, "save_every": 0},
        ("train_mean_nll", "test/nll"),
    ),
    "chat_sl": Recipe(
        "recipes.chat_sl.train", INSTRUCT, 8, "qwen3",
        {"model_name": INSTRUCT, "dataset": "{hub}/conversations.jsonl", "batch_size": 16, "lora_rank": 8,
         "max_length": 256, "learning_rate": 5e-3, "max_steps": 4},
        ("train_mean_nll",),
    ),
    "dpo": Recipe(
        "recipes.preference.dpo.train", BASE, 32, "role_colon",
        {"model_name": BASE, "dataset": "hhh", "batch_size": 16, "learning_rate": 1e-3, "max_length": 256,
         "max_steps": 4},
        ("dpo_loss", "margin", "accuracy"),
    ),
    "distillation": Recipe(
        "greedy_distillation.py", "Qwen/Qwen3.5-4B", 8, "role_colon", {},
        ("teacher_kl", "optim/kl_sample_train_v1", "optim/entropy"),
    ),
    "math_rl": Recipe(
        "recipes.math_rl.train", "Qwen/Qwen3-4B-Instruct-2507", 8, "qwen3_instruct",
        {"model_name": "Qwen/Qwen3-4B-Instruct-2507", "env": "arithmetic", "groups_per_batch": 16,
         "group_size": 2, "max_tokens": 4, "lora_rank": 8, "temperature": 0.0, "max_steps": 3,
         "eval_every": 0, "save_every": 0},
        ("env/all/reward/total", "env/all/ac_tokens_per_turn", "optim/entropy"),
    ),
}  # fmt: skip


@pytest.fixture(scope="session")  # pytest comes back to this file when it goes from one way to the other
def official(kitchen: Kitchen) -> Callable[[str], Run]:
    """What the official SDK comes to, cooked once for both ways of ours."""
    return functools.cache(lambda name: SAME[name].cook(kitchen))


@pytest.mark.parametrize("name", SAME)
def test_every_number_is_the_official_one(official: Callable[[str], Run], ours: Kitchen, name: str) -> None:
    expected, got = official(name), SAME[name].cook(ours)
    for series in SAME[name].series:
        right = expected.series(series)
        assert right, f"{series} is not among {sorted(expected.metrics[0])}"
        assert got.series(series) == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize(
    "check", [check_rl_loop, check_math_rl, check_shorter, check_guess_number, check_distillation]
)
def test_what_is_learnt_by_chance_is_learnt(ours: Kitchen, check: Callable[[Kitchen], None]) -> None:
    check(ours)


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_tutorial_that_needs_archives(ours: Kitchen, tmp_path: Path, name: str) -> None:
    """What the official SDK no longer can (test_tutorials.py), ours does."""
    # Without a key a tutorial asks for one and stops; with this address it is not used.
    kitchen = replace(ours, url="local") if ours.way == EMBEDDED else ours
    said = follow(kitchen, tmp_path, name).said
    assert PRINTS[name] in said
    assert "Traceback" not in said
