"""The cookbook's tutorials, each run from beginning to end as the script that it also is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compat.cookbook.checks import ARCHIVES, PRINTS, follow
from tests.compat.cookbook.kitchen import Kitchen

TUTORIALS = [
    "101_hello_tinker", "102_first_sft", "103_async_patterns", "104_first_rl", "201_rendering",
    "202_loss_functions", "203_completers", "205_evaluations", "301_cookbook_abstractions",
    "302_custom_environment", "303_sft_with_config", "304_rl_with_config", "401_sl_hyperparams",
    "402_rl_hyperparams", "403_dpo_preferences", "404_sequence_extension", "405_multi_agent",
    "406_prompt_distillation", "407_rlhf_pipeline", "503_publish_hub",
]  # fmt: skip


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial(kitchen: Kitchen, tmp_path: Path, name: str) -> None:
    said = follow(kitchen, tmp_path, name).said
    assert PRINTS.get(name, "") in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_tutorial_that_needs_archives_gets_as_far_as_its_sdk(
    kitchen: Kitchen, tmp_path: Path, name: str
) -> None:
    said = follow(kitchen, tmp_path, name, fails=True).said
    assert re.search(r"WeightsDownloadError.*has no attribute 'get_checkpoint_archive_url", said)


def test_the_losses_of_the_tutorial_agree_with_each_other(kitchen: Kitchen, tmp_path: Path) -> None:
    said = follow(kitchen, tmp_path, "202_loss_functions").said
    losses = dict(re.findall(r"^(\w+) +loss:sum = (\S+)$", said, re.M))
    assert set(losses) == {"cross_entropy", "importance_sampling", "ppo", "cispo"}
    assert float(losses["cross_entropy"]) > 0
    # Both passes see the same tokens under the same weights.
    scored = re.findall(r"logprobs \(last 3.*\): (\[.*\])", said)
    assert len(scored) == 2
    assert scored[0] == scored[1]
