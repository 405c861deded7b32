"""From logits to tokens: pure functions, row by row.

Promises: a row's draw depends on its own logits and its own random stream alone, never on its neighbours;
reported logprobs are log_softmax(logits / T) over all logits, before any top-k or top-p cut, at T = 1 when
greedy; ids at or beyond `vocab` (padding) take part in the normaliser and are never drawn or listed.
Knows nothing of requests, pages or stops.

Shapes: B rows, V padded vocabulary, N blocks, S block size, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.rng import exponentials
from tinkex.types.outputs import TOPK_PADDING

BLOCK = 256  # ids that are drawn among at once
COLDEST = 1e-5  # temperatures below this one would overflow float32; they are as good as greedy already


@dataclass(frozen=True)
class Choice:
    """How each of B rows is drawn from."""

    temperature: Tensor  # float32 [B]; 0 is greedy
    top_k: Tensor  # int64 [B]; 0 or less: off
    top_p: Tensor  # float32 [B]
    keys: np.ndarray  # uint64 [B]: one random stream per row, see engine/streams.py


# -- drawing -------------------------------------------------------------------------------------------


def scaled_logprobs(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """log_softmax(logits / T) in float32, with T = 1 for greedy rows."""
    return F.log_softmax(scaled(logits_BV, temperature_B), dim=-1)


def scaled(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """logits / T in float32, with T = 1 for greedy rows."""
    return logits_BV.float() / torch.where(temperature_B == 0, 1.0, temperature_B.clamp_min(COLDEST))[:, None]


def draw(logprobs_BV: Tensor, choice: Choice, vocab: int) -> Tensor:
    """One token id per row, int64 [B], from the `scaled_logprobs` of the rows."""
    greedy_B = choice.temperature == 0
    if bool(greedy_B.all()):
        return logprobs_BV[:, :vocab].argmax(-1)
    # over the likeliest that may be drawn: beside padding, all of them may be too small for float32
    p_BV = (logprobs_BV - logprobs_BV[:, :vocab].amax(-1, keepdim=True)).exp()
    p_BV[:, vocab:] = 0.0
    cut = (choice.top_k > 0) | (choice.top_p < 1.0)
    if bool(cut.any()):
        rows = cut.nonzero()[:, 0]
        p_BV[rows] = keep_likeliest(p_BV[rows], choice.top_k[rows], choice.top_p[rows])
    tokens_B = race(p_BV, choice.keys)
    if bool(greedy_B.any()):
        tokens_B[greedy_B] = logprobs_BV[greedy_B, :vocab].argmax(-1)
    return tokens_B


def keep_likeliest(p_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """`p_BV` with 0 for all but the top_k likeliest, and of those all but the smallest set holding top_p."""
    sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(p_BV.shape[1], device=p_BV.device)
    k_B1 = torch.where(top_k_B > 0, top_k_B, p_BV.shape[1])[:, None]
    sorted_BV = sorted_BV.double().masked_fill(ranks_V >= k_B1, 0.0)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV  # the mass of what is likelier
    out = (before_BV >= top_p_B.double()[:, None] * sorted_BV.sum(-1, keepdim=True)) & (ranks_V > 0)
    kept_BV = sorted_BV.masked_fill(out & (top_p_B < 1.0)[:, None], 0.0).to(p_BV.dtype)
    return torch.zeros_like(p_BV).scatter_(-1, order_BV, kept_BV)


def race(p_BV: Tensor, keys: np.ndarray) -> Tensor:
    """Draw from unnormalised probabilities by exponential races: first a block of ids, then an id in it.

    The winner is argmax(p / e) with e exponential. Rounding noise in p (another batch size, another kernel)
    changes the winner only about as often as the mass it moves, wherever in the vocabulary it moves it; two
    rounds need a few hundred random numbers a row instead of V.
    """
    B, V = p_BV.shape
    p_BNS = F.pad(p_BV, (0, -V % BLOCK)).view(B, -1, BLOCK)
    N = p_BNS.shape[1]
    noise = torch.from_numpy(exponentials(keys, N + BLOCK)).to(p_BV.device)
    block_B = (p_BNS.sum(-1) / noise[:, :N]).argmax(-1)
    inside_BS = p_BNS[torch.arange(B, device=p_BV.device), block_B]
    return block_B * BLOCK + (inside_BS / noise[:, N:]).argmax(-1)


# -- listing -------------------------------------------------------------------------------------------


def likeliest(logprobs_BV: Tensor, k: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """The k likeliest ids of each row and their logprobs, likeliest first; padded where vocab < k."""
    found = min(k, vocab)
    values, ids = logprobs_BV[:, :vocab].topk(found, dim=-1)
    token_ids = np.zeros((len(logprobs_BV), k), np.int32)
    logprobs = np.full((len(logprobs_BV), k), TOPK_PADDING, np.float32)
    token_ids[:, :found] = ids.cpu().numpy()
    logprobs[:, :found] = values.cpu().numpy()
    return token_ids, logprobs
