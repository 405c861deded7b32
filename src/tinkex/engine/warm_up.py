"""Before a server says that it is ready: compile every kernel and capture every step that requests will need.

Real requests of a throw-away adapter go through the engine's contract: passes of several sizes with a step,
prompts of several lengths, and every number of requests for which there is a captured decode step, with the
adapter and without. Only what was compiled and captured remains. An engine that cannot do one of these
things still serves: that part is compiled on first use. Needs only numpy.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tinkex.engine import protocol as p
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams
from tinkex.types.tensor import TensorData

log = logging.getLogger("tinkex")
RUN = "(warm-up)"  # no run of a client is called so
Part = tuple[str, Callable[[], None]]
# Seconds that parts took on an H200 with nothing compiled: progress is reported in proportion to them.
_SECONDS = {"a pass": 7.0, "a prompt": 0.4, "decode": 0.1}


@dataclass(frozen=True)
class WarmUp:
    """What is to be warm: rank of the adapters, requests decoded at once, tokens of a micro-batch."""

    rank: int = 32
    batch: int = 256
    pass_tokens: int = 16_384
    answers: int = 6  # tokens of each request: they come one by one, and all must decode together once
    samples: Sequence[SamplingParams] = field(
        default=(
            SamplingParams(max_tokens=2, stop=[], top_k=20),
            SamplingParams(max_tokens=2, stop=[], top_p=0.9),
            SamplingParams(max_tokens=2, stop=[], temperature=0.0),
        )
    )


def decode_sizes(batch: int) -> list[int]:
    """Numbers of requests, largest first: the first and the last that each captured step serves.

    >>> decode_sizes(64)
    [64, 33, 32, 17, 16, 9, 8, 5, 4, 3, 2, 1]
    """
    steps = [1, 2, 4, 8, 16, *range(32, batch + 32, 32)]
    ends = [min(size, batch) for size in steps if size < batch + 32]
    firsts = [size + 1 for size in ends[:-1]]
    return sorted({*ends, *firsts} & set(range(1, batch + 1)), reverse=True)


def prompt_sizes(most: int) -> list[int]:
    """Tokens of the steps with prompts that are captured, smallest first: no larger one serves the next.

    Kernels differ between sizes as close as 384 and 512, so none is left out. Up to 31 and up to 95 tokens an
    adapter's tiles may be smaller ones than those of 64 and 128.

    >>> prompt_sizes(1024)
    [16, 31, 64, 95, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024]
    """
    sizes, size = [16, 31, 64, 95], 128
    while size <= most:
        sizes.append(size)
        size += max(64, 1 << size.bit_length() >> 4)
    return sizes


def warm_up(engine: p.Engine, work: WarmUp, say: Callable[[str], None] = log.info) -> float:
    """Blocks until everything is warm; `say` hears how far it is, every few seconds. Returns the seconds."""
    warming = _Warming(engine, work)
    began = told = time.monotonic()
    parts = list(warming.parts())
    costs = [
        next((cost for name, cost in _SECONDS.items() if what.startswith(name)), 1.0) for what, _ in parts
    ]
    for done, (what, do) in enumerate(parts):
        now = time.monotonic()
        if now - told > 3.0 and done:
            told, left = now, (now - began) / sum(costs[:done]) * sum(costs[done:])
            say(f"compiling kernels and capturing steps: {done} of {len(parts)} ({what}), about {left:.0f} s")
        try:
            do()
        except p.EngineLost:
            raise
        except p.EngineError as error:
            log.warning("warming up, %s: %s; it will be compiled on first use", what, error)
    return time.monotonic() - began


def sample_once(engine: p.Engine) -> None:
    """Draw two tokens, which is enough on a CPU: the first decode step makes its copy of the weights."""
    work = p.SampleWork(np.zeros(1, np.int32), SamplingParams(max_tokens=2, stop=[]), None)
    asyncio.run(engine.sampler.sample(work))


class _Warming:
    """The parts of one warm-up, in order."""

    def __init__(self, engine: p.Engine, work: WarmUp) -> None:
        self._engine, self._work = engine, work
        self._context = engine.info.max_context
        self._draw = np.random.default_rng(0)

    def parts(self) -> Iterator[Part]:
        work, most = self._work, self._context // 2
        yield "an adapter", self._create
        for tokens in sorted({64, 1024, work.pass_tokens}):
            for loss in ("cross_entropy", "importance_sampling"):
                yield f"a pass of {tokens} tokens", lambda t=tokens, name=loss: self._train(t, name)
        yield "publishing", self._publish
        for length in (n for n in prompt_sizes(8192) if n <= most):
            yield f"a prompt of {length} tokens", lambda n=length: self._sample(1, n, twice=True)
        length = min(128, most)
        for count in (n for n in (4, 16, 32, 64) if n <= work.batch):
            yield f"{count} prompts", lambda n=count: self._sample(n, length, twice=True)
        for params in work.samples:
            yield "other ways of drawing", lambda given=params: self._sample(2, 16, given)
        for adapter in (RUN, None):
            for count in decode_sizes(work.batch):
                what = f"decode steps of {count} requests"
                yield what, lambda n=count, name=adapter: self._sample(n, 8, adapter=name)
        # Capturing gave the memory of passes back to the device: the first client would wait for it.
        yield "memory of a pass", lambda: self._train(work.pass_tokens, "cross_entropy")
        yield "its end", self._drop

    def _create(self) -> None:
        self._do(p.CreateAdapter(RUN, LoraConfig(rank=self._work.rank, seed=0)))

    def _do(self, command: p.Command[p.R]) -> p.R:
        return self._engine.trainer.submit(command).result()

    def _ids(self, count: int) -> np.ndarray:
        return self._draw.integers(0, self._engine.info.vocab_size, count).astype(np.int32)

    def _train(self, tokens: int, loss: str) -> None:
        """A pass of so many tokens in sequences of up to 256, and its step."""
        length = min(256, tokens, self._context)
        data = [self._datum(length, loss) for _ in range(max(1, tokens // length))]
        (outcome,) = p.run_passes(self._engine.trainer, [p.Pass(RUN, data, loss)])
        if isinstance(outcome, p.Failure):
            raise p.EngineError(outcome.message, outcome.category)
        self._do(p.OptimStep(RUN, AdamParams(learning_rate=1e-6)))

    def _datum(self, length: int, loss: str) -> Datum:
        ids, ones = self._ids(length + 1), np.ones(length, np.float32)
        inputs = {"target_tokens": ids[1:].astype(np.int64)}
        if loss == "importance_sampling":
            inputs |= {"logprobs": -ones, "advantages": ones}
        tensors = {name: TensorData.from_numpy(array) for name, array in inputs.items()}
        return Datum(ModelInput.from_ints(ids[:-1]), tensors)

    def _publish(self) -> None:
        with tempfile.TemporaryDirectory(prefix="tinkex-") as place:  # pinned memory is allocated once, too
            self._do(p.SaveAdapter(RUN, str(Path(place) / "copy"), sync=False, sampling=True))
        asyncio.run(self._engine.sampler.publish(RUN, self._do(p.ExportAdapter(RUN))))

    def _sample(
        self, count: int, length: int, params: SamplingParams | None = None, *, adapter: str | None = RUN,
        twice: bool = False,
    ) -> None:  # fmt: skip
        """So many requests at once; `twice`, since a step of prompts is captured the second time."""
        params = params or SamplingParams(max_tokens=self._work.answers, stop=[])

        async def everything() -> None:
            works = [p.SampleWork(self._ids(length), params, adapter) for _ in range(count)]
            await asyncio.gather(*(self._engine.sampler.sample(work) for work in works))

        for _ in range(1 + twice):
            asyncio.run(everything())

    def _drop(self) -> None:
        asyncio.run(self._engine.sampler.retire(RUN))
        self._do(p.DropAdapter(RUN))
