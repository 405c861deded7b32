"""What a recipe must have learned, whichever SDK ran it."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.compat.cookbook.kitchen import SOURCE, Kitchen, Run
from tinkex import ServiceClient


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
    check_seen_by_the_server(kitchen, run)


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


def check_seen_by_the_server(kitchen: Kitchen, run: Run) -> None:
    """What the server's console plots of a run, read from its requests, is what the recipe says of itself."""
    if not kitchen.url:
        return
    with ServiceClient(base_url=kitchen.url, api_key=kitchen.key) as service:
        rest = service.create_rest_client()
        (newest, *_) = rest.list_training_runs(limit=1).result(60).training_runs
        lines = list(rest.get_run_metrics(newest.training_run_id).result(60))
    for ours, theirs in (
        ("answer_tokens:mean", "env/all/ac_tokens_per_turn"),
        ("entropy:mean", "optim/entropy"),
    ):
        seen = [line[ours] for line in lines]
        assert seen == pytest.approx(run.series(theirs), rel=1e-2, abs=1e-2), ours
    assert any(line["reward_spread:mean"] > 0 for line in lines)


def check_distillation(kitchen: Kitchen) -> None:
    options = {
        "model_name": "Qwen/Qwen3.5-4B", "teacher_model": "Qwen/Qwen3-8B", "renderer_name": "role_colon",
        "dataset": "deepmath", "groups_per_batch": 32, "group_size": 4, "max_tokens": 4, "lora_rank": 8,
        "learning_rate": 5e-3, "max_steps": 12, "eval_every": 0, "save_every": 0,
    }  # fmt: skip
    run = kitchen.cook("recipes.distillation.on_policy_distillation", **options)
    distance = run.series("teacher_kl")
    assert len(distance) == 12
    assert mean(distance[-2:]) < 0.8 * distance[0]
    check_on_policy(run, steps=12)


# What each prints when it has done what it is about.
PRINTS = {
    "101_hello_tinker": "Qwen/Qwen3.5-9B-Base",
    "103_async_patterns": "Total: 32 completions",
    "202_loss_functions": "PPO (wide clip)",
    "303_sft_with_config": "Log path",
    "407_rlhf_pipeline": "Stage 3 (RL) complete.",
    "204_weights": "Downloaded adapter to",
    "501_export_hf": "Merged model saved to",
    "502_lora_adapter": "PEFT adapter saved to",
}


# These take a sampler's weights out as an archive, which the official SDK can no longer ask for.
ARCHIVES = ["204_weights", "501_export_hf", "502_lora_adapter"]


def follow(kitchen: Kitchen, directory: Path, name: str, fails: bool = False) -> Run:
    return kitchen.run(directory, str(SOURCE / "tutorials" / f"{name}.py"), fails=fails)
