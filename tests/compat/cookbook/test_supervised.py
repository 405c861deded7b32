"""Supervised recipes: the loss falls, checkpoints come and go as the recipe says, and training resumes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from tests.compat.cookbook.kitchen import PACKAGE, SOURCE, Kitchen

PROGRAMS = Path(__file__).parent / "programs"
SENTENCES = "tinker_cookbook/example_data/multilingual.txt"


@pytest.mark.ci
def test_sl_loop(kitchen: Kitchen) -> None:
    options = {"batch_size": 32, "max_steps": 12, "learning_rate": 5e-3, "lora_rank": 8, "save_every": 4}
    run = kitchen.cook("recipes.sl_loop", **options)
    nll = run.series("train_mean_nll")
    assert len(nll) == 12
    assert nll[-1] <= 0.8 * nll[0]
    assert [row["step"] for row in run.metrics] == list(range(12))
    assert [saved["name"] for saved in run.checkpoints] == ["000004", "000008", "final"]
    assert run.checkpoints[-1]["sampler_path"].startswith("tinker://")


def test_sl_basic(kitchen: Kitchen) -> None:
    options = {"learning_rate": 5e-3, "lora_rank": 8, "max_steps": 4, "eval_every": 2, "save_every": 2}
    run = kitchen.cook("recipes.sl_basic", **options)
    held_out = run.series("test/nll")
    assert len(held_out) == 2
    assert held_out[1] < 0.9 * held_out[0]
    assert all(math.isfinite(bits) for bits in run.series("test/bpb"))
    # The recipe submits a batch before it has the last one's results: only their order makes this fall.
    nll = run.series("train_mean_nll")
    assert nll == sorted(nll, reverse=True)


@pytest.mark.ci
def test_chat_sl_with_rolling_checkpoints(kitchen: Kitchen) -> None:
    options = {
        "model_name": "Qwen/Qwen3-8B", "dataset": kitchen.hub / "conversations.jsonl", "batch_size": 16,
        "max_length": 256, "lora_rank": 8, "learning_rate": 5e-3, "save_every": 2, "rolling_save_every": 1,
    }  # fmt: skip
    recipe, name = "recipes.chat_sl.train", "chat_sl"
    run = kitchen.cook(recipe, name, max_steps=4, behavior_if_log_dir_exists="delete", **options)
    by_name = {saved["name"]: saved for saved in run.checkpoints}
    assert list(by_name) == ["000001", "000002", "000003", "final"]
    assert [bool(saved.get("rolling")) for saved in by_name.values()] == [True, False, True, False]
    assert ["sampler_path" in saved for saved in by_name.values()] == [False, True, False, True]

    kept = _checkpoints(kitchen, by_name["final"]["state_path"])
    assert sorted(kept) == sorted(
        by_name[name][key] for name in ("000002", "final") for key in ("state_path", "sampler_path")
    )
    assert [kept[by_name[name]["state_path"]] is None for name in ("000002", "final")] == [False, True]

    # As if it had been interrupted: the record of the end, and those already deleted, are not there.
    log = run.directory / "checkpoints.jsonl"
    (periodic,) = [line for line in log.read_text().splitlines() if '"000002"' in line]
    log.write_text(periodic + "\n")
    resumed = kitchen.cook(recipe, name, max_steps=6, behavior_if_log_dir_exists="resume", **options)
    nll = resumed.series("train_mean_nll")
    assert len(nll) == 8  # four of the first run, then steps 2 to 5
    assert nll[4] < nll[2]
    assert nll[-1] < nll[4]


def test_off_policy_reasoning(kitchen: Kitchen) -> None:
    """A streamed dataset of somebody else's thoughts."""
    options = {
        "batch_size": 8, "max_prompts": 64, "buffer_size": 64, "max_steps": 4, "max_length": 512,
        "lora_rank": 8, "learning_rate": 5e-3,
    }  # fmt: skip
    nll = kitchen.cook("recipes.distillation.off_policy_reasoning", **options).series("train_mean_nll")
    assert len(nll) == 4
    assert nll[-1] < 0.8 * nll[0]


def test_prompt_distillation(kitchen: Kitchen, tmp_path: Path) -> None:
    """A teacher with a long prompt labels texts by their language; a student learns it from texts alone."""
    written = tmp_path / "said.jsonl"
    module = f"{PACKAGE}.recipes.prompt_distillation.create_data"
    checkout = replace(kitchen, hub=_checkout(kitchen.hub, tmp_path / "checkout"))
    assert "Saved data" in checkout.run(tmp_path, "-m", module, f"output_file={written}").said
    said = [[turn["content"] for turn in json.loads(row)["messages"]] for row in written.open()]
    assert len(said) == len((checkout.hub / SENTENCES).read_text().splitlines())
    assert mean(label == "el" for text, label in said if "α" in text) > 0.9
    assert mean(label == "ru" for text, label in said if "и" in text) > 0.9
    options = {
        "file_path": written, "model_name": "Qwen/Qwen3-8B", "batch_size": 32, "max_steps": 12,
        "renderer_name": "qwen3_disable_thinking", "lora_rank": 8, "learning_rate": 5e-3,
    }  # fmt: skip
    nll = kitchen.cook("recipes.prompt_distillation.train", **options).series("train_mean_nll")
    assert len(nll) == 12
    assert nll[-1] < 0.6 * nll[0]


def _checkout(hub: Path, directory: Path) -> Path:
    """The hub with the cookbook's own texts in it, which the recipe opens by their path in a checkout."""
    directory.mkdir()
    for entry in hub.iterdir():
        (directory / entry.name).symlink_to(entry)
    (directory / SENTENCES).parent.mkdir(parents=True)
    (directory / SENTENCES).symlink_to(SOURCE / SENTENCES)
    return directory


def _checkpoints(kitchen: Kitchen, path: str) -> dict[str, str | None]:
    """The checkpoints that the server has of the run of `path`, and when each expires."""
    said = kitchen.run(kitchen.runs, str(PROGRAMS / "checkpoints.py"), path).said
    return json.loads(said.splitlines()[-1])
