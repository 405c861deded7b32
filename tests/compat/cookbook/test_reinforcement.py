"""Reinforcement learning: the reward climbs, and sampler and trainer agree on every token of every step.

What is asked of a recipe is asked of it on our SDK too, in test_ours.py.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.compat.cookbook.checks import (
    check_guess_number,
    check_math_rl,
    check_on_policy,
    check_rl_loop,
    check_shorter,
)
from tests.compat.cookbook.kitchen import Kitchen

PROGRAMS = Path(__file__).parent / "programs"


def test_rl_loop(kitchen: Kitchen) -> None:
    check_rl_loop(kitchen)


def test_math_rl_on_arithmetic(kitchen: Kitchen) -> None:
    check_math_rl(kitchen)


@pytest.mark.ci
def test_shorter(kitchen: Kitchen) -> None:
    check_shorter(kitchen)


def test_guess_number(kitchen: Kitchen) -> None:
    check_guess_number(kitchen)


def test_a_penalty_for_leaving_the_base_model(kitchen: Kitchen) -> None:
    directory = kitchen.runs / "kl_penalty"
    run = kitchen.run(directory, str(PROGRAMS / "kl_penalty.py"), str(directory))
    distance = run.series("kl_policy_base")
    assert len(distance) == 5
    assert abs(distance[0]) < 1e-4  # the policy still is the base model
    assert mean(distance[2:]) > 1e-3
    check_on_policy(run, steps=5)


def test_twenty_questions(kitchen: Kitchen) -> None:
    """The player is trained, the answerer is another base model on the same server."""
    options = {
        "batch_size": 2, "group_size": 2, "num_epochs": 1, "max_tokens": 8, "learning_rate": 1e-3,
        "max_steps": 2, "eval_every": 0, "save_every": 0,
    }  # fmt: skip
    run = kitchen.cook("recipes.multiplayer_rl.twenty_questions.train", **options)
    check_on_policy(run, steps=2)
    assert all(turns == 20 for turns in run.series("env/all/turns_per_episode"))  # nobody guesses a noun
