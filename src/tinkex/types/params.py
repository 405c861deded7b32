"""Settings of sampling, of an optimizer step and of an adapter.

Defaults are the wire's; ranges are checked at construction. Plain dataclasses, so that an engine needs no
pydantic. Knows nothing of the wire.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from tinkex.errors import InvalidInputError
from tinkex.strict import Dumpable, check_count, strict

MAX_STOPS = 1024  # stop sequences of one request
MAX_BIASES = 4096  # entries of logit_bias
MAX_GRAMMAR = 256 * 1024  # characters of a grammar
GRAMMARS = ("json_schema", "regex", "lark")


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
    # A string, or strings and token ids. None: stop at the end-of-sequence token; []: never stop early.
    stop: str | Sequence[str | int] | None = None
    temperature: float = 1.0  # 0.0 is greedy
    top_k: int = -1  # -1 or 0: off
    top_p: float = 1.0
    # Extensions that only Tinkex servers have. They change what is drawn, never the reported logprobs.
    presence_penalty: float = 0.0  # subtracted from the logit of every token that was drawn
    frequency_penalty: float = 0.0  # the same, times how often it was drawn
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen so far; multiplies others
    min_p: float = 0.0  # tokens less likely than min_p times the likeliest are not drawn
    min_tokens: int = 0  # nothing ends the sequence earlier
    ignore_eos: bool = False  # continue after the end-of-sequence token
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens
    grammar: Mapping[str, Any] | None = None  # {"json_schema": {…}}, {"regex": "…"} or {"lark": "…"}

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
        self._check_extensions()

    def _check_extensions(self) -> None:
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "repetition_penalty", 0.01, 100.0)
        _number(self, "min_p", 0.0, 1.0)
        _whole(self, "min_tokens", 0)
        if type(self.ignore_eos) is not bool:
            raise InvalidInputError(
                f"SamplingParams.ignore_eos must be True or False, got {self.ignore_eos!r}"
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.grammar is not None:
            _check_grammar(self.grammar)
            if self.min_tokens:
                raise InvalidInputError("SamplingParams takes min_tokens or grammar, not both")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError(
                f"SamplingParams.min_tokens must be at most max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )

    def _check_stop(self, given: str | Sequence[str | int]) -> None:
        if isinstance(given, bytes) or not (isinstance(given, str | Sequence) or hasattr(given, "tolist")):
            must = "must be a string, strings, or token ids"
            raise InvalidInputError(f"SamplingParams.stop {must}, got {given!r}")
        if isinstance(given, str) and not given:
            raise InvalidInputError("SamplingParams.stop is an empty string; use [] to never stop early")
        if isinstance(given, str):
            return
        check_count("SamplingParams.stop", len(given), MAX_STOPS)
        stop = [int(s) if hasattr(s, "__index__") else s for s in given]  # numpy ints too
        if not all(isinstance(s, str | int) for s in stop):
            raise InvalidInputError(f"SamplingParams.stop must be strings or token ids, got {given!r}")
        if "" in stop:
            raise InvalidInputError("SamplingParams.stop has an empty string; use [] to never stop early")
        if any(isinstance(s, int) and s < 0 for s in stop):
            raise InvalidInputError(f"SamplingParams.stop has a negative token id: {stop}")
        object.__setattr__(self, "stop", stop)


def _biases(given: Any) -> dict[int, float]:
    """`logit_bias` with whole numbers as keys: JSON has strings there."""
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"SamplingParams.logit_bias must map token ids to numbers, got {given!r:.80}")
    biases = cast("Mapping[Any, Any]", given)
    check_count("SamplingParams.logit_bias", len(biases), MAX_BIASES)
    read: dict[int, float] = {}
    for token, bias in biases.items():
        number = int(token) if hasattr(token, "__index__") or str(token).isdecimal() else -1
        if number < 0 or isinstance(token, bool):
            raise InvalidInputError(f"SamplingParams.logit_bias has {token!r:.80}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise InvalidInputError(
                f"SamplingParams.logit_bias[{number}] must be a number in [-100, 100], got {bias!r:.80}"
            )
        read[number] = float(bias)
    return read


def _check_grammar(given: Any) -> None:
    names = ", ".join(GRAMMARS)
    grammar = cast("Mapping[Any, Any]", given if isinstance(given, Mapping) else {})
    if len(grammar) != 1 or next(iter(grammar)) not in GRAMMARS:
        raise InvalidInputError(f"SamplingParams.grammar must have exactly one of {names}, got {given!r:.80}")
    ((kind, text),) = grammar.items()
    kinds, wanted = (Mapping, "a JSON schema") if kind == "json_schema" else (str, "a string")
    if not isinstance(text, kinds):
        raise InvalidInputError(f"SamplingParams.grammar[{kind!r}] must be {wanted}, got {text!r:.80}")
    if len(str(cast("object", text))) > MAX_GRAMMAR:
        raise InvalidInputError(f"SamplingParams.grammar has more than {MAX_GRAMMAR} characters")


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
