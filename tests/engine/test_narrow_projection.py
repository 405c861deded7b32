"""Few rows with a large weight, and u beside the product, against plain operations."""

from __future__ import annotations

import pytest
import torch

from tests.engine.adapter_rows import DOWN, GATE_UP, QKV, assert_near, given
from tests.engine.by_kernels import BF16, DEVICE, MARKS, random
from tinkex.engine.cuda import elementwise, lora_kernels
from tinkex.engine.cuda.deferred_expand import DeferredExpand
from tinkex.engine.cuda.narrow_projection import NarrowTile, product_and_shrink
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.hooks import Site

pytestmark = [*MARKS, pytest.mark.slow]


@pytest.mark.parametrize("lengths", [[1, 0, 0, 0], [7, 5, 3, 1]])
@pytest.mark.parametrize("tile", [NarrowTile(16, 64, 4, 3), NarrowTile(64, 32, 4, 3)])
@pytest.mark.parametrize("site", [QKV, GATE_UP, DOWN])
def test_a_product_with_adapters(lengths: list[int], site: Site, tile: NarrowTile) -> None:
    x, weight, at, want, _held = given(site, lengths)
    bias = random(len(weight), seed=9)
    for added in (None, bias):
        y, u = product_and_shrink(x, weight, added, at, tile)
        lora_kernels.expand(u, y, at.b)
        assert_near((y,), (want if added is None else want + added.float(),))
    y, u = product_and_shrink(x, weight, None, at, tile)
    assert_near((DeferredExpand(y, u, at).total(),), (want,))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("width", [64, 100])
def test_a_gated_shared_expert(rows: int, width: int) -> None:
    y, shared, x = (random(rows, width, seed=i) for i in range(3))
    gate = random(1, width, seed=4)
    got = elementwise.add_gated(y, shared, x, gate)
    assert got.dtype == BF16
    assert got.device.type == DEVICE.type
    want = Backend().add_gated(*(part.float() for part in (y, shared, x, gate)))
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
