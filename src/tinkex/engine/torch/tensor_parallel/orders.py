"""The orders that rank 0 of a tensor-parallel group sends to the other ranks: picklable values.

Only rank 0 checks requests, plans steps and computes losses. The other ranks hold their parts of the same
adapters, pages and states, and execute orders in sequence. Rank 0 numbers the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tinkex.engine.torch.continuous_batch import StepLimits
from tinkex.types.params import AdamParams, LoraConfig

Key = int | None  # of an adapter; None: the base model


@dataclass(frozen=True)
class Prepare:
    """Have a KV cache of so many pages and, for a hybrid, so many slots for states."""

    pages: int
    slots: int
    limits: StepLimits


@dataclass(frozen=True)
class MakeAdapter:
    key: int
    lora: LoraConfig
    seed: int


@dataclass(frozen=True)
class TakeAdapter:
    """A whole adapter follows, parameters and with `moments` the optimizer's: broadcast as fp32 numbers."""

    key: int
    lora: LoraConfig
    shared: bool
    step: int
    moments: bool


@dataclass(frozen=True)
class FreeAdapters:
    keys: tuple[int, ...]


@dataclass(frozen=True)
class ComputeBatch:
    """One micro-batch; `clear` are adapters whose earlier gradients do not count.

    `calls`: how often logprobs are computed, and whether with their gradient.
    """

    adapters: Sequence[int]
    lengths: Sequence[int]
    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray  # of `logprobs.Targets`
    ids: np.ndarray
    starts: np.ndarray
    clear: Sequence[int]
    backward: bool
    recompute: bool
    calls: Sequence[bool]


@dataclass(frozen=True)
class StepAdapter:
    key: int
    params: AdamParams


@dataclass(frozen=True)
class CollectAdapter:
    """Give rank 0 this rank's part."""

    key: int
    optimizer: bool


# Of pages: ("clear", pages), ("copy", source, target); of states: ("state", target, source or None).
Change = tuple[Literal["clear", "copy", "state"], Any, Any]


@dataclass(frozen=True)
class AdvanceSequences:
    """One step's tokens, after `changes` to pages and states."""

    changes: Sequence[Change]
    tokens: np.ndarray
    spans: Sequence[tuple[Sequence[int], int, int]]  # pages, start and new tokens
    adapters: Sequence[Key]
    slots: Sequence[int]


@dataclass(frozen=True)
class ReadLogits:
    """The logits of rows of the last step, for rank 0."""

    rows: np.ndarray | slice
    adapters: Sequence[Key]
    counts: Sequence[int]


@dataclass(frozen=True)
class DrawTokens:
    """One token for each of some rows of the last step."""

    rows: np.ndarray
    adapters: Sequence[Key]
    temperature: np.ndarray
    keys: np.ndarray


# -- decode steps by captured graphs: what `DecodeSteps` does -------------------------------------------


@dataclass(frozen=True)
class PlaceRows:
    """`PlacedRows`, with adapters by their numbers."""

    pages: np.ndarray
    temperature: np.ndarray
    adapters: Sequence[Key]
    keeps_logits: bool


@dataclass(frozen=True)
class LaunchStep:
    """One step of the placed rows, after `changes` to pages and states."""

    changes: Sequence[Change]
    orders: np.ndarray


@dataclass(frozen=True)
class ShareTokens:
    """Take the tokens that rank 0 drew by rules."""
