"""Every field that OpenAI's and Anthropic's SDKs can send, and what this server does with it.

A field's values are neutral (they mean that nothing is asked for), honoured (they change the request),
ignored (they can change no answer) or refused by name. tests/compat compares the names with the SDKs' own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.server.conftest import MODEL


class ApiField(NamedTuple):
    neutral: tuple[Any, ...] = (None,)
    honoured: tuple[Any, ...] = ()
    ignored: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()


def needed(value: Any) -> ApiField:
    return ApiField((), (value,))


def refused(*values: Any, neutral: tuple[Any, ...] = ()) -> ApiField:
    return ApiField((None, *neutral), refused=values)


def ignored(*values: Any) -> ApiField:
    return ApiField(ignored=values)


def honoured(*values: Any, neutral: tuple[Any, ...] = (), refused: tuple[Any, ...] = ()) -> ApiField:
    return ApiField((None, *neutral), values, refused=refused)


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALLED = {"type": "function", "function": {"name": "weather"}}
ASKED = [{"role": "user", "content": "hi"}]
SHARED = {
    "frequency_penalty": honoured(0.5, neutral=(0, 0.0), refused=(3,)),
    "logit_bias": honoured({"5": 10}, neutral=({},), refused=({"x": 1},)),
    "n": honoured(2, neutral=(1,), refused=(0,)),
    "presence_penalty": honoured(0.5, neutral=(0, 0.0), refused=(3,)),
    "seed": honoured(7),
    "stop": honoured("x", ["x", "y"], neutral=([],), refused=(5,)),
    "stream": honoured(True, neutral=(False,)),
    "stream_options": honoured({"include_usage": True}, neutral=({},), refused=(1, {"other": True})),
    "temperature": honoured(0.5, neutral=(1, 1.0), refused=(-1,)),
    "top_p": honoured(0.5, neutral=(1,), refused=(2,)),
    "user": ignored("me"),
}
CHAT = SHARED | {
    "audio": refused({"voice": "alloy", "format": "wav"}),
    "function_call": refused({"name": "weather"}, neutral=("none", "auto")),
    "functions": refused([{"name": "weather"}], neutral=([],)),
    "logprobs": honoured(True, neutral=(False,)),
    "max_completion_tokens": honoured(5),
    "max_tokens": honoured(5, refused=(0,)),
    "messages": needed(ASKED),
    "metadata": ignored({"a": "b"}),
    "modalities": refused(["text", "audio"], neutral=(["text"],)),
    "model": needed(MODEL),
    "moderation": refused({"model": "omni-moderation-latest"}),
    "parallel_tool_calls": honoured(False, neutral=(True,)),
    "prediction": refused({"type": "content", "content": "x"}),
    "prompt_cache_key": ignored("k"),
    "prompt_cache_options": ignored({"mode": "explicit"}),
    "prompt_cache_retention": ignored("24h"),
    "reasoning_effort": honoured("low"),
    "response_format": honoured(
        {"type": "json_object"}, neutral=({"type": "text"},), refused=({"type": "xml"},)
    ),
    "safety_identifier": ignored("s"),
    "service_tier": ignored("flex"),
    "store": ignored(True, False),
    "tool_choice": honoured("none", neutral=("auto",), refused=("sometimes", CALLED)),
    "tools": honoured([FUNCTION], neutral=([],), refused=([{"type": "web_search"}], "x")),
    "top_logprobs": ApiField(refused=(2,)),  # without logprobs
    "verbosity": refused("low", "high", neutral=("medium",)),
    "web_search_options": refused({}),  # empty options ask for a search
}
COMPLETIONS = SHARED | {
    "best_of": ApiField((None, 1), refused=(3,)),
    "echo": honoured(True, neutral=(False,)),
    "logprobs": honoured(0, 2, refused=(100,)),
    "max_tokens": honoured(5, neutral=(16,), refused=(0,)),
    "model": needed(MODEL),
    "prompt": needed("hello"),
    "suffix": refused("x", neutral=("",)),
}
RESPONSE_FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA}
RESPONSES = {
    "access_programs": refused({"x": 1}),
    "background": refused(True, neutral=(False,)),
    "context_management": refused([{"type": "compaction"}], neutral=([],)),
    "conversation": refused("conv_1"),
    "image": refused({"detail": "low"}),
    "include": ApiField(
        (None, []), (["message.output_text.logprobs"],), (["reasoning.encrypted_content"],), (["x"], "x"),
    ),
    "input": needed("hi"),
    "instructions": honoured("Be brief."),
    "max_output_tokens": honoured(5, refused=(0,)),
    "max_tool_calls": ignored(3),  # of tools that OpenAI runs: there are none
    "metadata": ignored({"a": "b"}),
    "model": needed(MODEL),
    "moderation": refused({"model": "omni-moderation-latest"}),
    "parallel_tool_calls": honoured(False, neutral=(True,)),
    "previous_response_id": refused("resp_1"),
    "prompt": refused({"id": "p"}),
    "prompt_cache_key": ignored("k"),
    "prompt_cache_options": ignored({"mode": "explicit"}),
    "prompt_cache_retention": ignored("24h"),
    "reasoning": ApiField(
        (None, {}, {"effort": None, "summary": None}, {"context": "auto"}, {"mode": "standard"}),
        ({"effort": "low"},), ({"summary": "auto"},), ({"mode": "pro"}, {"other": 1}, "low"),
    ),
    "safety_identifier": ignored("s"),
    "service_tier": ignored("flex"),
    "store": ignored(True, False),
    "stream": honoured(True, neutral=(False,)),
    "stream_options": ignored({"include_obfuscation": True}),
    "temperature": honoured(0.5, neutral=(1,), refused=(-1,)),
    "text": honoured(
        {"format": {"type": "json_object"}},
        neutral=({}, {"format": {"type": "text"}}, {"verbosity": "medium"}),
        refused=({"verbosity": "low"}, {"format": {"type": "xml"}}, {"other": 1}, "x"),
    ),
    "tool_choice": honoured("none", neutral=("auto",), refused=("sometimes", {"type": "web_search"})),
    "tools": honoured([RESPONSE_FUNCTION], neutral=([],), refused=([{"type": "web_search"}], "x")),
    "top_logprobs": honoured(2, refused=(100,)),
    "top_p": honoured(0.5, neutral=(1,), refused=(2,)),
    "truncation": ApiField((None, "disabled"), ignored=("auto",), refused=("x",)),
    "user": ignored("me"),
}  # fmt: skip
TOOL = {"name": "weather", "input_schema": SCHEMA}
COUNT = {
    "messages": needed(ASKED),
    "model": needed(MODEL),
    "cache_control": ignored({"type": "ephemeral"}),
    "output_config": honoured(
        {"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}, neutral=({},),
        refused=({"task_budget": {"total": 9}}, {"format": {"type": "xml"}}, "x"),
    ),
    "output_format": honoured({"type": "json_schema", "schema": SCHEMA}, refused=({"type": "xml"}, "x")),
    "speed": refused("fast", neutral=("standard",)),
    "system": honoured("Be brief.", [{"type": "text", "text": "Be brief."}], refused=([{"type": "image"}],)),
    "thinking": honoured(
        {"type": "disabled"}, {"type": "enabled", "budget_tokens": 2048}, {"type": "adaptive"},
        {"type": "adaptive", "display": "omitted"},
        refused=({"type": "x"}, {"type": "adaptive", "other": 1}, {"type": "enabled", "display": "x"}, True),
    ),
    "tool_choice": honoured(
        {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": True}, neutral=({"type": "auto"},),
        refused=({"type": "x"}, {"type": "auto", "other": 1}, "auto"),
    ),
    "tools": honoured([TOOL], neutral=([],), refused=([{"type": "bash_20250124", "name": "bash"}], "x")),
    "betas": ignored(["x"]),
    "context_management": ApiField(  # the reply says that nothing was edited
        (None, {}, {"edits": []}), ignored=({"edits": [{"type": "clear_thinking_20251015"}]},),
        refused=({"other": 1}, "x"),
    ),
    "mcp_servers": refused([{"type": "url"}], neutral=([],)),
    "compaction": refused({"type": "x"}),
}  # fmt: skip
MESSAGES = COUNT | {
    "container": refused("c"),
    "diagnostics": refused({"previous_message_id": "m"}),
    "fallback_credit_token": refused("t"),
    "fallbacks": refused([{"model": "x"}], neutral=([],)),
    "inference_geo": ignored("eu"),
    "max_tokens": needed(4),
    "metadata": ignored({"user_id": "u"}),
    "service_tier": ignored("standard_only"),
    "stop_sequences": honoured(["x"], neutral=([],), refused=(5,)),
    "stream": honoured(True, neutral=(False,)),
    "thread": refused({"type": "create"}),
}
