"""What the sampler keeps of a request: its samples, their tokens and pages, and the adapter they use.

Plain records, and how one becomes an answer. Knows nothing of steps or of the cache's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tinkex.engine.protocol import SampleWork
from tinkex.engine.request import PromptScores, Stops
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.engine_thread import settle
from tinkex.types.outputs import SampledSequence, SampleResponse, StopReason, TopkLogprobs

_BASE = b"base"
# Called on the engine's thread: the sample's index, its new tokens (int32) and their logprobs (float32).
Listener = Callable[[int, np.ndarray, np.ndarray], None]


@dataclass(eq=False)
class Published:
    """An immutable adapter that requests can name. `root` tells its cache entries from every other's."""

    name: str
    adapter: Adapter
    root: bytes
    users: int = 0
    retired: list[Future[None]] = field(default_factory=list)  # who waits for its last user to be done

    def settle(self) -> None:
        """Tell those who retired it, once nobody uses it."""
        if self.users == 0:
            for future in self.retired:
                settle(future, None)
            self.retired = []


@dataclass(eq=False)
class Request:
    """One `SampleWork` on its way."""

    work: SampleWork
    future: Future[SampleResponse]
    published: Published | None
    max_tokens: int
    seed: int
    stops: Stops
    scores: PromptScores
    listener: Listener | None = None
    sequences: list[Sequence] = field(default_factory=list)
    unborn: list[Sequence] = field(default_factory=list)  # samples that wait for the first one's prompt
    cache_hits: int = 0
    ahead: bool = False  # whether the device may decode it ahead of the host

    @property
    def root(self) -> bytes:
        return self.published.root if self.published else _BASE

    @property
    def adapter(self) -> Adapter | None:
        return self.published.adapter if self.published else None

    @property
    def draws_plainly(self) -> bool:
        """Neither a cut of what may be drawn nor a list of what could have been."""
        params = self.work.params
        return params.top_k <= 0 and params.top_p >= 1.0 and not self.work.topk_sample_logprobs


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens so far, and the pages that hold the first `computed` of them."""

    request: Request
    index: int
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    tail: bytes = b""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    flying: int = 0  # steps of it that were launched and have not come back
    links: list[bytes] = field(default_factory=list)  # digests of its full pages
    reason: StopReason | None = None

    @property
    def length(self) -> int:
        return len(self.request.work.prompt) + len(self.out)

    @property
    def last(self) -> int:
        return self.out[-1] if self.out else int(self.request.work.prompt[-1])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        prompt = self.request.work.prompt
        if start >= len(prompt):
            return np.asarray(self.out[start - len(prompt) : stop - len(prompt)], np.int32)
        rest = self.out[: max(0, stop - len(prompt))]
        return np.concatenate([prompt[start:stop], np.asarray(rest, np.int32)])


def response(request: Request) -> SampleResponse:
    sequences = [sequence.finished(request.stops) for sequence in request.sequences]
    return request.scores.response(sequences, request.cache_hits)
