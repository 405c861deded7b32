"""The same recipes with our SDK under the name `tinker`, served and embedded: the same numbers."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.compat.cookbook.kitchen import Kitchen, Run
from tests.compat.cookbook.test_tutorials import ARCHIVES, follow

START = Path(__file__).parent / "programs" / "start.py"


def test_chat_sl_has_the_same_losses(kitchen: Kitchen, ours: Kitchen) -> None:
    def losses(where: Kitchen) -> list[float]:
        options = {
            "model_name": "Qwen/Qwen3-8B", "dataset": where.hub / "conversations.jsonl", "batch_size": 16,
            "max_length": 256, "learning_rate": 5e-3, "lora_rank": 8, "max_steps": 4,
            "load_checkpoint_path": _start(where, "Qwen/Qwen3-8B", 8, "qwen3"),
        }  # fmt: skip
        name = f"chat_sl-{where.way}"
        return where.cook(
            "recipes.chat_sl.train", name, behavior_if_log_dir_exists="delete", **options
        ).series("train_mean_nll")

    official = losses(kitchen)
    assert len(official) == 4
    assert losses(ours) == pytest.approx(official, abs=1e-5)


def test_dpo_has_the_same_losses(kitchen: Kitchen, ours: Kitchen) -> None:
    def run(where: Kitchen) -> Run:
        options = {
            "model_name": "Qwen/Qwen3.5-9B-Base", "dataset": "hhh", "batch_size": 16, "learning_rate": 1e-3,
            "max_length": 256, "max_steps": 4,
            "load_checkpoint_path": _start(where, "Qwen/Qwen3.5-9B-Base", 32, "role_colon"),
        }  # fmt: skip
        name = f"dpo-{where.way}"
        return where.cook(
            "recipes.preference.dpo.train", name, behavior_if_log_dir_exists="delete", **options
        )

    official, other = run(kitchen), run(ours)
    for name in ("dpo_loss", "margin", "accuracy"):
        assert other.series(name) == pytest.approx(official.series(name), abs=1e-5)


def test_shorter_is_learnt_and_on_policy(ours: Kitchen) -> None:
    options = {
        "model_name": "Qwen/Qwen3.5-4B", "batch_size": 4, "group_size": 8, "max_tokens": 24,
        "learning_rate": 1e-3, "max_steps": 10, "eval_every": 0,
    }  # fmt: skip
    run = ours.cook("recipes.preference.shorter.train", f"shorter-{ours.way}", **options)
    length = run.series("env/all/ac_tokens_per_turn")
    assert mean(length[-3:]) < 0.7 * mean(length[:3])
    assert max(map(abs, run.series("optim/kl_sample_train_v1"))) < 1e-3


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_tutorial_that_needs_archives(ours: Kitchen, tmp_path: Path, name: str) -> None:
    """What the official SDK no longer can (test_tutorials.py), ours does."""
    assert "Traceback" not in follow(ours, tmp_path, name).said


def _start(where: Kitchen, model: str, rank: int, renderer: str) -> str:
    return where.run(where.runs, str(START), model, str(rank), renderer).said.split()[-1]
