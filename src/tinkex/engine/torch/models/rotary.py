"""Rotary position embeddings: the frequencies that a config.json asks for, and their angles.

Every rope type is computed as transformers computes it, or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tinkex.errors import InvalidInputError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies, one for each pair of a head's first dimensions; the others are not rotated."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0  # of cos and sin
    adjacent: bool = False  # pairs are (0, 1), (2, 3) …, and not a dimension of either half
    sections: tuple[int, ...] = ()  # of three axes of positions: how many pairs the second and third turn

    def whole(self, head_dim: int) -> bool:
        """Whether it rotates whole heads by halves."""
        return 2 * len(self.inv_freq) == head_dim and not self.adjacent

    def angles(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [T, pairs]; positions may be [3, T]: time, row and column."""
        inv_freq = _on_device(self.inv_freq, positions_T.device)
        angle = positions_T.to(torch.float32)[..., None] * inv_freq
        if positions_T.dim() == 2:
            axes = [j % 3 if j < 3 * self.sections[j % 3] else 0 for j in range(len(self.inv_freq))]
            at = torch.tensor(axes, device=angle.device)
            angle = angle.gather(0, at.expand(1, *angle.shape[1:]))[0]
        cos, sin = angle.cos(), angle.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(dtype), sin.to(dtype)


@lru_cache
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Copied once: a copy in every pass would make the host wait for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def rope_fields(fields: Mapping[str, Any], layer_type: str = "full_attention") -> dict[str, Any]:
    """One form of the two: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (4).

    `rope_parameters` may be one for each type of layer.
    """
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    scaling = dict(scaling.get(layer_type, scaling))
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    scaling.setdefault("rope_theta", fields.get("rope_theta", 10000.0))
    return scaling


def read_rope(
    fields: Mapping[str, Any], head_dim: int, layer_type: str = "full_attention", *,
    partial: float | None = None, adjacent: bool = False,
) -> Rope:  # fmt: skip
    """`partial`: the part of a head that is rotated where the fields do not say; None: always all of it."""
    rope = rope_fields(fields, layer_type)
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    if kind not in ROPE_TYPES:
        raise InvalidInputError(f"rope_type {kind!r} is not supported; allowed: {', '.join(ROPE_TYPES)}")
    if kind == "proportional":  # the whole head in pairs, of which only the first turn
        turned = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
        inv_freq = theta ** -(torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim)
        inv_freq = inv_freq / rope.get("factor", 1.0)
        return Rope((*inv_freq.tolist(), *[0.0] * (head_dim // 2 - turned)))
    part = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial is None and part not in (None, 1.0):
        raise InvalidInputError(f"partial_rotary_factor {part} is not supported; allowed: 1.0")
    head_dim = int(head_dim * (part or partial or 1.0))
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scale = 1.0
    match kind:
        case "linear":
            inv_freq = inv_freq / rope["factor"]
        case "llama3":
            inv_freq = llama3_frequencies(inv_freq, rope)
        case "yarn":
            inv_freq, scale = _yarn(inv_freq, theta, rope, fields["max_position_embeddings"])
        case "longrope":
            inv_freq, scale = _longrope(inv_freq, rope, fields)
        # "dynamic" stretches only beyond max_position_embeddings, which is where our context ends.
    sections = tuple(rope.get("mrope_section") or ())
    return Rope(tuple(inv_freq.tolist()), scale, adjacent, sections)


def llama3_frequencies(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # within the first context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * kept + inv_freq / factor * (1 - kept)


def _yarn(
    inv_freq: Tensor, theta: float, rope: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    """Blend kept and stretched frequencies over a ramp of dimensions; and the factor on cos and sin."""
    pairs, factor = len(inv_freq), rope["factor"]
    original = rope.get("original_max_position_embeddings") or max_positions

    def pair_with_turns(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with_turns(rope.get("beta_fast") or 32), pair_with_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return inv_freq / factor * stretched + inv_freq * (1 - stretched), _yarn_scale(rope, factor)


def _longrope(inv_freq: Tensor, rope: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Divisors for each pair. A model made for more than the original context uses the long ones throughout,
    so that a token's logprob does not depend on its batch."""
    most = fields["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    original = original or most
    divisors = torch.tensor(rope["long_factor" if most > original else "short_factor"], dtype=torch.float32)
    scale, factor = rope.get("attention_factor"), rope.get("factor") or most / original
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inv_freq / divisors, float(scale)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
    return temperature(1.0)
