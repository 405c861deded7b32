"""The device's part of a sampling step: hidden states of new tokens, their logits, and draws from those.

`ContinuousBatch` decides what a step computes. Knows pages, slots and adapters, not requests or queues.

Shapes: T tokens of a step, D width, N rows whose logits are needed, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.kv import KVCache, TokenSpan
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.next_tokens import Choice
from tinkex.engine.torch.states import StatePool

if TYPE_CHECKING:
    from tinkex.engine.torch.adapters import Adapter
    from tinkex.engine.torch.backend import PrefillSteps
    from tinkex.engine.torch.images import FeatureRows
    from tinkex.engine.torch.lora import LoraBatch

Adapters = Sequence["Adapter | None"]
Rows = np.ndarray | slice


class StepTokens(NamedTuple):
    """The new tokens of a step: those of pieces[i] have adapters[i] and, in hybrids, the state slots[i]."""

    tokens: np.ndarray
    pieces: Sequence[TokenSpan]
    adapters: Adapters
    slots: Sequence[int]
    images: FeatureRows | None = None


class StepRunner:
    """Computes steps with a decoder, its KV cache and, of hybrids, its states."""

    draws = False  # itself, where no rank has all logits

    def __init__(
        self, decoder: Decoder, cache: KVCache, states: StatePool | None, prefill: PrefillSteps | None = None
    ) -> None:
        self._decoder, self._cache, self._states, self._prefill = decoder, cache, states, prefill
        self._device = decoder.unembed_weight.device

    def forward(self, step: StepTokens) -> Tensor:
        """The hidden states [T, D] of the step's tokens."""
        tokens, pieces, adapters, slots, images = step
        decoder, counts = self._decoder, [piece.new for piece in pieces]
        lora = self._lora(adapters, counts)
        if self._prefill is not None and images is None:
            h_TD = self._prefill(tokens, pieces, lora, slots)
            if h_TD is not None:
                return h_TD
        positions = np.concatenate([np.arange(p.start, p.start + p.new) for p in pieces])
        min_split_keys = 0 if self._prefill is None else self._prefill.min_split_keys
        attend = decoder.backend.paged_attend(self._cache, pieces, decoder.config.windows, min_split_keys)
        read = (to_device(ids, self._device) for ids in (tokens.astype(np.int64), positions))
        states = () if self._states is None else decoder.backend.slot_states(self._states, slots, counts)
        return decoder(*read, attend, lora, states=states, images=images)

    def logits(self, h_TD: Tensor, rows: Rows, adapters: Adapters, counts: Sequence[int]) -> Tensor:
        """[N, V] of some rows of `h_TD`, of which the next counts[i] have adapters[i]."""
        at = rows if isinstance(rows, slice) else to_device(rows, self._device)
        return self._decoder.logits(h_TD[at], self._lora(adapters, counts))

    def draw(
        self, h_TD: Tensor, rows: np.ndarray, adapters: Adapters, choice: Choice
    ) -> tuple[list[int], list[float]]:
        """A token and its logprob for each of some rows, if the runner `draws`."""
        raise NotImplementedError

    def _lora(self, adapters: Adapters, counts: Sequence[int]) -> LoraBatch | None:
        return self._decoder.backend.lora(adapters, counts) if any(adapters) else None
