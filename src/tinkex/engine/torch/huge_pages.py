"""CPU memory in huge pages, for what every step reads: weights, their second copies, the KV cache.

With pages of 4 KiB, a large matrix needs a TLB entry for every 1,024 numbers, and the cost of misses varies
with where malloc put it. Linux gives huge pages on request, if it has any; elsewhere this is ordinary
memory. In either case the tensors are like those of `torch.empty`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE = 2 << 20
_LINE = 64  # bytes; where a tensor may begin
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def huge_bytes(size: int) -> Tensor:
    """uint8 [size], zero, which takes memory where it is first written to."""
    if _ADVICE is None or size < _HUGE:
        return torch.zeros(size, dtype=torch.uint8)
    mapped = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(_ADVICE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping
    first = -whole.data_ptr() % _HUGE
    return whole[first : first + size]


class HugeArena:
    """One piece of memory of `size` bytes, given out in turn; freed when no tensor in it is left."""

    def __init__(self, size: int) -> None:
        self._left = huge_bytes(size)

    @staticmethod
    def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
        return -(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        taken = self._left[: math.prod(shape) * dtype.itemsize]
        self._left = self._left[self.size_of(shape, dtype) :]
        return taken.view(dtype).view(tuple(shape))
