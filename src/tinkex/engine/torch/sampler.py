"""Continuous batching: every step advances all running sequences by the tokens they still lack.

A sequence knows its tokens and how many of them the cache holds. One that lacks a single token is decoding,
one that lacks more is being prefilled (or recomputed after it lost its pages): the same code does both, in
one pass of the decoder, for any mix of adapters. Promises: pages are returned the moment a request ends,
however it ends; a step that fails fails the requests it touched and no others; running out of pages delays
requests and never fails them. Runs on one thread; knows nothing of event loops, training or files.

Shapes: T tokens of a step, D width, N rows whose logits are needed, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.protocol import EngineError, SampleWork
from tinkex.engine.request import PromptScores, Stops, check_work, seed_of, user_error
from tinkex.engine.streams import stream_keys
from tinkex.engine.torch.kv import PAGE, KVCache, PagedAttend, Piece, chain
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.sample import Choice, draw, likeliest, race, scaled_logprobs
from tinkex.engine.torch.sequences import Published, Request, Sequence, resolve, response
from tinkex.types.outputs import SampleResponse

_LOGITS = 1 << 24  # cells of logits held at once


@dataclass(frozen=True)
class Limits:
    """How much one step may do."""

    context: int  # tokens of a sequence
    sequences: int  # running at once
    prefill_alone: int = 1024  # tokens prefilled in a step in which nothing decodes
    prefill_beside: int = 128  # and in one in which something does, so that it is not kept waiting


class Batch:
    """The requests in flight and the steps that advance them."""

    def __init__(self, decoder: Decoder, cache: KVCache, limits: Limits) -> None:
        self.decoder, self.cache, self.limits = decoder, cache, limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._requests: set[Request] = set()
        self._device = decoder.unembed_weight.device

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
    ) -> Request:
        """Take in a request that `check_work` let pass."""
        seed = seed_of(work)
        stops = Stops(work, self.decoder.config.eos_ids)
        request = Request(work, future, published, max_tokens, seed, stops, PromptScores(work, seed))
        request.sequences = [Sequence(request, i) for i in range(work.num_samples)]
        request.unborn = request.sequences[1:]
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
        self._admit()
        plan = self._plan()
        if not plan:
            return
        try:
            h_TD, lora = self._forward(plan)
            self._score(plan, h_TD, lora)
            self._draw(plan, h_TD, lora)
        except Exception as error:
            failure = EngineError(f"a decoding step failed: {type(error).__name__}: {error}")
            for request in {sequence.request for sequence, _ in plan} & self._requests:
                self._fail(request, failure)
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
            links = chain(sequence.request.root, sequence.tokens(0, sequence.length), sequence.links)
            found = pages.find(links[:reusable])
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

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Who advances by how many tokens: whatever decodes by one, prompts as far as the budget goes."""
        for sequence in list(self.running):
            if sequence.pages:  # it may just have been preempted
                self._grow(sequence)
        lacking = [(s, s.length - s.computed) for s in self.running]
        decoding = any(count == 1 for _, count in lacking)
        budget = self.limits.prefill_beside if decoding else self.limits.prefill_alone
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
    def _forward(self, plan: list[tuple[Sequence, int]]) -> tuple[Tensor, LoraBatch | None]:
        """Compute the planned tokens: their final hidden states, and the adapters for `Decoder.logits`."""
        pieces = [Piece(s.pages, s.computed, count) for s, count in plan]
        tokens = np.concatenate([s.tokens(s.computed, s.computed + count) for s, count in plan])
        positions = np.concatenate([np.arange(p.start, p.start + p.new) for p in pieces])
        adapters = [s.request.published.adapter if s.request.published else None for s, _ in plan]
        lora = LoraBatch(adapters, [count for _, count in plan]) if any(adapters) else None
        h_TD = self.decoder(
            torch.from_numpy(tokens).to(self._device, torch.int64),
            torch.from_numpy(positions).to(self._device),
            PagedAttend(self.cache, pieces, self.decoder.config.windows, self._device),
            lora,
        )
        for sequence, count in plan:
            sequence.computed += count
            self._remember(sequence, count)
        return h_TD, lora

    def _remember(self, sequence: Sequence, count: int) -> None:
        """Make the pages that just became full findable."""
        first, full = (sequence.computed - count) // PAGE, sequence.computed // PAGE
        if first < full:
            links = chain(sequence.request.root, sequence.tokens(0, full * PAGE), sequence.links)
            for page in range(first, full):
                self.cache.pages.remember(sequence.pages[page], links[page])

    # -- logits ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _score(self, plan: list[tuple[Sequence, int]], h_TD: Tensor, lora: LoraBatch | None) -> None:
        """Feed the prompts' logprobs to those who asked for them, a bounded number of rows at a time."""
        end = 0
        at_once = max(1, _LOGITS // self.decoder.config.padded_vocab)
        for sequence, count in plan:
            start, end = end, end + count
            scores, prompt = sequence.request.scores, len(sequence.request.work.prompt)
            if sequence.index != 0:
                continue
            offset = sequence.computed - count  # row `start` has this position and scores the next one
            stop = min(prompt, sequence.computed + 1)
            while scores.next < stop:
                rows = min(at_once, stop - scores.next)
                first = start + scores.next - 1 - offset
                at = torch.arange(first, first + rows, device=self._device)
                scores.add(_TorchRows(self._logits(h_TD, at, lora), self.decoder.config.vocab_size), rows)

    def _logits(self, h_TD: Tensor, rows_N: Tensor, lora: LoraBatch | None) -> Tensor:
        return self.decoder.logits(h_TD[rows_N], lora, rows=None if lora is None else rows_N).float()

    @torch.inference_mode()
    def _draw(self, plan: list[tuple[Sequence, int]], h_TD: Tensor, lora: LoraBatch | None) -> None:
        """Draw the next token of every sequence that lacks none, newly forked samples included."""
        ready: list[tuple[Sequence, int]] = []
        row = -1
        for sequence, count in plan:
            row += count
            if sequence.computed == sequence.length:
                ready += [(sequence, row), *((fork, row) for fork in self._fork(sequence))]
        at_once = max(1, _LOGITS // self.decoder.config.padded_vocab)
        for part in (ready[i : i + at_once] for i in range(0, len(ready), at_once)):
            rows, inverse = np.unique([row for _, row in part], return_inverse=True)
            logits_NV = self._logits(h_TD, torch.from_numpy(rows).to(self._device), lora)
            if len(rows) < len(part):
                logits_NV = logits_NV[torch.from_numpy(inverse).to(self._device)]
            self._draw_rows([s for s, _ in part], logits_NV)

    def _draw_rows(self, sequences: list[Sequence], logits_NV: Tensor) -> None:
        choice = self._choice(sequences)
        logprobs_NV = scaled_logprobs(logits_NV, choice.temperature)
        tokens_N = draw(logprobs_NV, choice, self.decoder.config.vocab_size)
        chosen = logprobs_NV.gather(1, tokens_N[:, None])[:, 0].cpu().numpy()
        most = max(s.request.work.topk_sample_logprobs for s in sequences)
        top = likeliest(logprobs_NV, most, self.decoder.config.vocab_size) if most else None
        for i, (sequence, token) in enumerate(zip(sequences, tokens_N.tolist(), strict=True)):
            k = sequence.request.work.topk_sample_logprobs
            if top and k:
                sequence.top.append((top[0][i, :k], top[1][i, :k]))
            self._append(sequence, token, float(chosen[i]))

    def _choice(self, sequences: list[Sequence]) -> Choice:
        params = [s.request.work.params for s in sequences]
        keys = stream_keys(
            np.array([s.request.seed for s in sequences], np.uint64),
            np.array([s.index for s in sequences]),
            np.array([s.length for s in sequences]),
        )
        return Choice(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=self._device),
            torch.tensor([p.top_k for p in params], device=self._device),
            torch.tensor([p.top_p for p in params], dtype=torch.float32, device=self._device),
            keys,
        )

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
        if request.work.on_tokens:
            try:
                request.work.on_tokens(
                    sequence.index, np.array([token], np.int32), np.array([logprob], np.float32)
                )
            except Exception as error:
                self._fail(request, EngineError(f"on_tokens raised {type(error).__name__}: {error}"))

    def _finish(self) -> None:
        """Free the sequences that ended, and answer the requests whose last one did."""
        ended = [s for s in self.running if s.reason]
        for sequence in ended:
            self._stop_running(sequence)
        for request in dict.fromkeys(s.request for s in ended):
            if request in self._requests and all(s.reason for s in request.sequences):
                self._end(request)
                resolve(request.future, response(request))

    def _fail(self, request: Request, error: EngineError) -> None:
        self._end(request)
        resolve(request.future, EngineError(error.message, error.category))  # each its own traceback

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


class _TorchRows:
    """`tinkex.engine.request.Rows` over logits."""

    def __init__(self, logits_NV: Tensor, vocab: int) -> None:
        self._logprobs_NV = F.log_softmax(logits_NV, dim=-1)
        self._vocab = vocab

    def pick(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        device = self._logprobs_NV.device
        at = torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
        return self._logprobs_NV[at].cpu().numpy()

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        return likeliest(self._logprobs_NV, k, self._vocab)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return race(self._logprobs_NV.exp()[:, : self._vocab], keys).cpu().numpy()
