"""From logits to next tokens and to the logprobs that a request asked for.

A row's draw depends only on its own logits and random stream. Reported logprobs are log_softmax(
logits / T) before any cut, penalty, bias or grammar, at T = 1 when greedy. Ids from `vocab` on are padding:
their logits are -inf, so they are in no normaliser, and are never drawn or listed.

Shapes: N rows, one for each sequence, V padded vocabulary, B blocks, S block size, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.request import padded_top
from tinkex.engine.rng import exponentials, stream_key
from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.shaping import shaped

if TYPE_CHECKING:
    from tinkex.engine.native.step import CompiledStep
    from tinkex.engine.torch.backend import Backend
    from tinkex.engine.torch.sequences import RunningSequence, Top

BLOCK = 256  # ids per block of a draw
COLDEST = 1e-5  # lower temperatures would overflow float32, and draw the likeliest token all the same


@dataclass(frozen=True)
class Choice:
    """How each of N rows is drawn from. On the host, so that nothing waits for the device to decide."""

    temperature: np.ndarray  # float32 [N]; 0 is greedy
    top_k: np.ndarray  # int64 [N]; 0 or less: off
    top_p: np.ndarray  # float32 [N]
    keys: np.ndarray  # uint64 [N]: one random stream per row (engine/rng.py)
    min_p: np.ndarray | None = None  # float32 [N]; None: off in every row

    @classmethod
    def of(cls, sequences: Sequence[RunningSequence]) -> Choice:
        params = [s.request.work.params for s in sequences]
        keys = [stream_key(s.request.seed, s.index, s.length) for s in sequences]
        min_p = [p.min_p for p in params]
        return cls(
            np.array([p.temperature for p in params], np.float32),
            np.array([p.top_k for p in params], np.int64),
            np.array([p.top_p for p in params], np.float32),
            np.array(keys, np.uint64),
            np.array(min_p, np.float32) if any(min_p) else None,
        )


class Drawn(NamedTuple):
    """What was drawn for N rows, on the device."""

    tokens_N: Tensor  # int64
    logprobs_N: Tensor  # float32
    top_NK: tuple[Tensor, Tensor] | None = None  # ids and logprobs of the K likeliest, if a row lists them


def scaled_logprobs(logits_NV: Tensor, temperature_N: Tensor, vocab: int) -> Tensor:
    """log_softmax(logits / T) in float32, with T = 1 for greedy rows; -inf for padding."""
    scaled_NV = scaled(logits_NV, temperature_N)
    scaled_NV[:, vocab:] = -math.inf
    return F.log_softmax(scaled_NV, dim=-1)


def scaled(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """logits / T in float32, with T = 1 for greedy rows."""
    return logits_NV.float() / torch.where(temperature_N == 0, 1.0, temperature_N.clamp_min(COLDEST))[:, None]


def draw(logprobs_NV: Tensor, choice: Choice) -> Tensor:
    """One token id per row, int64 [N], from the `scaled_logprobs` of the rows."""
    device, greedy = logprobs_NV.device, choice.temperature == 0
    if greedy.all():
        return logprobs_NV.argmax(-1)
    p_NV = logprobs_NV.exp()
    cut = np.flatnonzero((choice.top_k > 0) | (choice.top_p < 1.0))
    if len(cut):
        rows, top_k, top_p = (to_device(a, device) for a in (cut, choice.top_k[cut], choice.top_p[cut]))
        p_NV[rows] = keep_likeliest(p_NV[rows], top_k, top_p)
    if choice.min_p is not None:
        min_p_N = to_device(choice.min_p, device)
        p_NV = p_NV.masked_fill(p_NV < min_p_N[:, None] * p_NV.amax(-1, keepdim=True), 0.0)
    tokens_N = race(p_NV, choice.keys)
    if greedy.any():
        tokens_N = torch.where(to_device(greedy, device), logprobs_NV.argmax(-1), tokens_N)
    return tokens_N


def keep_likeliest(p_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """`p_NV` with 0 for all but the top_k likeliest, and of those all but the smallest set holding top_p."""
    sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(p_NV.shape[1], device=p_NV.device)
    k_N1 = torch.where(top_k_N > 0, top_k_N, p_NV.shape[1])[:, None]
    sorted_NV = sorted_NV.double().masked_fill(ranks_V >= k_N1, 0.0)
    likelier_NV = sorted_NV.cumsum(-1) - sorted_NV  # the mass of all likelier ids
    out = (likelier_NV >= top_p_N.double()[:, None] * sorted_NV.sum(-1, keepdim=True)) & (ranks_V > 0)
    kept_NV = sorted_NV.masked_fill(out & (top_p_N < 1.0)[:, None], 0.0).to(p_NV.dtype)
    return torch.zeros_like(p_NV).scatter_(-1, order_NV, kept_NV)


def race(p_NV: Tensor, keys: np.ndarray) -> Tensor:
    """Draw from unnormalised probabilities by exponential races: first a block of ids, then an id in it.

    The winner is argmax(p / e) with e exponential. Rounding noise in p (another batch size, another kernel)
    changes the winner only about as often as the mass that it moves. Two rounds need a few hundred random
    numbers a row instead of V.
    """
    N, V = p_NV.shape
    p_NBS = F.pad(p_NV, (0, -V % BLOCK)).view(N, -1, BLOCK)
    B = p_NBS.shape[1]
    noise = to_device(exponentials(keys, B + BLOCK), p_NV.device)
    block_N = (p_NBS.sum(-1) / noise[:, :B]).argmax(-1)
    inside_NS = p_NBS[torch.arange(N, device=p_NV.device), block_N]
    return block_N * BLOCK + (inside_NS / noise[:, B:]).argmax(-1)


def likeliest(logprobs_NV: Tensor, k: int, vocab: int) -> tuple[Tensor, Tensor]:
    """The k likeliest ids of each row and their logprobs, likeliest first; fewer where vocab < k."""
    values, ids = logprobs_NV[:, :vocab].topk(min(k, vocab), dim=-1)
    return ids, values


def draw_next(
    sequences: Sequence[RunningSequence],
    logits_NV: Tensor,
    vocab: int,
    backend: Backend,
    compiled: CompiledStep | None = None,
) -> Iterator[tuple[RunningSequence, int, float, Top | None]]:
    """Each sequence's next token, its logprob, and the likeliest tokens if the request lists them."""
    plain = [i for i, s in enumerate(sequences) if s.request.draws_plainly]
    if len(plain) < len(sequences) and not backend.invariant:
        plain = []
    others = sorted(set(range(len(sequences))).difference(plain))
    if plain:
        some, logits = _rows(sequences, logits_NV, plain)
        choice = Choice.of(some)
        if compiled is None:
            tokens, logprobs = backend.draw(logits, choice, vocab)
        else:
            tokens, logprobs = compiled.draw(logits, choice.temperature, choice.keys)
        yield from zip(some, tokens, logprobs, [None] * len(some), strict=True)
    if others:
        some, logits = _rows(sequences, logits_NV, others)
        tokens_N, logprobs_N, top_NK = draw_by_rules(some, logits, vocab, backend)
        tops = listed(some, *(part.cpu().numpy() for part in top_NK)) if top_NK else [None] * len(some)
        yield from zip(some, tokens_N.tolist(), logprobs_N.tolist(), tops, strict=True)


def _rows(
    sequences: Sequence[RunningSequence], logits_NV: Tensor, rows: list[int]
) -> tuple[list[RunningSequence], Tensor]:
    return [sequences[i] for i in rows], logits_NV if len(rows) == len(sequences) else logits_NV[rows]


def draw_by_rules(
    sequences: Sequence[RunningSequence], logits_NV: Tensor, vocab: int, backend: Backend
) -> Drawn:
    """Draw with cuts, rules, grammars and lists of likely tokens. Does not wait for the device.

    A batch-invariant backend draws the rows one by one: torch's sums and the winners of ties depend on the
    number of rows.
    """
    temperature_N = to_device(Choice.of(sequences).temperature, logits_NV.device)
    logprobs_NV = backend.logprobs(logits_NV, temperature_N, vocab)
    most = max(s.request.work.topk_sample_logprobs for s in sequences)
    at_once = 1 if backend.invariant else len(sequences)
    parts = [slice(i, i + at_once) for i in range(0, len(sequences), at_once)]
    tokens, logprobs = zip(
        *(_draw_rows(sequences[i], logits_NV[i], logprobs_NV[i], temperature_N[i], vocab) for i in parts),
        strict=True,
    )
    if not most:
        return Drawn(torch.cat(tokens), torch.cat(logprobs))
    ids, values = zip(*(likeliest(logprobs_NV[i], most, vocab) for i in parts), strict=True)
    return Drawn(torch.cat(tokens), torch.cat(logprobs), (torch.cat(ids), torch.cat(values)))


def _draw_rows(
    sequences: Sequence[RunningSequence],
    logits_NV: Tensor,
    logprobs_NV: Tensor,
    temperature_N: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    drawn_from_NV = logprobs_NV
    if (changed := shaped(sequences, logits_NV)) is not None:
        rows, some_NV = changed
        drawn_from_NV = logprobs_NV.index_copy(0, rows, scaled_logprobs(some_NV, temperature_N[rows], vocab))
    tokens_N = draw(drawn_from_NV, Choice.of(sequences))
    return tokens_N, logprobs_NV.gather(1, tokens_N[:, None])[:, 0]


def listed(sequences: Sequence[RunningSequence], ids: np.ndarray, logprobs: np.ndarray) -> list[Top | None]:
    """What each sequence's request lists of the likeliest tokens."""
    asked = [s.request.work.topk_sample_logprobs for s in sequences]
    ids, logprobs = padded_top(ids, logprobs, max(asked))
    return [(ids[i, :k], logprobs[i, :k]) if k else None for i, k in enumerate(asked)]


class TorchRows:
    """`tinkex.engine.request.Rows` over logits, whose padding it overwrites."""

    def __init__(self, logits_NV: Tensor, vocab: int, backend: Backend) -> None:
        self._vocab = vocab
        if backend.invariant:
            ones_N = torch.ones(len(logits_NV), device=logits_NV.device)
            self._logprobs_NV = backend.logprobs(logits_NV, ones_N, vocab)
            self._parts = self._logprobs_NV.split(1)
        else:
            logits_NV[:, vocab:] = -math.inf
            self._logprobs_NV = F.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
            self._parts = (self._logprobs_NV,)

    def pick(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        at = [torch.from_numpy(index).to(self._logprobs_NV.device) for index in (rows, tokens)]
        return self._logprobs_NV[at[0], at[1]].cpu().numpy()

    def top(self, k: int) -> Top:
        ids, logprobs = zip(*(likeliest(part, k, self._vocab) for part in self._parts), strict=True)
        return padded_top(torch.cat(ids).cpu().numpy(), torch.cat(logprobs).cpu().numpy(), k)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        split = zip(self._parts, np.split(keys, len(self._parts)), strict=True)
        drawn = [race(part.exp(), some) for part, some in split]
        return torch.cat(drawn).cpu().numpy()
