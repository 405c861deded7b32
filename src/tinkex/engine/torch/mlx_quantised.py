"""A merged model with its matrices quantised as MLX does: affine, in groups of 64 along each row.

Codes, scales and biases are bitwise identical to those of `mlx.core.quantize`. One tensor is in memory at a
time. Only for dense models: MLX's names of experts are not implemented.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch.merge import MergedModel

BITS = {"q4": 4, "q8": 8}
GROUP = 64
_ROWS_BYTES = 32 << 20  # of fp32 rows that are quantised at a time
_SMALLEST = 1e-7  # of a scale, as in MLX


class MlxQuantised:
    """The tensors of a merged model as MLX loads them: a matrix is `weight`, `scales` and `biases`."""

    def __init__(self, model: MergedModel, quantize: str) -> None:
        if quantize not in BITS:
            raise user_error(f"quantize is {quantize!r}; allowed for mlx: {', '.join(BITS)}")
        if model.base is None or model.base.experts is not None:
            raise user_error(
                f"{model.config.get('model_type')} has experts or is no family of ours: export it as mlx "
                "without --quantize, and run `mlx_lm.convert -q` on that"
            )
        self._model, self._bits = model, BITS[quantize]
        self.base_dir = model.base_dir
        scheme = {"group_size": GROUP, "bits": self._bits, "mode": "affine"}
        self.config: dict[str, Any] = {**model.config, "quantization": scheme, "quantization_config": scheme}
        self.shards = {
            shard: [part for name in names for part in self._parts(name)]
            for shard, names in model.shards.items()
        }
        self.total = sum(self.nbytes(name) for names in self.shards.values() for name in names)
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def about(self, kind: str) -> dict[str, Any]:
        return {**self._model.about(kind), "bits": self._bits, "group": GROUP}

    def _is_packed(self, name: str) -> bool:
        """Matrices whose rows groups divide, as MLX's own converter chooses them."""
        _, shape = self._model.form(name)
        return name.endswith(".weight") and len(shape) == 2 and shape[1] % GROUP == 0

    def _parts(self, name: str) -> list[str]:
        stem = name.removesuffix("weight")
        return [name, f"{stem}scales", f"{stem}biases"] if self._is_packed(name) else [name]

    def _whole(self, part: str) -> str:
        """The tensor of the merged model that a tensor of ours is made of."""
        stem, _, ending = part.rpartition(".")
        return f"{stem}.weight" if ending in ("scales", "biases") else part

    def form(self, part: str) -> tuple[torch.dtype, tuple[int, ...]]:
        name = self._whole(part)
        dtype, shape = self._model.form(name)
        if not self._is_packed(name):
            return dtype, shape
        rows, columns = shape
        if part == name:
            return torch.uint32, (rows, columns * self._bits // 32)
        return dtype, (rows, columns // GROUP)

    def nbytes(self, part: str) -> int:
        dtype, shape = self.form(part)
        return dtype.itemsize * torch.Size(shape).numel()

    def tensor(self, part: str) -> Tensor:
        name = self._whole(part)
        if not self._is_packed(name):
            return self._model.tensor(name)
        if self._last[0] != name:
            self._last = "", {}  # free the last one first
            made = quantise(self._model.tensor(name), self._bits)
            self._last = name, dict(zip(self._parts(name), made, strict=True))
        return self._last[1][part]


def older_rope_fields(config: dict[str, Any]) -> dict[str, Any]:
    """What mlx-lm reads of `rope_parameters`: the fields that config.json had before there were those."""
    rope = config.get("rope_parameters") or {}
    found: dict[str, Any] = {}
    if local := rope.get("sliding_attention"):
        found["rope_local_base_freq"] = local["rope_theta"]
    rope = rope.get("full_attention", rope)
    found |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {key: value for key, value in found.items() if config.get(key) is None}


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes packed into 32-bit words, scales and biases: w ≈ scale · code + bias.

    >>> [list(each.shape) for each in quantise(torch.randn(8, 128), 4)]
    [[8, 16], [8, 2], [8, 2]]
    """
    rows = max(1, _ROWS_BYTES // (4 * weight.shape[1]))
    done = [_quantised_rows(part, bits) for part in weight.split(rows)]
    packed, scales, biases = (torch.cat(parts) for parts in zip(*done, strict=True))
    return packed, scales.to(weight.dtype), biases.to(weight.dtype)


def _quantised_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high, most = groups.amin(-1), groups.amax(-1), 2**bits - 1
    # The end of the range that is farther from zero is hit exactly, and so is zero.
    below = low.abs() > high.abs()
    scale = ((high - low) / most).clamp_min(_SMALLEST)
    scale, edge = torch.where(below, scale, -scale), torch.where(below, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, torch.zeros_like(edge))
    codes = ((groups - bias[..., None]) / scale[..., None]).round().clamp(0, most)
    words = codes.flatten(1).to(torch.int64).unflatten(1, (-1, 32 // bits))
    packed = (words << torch.arange(0, 32, bits)).sum(-1)
    return packed.to(torch.uint32), scale, bias
