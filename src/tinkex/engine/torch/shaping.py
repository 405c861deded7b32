"""The rules of requests (`engine/logit_rules.py`, `engine/grammar.py`) applied to rows of logits.

Shapes: N rows, one for each sequence, V padded vocabulary, M changed entries of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.logit_rules import LogitEdit
from tinkex.engine.torch.device_copies import to_device

if TYPE_CHECKING:
    from tinkex.engine.torch.sequences import RunningSequence


def shaped(sequences: Sequence[RunningSequence], logits_NV: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rows that rules change, int64, and their logits in float32 as changed; None if there are none."""
    rows = [i for i, s in enumerate(sequences) if s.request.rules is not None or s.grammar is not None]
    if not rows:
        return None
    rows_N = to_device(np.array(rows), logits_NV.device)
    changed_NV = logits_NV[rows_N].float()
    rules = [(n, sequences[i].request.rules, sequences[i].tokens) for n, i in enumerate(rows)]
    if edits := [(n, rule.edit(drawn)) for n, rule, drawn in rules if rule is not None]:
        _edit(changed_NV, edits)
    grammars = [(n, sequences[i].grammar) for n, i in enumerate(rows)]
    if masks := [(n, grammar.mask()) for n, grammar in grammars if grammar is not None]:
        _mask(changed_NV, masks)
    return rows_N, changed_NV


def _edit(logits_NV: Tensor, edits: Sequence[tuple[int, LogitEdit]]) -> None:
    """In place, by the arithmetic of `LogitEdit.apply`, for all rows at once."""
    device = logits_NV.device
    rows_M = to_device(np.repeat([row for row, _ in edits], [len(edit.ids) for _, edit in edits]), device)
    ids_M = to_device(np.concatenate([edit.ids for _, edit in edits]), device)
    added_M, repetition_M, subtracted_M = (
        to_device(np.concatenate(parts), device)
        for parts in zip(*((e.added, e.repetition, e.subtracted) for _, e in edits), strict=True)
    )
    x_M = logits_NV[rows_M, ids_M] + added_M
    x_M = torch.where(x_M < 0, x_M * repetition_M, x_M / repetition_M) - subtracted_M
    logits_NV[rows_M, ids_M] = x_M


def _mask(logits_NV: Tensor, masks: Sequence[tuple[int, np.ndarray]]) -> None:
    """Ids that a grammar does not allow get -inf, in place. Ids past a mask are padding."""
    device, V = logits_NV.device, logits_NV.shape[1]
    rows_N = to_device(np.array([row for row, _ in masks]), device)
    bytes_NB = to_device(np.stack([mask for _, mask in masks]), device)
    bits_8 = torch.arange(8, device=device, dtype=torch.uint8)
    allowed = ((bytes_NB[:, :, None] >> bits_8) & 1).flatten(1).bool()
    allowed = torch.nn.functional.pad(allowed, (0, max(0, V - allowed.shape[1])))[:, :V]
    logits_NV[rows_N] = logits_NV[rows_N].masked_fill(~allowed, -math.inf)
