"""Learning from a preference and from a teacher: both need sampler and trainer to score alike."""

from __future__ import annotations

import json
import math

import pytest

from tests.compat.cookbook.checks import check_distillation, check_on_policy
from tests.compat.cookbook.kitchen import PACKAGE, Kitchen, Run


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
    check_distillation(kitchen)


def test_rlhf_in_three_stages(kitchen: Kitchen) -> None:
    """Each stage starts from what the one before has saved: a state, and a sampler that judges."""
    options = {
        "short_name": "three", "batch_size": 16, "lora_rank": 8, "max_length": 256, "max_steps": 3,
        "sft_learning_rate": 5e-3, "rm_learning_rate": 5e-3, "rl_learning_rate": 1e-3, "rl_max_tokens": 8,
        "eval_every": 2,
    }  # fmt: skip
    module = f"{PACKAGE}.recipes.preference.rlhf.rlhf_pipeline"
    said = kitchen.run(kitchen.runs, "-m", module, *(f"{k}={v}" for k, v in options.items())).said
    policy, judge, tuned = (Run(kitchen.runs / "rlhf-three" / stage, said) for stage in ("sft", "rm", "rl"))
    for stage in (policy, judge):
        nll = stage.series("train_mean_nll")
        assert len(nll) == 3
        assert nll[-1] < nll[0]
    config = json.loads((tuned.directory / "config.json").read_text())
    assert config["load_checkpoint_path"] == policy.checkpoints[-1]["state_path"]
    assert judge.checkpoints[-1]["sampler_path"] in json.dumps(config)
    check_on_policy(tuned, steps=3)
    assert all(0 <= rate <= 1 for rate in tuned.series("test/win_rate"))
