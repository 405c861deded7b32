# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Sums along a tile's rows, two numbers at a time: the same bits however a tile is laid out in threads.

`tl.sum` adds up what a thread has before threads meet, so its bits are those of a layout, and a kernel for
few rows of a sampler has another than one for a trainer's many. The orders here are those in which the
kernels' own layouts have the least to exchange. Knows nothing of what is added up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each row's sum of a product's result, at least 16 columns: far columns first, eight apart last.

    Of neighbours a thread has two, and those eight apart may be another warp's.
    """
    n: tl.constexpr = COLUMNS // 2
    if COLUMNS > 16:
        return spread(tl.sum(tl.reshape(x, (ROWS, 2, n)), 1), ROWS, n)
    else:
        x = tl.sum(tl.reshape(x, (ROWS, 2, 4, 2)), 3)
        x = tl.sum(tl.reshape(x, (ROWS, 2, 2, 2)), 2)
        return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def spread_down(x, COLUMNS: tl.constexpr):
    """What `spread` gives, of 16 rows turned round: each column's sum."""
    x = tl.sum(tl.reshape(x, (2, 4, 2, COLUMNS)), 2)
    x = tl.sum(tl.reshape(x, (2, 2, 2, COLUMNS)), 1)
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def close(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each row's sum of what was loaded, neighbours first: a thread has several."""
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 2, 2)), 2)
    if COLUMNS > 2:
        return close(x, ROWS, COLUMNS // 2)
    else:
        return tl.reshape(x, (ROWS,))
