"""Parameters of LoRA per rank, on the real shapes of models: as many as hosted Tinker counts."""

from __future__ import annotations

import pytest
import torch

from tests.engine.released_shapes import MODELS
from tinkex.engine.torch.adapters import lay_out
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.families import model_config
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MODELS)
def test_parameters_per_rank_are_as_hosted(name: str) -> None:
    fields, expected = MODELS[name]
    config = model_config(fields)
    with torch.device("meta"):
        sites = Decoder(config, Backend()).sites()
    counts = {"mlp": 0, "attn": 0, "unembed": 0}
    for shape in lay_out(sites, LoraConfig(1)).values():
        counts[shape.parts[0].kind] += shape.size
    assert tuple(counts.values()) == expected
