"""The records of continuous batching: requests, their sequences, and published adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tinkex.engine.grammar import GrammarState
from tinkex.engine.logit_rules import LogitRules
from tinkex.engine.protocol import EngineError, SampledTokens, SampleWork
from tinkex.engine.request import PromptScores, Sample, Stops
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.engine_thread import settle
from tinkex.engine.torch.images import PlacedImage
from tinkex.engine.torch.models.attend import Spans
from tinkex.types.outputs import SampleResponse

_BASE = b"base"
Listener = Callable[[SampledTokens], None]  # called on the engine's thread with each token drawn


@dataclass(eq=False)
class PublishedAdapter:
    """An immutable adapter that requests can name. `root` sets its prefix-cache entries apart."""

    name: str
    adapter: Adapter
    root: bytes
    users: int = 0
    retired: list[Future[None]] = field(default_factory=list)  # resolved when its last user is done

    def settle(self) -> None:
        """Resolve the calls of `retire` if no request uses it any more."""
        while self.users == 0 and self.retired:
            settle(self.retired.pop(), None)


@dataclass(eq=False)
class RunningRequest:
    work: SampleWork
    future: Future[SampleResponse]
    published: PublishedAdapter | None
    max_tokens: int
    seed: int
    stops: Stops
    scores: PromptScores
    listener: Listener | None = None
    rules: LogitRules | None = None  # penalties and the like
    images: Sequence[PlacedImage] = ()  # of its prompt
    spans: Spans = ()  # of its images, if the model's layers attend within whole ones
    extras: Mapping[int, bytes] = field(default_factory=dict)  # `page_extras` of them
    sequences: list[RunningSequence] = field(default_factory=list)
    unforked: list[RunningSequence] = field(default_factory=list)  # start when the first's prompt is computed
    cache_hits: int = 0  # prompt tokens found in the prefix cache
    ahead: bool = False  # the device may decode it one step ahead of the host

    @property
    def root(self) -> bytes:
        return self.published.root if self.published else _BASE

    @property
    def adapter(self) -> Adapter | None:
        return self.published.adapter if self.published else None

    @property
    def draws_plainly(self) -> bool:
        """No top-k, top-p, min-p, penalty, bias or grammar, and no list of likely tokens."""
        params = self.work.params
        changed = self.rules is not None or params.min_p > 0 or params.grammar is not None
        cut = changed or params.top_k > 0 or params.top_p < 1.0
        return not cut and not self.work.topk_sample_logprobs

    def response(self) -> SampleResponse:
        sequences = [sequence.finished(self.stops) for sequence in self.sequences]
        return self.scores.response(sequences, self.cache_hits)

    def diverged(self) -> EngineError:
        """Why it fails if a logprob is not finite."""
        if self.published is None:
            return EngineError("the model's logits are not finite")
        whose = f"the logits with adapter {self.published.name!r} are not finite: its weights have diverged"
        return EngineError(f"{whose}, likely by too large a learning rate", "user")


@dataclass(eq=False, kw_only=True)
class RunningSequence(Sample):
    """One sample of a request, and the pages that hold the keys and values of its first `computed` tokens."""

    request: RunningRequest
    pages: list[int] = field(default_factory=list)
    slot: int | None = None  # of the states of recurrent layers, after `computed` tokens and those in flight
    copied: int | None = None  # a slot with a copy for a snapshot, from before the step in flight
    computed: int = 0
    in_flight: int = 0  # decode steps that were launched and have not come back
    links: list[bytes] = field(default_factory=list)  # digests of its full pages
    grammar: GrammarState | None = None

    @property
    def length(self) -> int:
        return len(self.request.work.prompt) + len(self.tokens)

    @property
    def lacking(self) -> int:
        """Tokens whose keys and values are not computed yet."""
        return self.length - self.computed

    @property
    def first_needed(self) -> int:
        """The first position whose logits are still needed: cached pages before it are reused."""
        wanted = self.request.scores.next
        return wanted if self.index == 0 and wanted < len(self.request.work.prompt) else self.length

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else int(self.request.work.prompt[-1])

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Token ids of positions start:stop, over prompt and samples."""
        prompt = self.request.work.prompt
        drawn = self.tokens[max(0, start - len(prompt)) : max(0, stop - len(prompt))]
        return np.concatenate([prompt[start:stop], np.asarray(drawn, np.int32)])


Top = tuple[np.ndarray, np.ndarray]  # ids and logprobs of likely tokens
Landed = list[tuple[RunningSequence, int, float, Top | None]]  # new tokens, their logprobs, likely ones
