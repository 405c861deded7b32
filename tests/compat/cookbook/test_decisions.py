"""Choices scored at once: the cookbook's probabilities are those of the model's own distribution."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.compat.cookbook.kitchen import Kitchen

PROGRAM = Path(__file__).parent / "programs" / "decision.py"
MODEL = "Qwen/Qwen3-8B"


def test_a_decision(kitchen: Kitchen) -> None:
    check_decision(kitchen)


def test_a_decision_on_our_sdk(ours: Kitchen) -> None:
    check_decision(ours)


def check_decision(kitchen: Kitchen) -> None:
    said = json.loads(kitchen.run(kitchen.runs, str(PROGRAM), MODEL, "qwen3").said.splitlines()[-1])
    probabilities = list(said["probabilities"].values())
    assert sum(probabilities) == pytest.approx(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(kitchen.hub / MODEL, dtype=torch.float32)
    before = torch.tensor([said["tokens"][: said["position"]]])
    with torch.no_grad():
        logits = model(input_ids=before).logits[0, -1, said["answers"]]
    assert probabilities == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
    assert max(probabilities) - min(probabilities) > 1e-3  # a choice, not a guess
