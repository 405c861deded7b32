"""What was trained leaves through the cookbook's tools, and says elsewhere what it said here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.compat.cookbook.kitchen import Kitchen

PROGRAM = Path(__file__).parent / "programs" / "export.py"


@pytest.mark.parametrize(
    ("model", "train_unembed"),
    [("Qwen/Qwen3-8B", True), ("meta-llama/Llama-3.2-1B", False)],
    ids=["untied", "tied"],
)
def test_download_adapter_and_merge(
    kitchen: Kitchen, tmp_path: Path, model: str, train_unembed: bool
) -> None:
    run = kitchen.run(tmp_path, str(PROGRAM), model, str(train_unembed), str(tmp_path))
    served = json.loads(run.said.splitlines()[-1])
    base = _load(kitchen.hub / model)
    known = len(transformers.AutoTokenizer.from_pretrained(kitchen.hub / model))
    assert (
        _logprobs(base, served["tokens"], known) - torch.tensor(served["logprobs"])
    ).abs().max() > 0.1  # it learnt
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    for copy in (adapted, _load(tmp_path / "merged")):
        difference = _logprobs(copy, served["tokens"], known) - torch.tensor(served["logprobs"])
        assert difference.abs().max() < 1e-4


def _load(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _logprobs(model: Any, tokens: list[int], known: int) -> torch.Tensor:
    """Among the `known` ids that the tokenizer has, as the server's."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1, :known]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
