"""POST /v1/responses: OpenAI's newer API for chats, as far as clients use it by default.

A request becomes a `ChatRequest`; the reply is written as items, or as their events. Nothing is stored: a
request that refers to an earlier response is refused.
"""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from tinkex.errors import InvalidInputError
from tinkex.server.bodies import IncomingRequest
from tinkex.server.gateway import Endpoint
from tinkex.server.json_values import as_list, as_object, need_list, need_object, refuse_rest
from tinkex.server.openai.blocks import BlockEvent, ReplyBlock, ReplyBlocks
from tinkex.server.openai.messages import content_text
from tinkex.server.openai.replies import ChoiceDelta, CompletionReply, Json, TokenLogprob, error_fields
from tinkex.server.openai.requests import ChatRequest, read_request
from tinkex.server.openai.routes import PREFIXES, openai_error
from tinkex.server.openai.text_sampler import TextSampler
from tinkex.server.stream_sample import server_sent

_SAME = (
    "model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "top_k", "seed",
    "min_p", "chat_template_kwargs", "user",
)  # fmt: skip
# They change nothing here: nothing is stored, cached by key, or summarised.
_IGNORED = (
    "store", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "stream_options", "max_tool_calls",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled", "auto"), "background": (False,), "context_management": ([],),
    "text.verbosity": ("medium",), "reasoning.context": ("auto",), "reasoning.mode": ("standard",),
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
# Of what the server never does, so that there is nothing to include; thoughts are in plain text.
_INCLUDED = {
    _LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
}  # fmt: skip


def responses_routes(text: TextSampler) -> list[Route]:
    endpoint = Endpoint(text.gateway, "openai_responses", partial(_respond, text), openai_error)
    return [Route(f"{prefix}/responses", endpoint, methods=["POST"]) for prefix in PREFIXES]


async def _respond(text: TextSampler, http: IncomingRequest) -> Response:
    caller = text.admit(http)
    fields = await text.fields(http)
    request = read_request(ChatRequest, chat_fields(fields), {"max_completion_tokens": "max_output_tokens"})
    return await text.respond(http, caller, request, partial(ResponsesWriter, fields=fields))


# -- requests --------------------------------------------------------------------------------------------


def chat_fields(fields: Json) -> Json:
    """The body of the chat that says the same."""
    given = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
    chat: Json = {name: given.pop(name) for name in _SAME if name in given}
    chat["messages"] = _messages(given.pop("instructions", None), given.pop("input", None))
    chat["max_completion_tokens"] = given.pop("max_output_tokens", None)
    chat["tools"] = [_tool(tool, i) for i, tool in enumerate(need_list(given.pop("tools", None), "tools"))]
    chat["tool_choice"] = _tool_choice(given.pop("tool_choice", "auto"))
    names = ("effort", "summary", "generate_summary", "context", "mode")
    reasoning = need_object(given.pop("reasoning", None), "reasoning", *names)
    chat["reasoning_effort"] = reasoning.get("effort")
    text = need_object(given.pop("text", None), "text", "format", "verbosity")
    form = as_object(text.get("format"))
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {**form, "name": form.get("name", "answer")}}
    chat["response_format"] = form or None
    included = need_list(given.pop("include", None), "include")
    refuse_rest({f"include {name}": True for name in included if name not in _INCLUDED}, {})
    chat["logprobs"] = _LOGPROBS in included or chat.get("top_logprobs") is not None
    given |= {"text.verbosity": text.get("verbosity")}
    given |= {f"reasoning.{name}": reasoning.get(name) for name in ("context", "mode")}
    refuse_rest(given, _NEUTRAL)
    return chat


def _messages(instructions: Any, given: Any) -> list[Json]:
    messages: list[Json] = []
    if instructions is not None:
        messages.append({"role": "system", "content": content_text(instructions, "instructions")})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else as_list(given)
    thought = ""
    for i, item in enumerate(map(as_object, items)):
        where = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                content = content_text(item.get("content"), where)
                messages.append({"role": item.get("role"), "content": content})
                if item.get("role") == "assistant" and thought:
                    messages[-1]["reasoning_content"], thought = thought, ""
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
                    thought = ""
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = content_text(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                parts = [*as_list(item.get("content")), *as_list(item.get("summary"))]
                thought = "".join(str(as_object(part).get("text", "")) for part in parts)
            case other:
                raise InvalidInputError(f"{where}: items of type {other!r} are not offered")
    return messages


def _tool(given: Any, i: int) -> Json:
    tool = as_object(given)
    if tool.get("type") != "function":
        raise InvalidInputError(f"tools[{i}]: only functions are offered, got {str(tool.get('type'))[:80]!r}")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name)}
    return {"type": "function", "function": function}


def _tool_choice(given: Any) -> Any:
    match given:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": tools}:
            named = [{"type": "function", "function": as_object(tool)} for tool in as_list(tools)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        case _:
            return given


# -- replies ---------------------------------------------------------------------------------------------


class ResponsesWriter:
    """Writes a reply as a response with items."""

    def __init__(self, reply: CompletionReply, fields: Json) -> None:
        self._reply, self._fields = reply, fields
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._blocks, self._ids = ReplyBlocks(), dict[int, str]()
        self._reason: str | None = None
        self._tokens: list[TokenLogprob] = []
        self._count = 0

    def whole(self) -> Json:
        for delta in self._reply.choices[0].deltas:
            self._add(delta)
        return self._response("incomplete" if self._reason == "length" else "completed")

    def begin(self) -> list[bytes]:
        started = self._response("in_progress")
        return [self._event(f"response.{name}", response=started) for name in ("created", "in_progress")]

    def more(self, delta: ChoiceDelta) -> list[bytes]:
        return [event for block in self._add(delta) for event in self._written(block)]

    def _add(self, delta: ChoiceDelta) -> list[BlockEvent]:
        self._reason = delta.reason or self._reason
        self._tokens += delta.tokens
        return self._blocks.add(delta.parts)

    def end(self) -> list[bytes]:
        ends = [event for block in self._blocks.end() for event in self._written(block)]
        state = "incomplete" if self._reason == "length" else "completed"
        return [*ends, self._event(f"response.{state}", response=self._response(state))]

    def failed(self, status: int, message: str) -> bytes:
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": message}}
        if status < 500:
            failed["error"]["code"] = error_fields(status, message)["code"] or "invalid_prompt"
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return server_sent(kind, numbered)

    def _written(self, event: BlockEvent) -> list[bytes]:
        what, block, text = event
        at: Json = {"output_index": block.index, "item_id": self._id_of(block)}
        inside = {**at, "content_index": 0}
        match block.kind, what:
            case _, "begin":
                item = self._item(block, "in_progress")
                added = self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind == "call":
                    return [added]
                return [
                    added,
                    self._event("response.content_part.added", **inside, part=self._part(block, "")),
                ]
            case "call", "more":
                return [self._event("response.function_call_arguments.delta", **at, delta=text)]
            case "reasoning", "more":
                return [self._event("response.reasoning_text.delta", **inside, delta=text)]
            case _, "more":
                return [
                    self._event(
                        "response.output_text.delta", **inside, delta=text, logprobs=self._logprobs(text)
                    )
                ]
            case _:
                return self._ended(block, at, inside)

    def _ended(self, block: ReplyBlock, at: Json, inside: Json) -> list[bytes]:
        text, events = block.text, list[bytes]()
        if block.kind == "call":
            name = block.call.name if block.call else ""
            events.append(
                self._event("response.function_call_arguments.done", **at, name=name, arguments=text)
            )
        else:
            kind = "reasoning_text" if block.kind == "reasoning" else "output_text"
            more: Json = {} if block.kind == "reasoning" else {"logprobs": self._logprobs(text)}
            events.append(self._event(f"response.{kind}.done", **inside, text=text, **more))
            events.append(self._event("response.content_part.done", **inside, part=self._part(block, text)))
        item = self._item(block, "completed")
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _id_of(self, block: ReplyBlock) -> str:
        kind = {"call": "fc", "reasoning": "rs", "text": "msg"}[block.kind]
        return self._ids.setdefault(block.index, f"{kind}_{uuid.uuid4().hex}")

    def _item(self, block: ReplyBlock, status: str) -> Json:
        item: Json = {"id": self._id_of(block), "status": status}
        done = status != "in_progress"
        if block.kind == "call":
            assert block.call is not None
            call_id = f"call_{item['id'].removeprefix('fc_')[:24]}"
            arguments = block.text if done else ""
            named = {"call_id": call_id, "name": block.call.name, "arguments": arguments}
            return {**item, "type": "function_call", **named}
        content = [self._part(block, block.text)] if done else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str) -> Json:
        usage = self._reply.usage()
        asked = self._fields
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "model": self._reply.request.model, "error": None, "instructions": asked.get("instructions"),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if status == "in_progress" else [
                self._item(block, "completed") for block in self._blocks.all
            ],
            "metadata": asked.get("metadata") or {},
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "temperature": self._reply.request.temperature, "top_p": self._reply.request.top_p,
            "tool_choice": asked.get("tool_choice") or "auto", "tools": asked.get("tools") or [],
            "max_output_tokens": asked.get("max_output_tokens"), "previous_response_id": None, "store": False,
            "text": asked.get("text") or {"format": {"type": "text"}}, "truncation": "disabled",
            "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
            "usage": None if status == "in_progress" else {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }  # fmt: skip

    def _part(self, block: ReplyBlock, text: str) -> Json:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(text)}

    def _logprobs(self, text: str) -> list[Json]:
        """Of the tokens that a text is made of: thoughts and calls have others."""
        spans, raw = list[tuple[int, int]](), b""
        for token, _, _ in self._tokens:
            piece = self._reply.bytes_of(token)
            spans.append((len(raw), len(raw) + len(piece)))
            raw += piece
        begin = raw.rfind(text.encode()) if text else -1
        if begin < 0:  # bytes that are no characters are shown as others: the text is all that there is
            begin, end = 0, len(raw) if text else 0
        else:
            end = begin + len(text.encode())
        found = zip(self._tokens, spans, strict=True)
        return self._reply.shown(token for token, (at, until) in found if at < end and until > begin)
