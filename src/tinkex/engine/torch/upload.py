"""Numbers on their way between the host and the device, through pinned memory: nobody waits for the device.

The memory is kept until a copy is done, so what was given may change or go as soon as a call returns. It is
numpy that copies into it: torch would share larger arrays among threads, and to wake those takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # bytes: what begins elsewhere would need kernels of its own


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` as a tensor on `device`; on the CPU it is the array's own memory."""
    return torch.from_numpy(array) if device.type == "cpu" else _pinned(array).to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The same of several, in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays]
    padded = [array.tobytes().ljust(size) for array, size in zip(arrays, sizes, strict=True)]
    sent = to_device(np.frombuffer(bytearray().join(padded), np.uint8), device).split(sizes)
    return [
        piece[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for piece, array in zip(sent, arrays, strict=True)
    ]


def fill(target: Tensor, array: np.ndarray) -> None:
    """Put `array` where a captured step looks for it."""
    target.copy_(_pinned(array) if target.is_cuda else torch.from_numpy(array), non_blocking=True)


def _pinned(array: np.ndarray) -> Tensor:
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned


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
