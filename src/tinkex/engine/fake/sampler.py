"""The fake engine's sampler: token by token on the event loop, giving way to others after each."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinkex.engine.fake.files import FakeExport, load
from tinkex.engine.fake.model import BASE, EOS, VOCAB, Adapter, Head, log_softmax
from tinkex.engine.fake.trainer import FakeTrainer
from tinkex.engine.protocol import ExportedAdapter, Location, SampledTokens, SampleWork
from tinkex.engine.request import PromptScores, Stops, check_work, needs_token_bytes, seed_of, user_error
from tinkex.engine.rng import exponentials, stream_key
from tinkex.engine.token_bytes import TokenTable
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
    """An adapter that requests can name, and the requests that use it."""

    head: Head
    requests: list[_Request] = field(default_factory=list)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class _Request:
    """One `SampleWork` on its way; `advance` draws one token for each of its samples."""

    def __init__(self, work: SampleWork, head: Head, most: int, token_bytes: Sequence[bytes]) -> None:
        self._work, self._head, self._most = work, head, most
        self._seed, self._stops = seed_of(work), Stops(work, (EOS,), token_bytes)
        self._scores = _score(work, head, self._seed) if PromptScores.asked(work) else None
        self.samples = [_Sample(int(work.prompt[-1])) for _ in range(work.num_samples)]
        self._left, self._position = len(self.samples), len(work.prompt)

    def advance(self) -> bool:
        """Whether any sample goes on."""
        for index, sample in enumerate(self.samples):
            if sample.reason is None:
                _advance(self._work, sample, self._head, stream_key(self._seed, index, self._position))
                stopped, sample.tail = self._stops.after(sample.tail, sample.last)
                full = len(sample.tokens) == self._most
                sample.reason = "stop" if stopped else "length" if full else None
                self._left -= sample.reason is not None
                if self._work.on_tokens:
                    piece = _piece(index, sample)
                    self._work.on_tokens(index, piece.tokens, piece.logprobs)
        self._position += 1
        return self._left > 0

    def response(self) -> SampleResponse:
        sequences = [_sampled(sample, self._stops) for sample in self.samples]
        if self._scores is None:
            return SampleResponse(sequences)
        return SampleResponse(
            sequences,
            prompt_logprobs_np=self._scores.prompt_logprobs,
            topk_prompt_logprobs_np=self._scores.topk,
            target_prompt_logprobs=self._scores.targets,
            prompt_alt_tokens=self._scores.alts,
        )


class FakeSampler:
    """Any number of requests, each a coroutine."""

    def __init__(self, trainer: FakeTrainer, table: TokenTable) -> None:
        self._trainer, self._table = trainer, table
        self._base = _Published(_BASE)
        self.published: dict[str, _Published] = {}
        self._retiring: list[_Published] = []

    async def sample(self, work: SampleWork) -> SampleResponse:
        table = await self._table.get() if needs_token_bytes(work) else ()
        with self._admitted(work, table) as request:
            while request.advance():
                await self._turn()
            return request.response()

    async def stream(self, work: SampleWork) -> AsyncIterator[SampledTokens | SampleResponse]:
        table = await self._table.get() if needs_token_bytes(work) else ()
        with self._admitted(work, table) as request:
            more = True
            while more:
                drawing = [(i, sample) for i, sample in enumerate(request.samples) if not sample.reason]
                more = request.advance()
                for index, sample in drawing:
                    yield _piece(index, sample)
                await self._turn()
            yield request.response()

    async def _turn(self) -> None:
        """Let others run."""
        await asyncio.sleep(0)
        self._trainer.check_open()

    @contextlib.contextmanager
    def _admitted(self, work: SampleWork, table: Sequence[bytes]) -> Iterator[_Request]:
        self._trainer.check_open()
        most = check_work(work, VOCAB, self._trainer.context)
        if work.adapter is not None and work.adapter not in self.published:
            raise user_error(f"there is no published adapter {work.adapter!r}")
        published = self.published[work.adapter] if work.adapter is not None else self._base
        request = _Request(work, published.head, most, table)
        published.requests.append(request)
        try:
            yield request
        finally:
            published.requests.remove(request)
            if not published.requests:
                published.idle.set()

    async def publish(self, name: str, source: Location | ExportedAdapter) -> None:
        self._trainer.check_open()
        if name not in self.published:
            self.published[name] = _Published(Head(self._adapter(source).matrix()))

    def _adapter(self, source: Location | ExportedAdapter) -> Adapter:
        if not isinstance(source, FakeExport):
            assert isinstance(source, str), f"{type(source).__name__} is of another kind of engine"
            return load(source, self._trainer.model, optimizer=False)
        if source.model != self._trainer.model:
            raise user_error(f"the adapter is for base model {source.model!r}, not {self._trainer.model!r}")
        adapter = Adapter(source.lora)
        adapter.params = source.params
        return adapter

    async def retire(self, name: str) -> None:
        published = self.published.pop(name, None)
        if published and published.requests:
            published.idle.clear()
            self._retiring.append(published)
            await published.idle.wait()
            self._retiring.remove(published)

    def running(self) -> Iterator[_Sample]:
        everything = (self._base, *self.published.values(), *self._retiring)
        return (s for published in everything for r in published.requests for s in r.samples if not s.reason)


def _piece(index: int, sample: _Sample) -> SampledTokens:
    """The token drawn last."""
    return SampledTokens(
        index, np.array(sample.tokens[-1:], np.int32), np.array(sample.logprobs[-1:], np.float32)
    )


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
