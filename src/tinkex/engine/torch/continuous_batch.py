"""Continuous batching: every step computes the tokens of running sequences that are not in the KV cache yet.

A sequence with one such token is decoding; one with more is in prefill, or is recomputed after preemption.
One forward pass of the decoder does both, for any mix of adapters. A request's pages are free as soon as it
ends; a failed step fails only the requests in it; running out of pages delays requests and never fails them.

Shapes: T tokens of a step, D width, N rows whose logits are needed, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.grammar import GrammarState
from tinkex.engine.logit_rules import LogitRules
from tinkex.engine.protocol import EngineError, SampleWork
from tinkex.engine.request import PromptScores, Stops, check_work, seed_of, user_error
from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.engine_thread import settle
from tinkex.engine.torch.images import PlacedImage, feature_rows, page_extras, spans_of, whole_chunk
from tinkex.engine.torch.kv import PAGE, KVCache, TokenSpan
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.next_tokens import Choice, TorchRows, draw_next
from tinkex.engine.torch.sequence_memory import SequenceMemory
from tinkex.engine.torch.sequences import (
    Landed,
    Listener,
    PublishedAdapter,
    RunningRequest,
    RunningSequence,
    Top,
)
from tinkex.engine.torch.states import StatePool
from tinkex.engine.torch.step_runner import StepRunner, StepTokens
from tinkex.types.outputs import SampleResponse

if TYPE_CHECKING:
    from tinkex.engine.native.step import CompiledStep
    from tinkex.engine.torch.backend import DecodeAhead, PrefillSteps

T = TypeVar("T")
Plan = list[tuple[RunningSequence, int]]  # sequences, and the tokens each advances by


@dataclass(frozen=True)
class StepLimits:
    """The budgets of one step."""

    context: int  # tokens of a sequence
    sequences: int  # running at once
    prefill_alone: int = 1024  # prefill tokens in a step without decoding sequences
    prefill_beside: int = 128  # prefill tokens in a step with decoding sequences; bounds their latency
    logits: int = 1 << 24  # elements of logits in memory at once

    @property
    def tokens(self) -> int:
        """Of the largest step."""
        return max(self.prefill_alone, self.sequences + PAGE)


class ContinuousBatch:
    """The requests in flight and the steps that advance them."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        limits: StepLimits,
        pipeline: DecodeAhead | None = None,
        compiled: CompiledStep | None = None,
        prefill: PrefillSteps | None = None,
        probe: Callable[[], None] = lambda: None,
        states: StatePool | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        """`probe`, called when a step has failed, raises if the device is lost. Hybrids have `states`."""
        self.decoder, self.cache, self.limits = decoder, cache, limits
        self.memory = SequenceMemory(cache, states)
        self._pipeline, self._compiled, self._probe = pipeline, compiled, probe
        self._runner = runner or StepRunner(decoder, cache, states, prefill)
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []
        self.preemptions = 0
        self._requests: set[RunningRequest] = set()
        self._device = decoder.unembed_weight.device
        self._at_once = max(1, limits.logits // decoder.config.padded_vocab)  # rows of logits

    def check_work(self, work: SampleWork) -> int:
        """How many tokens each sample may have; raises EngineError if the request can never be served."""
        shape = self.decoder.config
        max_tokens = check_work(work, shape.vocab_size, shape.padded_vocab, self.limits.context)
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
        published: PublishedAdapter | None,
        future: Future[SampleResponse],
        token_bytes: Sequence[bytes] = (),
        listener: Listener | None = None,
        images: Sequence[PlacedImage] = (),
        grammar: GrammarState | None = None,
    ) -> RunningRequest:
        """Queue a request that `check_work` let pass. `listener` is called with each token drawn.

        `images` fill positions of the prompt, whose token ids are placeholders there. `grammar` is where the
        first sample begins.
        """
        seed, stops = seed_of(work), Stops(work, self.decoder.config.eos_ids, token_bytes)
        scores = PromptScores(work, seed)
        spans = spans_of(images) if self.decoder.config.whole_images else ()
        rules = LogitRules(work, stops.ids) if LogitRules.asked(work) else None
        more = listener, rules, images, spans, page_extras(images)
        request = RunningRequest(work, future, published, max_tokens, seed, stops, scores, *more)
        for i in range(work.num_samples):
            state = grammar and (grammar.fork() if i else grammar)
            request.sequences.append(RunningSequence(work.first_sample + i, request=request, grammar=state))
        request.unforked = request.sequences[1:]
        request.ahead = self._pipeline is not None and self._pipeline.serves(request)
        if published:
            published.users += 1
        self._requests.add(request)
        self.waiting.append(request.sequences[0])
        return request

    def cancel(self, request: RunningRequest) -> None:
        """Drop a request; its pages are free when this returns. One that has ended is ignored."""
        if request in self._requests:
            self._end(request)

    def fail_all(self, error: EngineError) -> None:
        for request in list(self._requests):
            self._fail(request, error)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> None:
        """Advance every running sequence by one token, or by a chunk of its prompt."""
        if self._pipeline is not None and self._step_ahead(self._pipeline):
            return
        self._admit()
        if not (plan := self._plan()):
            return
        # Decoding sequences go through the compiled step where there is one, all others through torch.
        compiled = {s for s, _ in plan if self._compiled is not None and s.lacking == 1 and s.tokens}
        for decoding, advance in ((True, self._advance_compiled), (False, self._advance)):
            # without those whose request has failed already
            part = [(s, count) for s, count in plan if (s in compiled) == decoding and s.pages]
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
        """Decode sequences that lack the token drawn last: no prompt to score, nothing to fork."""
        assert self._compiled is not None
        for part in self._bounded([sequence for sequence, _ in plan]):
            if part := [s for s in part if s.pages]:  # without those whose request failed meanwhile
                logits_NV = self._compiled([(s.last, s.computed, s.pages, s.request.adapter) for s in part])
                for sequence in part:
                    self.memory.computed(sequence, 1)
                self._draw_rows(part, logits_NV)

    def _bounded(self, rows: list[T]) -> Iterator[list[T]]:
        return (rows[i : i + self._at_once] for i in range(0, len(rows), self._at_once))

    def _fail_step(self, sequences: Iterable[RunningSequence], error: Exception) -> None:
        failure = EngineError(f"a decoding step failed: {type(error).__name__}: {error}")
        for request in {sequence.request for sequence in sequences} & self._requests:
            self._fail(request, failure)
        self._probe()

    def _step_ahead(self, pipeline: DecodeAhead) -> bool:
        """Launch the next decode step before the last one's tokens are read; True if that was all to do.

        Anything but decoding (admission, prefill, preemption) first waits for the steps in flight.
        """
        try:
            if self.waiting and len(self.running) < self.limits.sequences:
                self._land(pipeline.land())
                self._admit()
            going = [s for s in self.running if len(s.tokens) + s.in_flight < s.request.max_tokens]
            # Without a token yet, its samples are still to be forked.
            decoding = all(s.lacking == 1 and s.tokens and s.request.ahead for s in self.running)
            has_room = (self.memory.has_room(s, s.computed + s.in_flight + 1) for s in going)
            if not decoding or not all(has_room):
                self._land(pipeline.land())
                return False
            for sequence in going:
                self.memory.copy_ahead(sequence)
            self._land(pipeline.step(going) if going else pipeline.land())
            pipeline.draw()
        except Exception as error:
            pipeline.drop()
            self._fail_step(self.running, error)
        return True

    def _land(self, landed: Landed) -> None:
        for sequence, token, logprob, top in landed:
            if sequence.pages and not sequence.reason:
                self.memory.computed(sequence, 1)
                self._append(sequence, token, logprob, top)
        self._finish()

    def _admit(self) -> None:
        """Start waiting sequences, first come first served, while slots and pages last."""
        backlog = sum(s.lacking - 1 for s in self.running)  # prefill tokens that already wait
        while self.waiting and len(self.running) < self.limits.sequences:
            sequence = self.waiting[0]
            if backlog >= self.limits.prefill_alone:
                return  # no budget for it now, and later more of its prompt may be cached
            if not self.memory.start(sequence, spare=-(-len(self.running) // PAGE)):
                return
            self.waiting.popleft()
            if sequence.index == 0 and not sequence.tokens:
                sequence.request.cache_hits = sequence.computed
            self.running.append(sequence)
            backlog += sequence.lacking - 1

    def _plan(self) -> Plan:
        """Tokens for each sequence: one if it decodes, its prompt as far as the budget goes otherwise."""
        for sequence in list(self.running):
            if sequence.pages:  # it may just have been preempted
                self._grow(sequence)
        decoding = sum(s.lacking == 1 for s in self.running)
        budget = self.limits.prefill_alone
        if decoding:
            # In all no more tokens than in a step without decoding: CUDA graphs of that size are captured.
            budget = min(self.limits.prefill_beside, max(PAGE, budget - decoding))
        plan = []
        for sequence in self.running:
            count = sequence.lacking
            if count > 1:
                count = self.memory.bounded(sequence, min(count, max(budget, 0)))
                if sequence.request.spans and count:
                    count = whole_chunk(sequence.request.spans, sequence.computed, count)
                budget -= count
            if count:
                plan.append((sequence, count))
        return sorted(plan, key=lambda item: item[0].request.root)  # sequences of one adapter side by side

    def _grow(self, sequence: RunningSequence) -> None:
        """Allocate the page that a sequence's next token needs; preempt the youngest if none is free."""
        while not self.memory.has_room(sequence, sequence.length):
            victim = self.running[-1]  # first in the queue now, and recomputed later
            self.preemptions += 1
            self._stop_running(victim)
            self.waiting.appendleft(victim)
            if victim is sequence:
                return

    @torch.inference_mode()
    def _forward(self, plan: Plan) -> Tensor:
        pieces = [TokenSpan(s.pages, s.computed, count, s.request.spans) for s, count in plan]
        tokens = np.concatenate([s.ids(s.computed, s.computed + count) for s, count in plan])
        images = feature_rows(((s.request.images, s.computed, count) for s, count in plan), self._device)
        slots = [sequence.slot for sequence, _ in plan if sequence.slot is not None]
        adapters = [sequence.request.adapter for sequence, _ in plan]
        h_TD = self._runner.forward(StepTokens(tokens, pieces, adapters, slots, images))
        for sequence, count in plan:
            self.memory.computed(sequence, count)
        return h_TD

    @torch.inference_mode()
    def _score(self, plan: Plan, h_TD: Tensor) -> None:
        """Score prompts for the requests that asked for it, a bounded number of rows at a time."""
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
                some, adapters = slice(first, first + rows), [sequence.request.adapter]
                logits_NV = self._runner.logits(h_TD, some, adapters, [rows])
                scores.add(TorchRows(logits_NV, self.decoder.config.vocab_size, self.decoder.backend), rows)

    @torch.inference_mode()
    def _draw(self, plan: Plan, h_TD: Tensor) -> None:
        """Draw the next token of every fully computed sequence, and of newly forked samples."""
        ready: list[tuple[RunningSequence, int]] = []
        row = -1
        for sequence, count in plan:
            row += count
            if sequence.computed == sequence.length:
                ready += [(sequence, row), *((fork, row) for fork in self._fork(sequence))]
        for part in self._bounded(ready):
            sequences, rows = [s for s, _ in part], np.array([row for _, row in part])
            if self._runner.draws and all(sequence.request.draws_plainly for sequence in sequences):
                adapters = [sequence.request.adapter for sequence in sequences]
                drawn = self._runner.draw(h_TD, rows, adapters, Choice.of(sequences))
                for sequence, token, logprob in zip(sequences, *drawn, strict=True):
                    self._append(sequence, token, logprob, None)
                continue
            rows, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
            adapters = [sequences[i].request.adapter for i in first]
            logits_NV = self._runner.logits(h_TD, rows, adapters, [1] * len(rows))
            if len(rows) < len(part):
                logits_NV = logits_NV[to_device(inverse, self._device)]
            self._draw_rows(sequences, logits_NV)

    def _draw_rows(self, sequences: list[RunningSequence], logits_NV: Tensor) -> None:
        vocab, backend = self.decoder.config.vocab_size, self.decoder.backend
        for drawn in draw_next(sequences, logits_NV, vocab, backend, self._compiled):
            self._append(*drawn)

    def _fork(self, first: RunningSequence) -> Iterator[RunningSequence]:
        """Start the other samples of a prompt that was just computed.

        Samples without a slot or page now wait like any sequence; they will find the prompt's pages cached.
        """
        unforked, first.request.unforked = first.request.unforked, []
        for i, sequence in enumerate(unforked):
            if len(self.running) >= self.limits.sequences or not self.memory.fork(first, sequence):
                self.waiting.extendleft(reversed(unforked[i:]))
                return
            self.running.append(sequence)
            yield sequence

    def _append(self, sequence: RunningSequence, token: int, logprob: float, top: Top | None) -> None:
        request = sequence.request
        if request not in self._requests:  # another of its samples failed it in this step
            return
        if top is not None:
            sequence.top.append(top)
        if not math.isfinite(logprob):
            return self._fail(request, request.diverged())
        sequence.append(token, logprob, request.stops, request.max_tokens)
        if sequence.grammar is not None:
            try:
                sequence.grammar.consume(token)
            except EngineError as error:
                return self._fail(request, error)
        if request.listener:
            try:
                request.listener(sequence.piece())
            except Exception as error:
                self._fail(request, EngineError(f"streaming failed: {type(error).__name__}: {error}"))

    def _finish(self) -> None:
        ended = [s for s in self.running if s.reason]
        for sequence in ended:
            self._stop_running(sequence)
        for request in dict.fromkeys(s.request for s in ended):
            if request in self._requests and all(s.reason for s in request.sequences):
                answer = request.response()
                self._end(request)
                settle(request.future, answer)

    def _fail(self, request: RunningRequest, error: EngineError) -> None:
        self._end(request)
        settle(request.future, copy.copy(error))  # each its own traceback

    def _end(self, request: RunningRequest) -> None:
        self._requests.discard(request)
        for sequence in request.sequences:
            if sequence.pages:
                self._stop_running(sequence)
        self.waiting = deque(s for s in self.waiting if s.request is not request)
        if request.published:
            request.published.users -= 1
            request.published.settle()

    def _stop_running(self, sequence: RunningSequence) -> None:
        self.running.remove(sequence)
        self.memory.free(sequence)
