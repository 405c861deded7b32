# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Row sums in a fixed order of pairwise additions, so that they do not depend on a tile's layout in threads.

`tl.sum` adds what one thread holds first, so its result depends on the layout. A decode kernel for few rows
has another layout than a training kernel for many, and the two must be bitwise identical. The orders here are
those in which the kernels' layouts exchange least between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_mma_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row sums of the result of `tl.dot`, at least 16 columns: distant columns first, eight apart last.

    A thread holds two neighbours; columns eight apart may belong to another warp.
    """
    n: tl.constexpr = COLUMNS // 2
    if COLUMNS > 16:
        return sum_mma_rows(tl.sum(tl.reshape(x, (ROWS, 2, n)), 1), ROWS, n)
    else:
        x = tl.sum(tl.reshape(x, (ROWS, 2, 4, 2)), 3)
        x = tl.sum(tl.reshape(x, (ROWS, 2, 2, 2)), 2)
        return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def sum_mma_columns(x, COLUMNS: tl.constexpr):
    """Column sums of 16 rows, bitwise identical to `sum_mma_rows` of the transpose."""
    x = tl.sum(tl.reshape(x, (2, 4, 2, COLUMNS)), 2)
    x = tl.sum(tl.reshape(x, (2, 2, 2, COLUMNS)), 1)
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def sum_loaded_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row sums of a loaded tile, neighbours first: a thread holds several."""
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 2, 2)), 2)
    if COLUMNS > 2:
        return sum_loaded_rows(x, ROWS, COLUMNS // 2)
    else:
        return tl.reshape(x, (ROWS,))
