"""The fake engine's sampler: token by token on the event loop, yielding to other tasks after each."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import numpy as np

from tinkex.engine.fake.bigram import BASE, EOS, VOCAB, FakeAdapter, FakeExport, Head, log_softmax
from tinkex.engine.fake.trainer import FakeTrainer
from tinkex.engine.grammar import Grammars, GrammarState
from tinkex.engine.logit_rules import LogitRules
from tinkex.engine.protocol import ExportedAdapter, Location, SampledTokens, SampleWork
from tinkex.engine.request import PromptScores, Sample, Stops, check_work, padded_top, seed_of, user_error
from tinkex.engine.rng import exponentials, stream_key
from tinkex.engine.token_bytes import TokenTable
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import SamplingParams

_BASE, _ENDS = Head(BASE), (EOS,)


@dataclass(frozen=True)
class _ArrayRows:
    """`tinkex.engine.request.Rows` over an array."""

    logprobs_NV: np.ndarray

    def pick(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self.logprobs_NV[rows, tokens].astype(np.float32)

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.argsort(-self.logprobs_NV, axis=1, kind="stable")[:, :k]
        return padded_top(ids, np.take_along_axis(self.logprobs_NV, ids, 1), k)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return np.argmax(np.exp(self.logprobs_NV) / exponentials(keys, VOCAB), axis=1)


@dataclass(eq=False)
class _PublishedHead:
    """An adapter that requests can name."""

    head: Head
    users: int = 0
    idle: asyncio.Event | None = None  # awaited by `retire`: set once no request uses it


class _FakeRequest:
    """One `SampleWork` under way; `advance` draws one token for each of its samples."""

    def __init__(
        self,
        work: SampleWork,
        head: Head,
        most: int,
        token_bytes: Sequence[bytes],
        grammar: GrammarState | None,
    ) -> None:
        self._work, self._head, self._most = work, head, most
        self._seed, self._stops = seed_of(work), Stops(work, _ENDS, token_bytes)
        self._scores = PromptScores(work, self._seed) if PromptScores.asked(work) else None
        if self._scores and (wanted := len(work.prompt) - self._scores.next):
            rows_NV = head.logprobs(work.prompt[self._scores.next - 1 : -1])
            self._scores.add(_ArrayRows(rows_NV), wanted)
        self._position = len(work.prompt)
        self.samples = [Sample(work.first_sample + i) for i in range(work.num_samples)]
        self.going = self.samples
        self._rules = LogitRules(work, self._stops.ids) if LogitRules.asked(work) else None
        self._grammars = None if grammar is None else [grammar, *(grammar.fork() for _ in self.samples[1:])]

    def advance(self) -> list[Sample]:
        """Draw a token for each unfinished sample; returns those samples."""
        drawing, work, changed = self.going, self._work, None
        for sample in drawing:
            last = sample.tokens[-1] if sample.tokens else work.prompt.item(-1)
            key = stream_key(self._seed, sample.index, self._position)
            grammar = None if self._grammars is None else self._grammars[sample.index - work.first_sample]
            if self._rules is not None or grammar is not None:
                changed = self._changed(sample, last, grammar)
            token, logprob = _draw(work, sample, last, self._head, key, changed)
            sample.append(token, logprob, self._stops, self._most)
            if grammar is not None:
                grammar.consume(token)
        self._position += 1
        self.going = [sample for sample in drawing if sample.reason is None]
        return drawing

    def _changed(self, sample: Sample, last: int, grammar: GrammarState | None) -> np.ndarray:
        """[V]: the logits to draw from, as the rules and the grammar change them."""
        logits_V = self._head.logits(np.array([last]))[0]
        if self._rules is not None:
            edit = self._rules.edit(sample.tokens)
            logits_V[edit.ids] = edit.apply(logits_V[edit.ids])
        if grammar is not None:
            allowed = np.unpackbits(grammar.mask(), bitorder="little")[:VOCAB]
            logits_V[allowed == 0] = -np.inf
        return logits_V

    def response(self) -> SampleResponse:
        sequences = [sample.finished(self._stops) for sample in self.samples]
        return SampleResponse(sequences) if self._scores is None else self._scores.response(sequences)


class FakeSampler:
    """Any number of requests, each a coroutine."""

    def __init__(self, trainer: FakeTrainer, table: TokenTable, grammars: Grammars) -> None:
        self._trainer, self._table, self._grammars = trainer, table, grammars
        self._base = _PublishedHead(_BASE)
        self.published: dict[str, _PublishedHead] = {}
        self._requests: set[_FakeRequest] = set()

    async def sample(self, work: SampleWork) -> SampleResponse:
        table = await self._table.of(work) if work.stop_bytes else ()
        grammar = await self._grammars.of(work) if work.params.grammar is not None else None
        request, published = self._admit(work, table, grammar)
        try:
            request.advance()
            while request.going:
                await self._turn()
                request.advance()
            return request.response()
        finally:
            self._leave(request, published)

    async def stream(self, work: SampleWork) -> AsyncGenerator[SampledTokens | SampleResponse, None]:
        request, published = self._admit(work, await self._table.of(work), await self._grammars.of(work))
        try:
            while request.going:
                for sample in request.advance():
                    yield sample.piece()
                await self._turn()
            yield request.response()
        finally:
            self._leave(request, published)

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        self._trainer.check_open()

    def _admit(
        self, work: SampleWork, table: Sequence[bytes], grammar: GrammarState | None
    ) -> tuple[_FakeRequest, _PublishedHead]:
        self._trainer.check_open()
        most = check_work(work, VOCAB, VOCAB, self._trainer.context)
        published = self._base if work.adapter is None else self.published.get(work.adapter)
        if published is None:
            raise user_error(f"there is no published adapter {work.adapter!r}")
        request = _FakeRequest(work, published.head, most, table, grammar)
        self._requests.add(request)
        published.users += 1
        return request, published

    def _leave(self, request: _FakeRequest, published: _PublishedHead) -> None:
        self._requests.remove(request)
        published.users -= 1
        if published.idle is not None and not published.users:
            published.idle.set()

    async def publish(self, name: str, source: Location | ExportedAdapter) -> None:
        self._trainer.check_open()
        if name not in self.published:
            self.published[name] = _PublishedHead(Head(self._adapter(source).matrix()))

    def _adapter(self, source: Location | ExportedAdapter) -> FakeAdapter:
        if not isinstance(source, FakeExport):
            assert isinstance(source, str), f"{type(source).__name__} is of another kind of engine"
            return self._trainer.load(source)
        if source.model != self._trainer.model:
            raise user_error(f"the adapter is for base model {source.model!r}, not {self._trainer.model!r}")
        adapter = FakeAdapter(source.lora)
        adapter.params = source.params
        return adapter

    async def retire(self, name: str) -> None:
        published = self.published.pop(name, None)
        if published and published.users:
            published.idle = asyncio.Event()
            await published.idle.wait()

    def running(self) -> list[Sample]:
        return [sample for request in list(self._requests) for sample in request.going]


def _draw(
    work: SampleWork, sample: Sample, last: int, head: Head, key: int, changed_V: np.ndarray | None
) -> tuple[int, float]:
    """A token, drawn from the `changed_V` logits if there are such, and its logprob by the unchanged ones."""
    params = work.params
    logprobs_V, totals = head.after(last)
    if params.temperature not in (0.0, 1.0):
        logprobs_V = log_softmax(logprobs_V / params.temperature)
        totals = np.exp(logprobs_V).cumsum()
    drawn_V = logprobs_V if changed_V is None else log_softmax(changed_V / (params.temperature or 1.0))
    if changed_V is not None or params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        totals = _cut(np.exp(drawn_V), params).cumsum()
    if params.temperature > 0:
        share = ((key >> 11) + 1) * 2.0**-53  # in (0, 1]: a token that was cut is never drawn
        token = bisect_left(totals, share * totals[-1])
    else:
        token = int(drawn_V.argmax())
    if work.topk_sample_logprobs:
        ids, values = _ArrayRows(logprobs_V[None]).top(work.topk_sample_logprobs)
        sample.top.append((ids[0], values[0]))
    return token, logprobs_V.item(token)


def _cut(p_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """`p_V` with 0 for the ids that top-k, top-p and min-p remove."""
    order = np.argsort(-p_V, kind="stable")
    if params.top_k > 0:
        p_V[order[params.top_k :]] = 0
    if params.top_p < 1:
        ranked = p_V[order] / p_V.sum()
        p_V[order[1:][(ranked.cumsum() - ranked)[1:] >= params.top_p]] = 0
    p_V[p_V < params.min_p * p_V.max()] = 0
    return p_V
