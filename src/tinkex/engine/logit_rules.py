"""How a request changes the logits that a token is drawn from: bias, penalties, a minimum length.

The order is that of transformers and vLLM: bias, bans, repetition penalty, then presence and frequency
penalties; temperature and cuts come after. Reported logprobs are those of the unchanged logits. Needs only
numpy: an engine applies the `LogitEdit` of each sequence to its own tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tinkex.engine.protocol import SampleWork


@dataclass(frozen=True)
class LogitEdit:
    """What changes in M entries of one row: logit + added, times or divided by repetition, - subtracted."""

    ids: np.ndarray  # int64 [M], each once
    added: np.ndarray  # float32 [M]
    repetition: np.ndarray  # float32 [M]; 1: none
    subtracted: np.ndarray  # float32 [M]

    def apply(self, logits_M: np.ndarray) -> np.ndarray:
        logits_M = logits_M + self.added
        logits_M = np.where(logits_M < 0, logits_M * self.repetition, logits_M / self.repetition)
        return logits_M - self.subtracted


class LogitRules:
    """The rules of one request; `edit` depends on the tokens that a sequence has drawn."""

    def __init__(self, work: SampleWork, stop_ids: Collection[int]) -> None:
        params = work.params
        biases = params.logit_bias or {}
        self._biased = np.fromiter(biases, np.int64, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._min_tokens, self._stop_ids = params.min_tokens, np.array(sorted(stop_ids), np.int64)
        self._repetition = params.repetition_penalty
        repeated = work.prompt if self._repetition != 1 else work.prompt[:0]
        self._prompt = np.unique(repeated).astype(np.int64)
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._penalises = self._repetition != 1 or bool(self._presence or self._frequency)

    @staticmethod
    def asked(work: SampleWork) -> bool:
        params = work.params
        return bool(
            params.logit_bias or params.min_tokens or params.presence_penalty or params.frequency_penalty
            or params.repetition_penalty != 1
        )  # fmt: skip

    def edit(self, drawn: Sequence[int]) -> LogitEdit:
        """What to change before the token after `drawn` is drawn."""
        early = self._stop_ids if len(drawn) < self._min_tokens else self._stop_ids[:0]
        counted = np.asarray(drawn if self._penalises else (), np.int64)
        seen, counts = np.unique(counted, return_counts=True)
        ids = np.unique(np.concatenate([self._biased, early, self._prompt, seen]))
        added = np.zeros(len(ids), np.float32)
        added[np.searchsorted(ids, self._biased)] = self._biases
        added[np.searchsorted(ids, early)] = -math.inf
        repetition, subtracted = np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32)
        where = np.searchsorted(ids, seen)
        repetition[where] = repetition[np.searchsorted(ids, self._prompt)] = self._repetition
        subtracted[where] = self._presence + self._frequency * counts
        return LogitEdit(ids, added, repetition, subtracted)
