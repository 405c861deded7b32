"""Settings of sampling, of an optimizer step and of an adapter.

Defaults are the wire's; ranges are checked at construction. Plain dataclasses, so that an engine needs no
pydantic. Knows nothing of the wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from tinkex.errors import InvalidInputError
from tinkex.strict import Dumpable, check_count, strict

MAX_STOPS = 1024  # stop sequences of one request


def _plain(owner: Any, name: str) -> Any:
    """The field's value; a numpy scalar is replaced by the Python number."""
    value = getattr(owner, name)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
        object.__setattr__(owner, name, value)
    return value


def _number(owner: Any, name: str, low: float, high: float, *, open_high: bool = False) -> None:
    value = getattr(owner, name)
    if type(value) is float and (low <= value < high or (value == high and not open_high)):  # the common case
        return
    value, who = _plain(owner, name), type(owner).__name__
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidInputError(f"{who}.{name} must be a number, got {value!r}")
    if value < low or value > high or (open_high and value == high):
        bound = f"[{low:g}, {high:g}" + (")" if open_high else "]")
        raise InvalidInputError(f"{who}.{name} must be in {bound}, got {value!r}")


def _whole(owner: Any, name: str, low: int) -> None:
    value = getattr(owner, name)
    if type(value) is int and low <= value < 2**63:  # the common case
        return
    value, who = _plain(owner, name), type(owner).__name__
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(f"{who}.{name} must be a whole number, got {value!r}")
    if value < low:
        raise InvalidInputError(f"{who}.{name} must be at least {low}, got {value!r}")
    if value >= 2**63:
        raise InvalidInputError(f"{who}.{name} must fit into 64 bits, got {value!r}")


@strict
class SamplingParams(Dumpable):
    """How to sample tokens.

    >>> SamplingParams(max_tokens=64, temperature=0.7, stop=["\\n"]).top_p
    1.0
    """

    max_tokens: int | None = None  # None: up to the end of the context
    seed: int | None = None
    # A string, strings, or token ids. None: stop at the end-of-sequence token; []: never stop early.
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0  # 0.0 is greedy
    top_k: int = -1  # -1 or 0: off
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _whole(self, "max_tokens", 1)
        if self.seed is not None:
            _whole(self, "seed", -(2**63))
        _number(self, "temperature", 0.0, math.inf, open_high=True)
        _number(self, "top_p", 0.0, 1.0)
        _whole(self, "top_k", -1)
        if self.stop is not None:
            self._check_stop(self.stop)

    def _check_stop(self, given: str | Sequence[str] | Sequence[int]) -> None:
        if isinstance(given, bytes) or not (isinstance(given, str | Sequence) or hasattr(given, "tolist")):
            must = "must be a string, strings, or token ids"
            raise InvalidInputError(f"SamplingParams.stop {must}, got {given!r}")
        if isinstance(given, str) and not given:
            raise InvalidInputError("SamplingParams.stop is an empty string; use [] to never stop early")
        if isinstance(given, str):
            return
        check_count("SamplingParams.stop", len(given), MAX_STOPS)
        stop = [int(s) if hasattr(s, "__index__") else s for s in given]  # numpy ints too
        if not (all(isinstance(s, str) for s in stop) or all(isinstance(s, int) for s in stop)):
            raise InvalidInputError(
                f"SamplingParams.stop must be all strings or all token ids, got {given!r}"
            )
        if "" in stop:
            raise InvalidInputError("SamplingParams.stop has an empty string; use [] to never stop early")
        if any(isinstance(s, int) and s < 0 for s in stop):
            raise InvalidInputError(f"SamplingParams.stop has a negative token id: {stop}")
        object.__setattr__(self, "stop", stop)


@strict
class AdamParams(Dumpable):
    """Settings of one AdamW step. The defaults of beta2 and eps differ from PyTorch's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled
    grad_clip_norm: float = 0.0  # global norm; 0 is off

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            _number(self, name, 0.0, math.inf, open_high=True)
        for name in ("beta1", "beta2"):
            _number(self, name, 0.0, 1.0, open_high=True)


@strict
class LoraConfig(Dumpable):
    """The shape of an adapter."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        rank = _plain(self, "rank")
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise InvalidInputError(f"lora_config.rank must be a whole number, got {rank!r}")
        if rank < 1:
            raise InvalidInputError(f"lora_config.rank must be positive, got {rank!r}")
        for name in ("train_unembed", "train_mlp", "train_attn"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidInputError(f"LoraConfig.{name} must be True or False, got {value!r}")
        if self.seed is not None:
            _whole(self, "seed", -(2**63))
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise InvalidInputError("At least one of train_unembed, train_mlp, or train_attn must be True")


LossFnType = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom",
    "kl_divergence",
]  # fmt: skip
LOSS_NAMES: tuple[str, ...] = LossFnType.__args__  # type: ignore[attr-defined]
