"""Logprobs, their gradient and draws where each rank has the logits of a part of the vocabulary.

Softmax and sampling reduce over the ranks, so no rank holds all logits. The exceptions are
requests that do not draw plainly (`RunningRequest.draws_plainly`): their logits are gathered (`whole`).
`logprobs` and `next_tokens` do the same on one device.

Shapes: N rows, D width, V padded vocabulary of this rank, B blocks, S block size, M target cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.rng import exponentials
from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.logprobs import chunk_logits, hidden_gradient
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.next_tokens import BLOCK, Choice, scaled
from tinkex.engine.torch.tensor_parallel.shards import Shards


class ShardedVocab:
    """The vocabulary of a model over `shards`, as many ids on each rank."""

    def __init__(self, shards: Shards, config: ModelConfig) -> None:
        """`config` is a rank's."""
        self._shards, self._size, self._softcap = shards, config.vocab_rows, config.logit_softcap
        self._padded, self._start = config.padded_vocab, shards.rank * config.vocab_rows
        self._ours = min(max(config.vocab_size - self._start, 0), self._size)  # the rest are padding

    def logprob_chunk(
        self,
        h_ND: Tensor,
        weight_VD: Tensor,
        vocab: int,
        lora: LoraBatch,
        start: int,
        cells: tuple[Tensor, Tensor],
        grads: Callable[[Tensor], Tensor] | None,
        out_ND: Tensor | None,
    ) -> Tensor:
        """As `logprobs.logprob_chunk`. The gradient to the logprobs is rank 0's."""
        logits_NV, slope_NV = chunk_logits(h_ND, weight_VD, lora, start, self._softcap)
        logits_NV = logits_NV.float()
        logits_NV[:, self._ours :] = -math.inf
        rows, ids = cells
        own = (ids >= self._start) & (ids < self._start + self._size)
        local = torch.where(own, ids - self._start, 0)
        top_N = self._shards.reduce(logits_NV.amax(-1), "max")
        sums = (logits_NV - top_N[:, None]).exp_().sum(-1)
        targets_M = torch.where(own, logits_NV[rows, local], 0.0)
        both = self._shards.reduce(torch.cat((sums, targets_M)))
        lse_N = both[: len(top_N)].log() + top_N
        lp = both[len(top_N) :] - lse_N[rows]
        if grads is None or out_ND is None:
            return lp
        grad_M = self._shards.broadcast(grads(lp).contiguous())
        chosen = grad_M != 0
        rows, local, own, grad_M = (column[chosen] for column in (rows, local, own, grad_M))
        live, rows = torch.unique_consecutive(rows, return_inverse=True)
        if not len(live):
            return lp
        if len(live) < len(h_ND):
            logits_NV, lse_N = logits_NV[live], lse_N[live]
        total_N = torch.zeros(len(live), device=h_ND.device).index_add_(0, rows, grad_M)
        grad_NV = logits_NV.sub_(lse_N[:, None]).exp_().mul_(-total_N[:, None])
        grad_NV = grad_NV.index_put_((rows, local), torch.where(own, grad_M, 0.0), accumulate=True)
        if slope_NV is not None:
            grad_NV *= slope_NV[live]
        grad_ND = hidden_gradient(grad_NV, h_ND, weight_VD, lora, start, live)
        out_ND.index_copy_(0, live, self._shards.reduce(grad_ND.contiguous()))
        return lp

    def whole(self, logits_NV: Tensor) -> Tensor:
        """The logits of all ids."""
        return self._shards.joined(logits_NV, self._padded)

    def draw(self, logits_NV: Tensor, choice: Choice) -> tuple[list[int], list[float]]:
        """As `Backend.draw`: the same race, of which each rank runs its own blocks."""
        temperature_N = to_device(choice.temperature, logits_NV.device)
        x_NV = scaled(logits_NV, temperature_N)
        x_NV[:, self._ours :] = -math.inf
        best = x_NV.max(-1)
        top_N = self._shards.reduce(best.values.clone(), "max")
        p_NV = (x_NV - top_N[:, None]).exp()
        sums_NB = self._shards.reduce(self._block_sums(p_NV))
        total_N = sums_NB.sum(-1)
        noise = torch.from_numpy(exponentials(choice.keys, sums_NB.shape[1] + BLOCK)).to(p_NV.device)
        block_N = (sums_NB / noise[:, : sums_NB.shape[1]]).argmax(-1)
        inside_NS = self._shards.reduce(self._of_block(p_NV, block_N))
        won_N = (inside_NS / noise[:, sums_NB.shape[1] :]).argmax(-1)
        tokens_N, p_N = block_N * BLOCK + won_N, inside_NS.gather(1, won_N[:, None])[:, 0]
        greedy_N = temperature_N == 0
        if bool(greedy_N.any()):
            never = torch.iinfo(torch.int64).max
            id_N = torch.where(best.values == top_N, best.indices + self._start, never)
            likeliest_N = self._shards.reduce(id_N, "min")
            tokens_N = torch.where(greedy_N, likeliest_N, tokens_N)
            p_N = torch.where(greedy_N, 1.0, p_N)
        return tokens_N.tolist(), (p_N.log() - total_N.log()).tolist()

    def _block_sums(self, p_NV: Tensor) -> Tensor:
        """The sums of all blocks, [N, B], as far as this rank's ids are in them."""
        first, lead = divmod(self._start, BLOCK)
        own_NB = F.pad(p_NV, (lead, -(lead + self._size) % BLOCK)).view(len(p_NV), -1, BLOCK).sum(-1)
        sums_NB = p_NV.new_zeros(len(p_NV), -(-self._padded // BLOCK))
        count = min(own_NB.shape[1], max(sums_NB.shape[1] - first, 0))  # later ones are only padding
        sums_NB[:, first : first + count] = own_NB[:, :count]
        return sums_NB

    def _of_block(self, p_NV: Tensor, block_N: Tensor) -> Tensor:
        """What this rank has of one block of each row: [N, S]."""
        at_NS = block_N[:, None] * BLOCK + torch.arange(BLOCK, device=p_NV.device) - self._start
        ours_NS = (at_NS >= 0) & (at_NS < self._size)
        return torch.where(ours_NS, p_NV.gather(1, at_NS.clamp(0, self._size - 1)), 0.0)
