"""Logprobs of target tokens from hidden states, and their gradient, a chunk of tokens at a time.

There is never a [T, V] tensor: each chunk's logits are overwritten by their own gradient. If a cell's
gradient depends only on its logprob, logits are computed once; otherwise the caller calls twice. Ids from
`vocab` on are padding: their logits are -inf, their gradients exactly zero.

Shapes: T tokens, D width, V padded vocabulary, M target cells, N rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tinkex.engine.torch.functions import capped, linear
from tinkex.engine.torch.lora import LoraBatch, add, add_backward, shrink
from tinkex.engine.torch.models.weights import UNEMBED

# Bytes of a chunk's logits in fp32: enough rows for efficient products, little next to a model. On the CPU
# below 32 MiB: from there on malloc maps fresh pages for every chunk, and clearing them costs more time.
CHUNK_BYTES = {"cpu": 28 << 20, "cuda": 2 << 30}


class GradOf(Protocol):
    """The loss's gradient to the logprobs of cells first:last."""

    def __call__(self, lp: Tensor, first: int, last: int) -> Tensor: ...


@dataclass(frozen=True)
class Targets:
    """The target cells: which token's logprob at which position, in the order of positions."""

    rows_M: Tensor  # int64, ascending
    ids_M: Tensor  # int64
    starts: Tensor  # int64 [T + 1], on the CPU: the cells of row t are starts[t]:starts[t + 1]


def target_logprobs(
    h_TD: Tensor,
    weight_VD: Tensor,
    targets: Targets,
    lora: LoraBatch,
    vocab: int,
    grad_of: GradOf | None = None,
    *,
    chunk: int | None = None,
    compute: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The targets' logprobs (fp32 [M]) and, with `grad_of`, the loss's gradient to h_TD.

    Gradients of the unembedding's adapters are added to their buffers. `compute` computes one chunk, as
    `logprob_chunk` does.
    """
    compute = compute or logprob_chunk
    tokens = h_TD.shape[0]
    chunk = chunk or max(16, CHUNK_BYTES.get(h_TD.device.type, 1 << 30) // (4 * weight_VD.shape[0]))
    chunk = -(-tokens // -(-tokens // chunk))  # as many chunks, of equal sizes
    lp_M = torch.empty(targets.ids_M.shape, dtype=torch.float32, device=h_TD.device)
    grad_TD = torch.zeros_like(h_TD) if grad_of else None
    with torch.no_grad():
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            first, last = int(targets.starts[start]), int(targets.starts[stop])
            cells = targets.rows_M[first:last] - start, targets.ids_M[first:last]
            out_ND = None if grad_TD is None else grad_TD[start:stop]
            grads = None if grad_of is None else partial(grad_of, first=first, last=last)
            lp_M[first:last] = compute(h_TD[start:stop], weight_VD, vocab, lora, start, cells, grads, out_ND)
    return lp_M, grad_TD


def logprob_chunk(
    h_ND: Tensor,
    weight_VD: Tensor,
    vocab: int,
    lora: LoraBatch,
    start: int,
    cells: tuple[Tensor, Tensor],
    grads: Callable[[Tensor], Tensor] | None,
    out_ND: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """The logprobs of one chunk's cells (row, id); with `grads`, their gradient to h_ND goes to `out_ND`.

    The adapters' gradients are added to theirs; `out_ND` comes with zeros. `softcap`: `ModelConfig`'s.
    """
    logits_NV, slope_NV = chunk_logits(h_ND, weight_VD, lora, start, softcap)
    logits_NV[:, vocab:] = -math.inf
    if logits_NV.dtype == torch.float32:  # in place: a row is read before it is written
        logp_NV = torch.log_softmax(logits_NV, -1, out=logits_NV)
    else:
        logp_NV = torch.log_softmax(logits_NV, -1, dtype=torch.float32)
    lp = logp_NV[cells]
    if grads is None or out_ND is None:
        return lp
    grad_M = grads(lp)
    chosen = grad_M != 0  # rows without a gradient, such as a prompt's, take no part in the products
    rows, ids, grad_M = (column[chosen] for column in (*cells, grad_M))
    live, rows = torch.unique_consecutive(rows, return_inverse=True)
    if not len(live):
        return lp
    if len(live) < len(h_ND):
        logp_NV = logp_NV[live]
    total_N = torch.zeros(len(live), device=h_ND.device).index_add_(0, rows, grad_M)
    grad_NV = logp_NV.exp_().mul_(-total_N[:, None])  # Σ g·(onehot − softmax), g being a cell's gradient
    grad_NV = grad_NV.index_put_((rows, ids), grad_M, accumulate=True)
    if slope_NV is not None:
        grad_NV *= slope_NV[live]
    out_ND.index_copy_(0, live, hidden_gradient(grad_NV, h_ND, weight_VD, lora, start, live))
    return lp


def chunk_logits(
    h_ND: Tensor, weight_VD: Tensor, lora: LoraBatch, start: int, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """The logits of a chunk that begins at token `start`, and their derivative by the softcap's argument."""
    logits_NV = linear(h_ND, weight_VD)
    add(UNEMBED, lora.jobs(UNEMBED, start, start + len(h_ND)), h_ND, logits_NV)
    if softcap is None:
        return logits_NV, None
    logits_NV = capped(logits_NV, softcap)
    return logits_NV, 1 - (logits_NV / softcap).square()


def hidden_gradient(
    grad_NV: Tensor, h_ND: Tensor, weight_VD: Tensor, lora: LoraBatch, start: int, live: Tensor
) -> Tensor:
    """The gradient to the chunk's rows `live`, from that to their logits; the adapters' is added."""
    jobs, grad_NV = lora.jobs(UNEMBED, start, start + len(live)), grad_NV.to(h_ND.dtype)
    if len(live) < len(h_ND):
        jobs, h_ND = lora.jobs(UNEMBED, rows=live + start), h_ND[live]
    grad_ND = linear(grad_NV, weight_VD.t())
    add_backward(UNEMBED, jobs, grad_NV, h_ND, shrink(UNEMBED, jobs, h_ND), grad_ND)
    return grad_ND
