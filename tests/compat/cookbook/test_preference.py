"""Learning from a preference and from a teacher: both need sampler and trainer to score alike."""

from __future__ import annotations

import math
from statistics import mean

import pytest

from tests.compat.cookbook.kitchen import Kitchen


@pytest.mark.ci
def test_dpo(kitchen: Kitchen) -> None:
    options = {
        "model_name": "Qwen/Qwen3.5-9B-Base", "dataset": "hhh", "batch_size": 16, "learning_rate": 1e-3,
        "max_length": 256, "max_steps": 10,
    }  # fmt: skip
    run = kitchen.cook("recipes.preference.dpo.train", **options)
    first, last = run.metrics[0], run.metrics[-1]
    assert abs(first["dpo_loss"] - math.log(2)) < 1e-3  # the policy still is its reference
    assert abs(first["margin"]) < 1e-3
    assert last["dpo_loss"] < 0.5
    assert last["accuracy"] >= 0.9


def test_on_policy_distillation(kitchen: Kitchen) -> None:
    options = {
        "model_name": "Qwen/Qwen3.5-4B", "teacher_model": "Qwen/Qwen3-8B", "renderer_name": "role_colon",
        "dataset": "deepmath", "groups_per_batch": 32, "group_size": 4, "max_tokens": 4, "lora_rank": 8,
        "learning_rate": 5e-3, "max_steps": 12, "eval_every": 0, "save_every": 0,
    }  # fmt: skip
    run = kitchen.cook("recipes.distillation.on_policy_distillation", **options)
    distance = run.series("teacher_kl")
    assert len(distance) == 12
    assert mean(distance[-2:]) < 0.8 * distance[0]
    assert max(map(abs, run.series("optim/kl_sample_train_v1"))) < 1e-3
