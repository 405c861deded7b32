"""The fake engine's sampler: token by token on the event loop, giving way to others after each."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tinkex.engine.fake.files import load
from tinkex.engine.fake.model import BASE, EOS, VOCAB, Head, log_softmax
from tinkex.engine.fake.trainer import FakeTrainer
from tinkex.engine.protocol import EngineError, SampleWork
from tinkex.engine.request import PromptScores, Stops, check_work, seed_of, user_error
from tinkex.engine.streams import exponentials, stream_key
from tinkex.types.outputs import TOPK_PADDING, SampledSequence, SampleResponse, StopReason, TopkLogprobs
from tinkex.types.params import SamplingParams

_BASE = Head(BASE)


@dataclass(eq=False, slots=True)
class _Sample:
    """One sequence on its way."""

    last: int  # token
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    tail: bytes = b""
    reason: StopReason | None = None


class _Rows:
    """`tinkex.engine.request.Rows` over an array."""

    def __init__(self, logprobs_NV: np.ndarray) -> None:
        self._logprobs_NV = logprobs_NV

    def pick(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._logprobs_NV[rows, tokens].astype(np.float32)

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        found = np.argsort(-self._logprobs_NV, axis=1, kind="stable")[:, :k]
        ids = np.zeros((len(found), k), np.int32)
        logprobs = np.full((len(found), k), TOPK_PADDING, np.float32)
        ids[:, : found.shape[1]] = found
        logprobs[:, : found.shape[1]] = np.take_along_axis(self._logprobs_NV, found, 1)
        return ids, logprobs

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return np.argmax(np.exp(self._logprobs_NV) / exponentials(keys, VOCAB), axis=1)


@dataclass(eq=False)
class _Published:
    """An adapter that requests can name, and what they are drawing with it."""

    head: Head
    samples: list[list[_Sample]] = field(default_factory=list)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class FakeSampler:
    """Any number of requests, each a coroutine."""

    def __init__(self, trainer: FakeTrainer) -> None:
        self._trainer = trainer
        self._base: list[list[_Sample]] = []
        self.published: dict[str, _Published] = {}
        self._retiring: list[_Published] = []

    async def sample(self, work: SampleWork) -> SampleResponse:
        if self._trainer.closed:
            raise EngineError("the engine is closed")
        count = check_work(work, VOCAB, self._trainer.context)
        if work.adapter is not None and work.adapter not in self.published:
            raise user_error(f"there is no published adapter {work.adapter!r}")
        published = self.published[work.adapter] if work.adapter is not None else None
        head, seed = published.head if published else _BASE, seed_of(work)
        scores = _score(work, head, seed) if PromptScores.asked(work) else None
        last = int(work.prompt[-1])
        samples, stops = [_Sample(last) for _ in range(work.num_samples)], Stops(work, (EOS,))
        running = published.samples if published else self._base
        running.append(samples)
        try:
            await self._decode(work, samples, head, seed, count, stops)
        finally:
            running.remove(samples)
            if published and not running:
                published.idle.set()
        sequences = [_sampled(sample, stops) for sample in samples]
        if scores is None:
            return SampleResponse(sequences)
        return SampleResponse(
            sequences,
            prompt_logprobs_np=scores.prompt_logprobs,
            topk_prompt_logprobs_np=scores.topk,
            target_prompt_logprobs=scores.targets,
            prompt_alt_tokens=scores.alts,
        )

    async def _decode(
        self,
        work: SampleWork,
        samples: list[_Sample],
        head: Head,
        seed: int,
        count: int,
        stops: Stops,
    ) -> None:
        left = len(samples)
        for position in range(len(work.prompt), len(work.prompt) + count):
            for index, sample in enumerate(samples):
                if sample.reason is None:
                    _advance(work, sample, head, stream_key(seed, index, position))
                    stopped, sample.tail = stops.after(sample.tail, sample.last)
                    sample.reason = "stop" if stopped else "length" if len(sample.tokens) == count else None
                    left -= sample.reason is not None
                    if work.on_tokens:
                        new = (
                            np.array(sample.tokens[-1:], np.int32),
                            np.array(sample.logprobs[-1:], np.float32),
                        )
                        work.on_tokens(index, *new)
            if not left:
                return
            await asyncio.sleep(0)
            if self._trainer.closed:
                raise EngineError("the engine was closed")

    async def publish(self, source: str | Path, name: str) -> None:
        if name in self.published:
            return
        if isinstance(source, Path):
            adapter = load(source, self._trainer.model, optimizer=False)
        else:
            adapter = self._trainer.snapshot(source)
        self.published[name] = _Published(Head(adapter.matrix()))

    async def retire(self, name: str) -> None:
        published = self.published.pop(name, None)
        if published and published.samples:
            published.idle.clear()
            self._retiring.append(published)
            await published.idle.wait()
            self._retiring.remove(published)

    def running(self) -> Iterator[_Sample]:
        lists = [self._base, *(p.samples for p in (*self.published.values(), *self._retiring))]
        return (sample for groups in lists for group in groups for sample in group if not sample.reason)


def _score(work: SampleWork, head: Head, seed: int) -> PromptScores:
    scores = PromptScores(work, seed)
    if wanted := len(work.prompt) - scores.next:
        scores.add(_Rows(head.logprobs(work.prompt[scores.next - 1 : -1])), wanted)
    return scores


def _advance(work: SampleWork, sample: _Sample, head: Head, key: int) -> None:
    """Draw one token."""
    params = work.params
    logprobs_V, totals = head.after(sample.last)
    if params.temperature not in (0.0, 1.0):
        logprobs_V = log_softmax(logprobs_V / params.temperature)
        totals = np.exp(logprobs_V).cumsum()
    if params.top_k > 0 or params.top_p < 1:
        totals = _cut(np.exp(logprobs_V), params).cumsum()
    if params.temperature > 0:
        share = ((key >> 11) + 1) * 2.0**-53  # in (0, 1]: what was cut is never drawn
        token = bisect_left(totals, share * totals[-1])
    else:
        token = int(logprobs_V.argmax())
    sample.last = token
    sample.tokens.append(token)
    sample.logprobs.append(float(logprobs_V[token]))
    if work.topk_sample_logprobs:
        ids, values = _Rows(logprobs_V[None]).top(work.topk_sample_logprobs)
        sample.top.append((ids[0], values[0]))


def _cut(p_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What top-k and top-p leave: the others are 0."""
    order = np.argsort(-p_V, kind="stable")
    if params.top_k > 0:
        p_V[order[params.top_k :]] = 0
    if params.top_p < 1:
        ranked = p_V[order] / p_V.sum()
        p_V[order[1:][(ranked.cumsum() - ranked)[1:] >= params.top_p]] = 0
    return p_V


def _sampled(sample: _Sample, stops: Stops) -> SampledSequence:
    top = None
    if sample.top:
        ids, logprobs = (np.stack(part) for part in zip(*sample.top, strict=True))
        top = TopkLogprobs(ids, logprobs)
    assert sample.reason
    detail, match = stops.why(sample.reason, sample.tokens)
    return SampledSequence(
        sample.reason,
        tokens_np=np.array(sample.tokens, np.int32),
        logprobs_np=np.array(sample.logprobs, np.float32),
        topk_logprobs_np=top,
        stop_detail=detail,
        stop_match=match,
    )
