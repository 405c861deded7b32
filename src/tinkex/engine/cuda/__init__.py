"""Triton kernels for CUDA in bf16: the fast paths behind the engine's seams.

Each does what a plain function elsewhere in the engine does, and a test on a GPU holds it to that one.
Nothing here is imported, Triton included, unless `usable` says so. Knows tensors alone: no requests, no runs.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


def usable(x: Tensor) -> bool:
    """Whether the kernels can compute with `x`; anywhere else the plain paths do."""
    return x.is_cuda and x.dtype == torch.bfloat16 and _have_triton()


@cache
def _have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
