"""Numbers arrive as they were, several of them in one copy too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinkex.engine.torch.device_copies import all_to_device, fill, from_device, to_device

ARRAYS = [
    np.arange(7, dtype=np.int64)[None, ::-1].copy(),
    np.linspace(0, 1, 3, dtype=np.float32),
    np.zeros((0, 4), np.int32),
    np.arange(150_000, dtype=np.int32).reshape(3, -1),
    np.arange(12, dtype=np.int32).reshape(3, -1).T,
]


def test_an_array(device: torch.device) -> None:
    for array in ARRAYS:
        sent = to_device(array.copy(), device)
        assert sent.device.type == device.type
        assert np.array_equal(sent.cpu().numpy(), array)
        assert np.array_equal(from_device(sent)(), array)


def test_several_arrays(device: torch.device) -> None:
    sent = all_to_device(ARRAYS, device)
    for tensor, array in zip(sent, ARRAYS, strict=True):
        assert (tensor.device.type, tensor.dtype) == (device.type, torch.from_numpy(array).dtype)
        assert np.array_equal(tensor.cpu().numpy(), array)
        assert device.type == "cpu" or tensor.data_ptr() % 16 == 0  # else kernels are compiled anew for it


def test_what_was_given_may_change_at_once(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("there it is the array's own memory")
    array = np.ones(1 << 20, np.int32)
    sent, both = to_device(array, device), all_to_device([array, array], device)
    target = torch.zeros(1 << 20, dtype=torch.int32, device=device)
    fill(target, array)
    array[:] = 2
    for tensor in (sent, *both, target):
        assert bool((tensor == 1).all())
