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

from tinkex.engine.native.step import CompiledStep
from tinkex.engine.rng import stream_key
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.sample import Choice, draw, likeliest, race
from tinkex.engine.torch.sequences import Sequence
from tinkex.engine.torch.upload import to_device

Top = tuple[np.ndarray, np.ndarray]  # ids and logprobs of likely tokens


Drawn = tuple[Sequence, int, float, Top | None]


def lora_of(backend: Backend, sequences: Several[Sequence], counts: Several[int]) -> LoraBatch | None:
    """The adapters of some sequences' tokens; None if all are the base model's."""
    adapters = [s.request.adapter for s in sequences]
    return backend.lora(adapters, counts) if any(adapters) else None


def draw_next(
    sequences: Several[Sequence],
    logits_NV: Tensor,
    vocab: int,
    backend: Backend,
    compiled: CompiledStep | None = None,
) -> Iterator[Drawn]:
    """Each sequence's next token and its logprob, with the likeliest ones where they were asked for."""
    if backend.invariant:
        yield from _draw_invariantly(sequences, logits_NV, vocab, backend)
        return
    plainly = all(s.request.draws_plainly for s in sequences)
    if plainly and compiled is not None:
        temperature = np.array([s.request.work.params.temperature for s in sequences], np.float32)
        for drawn in zip(sequences, *compiled.draw(logits_NV, temperature, _keys(sequences)), strict=True):
            yield *drawn, None
        return
    choice = _choice(sequences, logits_NV.device)
    if plainly:
        for drawn in zip(sequences, *backend.draw(logits_NV, choice, vocab), strict=True):
            yield *drawn, None
        return
    yield from _draw_any(sequences, backend.logprobs(logits_NV, choice.temperature), choice, vocab)


def _draw_invariantly(
    sequences: Several[Sequence], logits_NV: Tensor, vocab: int, backend: Backend
) -> Iterator[Drawn]:
    """Draw so that no sequence's result depends on another.

    What `Backend.draw` cannot draw is drawn row by row: torch's sums and ties depend on the number of rows.
    """
    plain = [i for i, s in enumerate(sequences) if s.request.draws_plainly]
    rest = [i for i, s in enumerate(sequences) if not s.request.draws_plainly]
    if plain:
        some = [sequences[i] for i in plain]
        logits = logits_NV[plain] if rest else logits_NV
        tokens, logprobs = backend.draw(logits, _choice(some, logits.device), vocab)
        for drawn in zip(some, tokens, logprobs, strict=True):
            yield *drawn, None
    choices = [_choice([sequences[i]], logits_NV.device) for i in rest]
    if rest:
        temperature = torch.cat([choice.temperature for choice in choices])
        logprobs_NV = backend.logprobs(logits_NV[rest], temperature)
        for i, row_1V, choice in zip(rest, logprobs_NV.split(1), choices, strict=True):
            yield from _draw_any([sequences[i]], row_1V, choice, vocab)


def _draw_any(
    sequences: Several[Sequence], logprobs_NV: Tensor, choice: Choice, vocab: int
) -> Iterator[Drawn]:
    """With top-k, top-p and lists of likely tokens where they were asked for."""
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
        to_device(np.array([p.temperature for p in params], np.float32), device),
        to_device(np.array([p.top_k for p in params]), device),
        to_device(np.array([p.top_p for p in params], np.float32), device),
        _keys(sequences),
    )


class TorchRows:
    """`tinkex.engine.request.Rows` over logits."""

    def __init__(self, logits_NV: Tensor, vocab: int, backend: Backend) -> None:
        self._vocab = vocab
        if backend.invariant:
            ones_N = torch.ones(len(logits_NV), device=logits_NV.device)
            self._logprobs_NV = backend.logprobs(logits_NV, ones_N)
            self._parts = self._logprobs_NV.split(1)
        else:
            self._logprobs_NV = F.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
            self._parts = (self._logprobs_NV,)

    def pick(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        device = self._logprobs_NV.device
        at = torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
        return self._logprobs_NV[at].cpu().numpy()

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids, logprobs = zip(*(likeliest(part, k, self._vocab) for part in self._parts), strict=True)
        return np.concatenate(ids), np.concatenate(logprobs)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        split = zip(self._parts, np.split(keys, len(self._parts)), strict=True)
        drawn = [race(part.exp()[:, : self._vocab], some) for part, some in split]
        return torch.cat(drawn).cpu().numpy()
