"""Results of a pass and of sampling, over numpy arrays.

Arrays are kept as they arrived (`*_np`); the lists of the official types are made on first use. Immutable.
Needs only numpy; knows nothing of the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal

import numpy as np

from tinkex.errors import InvalidInputError
from tinkex.types.chunks import shown
from tinkex.types.data import LossFnOutput
from tinkex.types.tensor import TensorData

StopReason = Literal["length", "stop"]
# A finer stop reason, where the server gives one. Other servers may use other words.
StopDetail = Literal["eos", "stop_sequence", "max_tokens", "context"]
TOPK_PADDING = -99999.0  # the logprob of an unused cell of TopkLogprobs
MAX_SAMPLE_BYTES = 1 << 30  # of one sample's result, by the estimate of `sample_bytes`
# Bytes that a drawn token, a score and a listed (token, logprob) take while a result is encoded as JSON.
_TOKEN, _SCORE, _LISTED = 72, 64, 128
_SHOWN = 4  # sequences that a repr lists


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """One record per datum (at least `logprobs`) and metrics named `name:reduction`."""

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def __repr__(self) -> str:
        count = f"{len(self.loss_fn_outputs)} datum{'' if len(self.loss_fn_outputs) == 1 else 's'}"
        return f"ForwardBackwardOutput({count}, metrics={self.metrics})"


@dataclass(frozen=True, eq=False)
class TopkLogprobs:
    """The k most likely tokens of each position; unused cells have logprob TOPK_PADDING."""

    token_ids: np.ndarray  # int32 [length, k]
    logprobs: np.ndarray  # float32 [length, k]

    @property
    def k(self) -> int:
        return self.token_ids.shape[1]

    @property
    def length(self) -> int:
        return self.token_ids.shape[0]

    def rows(self) -> list[list[tuple[int, float]] | None]:
        """A list per position, most likely first; None where nothing was computed."""
        out: list[list[tuple[int, float]] | None] = []
        for ids, lps in zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True):
            row = [(i, lp) for i, lp in zip(ids, lps, strict=True) if lp != TOPK_PADDING]
            out.append(row or None)
        return out


@dataclass(frozen=True)
class PromptAltTokens:
    """Tokens sampled at each prompt position, and their logprobs: both [len(prompt) - 1, k]."""

    tokens: TensorData
    logprobs: TensorData


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """One sampled continuation, the stop token or end-of-sequence token included.

    `stop_detail` and `stop_match` (the token id or the string that it stopped at) are our extension: None if
    the server does not send them.
    """

    stop_reason: StopReason
    sequence_id: str = ""
    tokens_np: np.ndarray | None = None
    logprobs_np: np.ndarray | None = None
    topk_logprobs_np: TopkLogprobs | None = None
    stop_detail: StopDetail | str | None = None
    stop_match: int | str | None = None

    @cached_property
    def tokens(self) -> list[int]:
        return [] if self.tokens_np is None else self.tokens_np.tolist()

    @cached_property
    def logprobs(self) -> list[float] | None:
        return None if self.logprobs_np is None else self.logprobs_np.tolist()

    @cached_property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.rows()

    def __repr__(self) -> str:
        tokens = "[]" if self.tokens_np is None else shown(self.tokens_np)
        return f"SampledSequence({self.stop_reason!r}, tokens={tokens})"


@dataclass(frozen=True, eq=False)
class NewTokens:
    """New tokens of one sequence of a stream; `sequence` counts from 0."""

    sequence: int
    tokens_np: np.ndarray  # int32
    logprobs_np: np.ndarray  # float32

    @cached_property
    def tokens(self) -> list[int]:
        return self.tokens_np.tolist()

    @cached_property
    def logprobs(self) -> list[float]:
        return self.logprobs_np.tolist()

    def __repr__(self) -> str:
        return f"NewTokens({self.sequence}, {shown(self.tokens_np)})"


@dataclass(frozen=True, eq=False)
class SampleResponse:
    """The result of a sample request: its sequences and the prompt's logprobs, if they were asked for."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs_np: np.ndarray | None = None  # float32 [len(prompt)], NaN where not computed
    topk_prompt_logprobs_np: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        if self.prompt_logprobs_np is None:
            return None
        return [None if lp != lp else lp for lp in self.prompt_logprobs_np.tolist()]  # NaN != NaN

    @cached_property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.rows()

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self.sequences[:_SHOWN]))
        more = f", … {len(self.sequences)} in all" if len(self.sequences) > _SHOWN else ""
        optional = [field.name for field in fields(self) if field.default is None]
        there = [name.removesuffix("_np") for name in optional if getattr(self, name) is not None]
        also = "".join(f", {name}=…" for name in there)
        return f"SampleResponse([{first}{more}]{also})"


def sample_bytes(
    length: int,
    max_tokens: int,
    num_samples: int = 1,
    prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    topk_sample_logprobs: int = 0,
    target_prompt_logprobs: TensorData | None = None,
    prompt_alt_tokens_k: int = 0,
) -> int:
    """The most bytes that a sample's result takes, known before anything is computed.

    InvalidInputError, which names the field that takes most of them, if they are over MAX_SAMPLE_BYTES.

    >>> sample_bytes(10, 100, num_samples=4)
    28800
    """
    targets = 0 if target_prompt_logprobs is None else target_prompt_logprobs.values_np.size
    total = num_samples * max_tokens * (_TOKEN + topk_sample_logprobs * _LISTED) + targets * _SCORE
    total += length * (prompt_logprobs * _SCORE + (topk_prompt_logprobs + prompt_alt_tokens_k) * _LISTED)
    if total > MAX_SAMPLE_BYTES:
        parts = {
            "num_samples": (num_samples, max_tokens * _TOKEN),
            "topk_prompt_logprobs": (topk_prompt_logprobs, length * _LISTED),
            "topk_sample_logprobs": (topk_sample_logprobs, num_samples * max_tokens * _LISTED),
            "target_prompt_logprobs": (targets, _SCORE),
            "prompt_alt_tokens_k": (prompt_alt_tokens_k, length * _LISTED),
        }  # the field, and the bytes of each one asked for
        name, (count, each) = max(parts.items(), key=lambda part: part[1][0] * part[1][1])
        room = MAX_SAMPLE_BYTES - (total - count * each)
        raise InvalidInputError(
            f"the result of this sample may take {total} bytes, and at most {MAX_SAMPLE_BYTES} are allowed: "
            f"{name} must be at most {max(0, room // each)} for {length} tokens of prompt, {num_samples} "
            f"samples and {max_tokens} tokens of each, got {count}"
        )
    return total
