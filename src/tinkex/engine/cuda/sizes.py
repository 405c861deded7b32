"""Grid and tile sizes, computed on the host before a launch.

Triton has functions of these names for use inside kernels. Called from the host they take longer than the
rest of a launch.
"""

from __future__ import annotations

from functools import cache

import torch

MULTIPROCESSORS = 132  # of an H100 or H200, on which tile shapes were measured


def cdiv(size: int, block: int) -> int:
    """The number of blocks that hold `size` elements."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The smallest power of two that is not smaller than `size`.

    >>> [power_of_2(n) for n in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << (size - 1).bit_length()


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use: 227 KB on Hopper, 163 or 99 KB on others."""
    if device.type != "cuda":  # the interpreter, as if on Hopper
        return 232_448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
