"""Tools, structured answers, prefill, token ids, aliases and vLLM's extensions, over a real socket."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.conftest import MODEL, Running, server_config

BEARER = {"authorization": "Bearer EMPTY"}  # no key is configured: any is a tenant
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOON = {"type": "function", "function": {"name": "noon"}}
ASKED = [{"role": "user", "content": "How is the weather?"}]


def post(server: Running, path: str, body: Any) -> Any:
    return server.ask("POST", path, body, BEARER, key=None)


def chat(server: Running, **more: Any) -> Any:
    body = {"model": MODEL, "messages": ASKED, "max_tokens": 300, "seed": 1, **more}
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json


def streamed(server: Running, **more: Any) -> list[Any]:
    body = {"model": MODEL, "messages": ASKED, "max_tokens": 300, "seed": 1, "stream": True, **more}
    lines = post(server, "/v1/chat/completions", body).body.decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


# -- tools -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "noon"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOON]}}, {"noon"}),
    ],
)
def test_a_call_that_must_be_made_matches_its_schema(server: Running, choice: Any, names: set[str]) -> None:
    asked = {"tools": [WEATHER, NOON], "tool_choice": choice, "parallel_tool_calls": False}
    (one,) = chat(server, **asked)["choices"]
    assert (one["finish_reason"], one["message"]["content"]) == ("tool_calls", None)
    (call,) = one["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"] in names) == ("function", True)
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert arguments["city"] in ("Bern", "Rome")
        assert arguments["days"] in (1, 2)
    pieces = [chunk["choices"][0] for chunk in streamed(server, **asked)]
    (again,) = [call for piece in pieces for call in piece["delta"].get("tool_calls", ())]
    assert (again["index"], again["function"]) == (0, call["function"])
    assert pieces[-1]["finish_reason"] == "tool_calls"


def test_a_conversation_with_calls_and_results_is_rendered(server: Running) -> None:
    called = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    body = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
    tokens = post(server, "/tokenize", body).json["tokens"]
    text = post(server, "/detokenize", {"model": MODEL, "tokens": tokens}).json["prompt"]
    assert '"name": "weather", "description"' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [NOON], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [NOON], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "exclude each other"),
        ({"structured_outputs": {"regex": "x", "choice": ["y"]}}, "one of"),
        ({"guided_regex": "("}, "grammar"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"min_tokens": 301}, "min_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Running, more: dict[str, Any], named: str) -> None:
    answer = post(
        server, "/v1/chat/completions", {"model": MODEL, "messages": ASKED, "max_tokens": 300, **more}
    )
    assert answer.status == 400
    assert named in answer.json["error"]["message"]


# -- structured answers ----------------------------------------------------------------------------------


def test_an_answer_matches_its_schema_regex_or_choice(server: Running) -> None:
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}}
    said = json.loads(chat(server, response_format=wanted)["choices"][0]["message"]["content"])
    assert said["city"] in ("Bern", "Rome")
    for more in (
        {"guided_choice": ["yes", "no/maybe"]},
        {"structured_outputs": {"choice": ["yes", "no/maybe"]}},
    ):
        assert chat(server, **more)["choices"][0]["message"]["content"] in ("yes", "no/maybe")
    assert chat(server, guided_regex="[ab]{3}c/d")["choices"][0]["message"]["content"][3:] == "c/d"
    body = {"model": MODEL, "prompt": "x", "max_tokens": 300, "guided_json": schema, "seed": 1}
    assert json.loads(post(server, "/v1/completions", body).json["choices"][0]["text"])["days"] in (1, 2)


# -- what is neutral, what is extra ----------------------------------------------------------------------


def test_parameters_at_their_neutral_values_change_nothing(server: Running) -> None:
    plain = chat(server, max_tokens=12)["choices"]
    neutral = {
        "add_generation_prompt": True, "length_penalty": 1.0, "bad_words": [], "use_beam_search": False,
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {},
        "min_p": 0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "skip_special_tokens": True,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "n": 1, "stop": None,
        "reasoning_effort": "low", "user": "u", "parallel_tool_calls": True, "prompt_logprobs": None,
        "spaces_between_special_tokens": True, "truncate_prompt_tokens": None, "verbosity": "medium",
    }  # fmt: skip
    assert chat(server, max_tokens=12, **neutral)["choices"] == plain


def test_penalties_bias_and_lengths_reach_the_sampler(server: Running, tokenizer_dir: Any) -> None:
    a = AutoTokenizer.from_pretrained(tokenizer_dir).encode("a")[0]

    def text(**more: Any) -> str:
        return chat(server, max_tokens=8, **more)["choices"][0]["message"]["content"]

    assert text(logit_bias={str(a): 100}) == "a" * 8
    assert text(logit_bias={str(a): 100}, frequency_penalty=2.0, presence_penalty=2.0) == "a" * 8
    assert text(logit_bias={str(a): 100}, stop_token_ids=[a]) == ""
    assert text(logit_bias={str(a): 100}, stop=["a"], min_tokens=4) == "a" * 3
    assert text(logit_bias={str(a): 100}, stop=["aa"], include_stop_str_in_output=True) == "aa"


def test_token_ids_and_prompt_logprobs_come_on_request(server: Running) -> None:
    asked = {"max_tokens": 6, "return_token_ids": True, "prompt_logprobs": 1, "logprobs": True}
    whole = chat(server, **asked)
    prompt = post(server, "/tokenize", {"model": MODEL, "messages": ASKED}).json["tokens"]
    assert whole["prompt_token_ids"] == prompt
    (one,) = whole["choices"]
    assert len(one["token_ids"]) == whole["usage"]["completion_tokens"]
    scores = whole["prompt_logprobs"]
    assert scores[0] is None
    assert [len(prompt), {str(t) in row for t, row in zip(prompt[1:], scores[1:], strict=True)}] == [
        len(scores), {True}
    ]  # fmt: skip
    pieces = streamed(server, max_tokens=6, return_token_ids=True)
    assert pieces[0]["prompt_token_ids"] == prompt
    assert [t for p in pieces[1:] for t in p["choices"][0]["token_ids"]] == one["token_ids"]
    last = streamed(server, max_tokens=6, prompt_logprobs=1)[-1]
    assert last["prompt_logprobs"] == scores
    body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "return_token_ids": True}
    (done,) = post(server, "/v1/completions", body).json["choices"]
    assert (len(done["prompt_token_ids"]), len(done["token_ids"]) <= 3) == (1, True)


def test_usage_is_told_in_every_chunk_on_request(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = streamed(server, max_tokens=6, return_token_ids=True, stream_options=options)
    drawn = [len(p["choices"][0]["token_ids"]) for p in pieces[1:-1]]
    told = [p["usage"]["completion_tokens"] for p in pieces[1:-1]]
    assert told == [sum(drawn[: i + 1]) for i in range(len(drawn))]
    assert pieces[-1]["usage"]["completion_tokens"] == told[-1]


def test_a_final_message_of_the_assistant_is_continued(server: Running) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "It is"}]
    body = {"model": MODEL, "messages": messages}

    def text(**more: Any) -> str:
        tokens = post(server, "/tokenize", {**body, **more}).json["tokens"]
        return post(server, "/detokenize", {"tokens": tokens}).json["prompt"]

    assert text().endswith("<|im_start|>assistant\nIt is")
    assert text(continue_final_message=False).endswith("It is<|im_end|>\n<|im_start|>assistant\n")
    assert text(add_generation_prompt=True).endswith("<|im_start|>assistant\n")
    assert chat(server, messages=messages, max_tokens=3)["usage"]["prompt_tokens"] > 0


def test_text_is_there_from_the_first_request_on(tmp_path: Path, tokenizer_dir: Path) -> None:
    """All that it needs is read before the server says that it serves: reading it takes seconds."""
    copy = Path(shutil.copytree(tokenizer_dir, tmp_path / "model"))
    running = Running(server_config(tmp_path / "home", str(copy)))
    for file in copy.iterdir():
        file.write_text("no longer readable")
    try:
        assert chat(running, max_tokens=3, logprobs=True)["usage"]["completion_tokens"] > 0
    finally:
        running.stop()


# -- routes ----------------------------------------------------------------------------------------------


def test_routes_that_do_not_exist_answer_in_openais_shape(server: Running) -> None:
    for path in ("embeddings", "images/generations", "nothing"):
        answer = post(server, f"/v1/{path}", {})
        assert answer.status == 404
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert "embed" in post(server, "/v1/embeddings", {}).json["error"]["message"]
    assert server.ask("GET", "/v1/chat/completions", headers=BEARER, key=None).json["error"]


def test_the_hosted_spelling_and_the_routes_beside(server: Running) -> None:
    assert server.ask("GET", "/health", key=None).status == 200
    assert server.ask("GET", "/version", key=None).json["version"]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "seed": 1}
    hosted, own = (post(server, f"{p}/completions", body).json["choices"] for p in ("/oai/api/v1", "/v1"))
    assert hosted == own
    one = server.ask("GET", f"/v1/models/{MODEL}", headers=BEARER, key=None).json
    assert one["max_model_len"] > 0


def test_pages_of_other_origins_are_let_in_only_if_they_are_named(start: Callable[..., Running]) -> None:
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    allowed = "access-control-allow-origin"
    plain = start()
    for method in ("GET", "OPTIONS"):
        answer = plain.ask(method, "/v1/models", headers={**BEARER, **asking}, key=None)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    plain.stop()
    named = start(cors_origins=("https://a.example",))
    answer = named.ask("OPTIONS", "/v1/chat/completions", headers=asking, key=None)
    assert (answer.status, answer.headers[allowed]) == (200, "https://a.example")
    for path in ("/api/v1/get_server_capabilities", "/v1/models"):
        answer = named.ask("GET", path, headers={"origin": "https://a.example"})
        assert (answer.status, answer.headers[allowed]) == (200, "https://a.example"), path
    other = {**BEARER, "origin": "https://b.example"}
    assert allowed not in named.ask("GET", "/v1/models", headers=other, key=None).headers


def test_adapters_are_listed_and_have_aliases(server: Running) -> None:
    run = server.open_run()
    saved = server.result(server.post("save_weights_for_sampler", model_id=run, path="mine", seq_id=1)).json
    key = {"x-api-key": "tml-alice"}

    def ask(method: str, path: str, body: Any = None) -> Any:
        return server.ask(method, path, body, key, key=None)

    def names() -> list[str]:
        return [model["id"] for model in ask("GET", "/v1/models").json["data"]]

    assert saved["path"] in names()
    assert ask("POST", "/v1/load_lora_adapter", {"lora_name": "me", "lora_path": saved["path"]}).status == 200
    assert "me" in names()
    body = {"prompt": "x", "max_tokens": 4, "seed": 1}
    texts = [
        ask("POST", "/v1/completions", {**body, "model": m}).json["choices"] for m in ("me", saved["path"])
    ]
    assert texts[0] == texts[1]
    assert post(server, "/v1/completions", {**body, "model": "me"}).status == 404  # another tenant's
    assert ask("POST", "/v1/unload_lora_adapter", {"lora_name": "me"}).status == 200
    assert ask("POST", "/v1/completions", {**body, "model": "me"}).status == 404
    bad = ask("POST", "/v1/load_lora_adapter", {"lora_name": "me", "lora_path": "/etc"})
    assert "tinker://" in bad.json["error"]["message"]
    # A checkpoint is deleted by its name alone, as some clients do.
    place = f"/api/v1/training_runs/{run}/checkpoints"
    assert ask("DELETE", f"{place}/mine").status == 204
    assert ask("DELETE", f"{place}/mine").status == 404
    assert saved["path"] not in names()
