"""Asynchronous copies between host and device through pinned memory.

torch keeps a pinned buffer until its copy is done, so the caller may change the array as soon as a call
returns. numpy fills the buffers: torch would use threads, whose waking takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # bytes; Triton compiles a second kernel for unaligned pointers


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` as a tensor on `device`; on the CPU it is the array's own memory."""
    return torch.from_numpy(array) if device.type == "cpu" else _pinned(array).to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """`to_device` of several arrays, in one copy."""
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
    """Copy `array` into `target`, an input buffer of a captured graph."""
    target.copy_(_pinned(array) if target.is_cuda else torch.from_numpy(array), non_blocking=True)


def _pinned(array: np.ndarray) -> Tensor:
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned


def from_device(tensor: Tensor) -> Callable[[], np.ndarray]:
    """Start copying `tensor` to the host; the result waits for the copy, and for nothing launched later."""
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
