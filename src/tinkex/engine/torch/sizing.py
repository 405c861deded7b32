"""How many bytes a model takes, by use, before it is loaded: for `tinkex plan`.

Read from the model's configuration alone, on tensors without memory. Knows no GPUs and no prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.facts import ModelFacts
from tinkex.engine.protocol import EngineConfig
from tinkex.engine.torch import engine as shares
from tinkex.engine.torch import memory
from tinkex.engine.torch.adapters import lay_out
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.kv import PAGE
from tinkex.engine.torch.load import outline
from tinkex.engine.torch.model_facts import model_facts
from tinkex.engine.torch.states import slot_bytes
from tinkex.types.params import LoraConfig

KV_SHARE, ADAPTER_SHARE = shares._KV_SHARE_ALONE, shares._ADAPTER_SHARE  # of what the weights leave free
_PARTS = 4  # of a live adapter: parameters, gradients, two moments


@dataclass(frozen=True)
class ModelSizes:
    """Bytes by use."""

    facts: ModelFacts
    adapter: int  # published, or as a file: fp32
    run: int  # resident, with gradients and moments
    kv_token: float  # of one token's keys and values, in all layers
    state: int  # of a sequence's recurrent states
    activation_token: int  # of one token of a pass, layers recomputed


def model_sizes(path: Path, config: EngineConfig, rank: int) -> ModelSizes:
    """What the model at `path` takes on an engine of these settings, with adapters of one rank."""
    facts = model_facts(path, config)
    decoder = outline(path, Backend())
    shape, itemsize = decoder.config, 4 if config.dtype == "float32" else 2
    parameters = sum(one.size for one in lay_out(decoder.sites(), LoraConfig(rank=rank)).values())
    pages = -(-facts.context // PAGE)
    return ModelSizes(
        facts=facts,
        adapter=4 * parameters,
        run=4 * parameters * _PARTS,
        kv_token=facts.kv_bytes / (pages * PAGE),
        state=slot_bytes(shape.state_shapes),
        activation_token=memory.activation_bytes(shape, itemsize, recompute=True),
    )
