"""Our recipes beside TRL's trainers: from one adapter of PEFT's, on the same data, the same losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.recipes.conftest import jsonl

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model, and an adapter that PEFT wrote."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    # No padded vocabulary: TRL would give its ids a share of the probability.
    shape = {"vocab_size": 259, "max_position_embeddings": 512}
    base = tiny_tokenizer(tiny_model(tmp_path / "base", "smollm2", **shape))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=8, lora_alpha=32, target_modules=layers, task_type="CAUSAL_LM")
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter"


def say(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_losses_are_trls_step_by_step(recipe: str, start: tuple[Path, Path], tmp_path: Path) -> None:
    import trl_sides

    draw = np.random.default_rng(0)
    words = ["".join(map(chr, draw.integers(97, 123, draw.integers(3, 30)))) for _ in range(60)]
    rows: list[dict[str, Any]] = []
    for number in range(20):
        question, answer, other = words[3 * number : 3 * number + 3]
        row: dict[str, Any] = {"prompt": say("user", question)}
        if recipe == "sft":
            row["completion"] = say("assistant", answer)
        else:
            row |= {"chosen": say("assistant", answer), "rejected": say("assistant", other)}
        rows.append(row)
    data = jsonl(tmp_path / "data.jsonl", rows)
    job = trl_sides.Job("ours", recipe, str(start[0]), str(start[1]), str(data), learning_rate=5e-3)
    ours, theirs = trl_sides.run(job), trl_sides.run(replace(job, side="trl"))
    assert len(ours.losses) == len(theirs.losses) == 5
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-3)
    assert max(ours.losses) - min(ours.losses) > 0.02, "five steps that change something"
