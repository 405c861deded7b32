"""Norms of a decoder: where its layers have them, and what x̂ = x / rms(x) is multiplied with."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_FACTORS: Any = WeakIdKeyDictionary()  # by weight: its version and address, and what `NormConfig.factor` made


class NormConfig(NamedTuple):
    """x̂·w in the model's dtype ("plain") or in fp32 ("wide"), or x̂·(1 + w) in fp32 ("offset")."""

    eps: float = 1e-6
    kind: Literal["plain", "wide", "offset"] = "plain"

    def factor(self, weight: Tensor) -> Tensor:
        """What x̂ is multiplied with: in fp32 where the product is to be. Computed once for each weight."""
        if self.kind == "plain":
            return weight
        now = weight._version, weight.data_ptr()
        version, known = _FACTORS.get(weight, (None, weight))
        if version != now:
            with torch.inference_mode(False), torch.no_grad():
                known = 1.0 + weight.float() if self.kind == "offset" else weight.float()
            _FACTORS[weight] = now, known
        return known


class NormPlacement(NamedTuple):
    """The names of a layer's norms in its files; None where it has none."""

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None  # on the mixer's result, before it is added
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = NormPlacement()


class ExpertNorms(NamedTuple):
    """The names of norms that experts and the shared expert have apart; their router reads none of them."""

    before_shared: str = "pre_feedforward_layernorm"
    after_shared: str = "post_feedforward_layernorm_1"
    before: str = "pre_feedforward_layernorm_2"
    after: str = "post_feedforward_layernorm_2"
