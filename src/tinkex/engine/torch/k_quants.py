"""Quantisers of GGUF's Q4_K, Q5_K and Q6_K, which the `gguf` package reads but cannot write.

Rows of fp32, a multiple of 256 wide, become the bytes of their blocks. Scales of sub-blocks are searched for
by least squares over a few candidates, weighted by size, for all blocks of the rows at once.

Shapes: N blocks of 256, S sub-blocks of a block, W values of a sub-block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BLOCK = 256


def q4_k(rows: Tensor) -> np.ndarray:
    """144 bytes a block: two fp16 scales, eight 6-bit scales and minima, 256 values of 4 bits."""
    d, minimum, packed, codes = _with_minima(rows, 15)
    pairs = codes.view(-1, 4, 2, 32)
    low = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return _bytes(rows, d, minimum, packed, low.flatten(1))


def q5_k(rows: Tensor) -> np.ndarray:
    """176 bytes a block: as Q4_K, with the fifth bits of all values before the rest."""
    d, minimum, packed, codes = _with_minima(rows, 31)
    fifth = codes >> 4
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = (fifth << shifts).sum(1, dtype=torch.uint8)
    pairs = (codes & 15).view(-1, 4, 2, 32)
    low = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return _bytes(rows, d, minimum, packed, high, low.flatten(1))


def q6_k(rows: Tensor) -> np.ndarray:
    """210 bytes a block: 256 values of 6 bits, sixteen 8-bit scales, one fp16 scale."""
    x_NSW = rows.reshape(-1, 16, 16).float()
    scale_NS = _symmetric_scales(x_NSW)
    largest = scale_NS.gather(1, scale_NS.abs().argmax(1, keepdim=True))
    d = torch.where(largest == 0, 0.0, largest / -128).half()
    inverse = _inverse(d.float())
    sub = (scale_NS * inverse).round().clamp(-128, 127)
    step = d.float() * sub
    codes = (x_NSW * _inverse(step)[:, :, None]).round().clamp(-32, 31)
    codes = (codes.to(torch.int16) + 32).to(torch.uint8)
    halves = codes.view(-1, 2, 4, 32)  # of 128 values: four runs of 32
    first, second, third, fourth = halves.unbind(2)
    low = torch.stack([(first & 15) | third << 4, (second & 15) | fourth << 4], 2)
    high = first >> 4 | (second >> 4) << 2 | (third >> 4) << 4 | (fourth >> 4) << 6
    scales = sub.to(torch.int8).view(torch.uint8)
    return _bytes(rows, low.flatten(1), high.flatten(1), scales, d)


QUANTISERS: dict[str, Callable[[Tensor], np.ndarray]] = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}


def _bytes(rows: Tensor, *parts: Tensor) -> np.ndarray:
    """The parts of every block one after another, as rows of bytes."""
    flat = [part.contiguous().view(torch.uint8).reshape(len(part), -1) for part in parts]
    return torch.cat(flat, 1).view(len(rows), -1).numpy()


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, 1.0 / x)


def _with_minima(rows: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d and dmin [N, 1] in fp16, their packed 6-bit factors [N, 12], and codes [N, 8, 32]."""
    x_NSW = rows.reshape(-1, 8, 32).float()
    scale_NS, minimum_NS = _affine_scales(x_NSW, most)
    d = (scale_NS.amax(1, keepdim=True) / 63).half()
    dmin = (minimum_NS.amax(1, keepdim=True) / 63).half()
    scales = (scale_NS * _inverse(d.float())).round().clamp(0, 63)
    minima = (minimum_NS * _inverse(dmin.float())).round().clamp(0, 63)
    step, offset = d.float() * scales, dmin.float() * minima
    codes = ((x_NSW + offset[:, :, None]) * _inverse(step)[:, :, None]).round().clamp(0, most)
    return d, dmin, _packed(scales.to(torch.uint8), minima.to(torch.uint8)), codes.to(torch.uint8)


def _packed(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return torch.cat([first, second, third], 1)


def _affine_scales(x_NSW: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum (not negative) of every sub-block such that x is near scale · code - minimum."""
    weight = x_NSW.square().mean(2, keepdim=True).sqrt() + x_NSW.abs()
    low = x_NSW.amin(2).clamp(max=0)
    spread = x_NSW.amax(2) - low
    scale, minimum = spread / most, -low
    best = _error(x_NSW, weight, scale, minimum, most)
    sum_w, sum_x = weight.sum(2), (weight * x_NSW).sum(2)
    for candidate in range(-10, 11):
        factor = _inverse(spread) * (most + 0.1 * candidate)
        code = ((x_NSW - low[:, :, None]) * factor[:, :, None]).round().clamp(0, most)
        weighted = weight * code
        sum_l, sum_l2, sum_xl = weighted.sum(2), (weighted * code).sum(2), (weighted * x_NSW).sum(2)
        determinant = sum_w * sum_l2 - sum_l.square()
        a = (sum_w * sum_xl - sum_x * sum_l) * _inverse(determinant)
        b = (sum_l2 * sum_x - sum_l * sum_xl) * _inverse(determinant)
        positive = b > 0  # a minimum above zero cannot be stored: fit the scale alone
        a = torch.where(positive, sum_xl * _inverse(sum_l2), a)
        b = torch.where(positive, 0.0, b)
        error = _error(x_NSW, weight, a, -b, most)
        better = (error < best) & (determinant > 0) & (a > 0)
        scale, minimum = torch.where(better, a, scale), torch.where(better, -b, minimum)
        best = torch.where(better, error, best)
    return scale, minimum


def _error(x_NSW: Tensor, weight: Tensor, scale: Tensor, minimum: Tensor, most: int) -> Tensor:
    code = ((x_NSW + minimum[:, :, None]) * _inverse(scale)[:, :, None]).round().clamp(0, most)
    return (weight * (scale[:, :, None] * code - minimum[:, :, None] - x_NSW).square()).sum(2)


def _symmetric_scales(x_NSW: Tensor) -> Tensor:
    """The scale of every sub-block such that x is near scale · code, codes from -32 to 31."""
    weight = x_NSW.square()
    largest = x_NSW.gather(2, x_NSW.abs().argmax(2, keepdim=True))[:, :, 0]
    scale, best = torch.zeros_like(largest), torch.full_like(largest, -1.0)
    for candidate in range(-9, 10):
        factor = -(32 + 0.1 * candidate) * _inverse(largest)
        code = (x_NSW * factor[:, :, None]).round().clamp(-32, 31)
        sum_xl, sum_l2 = (weight * x_NSW * code).sum(2), (weight * code.square()).sum(2)
        gain = sum_xl.square() * _inverse(sum_l2)
        better = (gain > best) & (sum_l2 > 0)
        scale = torch.where(better, sum_xl * _inverse(sum_l2), scale)
        best = torch.where(better, gain, best)
    return scale
