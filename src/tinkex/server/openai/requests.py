"""OpenAI's request bodies, read into sampling parameters and prompts of tokens.

A field that would change the answer and is not supported is refused by name; one that changes nothing is
ignored. Every value is checked here, with a message that names the field. This module knows OpenAI's fields
and the tokenizer's chat template, and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.errors import InvalidInputError
from tinkex.tokenizers import render_chat
from tinkex.types.base import AnyJson
from tinkex.types.params import SamplingParams

MOST_CHOICES = 128
MOST_PROMPTS = 256
MOST_ALTERNATIVES = 20
COMPLETION_TOKENS = 16  # OpenAI's default for max_tokens of a completion

_SHARED = {
    "model", "n", "stream", "stream_options", "temperature", "top_p", "top_k", "stop", "seed", "max_tokens",
    "logprobs",
}  # fmt: skip
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
}  # fmt: skip
# Accepted with these values only, which mean that the feature is off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_COMPLETION = _SHARED | {"prompt", "echo", "best_of"}
_CHAT = _SHARED | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
# Not allowed in chat_template_kwargs: arguments of `apply_chat_template` itself, not of the template.
_RESERVED = {
    "self", "tokenizer", "conversation", "messages", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
}  # fmt: skip


@dataclass(frozen=True)
class CompletionRequest:
    """One request: prompts as tokens, and how to continue each of them."""

    prompts: list[list[int]]
    params: SamplingParams
    choices: int
    alternatives: int | None  # top-k logprobs beside the sampled token's; None: no logprobs at all
    stop: list[str]
    echo: bool = False
    score_only: bool = False  # max_tokens 0 with echo: only the prompt is scored
    stream: bool = False
    stream_usage: bool = False


def model_of(fields: Mapping[str, Any]) -> str:
    return _typed(fields, "model", str, None)


def read_completion(fields: Mapping[str, Any], tokenizer: Any) -> CompletionRequest:
    _check_names(fields, _COMPLETION)
    alternatives, echo = _whole(fields, "logprobs", None, 0, MOST_ALTERNATIVES), _flag(fields, "echo")
    most = _whole(fields, "max_tokens", COMPLETION_TOKENS, 0)
    if most == 0 and not echo:
        raise InvalidInputError("max_tokens must be at least 1, or 0 with echo")
    choices = _whole(fields, "n", 1, 1, MOST_CHOICES) or 1
    if fields.get("best_of") not in (None, choices):
        raise InvalidInputError(
            f"best_of is not offered here (unless it equals n), got {fields['best_of']!r}"
        )
    return CompletionRequest(
        _prompts(fields.get("prompt"), tokenizer), _params(fields, most or 1), choices, alternatives,
        _stops(fields), echo, most == 0, *_streaming(fields),
    )  # fmt: skip


def read_chat(fields: Mapping[str, Any], tokenizer: Any) -> CompletionRequest:
    _check_names(fields, _CHAT)
    most = _whole(fields, "max_completion_tokens", _whole(fields, "max_tokens", None, 1), 1)
    alternatives = _whole(fields, "top_logprobs", None, 0, MOST_ALTERNATIVES)
    if not _flag(fields, "logprobs"):
        if alternatives is not None:
            raise InvalidInputError("top_logprobs needs logprobs to be true")
    else:
        alternatives = alternatives or 0
    more = _typed(fields, "chat_template_kwargs", dict, {})
    if reserved := _RESERVED & set(more):
        raise InvalidInputError(f"chat_template_kwargs must not have {', '.join(sorted(reserved))}")
    prompt = render_chat(tokenizer, _messages(fields.get("messages")), **more)
    choices = _whole(fields, "n", 1, 1, MOST_CHOICES) or 1
    return CompletionRequest(
        [prompt], _params(fields, most), choices, alternatives, _stops(fields), False, False,
        *_streaming(fields),
    )  # fmt: skip


# -- fields ----------------------------------------------------------------------------------------------


def _check_names(fields: Mapping[str, Any], known: set[str]) -> None:
    for name, value in fields.items():
        if value is None or name in known or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise InvalidInputError(f"unrecognized request argument: {name}")
        if value not in _NEUTRAL[name]:
            raise InvalidInputError(f"{name} is not offered by this server, got {str(value)[:80]}")


def _typed(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name} must be {_A[kind]}, got {str(value)[:80]}")
    return value


_A = {str: "a string", bool: "true or false", dict: "an object", list: "a list"}


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    return _typed(fields, name, bool, False)


def _whole(
    fields: Mapping[str, Any], name: str, default: int | None, low: int, high: int = 2**31
) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise InvalidInputError(f"{name} must be a whole number from {low} to {high}, got {str(value)[:80]}")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise InvalidInputError(f"{name} must be a number from 0 to {high:g}, got {str(value)[:80]}")
    return float(value)


def _params(fields: Mapping[str, Any], most: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=most,
        seed=_whole(fields, "seed", None, -(2**63), 2**63 - 1),
        stop=_stops(fields) or None,
        temperature=_number(fields, "temperature", 1.0, 100.0),
        top_p=_number(fields, "top_p", 1.0, 1.0),
        top_k=_whole(fields, "top_k", -1, -1) or -1,
    )


def _stops(fields: Mapping[str, Any]) -> list[str]:
    stop: AnyJson = fields.get("stop")
    stops: AnyJson = [stop] if isinstance(stop, str) else stop if stop is not None else []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > 16:
        raise InvalidInputError(
            f"stop must be a string, or up to 16 of them, none empty, got {str(stop)[:80]}"
        )
    return stops


def _streaming(fields: Mapping[str, Any]) -> tuple[bool, bool]:
    options = _typed(fields, "stream_options", dict, {})
    return _flag(fields, "stream"), _flag(options, "include_usage")


def _prompts(prompt: AnyJson, tokenizer: Any) -> list[list[int]]:
    """Text, texts, tokens, or lists of tokens; as lists of tokens."""
    several: list[AnyJson] = (
        prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    )
    if len(several) > MOST_PROMPTS:
        raise InvalidInputError(f"prompt has {len(several)} prompts; at most {MOST_PROMPTS} are accepted")
    return [_prompt_tokens(one, tokenizer) for one in several]


def _prompt_tokens(prompt: AnyJson, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        prompt = list(tokenizer.encode(prompt))
    if not isinstance(prompt, list) or not all(type(t) is int and 0 <= t < 2**31 for t in prompt):
        raise InvalidInputError("prompt must be a string, a list of token ids, or a list of these")
    if not prompt:
        raise InvalidInputError("prompt is empty: this model has nothing to begin with")
    return prompt


def _messages(messages: AnyJson) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidInputError("messages must be a list with at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: AnyJson, where: str) -> dict[str, Any]:
    """The message with its content as one text, which is what chat templates take."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidInputError(f"{where} must be an object with a role, got {str(message)[:80]}")
    content: AnyJson = message.get("content")
    if isinstance(content, list):
        parts: list[AnyJson] = content
        for part in parts:
            kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else ("", None)
            if kind != "text" or not isinstance(text, str):
                raise InvalidInputError(
                    f"{where}.content: this model reads text parts alone, got {str(part)[:80]}"
                )
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise InvalidInputError(f"{where}.content must be a string or a list of text parts")
    return {**message, "content": content or ""}
