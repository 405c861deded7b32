"""The states of gated delta nets as kernels read them: of packed sequences, and of a step's slots in a pool.

`KernelStates` is what `CudaBackend` gives a decoder as its `StateGroup`; `mixed` is `DeltaNet.mixed` by
kernels. Slots and layout are read from the device, so that a step can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import delta_kernels as kernel
from tinkex.engine.cuda.delta_gradients import DeltaMixed
from tinkex.engine.cuda.delta_kernels import ChunkLayout, DeltaWeights, SlotStates
from tinkex.engine.torch.device_copies import all_to_device, to_device
from tinkex.engine.torch.models.delta_net import DeltaNet
from tinkex.engine.torch.states import StateGroup, StatePool


class KernelStates(StateGroup):
    """Without a pool, sequences start at zero. Without a layout, each row is one token of its slot."""

    def __init__(
        self, layout: ChunkLayout | None, pool: StatePool | None = None, slots_B: Tensor | None = None
    ) -> None:
        self.layout, self._pool, self._slots_B = layout, pool, slots_B

    def of(self, layer: int) -> SlotStates | None:
        if self._pool is None or self._slots_B is None:
            return None
        inputs, matrices = self._pool.tensors[layer]
        return SlotStates(inputs, matrices, self._slots_B)


def packed(lengths: Sequence[int], device: torch.device) -> KernelStates:
    return KernelStates(kernel.lay_out(lengths, device))


def of_slots(pool: StatePool, slots: Sequence[int], counts: Sequence[int]) -> KernelStates:
    """Of one step in which the sequence of slots[i] advances by counts[i] tokens."""
    held = np.asarray(slots, np.int32)
    if max(counts) == 1:
        return KernelStates(None, pool, to_device(held, pool.device))
    chunks, sequences, order = kernel.cells_of(counts)
    *cells, slots_B = all_to_device([chunks, sequences, held[order]], pool.device)
    return KernelStates(ChunkLayout(*cells), pool, slots_B)


def mixed(net: DeltaNet, qkvz: Tensor, rates: Tensor, states: KernelStates) -> Tensor:
    weights = DeltaWeights(net.config, net.conv, net.a_log, net.dt_bias, net.norm, net.eps)
    held = states.of(net.layer)
    if states.layout is None:
        assert held is not None
        return kernel.step(qkvz, rates, weights, held)
    if held is None and torch.is_grad_enabled() and (qkvz.requires_grad or rates.requires_grad):
        return DeltaMixed.apply(qkvz, rates, weights, states.layout)  # type: ignore[return-value]
    return kernel.mixed(qkvz, rates, weights, states.layout, held)
