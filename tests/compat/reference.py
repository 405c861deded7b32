"""What the answers must be: transformers, peft and torch.optim on the same tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.compat.clients.report import ADAM, SEQUENCES
from tests.engine.tiny import reference_logits, reference_model


def base_logprobs(model: Path, sequences: list[list[int]], temperature: float = 1.0) -> list[torch.Tensor]:
    """The base model's log-softmax at every position: [length, vocabulary] each."""
    return [(logits / temperature).log_softmax(-1) for logits in reference_logits(model, sequences)]


def scores(logprobs: torch.Tensor, ids: list[int]) -> list[float]:
    """Of each token after the first, given those before it."""
    return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def adapted(model: Path, adapter: Path) -> Any:
    """The base model with an exported adapter, through peft."""
    import peft

    return peft.PeftModel.from_pretrained(reference_model(model), adapter, is_trainable=True)


def trained(model: Any, steps: int, *, weight_decay: float, clip: float) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a plain loop over SEQUENCES: summed cross-entropy, clipping, AdamW."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, ADAM["learning_rate"], (ADAM["beta1"], ADAM["beta2"]), ADAM["eps"], weight_decay
    )
    losses, norms = [], []
    for _ in range(steps):
        loss = sum((sequence_loss(model, ids) for ids in SEQUENCES), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def sequence_loss(model: Any, ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")


def same_adapter(model: Any, adapter: Path, tolerance: float) -> bool:
    """Whether the trained peft model has the tensors of an exported directory."""
    exported = load_file(adapter / "adapter_model.safetensors")
    ours = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    return exported.keys() == ours.keys() and all(
        torch.allclose(tensor, ours[name], atol=tolerance) for name, tensor in exported.items()
    )
