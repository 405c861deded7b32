"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients and coding agents speak them.

A request becomes a `ChatRequest`; the reply is written as content blocks, or as their events. Errors have
Anthropic's shape. `/anthropic/api/v1/messages` is the same.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response
from starlette.routing import Route

from tinkex.errors import InvalidInputError
from tinkex.server.bodies import IncomingRequest
from tinkex.server.gateway import JSON, Endpoint
from tinkex.server.json_values import as_list, as_object, need_list, need_object, refuse_rest
from tinkex.server.openai.blocks import BlockEvent, ReplyBlock, ReplyBlocks
from tinkex.server.openai.messages import content_text
from tinkex.server.openai.replies import ChoiceDelta, CompletionReply, Json
from tinkex.server.openai.requests import ChatRequest, read_request
from tinkex.server.openai.text_sampler import TextSampler, tokenizer_of
from tinkex.server.stream_sample import server_sent

PREFIXES = ("/v1", "/anthropic/api/v1", "/anthropic/v1")
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SAME = ("model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "seed")
# Hints about placement and caching, which change no answer.
_IGNORED = ("metadata", "service_tier", "cache_control", "inference_geo", "betas")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "speed": ("standard",), "mcp_servers": ([],), "fallbacks": ([],),
    "thinking.display": ("summarized", "omitted"), "thinking.type": ("enabled", "disabled", "adaptive"),
    "output_format": ({},), "output_config.format": ({},),
}  # fmt: skip
_NAMES = {"stop": "stop_sequences"}


def anthropic_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error response as Anthropic's client reads it."""
    status = 400 if status == 422 else status
    body = orjson.dumps({"type": "error", "error": _error(status, message)})
    return Response(body, status, {**JSON, **(headers or {})})


def _error(status: int, message: str) -> Json:
    return {"type": _ERRORS.get(status, "api_error"), "message": message}


def anthropic_routes(text: TextSampler) -> list[Route]:
    create = Endpoint(text.gateway, "anthropic_messages", partial(_create, text), anthropic_error)
    count = Endpoint(text.gateway, "anthropic_count", partial(_count, text), anthropic_error)
    unknown = Endpoint(text.gateway, "anthropic_unknown", _unknown, anthropic_error)
    return [
        *(
            Route(f"{prefix}/messages{rest}", endpoint, methods=["POST"])
            for prefix in PREFIXES
            for rest, endpoint in (("", create), ("/count_tokens", count))
        ),
        *(
            Route(path, unknown, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
            for path in ("/v1/messages", "/v1/messages/{rest:path}", "/anthropic/{rest:path}")
        ),
    ]


async def _unknown(http: IncomingRequest) -> Response:
    return anthropic_error(404, f"{http.scope['method']} {http.scope['path']} is not offered here")


async def _create(text: TextSampler, http: IncomingRequest) -> Response:
    caller = text.admit(http)
    fields = await text.fields(http)
    if not isinstance(fields.get("max_tokens"), int):
        raise InvalidInputError("max_tokens: a whole number is required")
    request = read_request(ChatRequest, chat_fields(fields), _NAMES)
    return await text.respond(http, caller, request, partial(MessagesWriter, fields=fields))


async def _count(text: TextSampler, http: IncomingRequest) -> Response:
    caller = text.admit(http)
    fields = await text.fields(http)
    request = read_request(ChatRequest, chat_fields(fields), _NAMES)
    _, base = await text.open(request.model, caller)
    chat = await asyncio.to_thread(request.rendered, await tokenizer_of(base))
    count: Json = {"input_tokens": len(chat.prompt)}
    if fields.get("context_management"):
        count["context_management"] = {"original_input_tokens": len(chat.prompt)}  # nothing was edited
    return Response(orjson.dumps(count), 200, JSON)


# -- requests --------------------------------------------------------------------------------------------


def chat_fields(fields: Json) -> Json:
    """The body of the chat that says the same."""
    given = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
    chat: Json = {name: given.pop(name) for name in _SAME if name in given}
    chat["max_tokens"], chat["stop"] = given.pop("max_tokens", None), given.pop("stop_sequences", None)
    system = content_text(given.pop("system", None), "system")
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(need_list(given.pop("messages", None), "messages")):
        chat["messages"] += _messages(as_object(message), f"messages[{i}]")
    tools = need_list(given.pop("tools", None), "tools")
    chat["tools"] = [_tool(as_object(tool), i) for i, tool in enumerate(tools)]
    names = ("type", "name", "disable_parallel_tool_use")
    choice = need_object(given.pop("tool_choice", None), "tool_choice", *names)
    chat["tool_choice"] = _tool_choice(choice)
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    thinking = need_object(given.pop("thinking", None), "thinking", "type", "budget_tokens", "display")
    if thinking:
        enabled = thinking.get("type") != "disabled"
        chat["chat_template_kwargs"] = {
            "enable_thinking": enabled,
            **as_object(chat.get("chat_template_kwargs")),
        }
    wanted = need_object(given.pop("output_config", None), "output_config", "effort", "format")
    chat["reasoning_effort"] = wanted.get("effort")
    given["output_config.format"] = wanted.get("format")
    for name in ("output_config.format", "output_format"):
        if as_object(given.get(name)).get("type") == "json_schema":
            schema = {"name": "answer", "schema": given.pop(name).get("schema")}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    need_object(given.pop("context_management", None), "context_management", "edits")  # the reply says: none
    given |= {f"thinking.{name}": thinking.get(name) for name in ("type", "display")}
    refuse_rest(given, _NEUTRAL)
    return chat


def _messages(message: Json, where: str) -> list[Json]:
    """A message as the chat has it: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidInputError(f"{where}.role must be user or assistant, got {role!r:.80}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Json] = []
    said: Json = {"role": role, "content": ""}
    for block in map(as_object, as_list(content)):
        match block.get("type"):
            case "text":
                said["content"] += content_text([{"type": "text", "text": block.get("text")}], where)
            case "thinking":
                said["reasoning_content"] = block.get("thinking")
            case "redacted_thinking":
                pass  # only its author can read it
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                call = {"id": block.get("id"), "type": "function", "function": function}
                said.setdefault("tool_calls", []).append(call)
            case "tool_result":
                text = content_text(block.get("content"), where)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            case other:
                raise InvalidInputError(f"{where}.content: blocks of type {other!r} are not offered")
    return [*results, said] if said["content"] or said.get("tool_calls") or not results else results


def _tool(tool: Json, i: int) -> Json:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise InvalidInputError(
            f"tools[{i}]: only tools with a name and an input_schema, got {str(tool)[:80]}"
        )
    function = {"name": tool["name"], "parameters": tool.get("input_schema")}
    return {"type": "function", "function": {**function, "description": tool.get("description", "")}}


def _tool_choice(choice: Json) -> Any:
    match choice.get("type", "auto"):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case other:
            return other


# -- replies ---------------------------------------------------------------------------------------------


class MessagesWriter:
    """Writes a reply as a message with content blocks."""

    def __init__(self, reply: CompletionReply, fields: Json) -> None:
        hidden = as_object(fields.get("thinking")).get("display") == "omitted"
        self._reply, self._blocks = reply, ReplyBlocks("reasoning" if hidden else None)
        self._edits: Json = {"context_management": {"applied_edits": []}}
        if not fields.get("context_management"):
            self._edits = {}
        self._id = f"msg_{uuid.uuid4().hex}"
        self._last: ChoiceDelta | None = None

    def whole(self) -> Json:
        for delta in self._reply.choices[0].deltas:
            self._blocks.add(delta.parts)
            self._last = delta
        content = [_block(block, block.text) for block in self._blocks.all]
        return {
            **self._message(), "content": content, **self._ending(), "usage": self._usage(), **self._edits,
        }  # fmt: skip

    def begin(self) -> list[bytes]:
        usage: Json = {**self._usage(), "output_tokens": 0}
        nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        message: Json = {**self._message(), **nothing, "usage": usage}
        return [server_sent("message_start", {"type": "message_start", "message": message})]

    def more(self, delta: ChoiceDelta) -> list[bytes]:
        self._last = delta
        return [_written(event) for event in self._blocks.add(delta.parts)]

    def end(self) -> list[bytes]:
        closing = {"type": "message_delta", "delta": self._ending(), "usage": self._usage(), **self._edits}
        return [
            *(_written(event) for event in self._blocks.end()),
            server_sent("message_delta", closing),
            server_sent("message_stop", {"type": "message_stop"}),
        ]

    def failed(self, status: int, message: str) -> bytes:
        return server_sent("error", {"type": "error", "error": _error(status, message)})

    def _message(self) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._reply.request.model}

    def _ending(self) -> Json:
        assert self._last is not None
        stop, reason = self._last.stopped_at, _REASONS[self._last.reason or "stop"]
        if stop is not None and reason == "end_turn":
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> Json:
        usage = self._reply.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
        }  # fmt: skip


def _block(block: ReplyBlock, text: str) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "call":
            assert block.call is not None
            given = as_object(json.loads(text or "{}"))
            named: Json = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": block.call.name}
            return {"type": "tool_use", **named, "input": given}


_DELTAS = {
    "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


def _written(event: BlockEvent) -> bytes:
    what, block, text = event
    match what:
        case "begin":
            name, fields = "content_block_start", {"content_block": _block(block, "")}
        case "more":
            kind, key = _DELTAS[block.kind]
            name, fields = "content_block_delta", {"delta": {"type": kind, key: text}}
        case "end":
            name, fields = "content_block_stop", {}
    return server_sent(name, {"type": name, "index": block.index, **fields})
