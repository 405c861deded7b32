"""Decoding one step ahead, on a CPU: a stand-in for the device's pipeline, held to the plain steps."""

from __future__ import annotations

from collections.abc import Sequence as Several
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.stepping import check, finish
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import EngineError, SampleWork
from tinkex.engine.rng import stream_keys
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.kv import KVCache, PagedAttend, TokenSpan
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.next_tokens import Choice, draw, draw_next, scaled_logprobs
from tinkex.engine.torch.sequences import Landed, RunningRequest, RunningSequence
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import SamplingParams

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class SlowPipeline:
    """What `decode.DecodePipeline` promises: the results of a step come out one step later."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._flight: Landed = []
        self._undrawn: dict[RunningSequence, torch.Tensor] = {}  # logits of requests with rules
        self.launched = 0
        self.error: Exception | None = None

    def serves(self, request: RunningRequest) -> bool:
        return True

    def step(self, sequences: Several[RunningSequence]) -> Landed:
        if self.error:
            raise self.error
        assert not self._undrawn
        before, known = self._flight, {s: token for s, token, *_ in self._flight}
        self._flight = [(s, *self._next(s, known.get(s, s.last)), None) for s in sequences]
        return self._land(before)

    def draw(self) -> None:
        """By rules, which read the tokens that have landed."""
        flight = {sequence: (token, logprob, top) for sequence, token, logprob, top in self._flight}
        for sequence, logits in self._undrawn.items():
            if sequence.pages and not sequence.reason:
                vocab, backend = self._decoder.config.vocab_size, self._decoder.backend
                flight |= {s: drawn for s, *drawn in draw_next([sequence], logits, vocab, backend)}
        self._flight, self._undrawn = [(s, *drawn) for s, drawn in flight.items()], {}

    def land(self) -> Landed:
        assert not self._undrawn
        before, self._flight = self._flight, []
        return self._land(before)

    def drop(self) -> None:
        self._flight, self._undrawn = [], {}

    @torch.inference_mode()
    def _next(self, sequence: RunningSequence, token: int) -> tuple[int, float]:
        self.launched += 1
        at, config = sequence.computed + sequence.in_flight, self._decoder.config
        sequence.in_flight += 1
        attend = PagedAttend(self._cache, [TokenSpan(sequence.pages, at, 1)], config.windows, CPU)
        logits = self._decoder.logits(self._decoder(torch.tensor([token]), torch.tensor([at]), attend))
        if not sequence.request.draws_plainly:
            self._undrawn[sequence] = logits
            return -1, 0.0
        temperature = torch.tensor([sequence.request.work.params.temperature])
        logprobs = scaled_logprobs(logits, temperature, config.vocab_size)
        keys = stream_keys(
            np.array([sequence.request.seed], np.uint64), np.array([sequence.index]), np.array([at + 1])
        )
        choice = Choice(temperature.numpy(), np.zeros(1, np.int64), np.ones(1, np.float32), keys)
        drawn = int(draw(logprobs, choice))
        return drawn, float(logprobs[0, drawn])

    def _land(self, flight: Landed) -> Landed:
        for sequence, *_ in flight:
            sequence.in_flight -= 1
        return flight


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = tiny_model(tmp_path_factory.mktemp("model"), "llama3")
    return load_decoder(path)


def new_batch(decoder: Decoder, ahead: bool, pages: int = 100, **limits: int) -> tuple[ContinuousBatch, Any]:
    c = decoder.config
    cache = KVCache(c.kv_shapes, pages, CPU, torch.float32)
    pipeline: Any = SlowPipeline(decoder, cache) if ahead else None
    return ContinuousBatch(
        decoder, cache, StepLimits(**{"context": 200, "sequences": 6, **limits}), pipeline
    ), pipeline


def submit(
    batch: ContinuousBatch, seed: int, length: int, work: dict | None = None, **params: Any
) -> tuple[Future[SampleResponse], RunningRequest]:
    ids = np.random.default_rng(seed).integers(4, 320, length).astype(np.int32)
    asked = SamplingParams(**{"max_tokens": 30, "stop": [], "seed": seed, **params})
    request, future = SampleWork(ids, asked, **(work or {})), Future()
    return future, batch.submit(request, batch.check_work(request), None, future)


@pytest.mark.parametrize("pages", [100, 7], ids=["enough pages", "few pages"])
def test_what_is_drawn_ahead_is_what_the_plain_steps_draw(decoder: Decoder, pages: int):
    """Stops, lengths, samples of one prompt and cut draws among them, with and without preemption."""
    answers = []
    for ahead in (False, True):
        batch, pipeline = new_batch(decoder, ahead, pages)
        futures = [submit(batch, i, 5 + 3 * i, max_tokens=4 + 3 * i)[0] for i in range(8)]
        futures += [submit(batch, 20 + i, 9, stop=list(range(i, 320, 7)))[0] for i in range(4)]
        futures += [
            submit(batch, 30, 18, work={"num_samples": 3})[0],
            submit(batch, 31, 6, temperature=0.0)[0],
        ]
        futures += [
            submit(batch, 32, 6, top_k=5)[0],
            submit(batch, 33, 7, presence_penalty=2.0, repetition_penalty=1.5)[0],
            submit(batch, 34, 8, min_tokens=6, stop=list(range(0, 320, 3)))[0],
            submit(batch, 35, 8, work={"topk_sample_logprobs": 2})[0],
        ]
        finish(batch)
        answers.append([[s.tokens for s in future.result(timeout=0).sequences] for future in futures])
        if ahead:
            assert pipeline.launched > 50
            assert pages > 7 or batch.preemptions > 0
    assert answers[0] == answers[1]


def test_cancelled_while_a_step_is_in_flight(decoder: Decoder):
    batch, _ = new_batch(decoder, ahead=True)
    kept, _ = submit(batch, 1, 10)
    _, gone = submit(batch, 2, 10)
    for _ in range(6):
        batch.step()
    batch.cancel(gone)
    check(batch)
    finish(batch)
    alone, _ = new_batch(decoder, ahead=False)
    wanted, _ = submit(alone, 1, 10)
    finish(alone)
    assert kept.result(timeout=0).sequences[0].tokens == wanted.result(timeout=0).sequences[0].tokens


def test_newcomers_find_nothing_in_flight(decoder: Decoder):
    """A request that comes while others decode ahead is read and answered; nobody loses a token."""
    batch, pipeline = new_batch(decoder, ahead=True)
    first, _ = submit(batch, 1, 10)
    for _ in range(8):
        batch.step()
    assert pipeline._flight
    second, _ = submit(batch, 2, 40)
    finish(batch)
    for future in (first, second):
        assert len(future.result(timeout=0).sequences[0].tokens) == 30


@pytest.mark.parametrize("length", [1, 17, 33])
def test_samples_of_a_prompt_that_lacks_one_token(decoder: Decoder, length: int):
    """The prefix cache has the rest of the prompt. It must not decode ahead before it has forked."""
    answers = []
    for ahead in (False, True):
        batch, _ = new_batch(decoder, ahead)
        submit(batch, 1, length)
        finish(batch)
        again, _ = submit(batch, 1, length, {"num_samples": 3})
        scored, _ = submit(batch, 1, length, {"num_samples": 2, "prompt_logprobs": True})
        finish(batch)
        answers.append([[s.tokens for s in f.result(timeout=0).sequences] for f in (again, scored)])
    assert answers[0] == answers[1]
    assert [len(sequences) for sequences in answers[1]] == [3, 2]


def test_a_step_that_fails_fails_those_it_touched(decoder: Decoder):
    batch, pipeline = new_batch(decoder, ahead=True)
    future, _ = submit(batch, 1, 10)
    for _ in range(4):
        batch.step()
    pipeline.error = RuntimeError("the device is gone")
    finish(batch)
    with pytest.raises(EngineError, match="the device is gone"):
        future.result(timeout=0)
    pipeline.error = None
    later, _ = submit(batch, 3, 10)
    finish(batch)
    assert len(later.result(timeout=0).sequences[0].tokens) == 30
