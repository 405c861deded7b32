"""`ModelFacts`: size, layout and memory needs of a model, read without loading it.

Shown by `tinkex plan` and the console.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.protocol import EngineConfig


@dataclass(frozen=True)
class ModelFacts:
    """What a model is, and what it needs; bytes are those of one engine."""

    family: str
    parameters: int
    active_parameters: int  # of one token
    layers: int
    context: int
    quantisation: str  # of its files; "" if none
    lora_per_rank: dict[str, int]  # by attn, mlp and unembed
    weight_bytes: int
    kv_bytes: int  # of one full context
    free_bytes: int
    fits: bool  # the weights and one full context
    limits: tuple[str, ...] = ()  # what it cannot do, in words


def describe(config: EngineConfig) -> ModelFacts | None:
    """What the model of `config` is, from its files; None for kind "fake". Heavy imports happen here."""
    if config.kind == "fake":
        return None
    from tinkex.engine.torch.sizing import model_facts

    return model_facts(Path(config.model), config)
