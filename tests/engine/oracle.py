"""peft and torch.optim on a transformers model: what our adapters are held against.

Knows our names of an adapter's tensors, through which values are copied, and nothing else of our code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny import reference_model
from tinkex.types.data import Datum, ModelInput

ATTN = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class PeftOracle:
    """A peft model with the same A and B as one of our adapters."""

    def __init__(
        self,
        path: Path,
        rank: int,
        *,
        attn: bool = True,
        mlp: bool = True,
        unembed: bool = True,
        targets: Sequence[str] = (),
    ) -> None:
        """`targets` are the names of the modules, where they are not the usual ones."""
        import peft  # takes a second, and most runs of the tests never get here

        targets = list(targets) or [
            *(ATTN if attn else ()),
            *(MLP if mlp else ()),
            *(("lm_head",) if unembed else ()),
        ]
        config = peft.LoraConfig(r=rank, lora_alpha=32, lora_dropout=0.0, target_modules=targets, bias="none")
        self.model: Any = peft.get_peft_model(reference_model(path), config)
        self.parameters = {
            name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def copy_from(self, named: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take over our adapter's values; every tensor of either side must have its partner."""
        ours = {f"{k}.lora_{s}": t for k, pair in named.items() for s, t in zip("AB", pair, strict=True)}
        assert ours.keys() == self.parameters.keys()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(ours[name])

    def logprobs(self, datum: Datum) -> torch.Tensor:
        """Logprobs of the targets, of their shape, with gradients."""
        ids = torch.from_numpy(datum.model_input.to_numpy().astype(np.int64))[None]
        log_probs = self.model(ids, use_cache=False).logits[0].log_softmax(-1)
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        return log_probs.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None
        }


def make_datum(rng: np.random.Generator, length: int, vocab: int, loss_fn: str = "cross_entropy") -> Datum:
    """A random datum for a loss; the first third of it is prompt."""
    ids = rng.integers(0, vocab, length + 1)
    prompt = length // 3
    mask = np.arange(length) >= prompt
    inputs: dict[str, Any] = {"target_tokens": ids[1:].astype(np.int64)}
    if loss_fn == "cross_entropy":
        inputs["weights"] = (rng.normal(size=length) * mask).astype(np.float32)
    else:
        inputs["logprobs"] = ((-5 + rng.normal(size=length)) * mask).astype(np.float32)
        inputs["advantages"] = (rng.normal(size=length) * mask).astype(np.float32)
    return Datum(ModelInput.from_ints(ids[:-1]), inputs)


def randomise(flat: torch.Tensor, seed: int) -> None:
    """Make an adapter's B other than zero, so that A has gradients too."""
    generator = torch.Generator().manual_seed(seed)
    flat.add_(torch.empty_like(flat).uniform_(-0.05, 0.05, generator=generator))


def older_layout(directory: Path) -> None:
    """Rewrite an adapter as it was before experts shared a factor: with both factors for every expert."""
    weights = load_file(directory / "adapter_model.safetensors")
    experts = max(
        len(tensor) for name, tensor in weights.items() if ".experts." in name and tensor.dim() == 3
    )
    for name, tensor in weights.items():
        if ".experts." in name and len(tensor) == 1:
            weights[name] = tensor * (1 + torch.arange(experts)[:, None, None] / experts)
    (directory / "SHA256SUMS").unlink()
    save_file(weights, directory / "adapter_model.safetensors")
