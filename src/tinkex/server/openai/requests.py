"""OpenAI's request bodies: pydantic models that give sampling parameters and prompts of tokens.

A field that would change the answer and is not supported is refused by name; one that changes nothing is
ignored. Knows OpenAI's fields and the tokenizer's chat template, and no HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tinkex.errors import InvalidInputError
from tinkex.strict import check_count
from tinkex.tokenizers import render_chat
from tinkex.types.base import AnyJson, RequestModel, explain

MOST_PROMPTS = 256
MOST_MESSAGES = 16_384
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
}  # fmt: skip
# Accepted with these values only, which mean that the feature is off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
# Not allowed in chat_template_kwargs: arguments of `apply_chat_template` itself, not of the template.
_RESERVED = {
    "self", "tokenizer", "conversation", "messages", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
}  # fmt: skip
_Text = Annotated[str, Field(min_length=1)]
_Alternatives = Annotated[int, Field(ge=0, le=20)]
_Tokens = Annotated[int, Field(ge=1, le=2**31)]


class StreamOptions(BaseModel):
    """OpenAI's stream_options."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class OpenAIRequest(RequestModel):
    """The fields that completions and chats share."""

    model_config = ConfigDict(strict=True)
    model: str
    n: int = Field(1, ge=1, le=128)  # choices for each prompt
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(-1, ge=-1, le=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[_Text], Field(max_length=16), BeforeValidator(lambda stop: [stop] if type(stop) is str else stop)
    ] = Field([])


def _few_prompts(given: AnyJson) -> AnyJson:
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        check_count("prompt", len(given), MOST_PROMPTS)
    return given


class CompletionRequest(OpenAIRequest):
    """The body of /v1/completions. With `echo` and max_tokens 0, only the prompt is scored."""

    prompt: Annotated[Any, BeforeValidator(_few_prompts)] = None
    echo: bool = False
    max_tokens: int = Field(16, ge=0, le=2**31)
    logprobs: _Alternatives | None = None
    best_of: Any = None

    @property
    def alternatives(self) -> int | None:
        """Top-k logprobs beside the sampled token's; None: no logprobs at all."""
        return self.logprobs

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or 1

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """`prompt` may be text, texts, tokens, or lists of tokens."""
        if not self.max_tokens and not self.echo:
            raise InvalidInputError("max_tokens must be at least 1, or 0 with echo")
        if self.best_of not in (None, self.n):
            raise InvalidInputError(f"best_of is not offered here (unless it equals n), got {self.best_of!r}")
        given: AnyJson = self.prompt
        several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
        return [_prompt_tokens(one, tokenizer) for one in several]


class ChatRequest(OpenAIRequest):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: _Alternatives | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    echo: ClassVar[bool] = False

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidInputError("top_logprobs needs logprobs to be true")
        if reserved := _RESERVED & set(self.chat_template_kwargs):
            raise InvalidInputError(f"chat_template_kwargs must not have {', '.join(sorted(reserved))}")
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)]
        return [render_chat(tokenizer, messages, **self.chat_template_kwargs)]


AnyRequest = CompletionRequest | ChatRequest
Kind = TypeVar("Kind", bound=OpenAIRequest)


def read_request(kind: type[Kind], fields: dict[str, Any]) -> Kind:
    given = {name: value for name, value in fields.items() if name not in _IGNORED}
    for name, accepted in _NEUTRAL.items():
        if (value := given.pop(name, None)) is not None and value not in accepted:
            raise InvalidInputError(f"{name} is not offered by this server, got {str(value)[:80]}")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise InvalidInputError(explain(error, "request")) from None


def _prompt_tokens(prompt: AnyJson, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        prompt = list(tokenizer.encode(prompt))
    if not isinstance(prompt, list) or not all(type(t) is int and 0 <= t < 2**31 for t in prompt):
        raise InvalidInputError("prompt must be a string, a list of token ids, or a list of these")
    if not prompt:
        raise InvalidInputError("prompt is empty: this model has nothing to begin with")
    return prompt


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with its content as one text, which is what chat templates take."""
    if not isinstance(message.get("role"), str):
        raise InvalidInputError(f"{where} must be an object with a role, got {str(message)[:80]}")
    content: AnyJson = message.get("content") or ""
    parts: list[AnyJson] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = ""
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise InvalidInputError(
                f"{where}.content: this model reads a string or text parts, got {str(part)[:80]}"
            )
        text += part["text"]
    return {**message, "content": text}
