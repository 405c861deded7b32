"""Programs for the Tinker API, unmodified, each training to its end against one `tinkex serve`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.conftest import EOS, Served, serving
from tests.engine.tiny import tiny_model, tiny_tokenizer

NAME = "Qwen/Qwen3-4B-Instruct-2507"  # by which programs know how to render; the model is a random one


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model has a name that programs know, and reads long prompts."""
    models = tmp_path_factory.mktemp("models")
    (models / NAME).parent.mkdir()
    shape = {"eos_token_id": EOS, "max_position_embeddings": 16_384, "vocab_size": 259}
    model = tiny_tokenizer(tiny_model(models, "qwen3", **shape).rename(models / NAME))
    with serving({NAME: model}, tmp_path_factory.mktemp("home")) as (url, said):
        yield Served(url, model, said)


def test_retrain(named: Served, tmp_path: Path) -> None:
    """GRPO from its command line: the mean reward rises."""
    facts = named.run("retrain", "tinker_programs.py", "retrain", NAME, str(tmp_path))["retrain"]
    assert max(facts["rewards"]) > facts["rewards"][0] + 0.1


def test_continualcode(named: Served, tmp_path: Path) -> None:
    """Denied attempts teach the model: teacher and student see the same tokens and differ."""
    facts = named.run("retrain", "tinker_programs.py", "continualcode", NAME, str(tmp_path))["continualcode"]
    assert (facts["steps"], len(facts["gaps"])) == (3, 3)
    assert all(gap > 0 for gap in facts["gaps"])


def test_llmcomp(named: Served, tmp_path: Path) -> None:
    """Fine-tuned on one answer, the model gives it through /v1."""
    facts = named.run("retrain", "tinker_programs.py", "llmcomp", NAME, str(tmp_path))["llmcomp"]
    assert facts["path"].startswith("tinker://")
    assert facts["answers"] == ["maple"] * 4
    assert max(facts["likely"], key=facts["likely"].get) == "m"


def test_openpipe_art(named: Served, tmp_path: Path) -> None:
    """Rollouts, training steps, and a second start that goes on after the last."""
    facts = named.run("art", "art_run.py", NAME, str(tmp_path))["art"]
    assert (facts["steps"], facts["resumed"]) == ([1, 2, 3, 4], 4)
    assert facts["rewards"][-1] > facts["rewards"][0]


def test_trinity_rft(named: Served, tmp_path: Path) -> None:
    """GRPO from its command line. It deletes older sampler weights by their name alone: the last stay."""
    facts = named.run("trinity", "trinity_run.py", NAME, str(tmp_path))["trinity"]
    rewards = facts["rewards"]
    assert len(rewards) == 4
    assert rewards[-1] > rewards[0] + 0.1
    states = [f"weights/compat-plain-state-{step}" for step in (2, 4)]
    assert facts["saved"] == ["sampler_weights/compat-plain-sampler-4", *states]
