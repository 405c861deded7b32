"""/v1/responses, /v1/messages and /inference/v1/generate over a real socket: one sampler, three shapes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.server.conftest import MODEL, Running
from tinkex.server.openai.replies import CompletionReply
from tinkex.server.openai.requests import ChatRequest, read_request
from tinkex.server.openai.responses_api import ResponsesWriter, chat_fields
from tinkex.types.outputs import SampledSequence, SampleResponse

BEARER = {"authorization": "Bearer EMPTY"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def post(server: Running, path: str, body: Any, headers: dict[str, str] = BEARER) -> Any:
    return server.ask("POST", path, {"model": MODEL, **body}, headers, key=None)


def events(raw: bytes) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for block in raw.decode().strip().split("\n\n"):
        name, _, data = block.partition("\ndata: ")
        found.append((name.removeprefix("event: "), json.loads(data)))
    return found


def chat_text(server: Running, messages: list[Any], **more: Any) -> str:
    body = {"messages": messages, "max_tokens": 12, "seed": 3, **more}
    return post(server, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]


# -- responses -------------------------------------------------------------------------------------------


def test_a_response_says_what_the_chat_says(server: Running) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    body = {"instructions": "Be brief.", "input": "hi", "max_output_tokens": 12, "seed": 3}
    got = post(server, "/v1/responses", body).json
    assert (got["object"], got["status"] in ("completed", "incomplete")) == ("response", True)
    (item,) = got["output"]
    assert item["content"][0]["text"] == chat_text(server, messages)
    assert got["usage"]["total_tokens"] == got["usage"]["input_tokens"] + got["usage"]["output_tokens"]
    stream = events(post(server, "/v1/responses", {**body, "stream": True}).body)
    assert [fields["sequence_number"] for _, fields in stream] == list(range(len(stream)))
    assert all(name == fields["type"] for name, fields in stream)
    text = "".join(f["delta"] for name, f in stream if name == "response.output_text.delta")
    assert text == item["content"][0]["text"]
    name, last = stream[-1]
    assert name == f"response.{got['status']}"
    assert last["response"]["output"][0]["content"] == item["content"]


def test_a_response_calls_functions_and_takes_their_results(server: Running) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    body = {"input": "?", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    (call,) = post(server, "/v1/responses", body).json["output"]
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"])["city"] in ("Bern", "Rome")
    stream = events(post(server, "/v1/responses", {**body, "stream": True}).body)
    pieces = [f["delta"] for name, f in stream if name == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call["arguments"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    asked = [{"role": "user", "content": "?"}, call, result]
    again = post(server, "/v1/responses", {"input": asked, "tools": [tool], "max_output_tokens": 4})
    assert again.status == 200
    assert again.json["usage"]["input_tokens"] > 20


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"background": True}, "background"),
        ({"input": None}, "messages"),
    ],
)
def test_responses_refuse_by_name(server: Running, more: dict[str, Any], named: str) -> None:
    answer = post(server, "/v1/responses", {"input": "x", **more})
    assert answer.status == 400
    assert named in answer.json["error"]["message"]


def test_a_response_matches_its_schema(server: Running) -> None:
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    got = post(server, "/v1/responses", {"input": "x", "text": {"format": form}, "seed": 1}).json
    assert json.loads(got["output"][0]["content"][0]["text"])["city"] in ("Bern", "Rome")


def test_a_response_has_the_logprobs_of_the_chat(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3}
    reply = post(server, "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}).json
    theirs = reply["choices"][0]["logprobs"]["content"]
    body = {"input": "hi", "max_output_tokens": 12, "seed": 3, "top_logprobs": 2}
    (item,) = post(server, "/v1/responses", body).json["output"]
    assert item["content"][0]["logprobs"] == theirs
    included = {**body, "top_logprobs": None, "include": ["message.output_text.logprobs"]}
    stream = events(post(server, "/v1/responses", {**included, "stream": True}).body)
    told = [one for name, f in stream if name == "response.output_text.delta" for one in f["logprobs"]]
    assert told == [{**one, "top_logprobs": []} for one in theirs]
    plain = post(server, "/v1/responses", {**body, "top_logprobs": None}).json
    assert plain["output"][0]["content"][0]["logprobs"] == []


# -- messages --------------------------------------------------------------------------------------------


def test_a_message_says_what_the_chat_says(server: Running) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": messages,
        "max_tokens": 12,
        "seed": 3,
    }
    got = post(server, "/v1/messages", body, {"x-api-key": "EMPTY", "anthropic-version": "2023-06-01"}).json
    assert (got["type"], got["role"]) == ("message", "assistant")
    said = chat_text(server, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert got["content"] == [{"type": "text", "text": said}]
    assert got["stop_reason"] in ("end_turn", "max_tokens")
    count = post(server, "/v1/messages/count_tokens", {k: body[k] for k in ("system", "messages")}).json
    usage = got["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    stream = events(post(server, "/anthropic/api/v1/messages", {**body, "stream": True}).body)
    names = [name for name, _ in stream]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(f["delta"]["text"] for name, f in stream if name == "content_block_delta") == said
    assert stream[-2][1]["delta"]["stop_reason"] == got["stop_reason"]
    assert stream[-2][1]["usage"]["output_tokens"] == usage["output_tokens"]


def test_a_message_uses_tools(server: Running) -> None:
    tool = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
    user = {"role": "user", "content": "?"}
    body = {
        "messages": [user], "tools": [tool], "max_tokens": 300, "seed": 1,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    got = post(server, "/v1/messages", body).json
    (use,) = got["content"]
    assert (use["type"], use["name"], got["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert use["input"]["city"] in ("Bern", "Rome")
    stream = events(post(server, "/v1/messages", {**body, "stream": True}).body)
    written = "".join(f["delta"]["partial_json"] for name, f in stream if name == "content_block_delta")
    assert json.loads(written) == use["input"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "rain"}]}
    said = [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert post(server, "/v1/messages", {"messages": said, "tools": [tool], "max_tokens": 4}).status == 200


def test_stop_sequences_and_prefill(server: Running, tokenizer_dir: Any) -> None:
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is"}]
    body = {"messages": said, "max_tokens": 64, "seed": 5}
    text = post(server, "/v1/messages", body).json["content"][0]["text"]
    stop = next(c for c in text[2:] if c.isascii() and c.isprintable() and not c.isspace())
    cut = post(server, "/v1/messages", {**body, "stop_sequences": [stop]}).json
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert cut["content"] == [{"type": "text", "text": text[: text.index(stop)]}]


def test_a_thought_is_shown_unless_it_is_to_be_omitted(server: Running) -> None:
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>"}]
    body = {"messages": said, "max_tokens": 12, "seed": 5}
    (shown,) = post(server, "/v1/messages", body).json["content"]
    assert (shown["type"], bool(shown["thinking"])) == ("thinking", True)
    hiding = {**body, "thinking": {"type": "adaptive", "display": "omitted"}}
    assert post(server, "/v1/messages", hiding).json["content"] == [{**shown, "thinking": ""}]
    names = [name for name, _ in events(post(server, "/v1/messages", {**hiding, "stream": True}).body)]
    assert "content_block_delta" not in names


def test_the_reply_says_that_no_context_was_edited(server: Running) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    body = {"messages": [{"role": "user", "content": "x"}], "context_management": edits}
    nothing = {"applied_edits": []}
    assert post(server, "/v1/messages", {**body, "max_tokens": 4}).json["context_management"] == nothing
    stream = events(post(server, "/v1/messages", {**body, "max_tokens": 4, "stream": True}).body)
    assert stream[-2][1]["context_management"] == nothing
    count = post(server, "/v1/messages/count_tokens", body).json
    assert count["context_management"] == {"original_input_tokens": count["input_tokens"]}


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
        ({"model": "claude-none"}, "not_found_error", "claude-none"),
        ({"mcp_servers": [1]}, "invalid_request_error", "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "invalid_request_error", "image"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_request_error", "role"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "invalid_request_error", "tools[0]"),
    ],
)
def test_errors_have_anthropics_shape(server: Running, change: dict[str, Any], kind: str, named: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **change}
    answer = server.ask("POST", "/v1/messages", {"model": MODEL, **body}, BEARER, key=None)
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == kind
    assert named in answer.json["error"]["message"]
    page = {"origin": "https://a.example"}
    refused = server.ask("POST", "/v1/messages", body, page, key=None).json
    assert refused["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/anthropic/api/v1/models", "/anthropic/nothing"])
def test_routes_that_do_not_exist_answer_in_anthropics_shape(server: Running, path: str) -> None:
    for method in ("GET", "POST"):
        answer = server.ask(method, path, {} if method == "POST" else None, BEARER, key=None)
        assert answer.status == 404
        assert answer.json["error"] == {
            "type": "not_found_error", "message": f"{method} {path} is not offered here",
        }  # fmt: skip


# -- tokens ----------------------------------------------------------------------------------------------


def test_generate_gives_the_samplers_ids_and_logprobs(server: Running) -> None:
    drawn = {"temperature": 0.7, "max_tokens": 9, "seed": 4}
    params = {**drawn, "logprobs": 1, "skip_special_tokens": False, "n": 2}
    body = {"token_ids": [50, 60, 70], "sampling_params": params, "cache_salt": "x"}
    got = post(server, "/inference/v1/generate", body).json
    assert got["prompt_token_ids"] == [50, 60, 70]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [50, 60, 70]}]}
    asked = {"base_model": MODEL, "num_samples": 2, "prompt": prompt, "sampling_params": drawn}
    sampled = server.result(server.post("asample", **asked)).json
    for choice, sequence in zip(got["choices"], sampled["sequences"], strict=True):
        assert choice["token_ids"] == sequence["tokens"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(sequence["logprobs"], abs=1e-6)
    refused = post(server, "/inference/v1/generate", {**body, "features": {"image": [1]}})
    assert "features" in refused.json["error"]["message"]
    stream = post(server, "/inference/v1/generate", {**body, "stream": True}).body.decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in stream[:-2]]
    assert stream[-2] == "data: [DONE]"
    assert {c["index"]: c["token_ids"] for c in chunks} == {
        c["index"]: c["token_ids"] for c in got["choices"]
    }


def test_the_logprobs_of_a_text_are_not_those_of_the_thought_before_it(tokenizer_dir: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    fields = {"model": MODEL, "input": "hi", "top_logprobs": 0}
    request = read_request(ChatRequest, chat_fields(fields))
    spelled = [tokenizer.decode([token]).encode() for token in range(len(tokenizer))]
    reply = CompletionReply(request, request.prepare(tokenizer), tokenizer, spelled, ())
    tokens = tokenizer.encode("<think>ab</think>ab")
    logprobs = [-float(i) for i in range(len(tokens))]
    reply.finish(0, SampleResponse([SampledSequence("length", "", np.array(tokens), np.array(logprobs))]))
    thought, said = ResponsesWriter(reply, fields).whole()["output"]
    assert (thought["type"], said["content"][0]["text"]) == ("reasoning", "ab")
    assert [one["token"] for one in said["content"][0]["logprobs"]] == ["a", "b"]
    assert [one["logprob"] for one in said["content"][0]["logprobs"]] == logprobs[-2:]
