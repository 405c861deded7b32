"""Our quantisers of GGUF blocks, read back by the `gguf` package, which has none of its own for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tinkex.engine.torch.k_quants import QUANTISERS

pytestmark = pytest.mark.slow


def rows(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 1024, generator=generator)
    if kind == "heavy tails":
        x = x * x.abs().square()
    if kind == "all positive":
        x = x.abs() + 0.5
    if kind == "small":
        x = x * 1e-2
    return x


def error(name: str, x: torch.Tensor) -> float:
    """Root of the mean square, of the values' own."""
    kind = GGMLQuantizationType[name]
    made = QUANTISERS[name](x) if name in QUANTISERS else quantize(x.numpy(), kind)
    back = dequantize(made, kind)
    return float(np.sqrt(np.square(back - x.numpy()).mean() / x.square().mean().item()))


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "all positive", "small"])
def test_blocks_are_nearer_to_the_values_than_those_of_simpler_types(kind: str) -> None:
    x = rows(kind)
    errors = {
        name: error(name, x) for name in ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
    }
    assert errors["Q8_0"] < errors["Q6_K"] < errors["Q5_K"] < errors["Q4_K"] < errors["Q4_0"], errors
    assert errors["Q5_K"] < errors["Q5_0"], errors
    assert errors["Q4_K"] < 0.09
    assert errors["Q6_K"] < 0.025


@pytest.mark.parametrize("name", QUANTISERS)
def test_every_block_has_its_size_and_odd_values_come_back(name: str) -> None:
    kind = GGMLQuantizationType[name]
    count, size = GGML_QUANT_SIZES[kind]
    x = torch.zeros(3, 2 * count)
    x[1] = 0.75
    x[2, 5] = -7.0  # one value alone
    made = QUANTISERS[name](x)
    assert made.shape == (3, 2 * size)
    assert made.dtype == np.uint8
    back = dequantize(made, kind)
    assert np.isfinite(back).all()
    assert not back[0].any()
    np.testing.assert_allclose(back[1], 0.75, rtol=0.02)
    np.testing.assert_allclose(back[2, 5], -7.0, rtol=0.02)
    assert np.abs(np.delete(back[2], 5)).max() < 0.01


@pytest.mark.parametrize("name", QUANTISERS)
def test_values_that_a_block_can_hold_come_back_as_they_were(name: str) -> None:
    """What was dequantised once is quantised again with hardly a difference."""
    kind = GGMLQuantizationType[name]
    first = dequantize(QUANTISERS[name](rows("normal")), kind)
    again = dequantize(QUANTISERS[name](torch.from_numpy(first)), kind)
    assert np.abs(again - first).max() < 0.6 * np.abs(first).max() / 2 ** int(name[1])
