"""Numbers on their way between the host and the device, through pinned memory: nobody waits for the device.

The memory is kept until a copy is done, so what was given may change or go as soon as a call returns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` as a tensor on `device`; on the CPU it is the array's own memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, array: np.ndarray) -> None:
    """Put `array` where a captured step looks for it."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def from_device(tensor: Tensor) -> Callable[[], np.ndarray]:
    """Let `tensor`'s numbers come to the host; the result waits for them, and for nothing launched later."""
    if not tensor.is_cuda:
        return tensor.numpy
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def wait() -> np.ndarray:
        there.synchronize()
        return pinned.numpy()

    return wait
