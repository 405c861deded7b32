# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""The first kernel of a captured decode step: reads the host's orders and the last step's tokens.

A torch operation (the embedding) follows it, so that later kernels may read its results before they wait
(PDL). Knows nothing of sequences: rows, positions and slots alone.

Shapes: B rows, P positions, C head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.pdl import PDL, wait_for_previous
from tinkex.engine.cuda.sizes import power_of_2

ORDERS = 5  # rows of the orders: source, token, position, slot, key


@launched
@triton.jit
def _begin(
    orders, last, tokens, slots, tiles, table, known_cos, known_sin, cos, sin, rows, stride, stride_table,
    PAGE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    row = tl.program_id(0)
    source = tl.load(orders + row)
    token = tl.load(orders + stride + row)
    if source >= 0:
        token = tl.load(last + source)
    position = tl.load(orders + 2 * stride + row)
    slot = tl.load(orders + 3 * stride + row)
    active = slot >= 0
    tl.store(tokens + row, tl.maximum(token, 0))
    tl.store(slots + row, slot)
    tl.store(tiles + row, row)
    tl.store(tiles + rows + row, active.to(tl.int32))
    tl.store(tiles + 2 * rows + row, position.to(tl.int32))
    tl.store(tiles + 3 * rows + row, row)
    at = tl.arange(0, BLOCK)
    place, half = tl.maximum(position, 0) * HALF + at, at < HALF
    tl.store(cos + row * HALF + at, tl.load(known_cos + place, mask=half), mask=half)
    tl.store(sin + row * HALF + at, tl.load(known_sin + place, mask=half), mask=half)
    if active:
        tl.store(table + row * stride_table + position // PAGE, (slot // PAGE).to(tl.int32))


def begin(
    orders: Tensor,
    last: Tensor,
    tokens: Tensor,
    slots: Tensor,
    tiles: Tensor,
    table: Tensor,
    page: int,
    known: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
) -> None:
    """Distribute the orders (int64 [ORDERS, capacity]) over the rows of a step.

    A row's token is the last token of row `source`, or `token` if `source` is negative; a row with a negative
    slot does nothing. The page that a row writes to is entered in the page table. `known` is cos and sin of
    every position, [P, C / 2] each; those of the rows go to `angles`.
    """
    rows, half = angles[0].shape
    _begin[(rows,)](
        orders, last, tokens, slots, tiles, table, *known, *angles, rows, orders.stride(0), table.stride(0),
        PAGE=page, HALF=half, BLOCK=power_of_2(half), num_warps=1, **PDL,
    )  # fmt: skip
