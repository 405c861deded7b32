"""Sizes of grids and tiles, worked out on the host before a launch.

Triton has functions of these names for use inside kernels; called from outside they take longer than the rest
of a launch.
"""

from __future__ import annotations

from functools import cache

import torch


def cdiv(size: int, block: int) -> int:
    """How many blocks hold `size` things."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The smallest that is not smaller than `size`.

    >>> [power_of_2(n) for n in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << (size - 1).bit_length()


@cache
def shared_bytes(device: torch.device) -> int:
    """How much of a multiprocessor's own memory a program may have: 227 KB on Hopper, 163 or 99 on others."""
    if device.type != "cuda":  # by the interpreter, as on Hopper
        return 232_448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
