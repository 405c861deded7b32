"""Continuous batching: every step advances all running sequences by the tokens they still lack.

A sequence knows its tokens and how many of them the cache holds. One that lacks a single token is decoding,
one that lacks more is being prefilled (or recomputed after it lost its pages): the same code does both, in
one pass of the decoder, for any mix of adapters. Promises: pages are returned the moment a request ends,
however it ends; a step that fails fails the requests it touched and no others; running out of pages delays
requests and never fails them. Runs on one thread; knows nothing of event loops, training or files.

Shapes: T tokens of a step, D width, N rows whose logits are needed, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.native.step import CompiledStep, Row
from tinkex.engine.protocol import EngineError, SampleWork
from tinkex.engine.request import PromptScores, Stops, check_work, seed_of, user_error
from tinkex.engine.torch.drawing import TorchRows, draw_next, lora_of
from tinkex.engine.torch.engine_thread import settle
from tinkex.engine.torch.kv import PAGE, KVCache, Piece, chain
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.sequences import Listener, Published, Request, Sequence, response
from tinkex.engine.torch.upload import to_device
from tinkex.types.outputs import SampleResponse

if TYPE_CHECKING:
    from tinkex.engine.cuda.decode_graphs import DecodePipeline, Landed
    from tinkex.engine.cuda.prefill_graphs import CapturedPrefill

T = TypeVar("T")
Plan = list[tuple[Sequence, int]]  # who advances by how many tokens


@dataclass(frozen=True)
class Limits:
    """How much one step may do."""

    context: int  # tokens of a sequence
    sequences: int  # running at once
    prefill_alone: int = 1024  # tokens prefilled in a step in which nothing decodes
    prefill_beside: int = 128  # and in one in which something does, so that it is not kept waiting
    logits: int = 1 << 24  # cells of logits held at once

    @property
    def tokens(self) -> int:
        """Of the largest step."""
        return max(self.prefill_alone, self.sequences + PAGE)


class Batch:
    """The requests in flight and the steps that advance them."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        limits: Limits,
        pipeline: DecodePipeline | None = None,
        compiled: CompiledStep | None = None,
        prefill: CapturedPrefill | None = None,
        probe: Callable[[], None] = lambda: None,
    ) -> None:
        """`probe`, called when a step has failed, raises if the device is lost."""
        self.decoder, self.cache, self.limits = decoder, cache, limits
        self._pipeline, self._compiled, self._prefill, self._probe = pipeline, compiled, prefill, probe
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._requests: set[Request] = set()
        self._device = decoder.unembed_weight.device
        if compiled is not None:
            compiled.attach(cache)

    # -- coming and going ------------------------------------------------------------------------------

    def check_work(self, work: SampleWork) -> int:
        """How many tokens each sample may have; raises EngineError if the request can never be served."""
        max_tokens = check_work(work, self.decoder.config.vocab_size, self.limits.context)
        held = self.cache.pages.count * PAGE
        if work.params.max_tokens is None:
            max_tokens = max(1, min(max_tokens, held + 1 - len(work.prompt)))
        if len(work.prompt) + max_tokens - 1 > held:
            raise user_error(
                f"the KV cache holds {held} tokens and this request may need "
                f"{len(work.prompt)} + {max_tokens - 1}; ask for less or give the engine more memory"
            )
        return max_tokens

    def submit(
        self,
        work: SampleWork,
        max_tokens: int,
        published: Published | None,
        future: Future[SampleResponse],
        token_bytes: Seq[bytes] = (),
        listener: Listener | None = None,
    ) -> Request:
        """Queue a request that `check_work` let pass. `listener` is called with each token drawn."""
        seed = seed_of(work)
        stops = Stops(work, self.decoder.config.eos_ids, token_bytes)
        scores = PromptScores(work, seed)
        request = Request(
            work, future, published, max_tokens, seed, stops, scores, listener or work.on_tokens
        )
        request.sequences = [Sequence(request, i) for i in range(work.num_samples)]
        request.unborn = request.sequences[1:]
        request.ahead = self._pipeline is not None and self._pipeline.serves(request)
        if published:
            published.users += 1
        self._requests.add(request)
        self.waiting.append(request.sequences[0])
        return request

    def cancel(self, request: Request) -> None:
        """Drop a request; its pages are free when this returns. One that has ended is left alone."""
        if request in self._requests:
            self._end(request)

    def fail_all(self, error: EngineError) -> None:
        for request in list(self._requests):
            self._fail(request, error)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self) -> None:
        """Assert that pages are held by running sequences and by nobody else."""
        assert not any(s.pages for r in self._requests for s in r.sequences if s not in self.running)
        self.cache.pages.check(s.pages for s in self.running)

    # -- the step --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Advance everything that runs, by one token or by a chunk of prompt."""
        if self._pipeline is not None and self._step_ahead(self._pipeline):
            return
        self._admit()
        plan = self._plan()
        if not plan:
            return
        # what decodes is one call of compiled code where there is any, whatever is prefilled beside it
        decoding: Plan = []
        rest: Plan = []
        for sequence, count in plan:
            lacks_one = sequence.length - sequence.computed == 1
            steps = self._compiled is not None and lacks_one and bool(sequence.out)
            (decoding if steps else rest).append((sequence, count))
        for part, advance in ((decoding, self._advance_compiled), (rest, self._advance)):
            part = [(s, count) for s, count in part if s.pages]  # a request may have failed in the first part
            try:
                if part:
                    advance(part)
            except Exception as error:
                self._fail_step((sequence for sequence, _ in part), error)
        self._finish()

    def _advance(self, plan: Plan) -> None:
        h_TD = self._forward(plan)
        self._score(plan, h_TD)
        self._draw(plan, h_TD)

    @torch.inference_mode()
    def _advance_compiled(self, plan: Plan) -> None:
        """Sequences that lack the one token that was drawn last: nothing to score, nothing to fork."""
        assert self._compiled is not None
        for part in self._bounded([sequence for sequence, _ in plan]):
            part = [s for s in part if s.pages]  # those that did not fail with another sample of theirs
            if not part:
                continue
            logits_NV = self._compiled([Row(s.last, s.computed, s.pages, s.request.adapter) for s in part])
            for sequence in part:
                sequence.computed += 1
                self._remember(sequence, 1)
            self._draw_rows(part, logits_NV)

    def _bounded(self, rows: list[T]) -> Iterator[list[T]]:
        """`rows` in parts whose logits may be held at once."""
        return (rows[i : i + self._at_once] for i in range(0, len(rows), self._at_once))

    @property
    def _at_once(self) -> int:
        """How many rows of logits may be held."""
        return max(1, self.limits.logits // self.decoder.config.padded_vocab)

    def _fail_step(self, sequences: Iterable[Sequence], error: Exception) -> None:
        failure = EngineError(f"a decoding step failed: {type(error).__name__}: {error}")
        for request in {sequence.request for sequence in sequences} & self._requests:
            self._fail(request, failure)
        self._probe()

    def _step_ahead(self, pipeline: DecodePipeline) -> bool:
        """Let the device decode one step ahead of us, if there is nothing else to do; True if that was all.

        Whatever else there is to do finds nothing in flight.
        """
        try:
            if self.waiting and len(self.running) < self.limits.sequences:
                self._land(pipeline.land())
                self._admit()
            if not all(s.length - s.computed == 1 and s.request.ahead for s in self.running):
                self._land(pipeline.land())
                return False
            going = [s for s in self.running if len(s.out) + s.flying < s.request.max_tokens]
            if going and not all(self._has_page_ahead(s) for s in going):
                self._land(pipeline.land())
                return False
            self._land(pipeline.step(going) if going else pipeline.land())
        except Exception as error:
            pipeline.drop()
            self._fail_step(self.running, error)
        return True

    def _has_page_ahead(self, sequence: Sequence) -> bool:
        """Make sure of the page that the next launched token needs; False if none is free."""
        if len(sequence.pages) * PAGE <= sequence.computed + sequence.flying:
            sequence.pages += self.cache.take(1) or []
        return len(sequence.pages) * PAGE > sequence.computed + sequence.flying

    def _land(self, landed: Landed) -> None:
        """Take in what the device has drawn; what belongs to sequences that ended meanwhile is dropped."""
        for sequence, token, logprob in landed:
            if sequence.pages and not sequence.reason:
                sequence.computed += 1
                self._remember(sequence, 1)
                self._append(sequence, token, logprob)
        self._finish()

    def _admit(self) -> None:
        """Start waiting sequences, first come first served, while there are places and pages."""
        pages = self.cache.pages
        backlog = sum(s.length - s.computed - 1 for s in self.running)  # beyond the one that decoding lacks
        while self.waiting and len(self.running) < self.limits.sequences:
            sequence = self.waiting[0]
            if backlog >= self.limits.prefill_alone:
                return  # it could not start now, and later it may find more of its prompt computed
            reusable = (self._first_needed(sequence) - 1) // PAGE
            found = pages.find(self._links(sequence, sequence.length)[:reusable])
            fresh = -(-sequence.length // PAGE) - len(found)
            spare = -(-len(self.running) // PAGE)  # what those that run will soon ask for
            if pages.available < fresh + spare:
                pages.release(found)
                return
            self.waiting.popleft()
            sequence.pages = found + (self.cache.take(fresh) or [])
            sequence.computed = len(found) * PAGE
            if sequence.index == 0 and not sequence.out:
                sequence.request.cache_hits = sequence.computed
            self.running.append(sequence)
            backlog += sequence.length - sequence.computed - 1

    def _first_needed(self, sequence: Sequence) -> int:
        """The first position whose score is still wanted; logits before it need not be computed again."""
        wanted = sequence.request.scores.next
        scoring = sequence.index == 0 and wanted < len(sequence.request.work.prompt)
        return wanted if scoring else sequence.length

    def _plan(self) -> Plan:
        """Who advances by how many tokens: whatever decodes by one, prompts as far as the budget goes."""
        for sequence in list(self.running):
            if sequence.pages:  # it may just have been preempted
                self._grow(sequence)
        lacking = [(s, s.length - s.computed) for s in self.running]
        decoding = sum(count == 1 for _, count in lacking)
        budget = self.limits.prefill_alone
        if (
            decoding
        ):  # in all no more than in a step without: graphs are captured for sizes, and that one recurs
            budget = min(self.limits.prefill_beside, max(PAGE, budget - decoding))
        plan = []
        for sequence, count in lacking:
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                plan.append((sequence, count))
        return sorted(plan, key=lambda item: item[0].request.root)  # neighbours share an adapter

    def _grow(self, sequence: Sequence) -> None:
        """Give a sequence the page that its next token needs, taken from the youngest if none is left."""
        while len(sequence.pages) * PAGE < sequence.length:
            page = self.cache.take(1)
            if page:
                sequence.pages += page
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages and let it wait, first in line; what they held is computed anew."""
        self.preemptions += 1
        self._stop_running(sequence)
        self.waiting.appendleft(sequence)

    @torch.inference_mode()
    def _forward(self, plan: Plan) -> Tensor:
        """Compute the planned tokens: their final hidden states."""
        pieces = [Piece(s.pages, s.computed, count) for s, count in plan]
        tokens = np.concatenate([s.tokens(s.computed, s.computed + count) for s, count in plan])
        backend = self.decoder.backend
        lora = lora_of(backend, [sequence for sequence, _ in plan], [count for _, count in plan])
        h_TD = self._prefill(tokens, pieces, lora) if self._prefill is not None else None
        if h_TD is None:
            positions = np.concatenate([np.arange(p.start, p.start + p.new) for p in pieces])
            windows = self.decoder.config.windows
            min_split_keys = 0 if self._prefill is None else self._prefill.min_split_keys
            h_TD = self.decoder(
                to_device(tokens.astype(np.int64), self._device),
                to_device(positions, self._device),
                backend.paged_attend(self.cache, pieces, windows, min_split_keys),
                lora,
            )
        for sequence, count in plan:
            sequence.computed += count
            self._remember(sequence, count)
        return h_TD

    def _remember(self, sequence: Sequence, count: int) -> None:
        """Make the pages that just became full findable."""
        first, full = (sequence.computed - count) // PAGE, sequence.computed // PAGE
        if first < full:
            links = self._links(sequence, full * PAGE)
            for page in range(first, full):
                self.cache.pages.remember(sequence.pages[page], links[page])

    def _links(self, sequence: Sequence, stop: int) -> list[bytes]:
        """The digests of a sequence's full pages, those before position `stop` included."""
        fresh = sequence.tokens(len(sequence.links) * PAGE, stop)
        return chain(sequence.request.root, fresh, sequence.links)

    # -- logits ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _score(self, plan: Plan, h_TD: Tensor) -> None:
        """Feed the prompts' logprobs to those who asked for them, a bounded number of rows at a time."""
        end = 0
        for sequence, count in plan:
            start, end = end, end + count
            scores, prompt = sequence.request.scores, len(sequence.request.work.prompt)
            if sequence.index != 0:
                continue
            offset = sequence.computed - count  # row `start` has this position and scores the next one
            stop = min(prompt, sequence.computed + 1)
            while scores.next < stop:
                rows = min(self._at_once, stop - scores.next)
                first = start + scores.next - 1 - offset
                h_ND = h_TD[first : first + rows]
                backend, vocab = self.decoder.backend, self.decoder.config.vocab_size
                logits_NV = self.decoder.logits(h_ND, lora_of(backend, [sequence], [rows]))
                scores.add(TorchRows(logits_NV, vocab, backend), rows)

    @torch.inference_mode()
    def _draw(self, plan: Plan, h_TD: Tensor) -> None:
        """Draw the next token of every sequence that lacks none, newly forked samples included."""
        ready: list[tuple[Sequence, int]] = []
        row = -1
        for sequence, count in plan:
            row += count
            if sequence.computed == sequence.length:
                ready += [(sequence, row), *((fork, row) for fork in self._fork(sequence))]
        for part in self._bounded(ready):
            rows, first, inverse = np.unique([row for _, row in part], return_index=True, return_inverse=True)
            lora = lora_of(self.decoder.backend, [part[i][0] for i in first], [1] * len(rows))
            logits_NV = self.decoder.logits(h_TD[to_device(rows, self._device)], lora)
            if len(rows) < len(part):
                logits_NV = logits_NV[to_device(inverse, self._device)]
            self._draw_rows([s for s, _ in part], logits_NV)

    def _draw_rows(self, sequences: list[Sequence], logits_NV: Tensor) -> None:
        vocab, backend = self.decoder.config.vocab_size, self.decoder.backend
        drawn = draw_next(sequences, logits_NV, vocab, backend, self._compiled)
        for sequence, token, logprob, top in drawn:
            if top is not None:
                sequence.top.append(top)
            self._append(sequence, token, logprob)

    def _fork(self, first: Sequence) -> Iterator[Sequence]:
        """Start the other samples of a prompt that was just computed.

        Those for which there is no place or page now wait like any sequence, and will find its pages cached.
        """
        unborn, first.request.unborn = first.request.unborn, []
        for i, sequence in enumerate(unborn):
            if not self._share_prompt(first, sequence):
                self.waiting.extendleft(reversed(unborn[i:]))
                return
            self.running.append(sequence)
            yield sequence

    def _share_prompt(self, first: Sequence, sequence: Sequence) -> bool:
        """Share the prompt's full pages; copy the last one if more is to be written into it."""
        pages, full = self.cache.pages, first.computed // PAGE
        partial = len(first.pages) - full
        if len(self.running) >= self.limits.sequences or pages.available < partial:
            return False
        copies = self.cache.take(partial) or []
        for source, target in zip(first.pages[full:], copies, strict=True):
            self.cache.copy_page(source, target)
        pages.share(first.pages[:full])
        sequence.pages, sequence.computed = first.pages[:full] + copies, first.computed
        sequence.links = first.links[:full]
        return True

    # -- ending ----------------------------------------------------------------------------------------

    def _append(self, sequence: Sequence, token: int, logprob: float) -> None:
        """One more token; decides whether it was the last, and tells whoever listens."""
        request = sequence.request
        if request not in self._requests:  # failed a moment ago, by another of its samples
            return
        if not math.isfinite(logprob):
            return self._fail(request, EngineError("the model's logits are not finite"))
        sequence.out.append(token)
        sequence.logprobs.append(logprob)
        stopped, sequence.tail = request.stops.after(sequence.tail, token)
        if stopped:
            sequence.reason = "stop"
        elif len(sequence.out) == request.max_tokens:
            sequence.reason = "length"
        if request.listener:
            try:
                request.listener(sequence.index, np.array([token], np.int32), np.array([logprob], np.float32))
            except Exception as error:
                self._fail(request, EngineError(f"streaming failed: {type(error).__name__}: {error}"))

    def _finish(self) -> None:
        """Free the sequences that ended, and answer the requests whose last one did."""
        ended = [s for s in self.running if s.reason]
        for sequence in ended:
            self._stop_running(sequence)
        for request in dict.fromkeys(s.request for s in ended):
            if request in self._requests and all(s.reason for s in request.sequences):
                self._end(request)
                settle(request.future, response(request))

    def _fail(self, request: Request, error: EngineError) -> None:
        self._end(request)
        settle(request.future, copy.copy(error))  # each its own traceback

    def _end(self, request: Request) -> None:
        """Forget a request and free all it holds."""
        self._requests.discard(request)
        for sequence in request.sequences:
            if sequence.pages:
                self._stop_running(sequence)
        self.waiting = deque(s for s in self.waiting if s.request is not request)
        if request.published:
            request.published.users -= 1
            request.published.settle()

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.pages.release(sequence.pages)
        sequence.pages, sequence.computed = [], 0
