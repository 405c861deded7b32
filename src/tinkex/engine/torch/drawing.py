"""From a step's logits to what its sequences asked for: their next tokens, and their prompts' scores.

Knows sequences and what they want drawn; nothing of steps, pages or of how logits are made.

Shapes: N rows, one for each sequence, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.streams import stream_key
from tinkex.engine.torch import kernels
from tinkex.engine.torch.compiled.step import CompiledStep
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.sample import Choice, draw, likeliest, race, scaled_logprobs
from tinkex.engine.torch.sequences import Sequence

Top = tuple[np.ndarray, np.ndarray]  # ids and logprobs of likely tokens


def lora_of(sequences: Several[Sequence], counts: Several[int]) -> LoraBatch | None:
    """The adapters of some sequences' tokens; None if all are the base model's."""
    adapters = [s.request.adapter for s in sequences]
    return LoraBatch(adapters, counts) if any(adapters) else None


def draw_next(
    sequences: Several[Sequence], logits_NV: Tensor, vocab: int, compiled: CompiledStep | None = None
) -> Iterator[tuple[Sequence, int, float, Top | None]]:
    """Each sequence's next token and its logprob, with the likeliest ones where they were asked for."""
    plainly = all(s.request.draws_plainly for s in sequences)
    if plainly and compiled is not None:
        temperature = np.array([s.request.work.params.temperature for s in sequences], np.float32)
        for drawn in zip(sequences, *compiled.draw(logits_NV, temperature, _keys(sequences)), strict=True):
            yield *drawn, None
        return
    choice = _choice(sequences, logits_NV.device)
    if plainly and kernels.usable(logits_NV):
        for drawn in zip(sequences, *_draw_by_kernel(logits_NV, choice, vocab), strict=True):
            yield *drawn, None
        return
    logprobs_NV = scaled_logprobs(logits_NV, choice.temperature)
    tokens_N = draw(logprobs_NV, choice, vocab)
    chosen = logprobs_NV.gather(1, tokens_N[:, None])[:, 0].tolist()
    most = max(s.request.work.topk_sample_logprobs for s in sequences)
    ids, logprobs = likeliest(logprobs_NV, most, vocab) if most else (None, None)
    for i, (sequence, token) in enumerate(zip(sequences, tokens_N.tolist(), strict=True)):
        k = sequence.request.work.topk_sample_logprobs
        top = (ids[i, :k], logprobs[i, :k]) if k and ids is not None and logprobs is not None else None
        yield sequence, token, chosen[i], top


def _keys(sequences: Several[Sequence]) -> np.ndarray:
    return np.array([stream_key(s.request.seed, s.index, s.length) for s in sequences], np.uint64)


def _choice(sequences: Several[Sequence], device: torch.device) -> Choice:
    params = [s.request.work.params for s in sequences]
    return Choice(
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.top_k for p in params], device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        _keys(sequences),
    )


def _draw_by_kernel(logits_NV: Tensor, choice: Choice, vocab: int) -> tuple[list[int], list[float]]:
    from tinkex.engine.torch.kernels.draw import draw

    keys_N = torch.from_numpy(choice.keys.view(np.int64)).to(logits_NV.device)
    tokens_N, chosen_N = torch.empty_like(keys_N), torch.empty_like(choice.temperature)
    draw(logits_NV, choice.temperature, keys_N, vocab, tokens_N, chosen_N)
    return tokens_N.tolist(), chosen_N.tolist()


class TorchRows:
    """`tinkex.engine.request.Rows` over logits."""

    def __init__(self, logits_NV: Tensor, vocab: int) -> None:
        self._logprobs_NV = F.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
        self._vocab = vocab

    def pick(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        device = self._logprobs_NV.device
        at = torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
        return self._logprobs_NV[at].cpu().numpy()

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        return likeliest(self._logprobs_NV, k, self._vocab)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return race(self._logprobs_NV.exp()[:, : self._vocab], keys).cpu().numpy()
