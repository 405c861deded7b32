"""OpenAI's request bodies, with vLLM's extensions: sampling parameters, prompts, and how replies are read.

A field that would change the answer and is not supported is refused by name, unless its value means that the
feature is off; one that changes nothing is ignored. Knows the fields and no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tinkex.errors import InvalidInputError
from tinkex.server.json_values import as_list, as_object, refuse_rest
from tinkex.server.openai.chat_formats import AnyParser, parser_of
from tinkex.server.openai.messages import RenderedChat, render, special_id
from tinkex.server.openai.tool_grammars import LarkWriter
from tinkex.strict import check_count
from tinkex.types.base import AnyJson, RequestModel, explain
from tinkex.types.params import SamplingParams

MOST_PROMPTS = 256
MOST_MESSAGES = 16_384
MOST_CALLS = 128  # of tools in one reply
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt",
    "prompt_cache_options", "prompt_cache_retention", "request_id", "priority",
}  # fmt: skip
# Accepted with these values only, which mean that the feature is off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    "length_penalty": (1,), "use_beam_search": (False,), "bad_words": ([],), "verbosity": ("medium",),
    "early_stopping": (False,), "typical_p": (1,), "top_a": (0,), "tfs": (1,), "detokenize": (True,),
    "spaces_between_special_tokens": (True,), "logits_processors": ([],), "allowed_token_ids": ([],),
    "documents": ([],), "mm_processor_kwargs": ({},), "truncate_prompt_tokens": (-1,), "vllm_xargs": ({},),
    "return_tokens_as_token_ids": (False,), "include_reasoning": (True,),
    "no_repeat_ngram_size": (0,), "media_io_kwargs": ({},), "truncation": (False,),
}  # fmt: skip
# Not allowed in chat_template_kwargs: arguments of `apply_chat_template` itself, not of the template.
_RESERVED = {
    "self", "tokenizer", "conversation", "messages", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tools",
}  # fmt: skip
_Text = Annotated[str, Field(min_length=1)]
_Alternatives = Annotated[int, Field(ge=0, le=20)]
_Tokens = Annotated[int, Field(ge=1, le=2**31)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """OpenAI's stream_options, and vLLM's. Nothing is obfuscated: chunks have the sizes of their texts."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


@dataclass(frozen=True)
class Prepared:
    """A request as the sampler takes it."""

    prompts: list[list[int]]
    grammar: Mapping[str, Any] | None = None
    new_parser: Callable[[], AnyParser] | None = None  # of the reply, if it is a chat's
    kept: frozenset[int] = frozenset()  # special tokens that the parser must see


class OpenAIRequest(RequestModel):
    """The fields that completions and chats share."""

    model_config = ConfigDict(strict=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = _NEUTRAL
    model: str
    n: int = Field(1, ge=1, le=128)  # choices for each prompt
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(-1, ge=-1, le=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[_Text], Field(max_length=16), BeforeValidator(lambda stop: [stop] if type(stop) is str else stop)
    ] = Field([])
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=128)] = Field([])
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=2**31)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[str, float] = Field({})
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    prompt_logprobs: _Alternatives | None = None
    response_format: dict[str, Any] = Field({})
    structured_outputs: dict[str, Any] = Field({})
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def most_tokens(self) -> int | None:
        raise NotImplementedError

    @property
    def hidden_stops(self) -> list[str]:
        """Stop strings that are not in the text."""
        return [] if self.include_stop_str_in_output else self.stop

    def params(self, grammar: Mapping[str, Any] | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.most_tokens, seed=self.seed, stop=[*self.stop, *self.stop_token_ids] or None,
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k or -1, min_p=self.min_p,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty, min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos, logit_bias=self.logit_bias or None,  # type: ignore[arg-type]
            grammar=grammar,
        )  # fmt: skip

    def constraint(self) -> tuple[str, Any] | None:
        """What the answer must match: ("json_schema" | "regex" | "lark", text)."""
        wanted = [_response_format(self.response_format)]
        guided = {
            "json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }  # fmt: skip
        wanted += [_structured(given) for given in (self.structured_outputs, guided)]
        found = [one for one in wanted if one is not None]
        if len(found) > 1:
            raise InvalidInputError("response_format, structured_outputs and guided_… exclude each other")
        return found[0] if found else None


def _response_format(given: Mapping[str, Any]) -> tuple[str, Any] | None:
    match given.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return "json_schema", {"type": "object"}
        case "json_schema":
            schema = as_object(given.get("json_schema")).get("schema")
            if not isinstance(schema, dict):
                raise InvalidInputError("response_format.json_schema needs a schema")
            return "json_schema", as_object(schema)
        case other:
            kinds = "text, json_object or json_schema"
            raise InvalidInputError(f"response_format.type must be {kinds}, got {other!r:.80}")


def _structured(given: Mapping[str, Any]) -> tuple[str, Any] | None:
    names = {"json": "json_schema", "regex": "regex", "choice": "regex", "grammar": "lark"}
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    if not asked:
        return None
    if len(asked) > 1 or next(iter(asked)) not in names:
        raise InvalidInputError(f"structured outputs take one of {', '.join(names)}, got {', '.join(asked)}")
    ((name, value),) = asked.items()
    if name == "choice":
        value = "|".join(re.escape(str(one)) for one in as_list(value))
    if name == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise InvalidInputError("guided_json is no JSON schema") from None
    return names[name], value


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
    add_special_tokens: bool = True

    @property
    def alternatives(self) -> int | None:
        """Top-k logprobs in addition to the sampled token's; None: no logprobs."""
        return self.logprobs

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or 1

    def prepare(self, tokenizer: Any) -> Prepared:
        """`prompt` may be text, texts, tokens, or lists of tokens."""
        if not self.max_tokens and not self.echo and self.prompt_logprobs is None:
            raise InvalidInputError("max_tokens must be at least 1, or 0 with echo")
        if self.best_of not in (None, self.n):
            raise InvalidInputError(f"best_of is not offered here (unless it equals n), got {self.best_of!r}")
        given: AnyJson = self.prompt
        several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
        wanted = self.constraint()
        return Prepared(
            [_prompt_tokens(one, tokenizer, self.add_special_tokens) for one in several],
            wanted and {wanted[0]: wanted[1]},
        )


class ChatRequest(OpenAIRequest):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: _Alternatives | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    echo: ClassVar[bool] = False
    neutral: ClassVar = {**_NEUTRAL, "echo": (False,), "add_special_tokens": (False,)}

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def functions(self) -> list[dict[str, Any]]:
        """The tools that may be called: their names, descriptions and parameters."""
        known: dict[str, dict[str, Any]] = {}
        for i, tool in enumerate(self.tools):
            function = as_object(tool.get("function"))
            if tool.get("type") != "function" or not isinstance(function.get("name"), str):
                raise InvalidInputError(f"tools[{i}] must be a function with a name, got {str(tool)[:80]}")
            if not isinstance(function.get("parameters") or {}, dict):
                raise InvalidInputError(f"tools[{i}].function.parameters must be a JSON schema")
            known[function["name"]] = function
        names, _ = self._chosen()
        for name in names or ():
            if name not in known:
                has = ", ".join(known) or "there are none"
                raise InvalidInputError(f"tool_choice names {name!r}, which is not in tools ({has})")
        return [function for name, function in known.items() if names is None or name in names]

    def _chosen(self) -> tuple[list[str] | None, bool]:
        """The functions that may be called (None: all), and whether one must be."""
        choice: Any = self.tool_choice
        match choice:
            case "none":
                return [], False
            case "auto":
                return None, False
            case "required" | "any":
                return None, True
            case {"type": "function", "function": {"name": str(name)}}:
                return [name], True
            case {"type": "allowed_tools", "allowed_tools": {"mode": str(mode), "tools": tools}}:
                listed = [as_object(as_object(tool).get("function")).get("name") for tool in as_list(tools)]
                return [str(name) for name in listed], mode == "required"
            case _:
                kinds = "none, auto, required or a function"
                raise InvalidInputError(f"tool_choice must be {kinds}, got {str(choice)[:80]}")

    def rendered(self, tokenizer: Any) -> RenderedChat:
        """The conversation as tokens."""
        if reserved := _RESERVED & set(self.chat_template_kwargs):
            raise InvalidInputError(f"chat_template_kwargs must not have {', '.join(sorted(reserved))}")
        more = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            more.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                more.setdefault("enable_thinking", False)
        goes_on = self.continue_final_message
        if goes_on is None and self.add_generation_prompt is not None:
            goes_on = False if self.add_generation_prompt else None
        tools = [{"type": "function", "function": function} for function in self.functions()]
        return render(tokenizer, self.messages, tools, goes_on=goes_on, **more)

    def prepare(self, tokenizer: Any) -> Prepared:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidInputError("top_logprobs needs logprobs to be true")
        functions, chat, find = self.functions(), self.rendered(tokenizer), special_id(tokenizer)
        most = MOST_CALLS if self.parallel_tool_calls else 1
        new_parser = partial(parser_of, chat.form, thinking=chat.thinking, tools=functions, most_calls=most)
        kept = frozenset(i for marker in chat.form.markers if (i := find(marker)) is not None)
        if not self.skip_special_tokens:
            kept = frozenset(tokenizer.all_special_ids)
        writer = LarkWriter(chat.form, find, thinking=chat.thinking)
        return Prepared([chat.prompt], self._grammar(writer, functions), new_parser, kept)

    def _grammar(
        self, writer: LarkWriter, functions: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        wanted = self.constraint()
        if self._chosen()[1]:
            if not functions:
                raise InvalidInputError("tool_choice asks for a call, and there are no tools")
            if wanted is not None:
                raise InvalidInputError("tool_choice asks for a call, and response_format for something else")
            named = isinstance(self.tool_choice, dict) and len(functions) == 1
            several = self.parallel_tool_calls and not named
            return {"lark": writer.calls(functions, MOST_CALLS if several else 1)}
        match wanted:
            case None:
                return None
            case ("json_schema", schema):
                return {"lark": writer.answer(schema)}
            case ("regex", regex):
                return {"lark": writer.matching(regex)}
            case (kind, text):
                return {kind: text}


AnyRequest = CompletionRequest | ChatRequest
Kind = TypeVar("Kind", bound=OpenAIRequest)


def read_request(kind: type[Kind], fields: dict[str, Any], names: Mapping[str, str] | None = None) -> Kind:
    """`names`: what the client calls a field, if not as it is called here."""
    given = {name: value for name, value in fields.items() if name not in _IGNORED and value is not None}
    refuse_rest({name: given.pop(name) for name in kind.neutral if name in given}, kind.neutral)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        message = explain(error, "request").replace(f"{kind.__name__} has no", "the request has no", 1)
        for ours, theirs in (names or {}).items():
            message = message.replace(f"request.{ours}", f"request.{theirs}")
        raise InvalidInputError(message) from None


def _prompt_tokens(prompt: AnyJson, tokenizer: Any, special: bool) -> list[int]:
    if isinstance(prompt, str):
        prompt = list(tokenizer.encode(prompt, add_special_tokens=special))
    if not isinstance(prompt, list) or not all(type(t) is int and 0 <= t < 2**31 for t in prompt):
        raise InvalidInputError("prompt must be a string, a list of token ids, or a list of these")
    if not prompt:
        raise InvalidInputError("prompt is empty: this model has nothing to begin with")
    return prompt
