"""Reinforcement learning: the reward climbs, and sampler and trainer agree on every token of every step.

What is asked of a recipe is asked of it on our SDK too, in test_ours.py.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.compat.cookbook.kitchen import Kitchen, Run

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


def check_rl_loop(kitchen: Kitchen) -> None:
    options = {
        "batch_size": 16, "group_size": 8, "max_tokens": 16, "max_steps": 16, "learning_rate": 2e-3,
        "lora_rank": 8, "save_every": 0,
    }  # fmt: skip
    reward = kitchen.cook("recipes.rl_loop", **options).series("reward/total")
    assert len(reward) == 16
    assert mean(reward[-6:]) > reward[0] + 0.1  # seen to rise by 0.5, and by 0.3 from a model taught less


def check_math_rl(kitchen: Kitchen) -> None:
    options = {
        "model_name": "Qwen/Qwen3-4B-Instruct-2507", "env": "arithmetic", "groups_per_batch": 32,
        "group_size": 8, "max_tokens": 4, "learning_rate": 2e-4, "lora_rank": 8, "max_steps": 14,
        "compute_post_kl": True, "eval_every": 0, "save_every": 0,
    }  # fmt: skip
    run = kitchen.cook("recipes.math_rl.train", **options)
    reward = run.series("env/all/reward/total")
    assert mean(reward[-5:]) > mean(reward[:2]) + 0.03  # of about 0.25: seen to rise by 0.08 to 0.12
    check_on_policy(run, steps=14)
    assert any(abs(kl) > 1e-4 for kl in run.series("kl_pre_post_v1"))  # each step moves the policy


def check_shorter(kitchen: Kitchen) -> None:
    options = {
        "model_name": "Qwen/Qwen3.5-4B", "batch_size": 4, "group_size": 8, "max_tokens": 24,
        "learning_rate": 1e-3, "max_steps": 12, "eval_every": 0,
    }  # fmt: skip
    run = kitchen.cook("recipes.preference.shorter.train", **options)
    length = run.series("env/all/ac_tokens_per_turn")
    assert mean(length[-3:]) < 0.7 * mean(length[:3])
    check_on_policy(run, steps=12)


def check_guess_number(kitchen: Kitchen) -> None:
    options = {
        "model_name": "Qwen/Qwen3.5-4B", "batch_size": 2, "group_size": 4, "max_tokens": 8, "max_steps": 2,
        "learning_rate": 1e-3, "eval_every": 0, "save_every": 0,
    }  # fmt: skip
    run = kitchen.cook("recipes.multiplayer_rl.guess_number.train", **options)
    check_on_policy(run, steps=2)
    assert all(turns > 5 for turns in run.series("env/all/turns_per_episode"))
    # Every turn's prompt holds the turns before it.
    assert all(length > 50 for length in run.series("env/all/ob_tokens_per_turn"))


def check_on_policy(run: Run, steps: int) -> None:
    """In float32 the sampler's logprobs are the trainer's, up to the order of sums."""
    first, second = run.series("optim/kl_sample_train_v1"), run.series("optim/kl_sample_train_v2")
    assert len(first) == len(second) == steps
    assert max(map(abs, first)) < 1e-3
    assert max(second) < 1e-4
