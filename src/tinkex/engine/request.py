"""The parts of a request that every sampler shares: checks, stop conditions, prompt scores, samples.

Logprobs come in through the `Rows` protocol, so there is never a table of [prompt, vocabulary]. Needs only
numpy; knows no models, queues or pages.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tinkex.engine.protocol import EngineError, SampledTokens, SampleWork
from tinkex.engine.rng import stream_keys
from tinkex.errors import InvalidInputError
from tinkex.types import outputs
from tinkex.types.chunks import EncodedTextChunk
from tinkex.types.data import ModelInput
from tinkex.types.outputs import TOPK_PADDING, SampledSequence, SampleResponse, StopDetail, TopkLogprobs
from tinkex.types.tensor import TensorData

_DRAWN = 1 << 20  # tokens drawn for one prompt: all other requests wait meanwhile
_NONE: frozenset[int] = frozenset()
_ALT_STREAMS = 1 << 32  # random streams of prompt_alt_tokens_k start here, past any sample's index


def user_error(message: str) -> EngineError:
    return EngineError(message, "user")


def token_ids(given: ModelInput, what: str) -> np.ndarray:
    """What the engine reads of an input, which `what` names. The one place that refuses images."""
    for chunk in given.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise InvalidInputError(f"{what} holds {type(chunk).__name__}; this base model reads text only")
    return given.to_numpy()


def check_work(work: SampleWork, vocab: int, padded_vocab: int, context: int) -> int:
    """Refuse a request that cannot be served; returns how many tokens may be drawn for each sample.

    A prompt may hold padding, ids from `vocab` on: they are read, and score nothing.
    """
    length = len(work.prompt)
    if length == 0:
        raise user_error("the prompt is empty; give at least one token")
    prompt = work.prompt
    unsigned = prompt.view(np.uint32)  # a negative id becomes a large one
    if unsigned.item(unsigned.argmax()) >= padded_vocab:  # `max` costs five times this
        at = int(np.argmax((prompt < 0) | (prompt >= padded_vocab)))
        raise user_error(f"prompt token {at} is {prompt[at]}; token ids must be 0..{padded_vocab - 1}")
    if work.num_samples < 1:
        raise user_error(f"num_samples must be at least 1, got {work.num_samples}")
    if min(work.topk_prompt_logprobs, work.topk_sample_logprobs, work.prompt_alt_tokens_k) < 0:
        names = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
        name = next(name for name in names if getattr(work, name) < 0)
        raise user_error(f"{name} must be at least 0, got {getattr(work, name)}")
    if work.prompt_alt_tokens_k > (most := _DRAWN // length):
        got = work.prompt_alt_tokens_k
        raise user_error(f"prompt_alt_tokens_k must be 0 to {most} for this request, got {got}")
    if work.prompt_logprobs_last_n is not None and work.prompt_logprobs_last_n < 1:
        raise user_error(f"prompt_logprobs_last_n must be at least 1, got {work.prompt_logprobs_last_n}")
    if b"" in work.stop_bytes:
        raise user_error("a stop sequence is empty; use stop=[] to never stop early")
    if work.params.logit_bias and max(work.params.logit_bias) >= vocab:
        raise user_error(f"logit_bias has token {max(work.params.logit_bias)}; ids must be 0..{vocab - 1}")
    if work.target_prompt_logprobs is not None:
        _check_targets(work.target_prompt_logprobs, length, vocab)
    max_tokens = _max_tokens(work, length, context)
    try:
        outputs.sample_bytes(
            length, max_tokens, work.num_samples, work.prompt_logprobs, work.topk_prompt_logprobs,
            work.topk_sample_logprobs, work.target_prompt_logprobs, work.prompt_alt_tokens_k,
        )  # fmt: skip
    except InvalidInputError as error:
        raise user_error(str(error)) from None
    return max_tokens


def _check_targets(targets: TensorData, length: int, vocab: int) -> None:
    shape = targets.dense_shape
    if targets.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1:
        raise user_error(
            f"target_prompt_logprobs must be int64 of shape [{length - 1}, K] for a prompt of {length} "
            f"tokens, got {targets.dtype} {list(shape)}"
        )
    values = targets.values_np
    if values.size and (values.min() < -1 or values.max() >= vocab):
        bad = values[(values < -1) | (values >= vocab)][0]
        raise user_error(f"target_prompt_logprobs has token {bad}; allowed: -1 (skip) and 0..{vocab - 1}")


def _max_tokens(work: SampleWork, length: int, context: int) -> int:
    asked = work.params.max_tokens
    count = max(1, context - length) if asked is None else asked
    # Scoring a prompt that fills the context draws one token, which needs no position of its own.
    if length + count > context and not (length == context and count == 1 and PromptScores.asked(work)):
        raise user_error(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{length} + {count} > {context}"
        )
    return count


def seed_of(work: SampleWork) -> int:
    """The request's seed as 64 bits; a random one if none was given."""
    return secrets.randbits(64) if work.params.seed is None else work.params.seed % 2**64


def padded_top(ids: np.ndarray, logprobs: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists of likely tokens padded to k entries, where the vocabulary has fewer."""
    ids, logprobs, missing = ids.astype(np.int32), logprobs.astype(np.float32), k - ids.shape[1]
    if missing:
        ids = np.pad(ids, ((0, 0), (0, missing)))
        logprobs = np.pad(logprobs, ((0, 0), (0, missing)), constant_values=TOPK_PADDING)
    return ids, logprobs


class Stops:
    """When a sequence ends early: at token ids, or where the bytes of its tokens contain a stop sequence."""

    def __init__(self, work: SampleWork, eos_ids: tuple[int, ...], token_bytes: Sequence[bytes] = ()) -> None:
        given = work.params.stop
        self._sequences, self._table = work.stop_bytes, token_bytes
        self._given = frozenset(s for s in given if isinstance(s, int)) if given else _NONE
        never = not self._sequences and given is not None and len(given) == 0
        self.ids = self._given if never or work.params.ignore_eos else self._given.union(eos_ids)
        self._from = work.params.min_tokens
        self._keep = max(map(len, self._sequences)) if self._sequences else 0
        self._at_length: StopDetail = "context" if work.params.max_tokens is None else "max_tokens"

    def after(self, tail: bytes, token: int, count: int) -> tuple[bool, bytes]:
        """Whether the sequence ends with `token`, its `count`-th; and the bytes to pass in next."""
        if count < self._from:
            return False, b""
        if token in self.ids:
            return True, tail
        if not self._sequences:
            return False, tail
        tail += self._bytes_of(token)
        return any(s in tail for s in self._sequences), tail[-self._keep :]

    def why(self, reason: outputs.StopReason, tokens: list[int]) -> tuple[StopDetail, int | str | None]:
        """More of why a sequence of these tokens ended, and the token or the text that it stopped at."""
        if reason == "length":
            return self._at_length, None
        if tokens[-1] in self.ids:
            return ("stop_sequence" if tokens[-1] in self._given else "eos"), tokens[-1]
        text = b"".join(map(self._bytes_of, tokens))
        found = [s for s in self._sequences if s in text]
        assert found, "a sequence that stopped at no token id stopped at bytes"
        first = min(found, key=lambda s: text.find(s) + len(s))
        return "stop_sequence", first.decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        return self._table[token] if token < len(self._table) else b""


class Rows(Protocol):
    """Logprobs at T = 1 of consecutive positions."""

    def pick(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The logprob of `tokens[i]` in row `rows[i]`."""
        ...

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and logprobs of each row's k likeliest tokens, likeliest first, padded with TOPK_PADDING."""
        ...

    def draw(self, keys: np.ndarray) -> np.ndarray:
        """One token per row from its distribution, by the stream of that row's key."""
        ...


class PromptScores:
    """The scores that a request asks for its prompt. Row i of a prompt's logits scores position i + 1."""

    def __init__(self, work: SampleWork, seed: int) -> None:
        prompt, length, k = work.prompt, len(work.prompt), work.topk_prompt_logprobs
        self._prompt, self._seed, self._alts, self._topk = prompt, seed, work.prompt_alt_tokens_k, k
        self._last_n_from = max(1, length - (work.prompt_logprobs_last_n or length))
        self._logprobs = np.full(length, np.nan, np.float32) if work.prompt_logprobs else None
        self._top_ids = np.zeros((length, k), np.int32)
        self._top_logprobs = np.full((length, k), TOPK_PADDING, np.float32)
        self._alt_tokens = np.zeros((length - 1, self._alts), np.int64)
        self._alt_logprobs = np.zeros((length - 1, self._alts), np.float32)
        self._set_targets(work.target_prompt_logprobs)
        self.next = self._first()  # the position to be added next

    @staticmethod
    def asked(work: SampleWork) -> bool:
        scores = work.prompt_logprobs or work.topk_prompt_logprobs or work.prompt_alt_tokens_k
        return bool(scores) or work.target_prompt_logprobs is not None

    def _first(self) -> int:
        length = len(self._prompt)
        first = self._last_n_from if self._logprobs is not None or self._topk else length
        if self._target_rows.size:
            first = min(first, int(self._target_rows[0]) + 1)
        return 1 if self._alts and length > 1 else first

    def _set_targets(self, targets: TensorData | None) -> None:
        """Targets of either layout as flat lists of (row, token) in row order."""
        self._targets = targets
        rows = values = np.empty(0, np.int64)
        if targets is not None:
            crow, (count, width) = targets.sparse_crow_np, targets.dense_shape
            rows = np.repeat(np.arange(count), width if crow is None else np.diff(crow))
            values = targets.values_np
        self._target_values = np.zeros(values.size, np.float32)
        self._target_cells = np.nonzero(values >= 0)[0]
        self._target_rows = rows[self._target_cells]
        self._target_tokens = values[self._target_cells]

    def add(self, rows: Rows, count: int) -> None:
        """Score positions `next` … `next + count - 1` from their `count` rows of logprobs, in order."""
        at, end = self.next, self.next + count
        skip = max(0, self._last_n_from - at)  # rows that only targets or alternatives need
        if self._logprobs is not None and skip < count:
            kept = np.arange(skip, count)
            picked = rows.pick(kept, self._prompt[at + skip : end].astype(np.int64))
            self._logprobs[at + skip : end] = np.where(np.isneginf(picked), np.nan, picked)  # of padding
        if self._topk and skip < count:
            ids, logprobs = rows.top(self._topk)
            self._top_ids[at + skip : end] = ids[skip:]
            self._top_logprobs[at + skip : end] = logprobs[skip:]
        low, high = np.searchsorted(self._target_rows, [at - 1, end - 1])
        if low < high:
            picked = rows.pick(self._target_rows[low:high] - (at - 1), self._target_tokens[low:high])
            self._target_values[self._target_cells[low:high]] = picked
        seeds, positions = np.full(count, self._seed, np.uint64), np.arange(at, end)
        for k in range(self._alts):
            tokens = rows.draw(stream_keys(seeds, np.full(count, _ALT_STREAMS + k), positions))
            self._alt_tokens[at - 1 : end - 1, k] = tokens
            self._alt_logprobs[at - 1 : end - 1, k] = rows.pick(np.arange(count), tokens)
        self.next = end

    def response(self, sequences: list[SampledSequence], cache_hits: int = 0) -> SampleResponse:
        """The whole answer: the samples, and what was asked about the prompt, in the layout asked for."""
        targets, given = None, self._targets
        if given is not None:
            targets = TensorData(
                self._target_values, "float32", given.dense_shape, given.sparse_crow_np, given.sparse_col_np
            )
        alts = (TensorData.from_numpy(values) for values in (self._alt_tokens, self._alt_logprobs))
        return SampleResponse(
            sequences,
            prompt_logprobs_np=self._logprobs,
            topk_prompt_logprobs_np=TopkLogprobs(self._top_ids, self._top_logprobs) if self._topk else None,
            target_prompt_logprobs=targets,
            prompt_cache_hit_tokens=cache_hits,
            prompt_alt_tokens=outputs.PromptAltTokens(*alts) if self._alts else None,
        )


@dataclass(eq=False)
class Sample:
    """One sample under way: its tokens so far, their logprobs, and why it ended, once it has."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    reason: outputs.StopReason | None = None
    _tail: bytes = b""

    def append(self, token: int, logprob: float, stops: Stops, max_tokens: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        stopped, self._tail = stops.after(self._tail, token, len(self.tokens))
        if stopped:
            self.reason = "stop"
        elif len(self.tokens) == max_tokens:
            self.reason = "length"

    def piece(self) -> SampledTokens:
        tokens, logprobs = self.tokens[-1:], self.logprobs[-1:]
        return SampledTokens(self.index, np.array(tokens, np.int32), np.array(logprobs, np.float32))

    def finished(self, stops: Stops) -> SampledSequence:
        assert self.reason
        detail, match = stops.why(self.reason, self.tokens)
        top = TopkLogprobs(*map(np.stack, zip(*self.top, strict=True))) if self.top else None
        return SampledSequence(
            self.reason,
            tokens_np=np.array(self.tokens, np.int32),
            logprobs_np=np.array(self.logprobs, np.float32),
            topk_logprobs_np=top,
            stop_detail=detail,
            stop_match=match,
        )
