"""OpenAI's shapes over a real socket: with plain HTTP, and with OpenAI's own client if it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.server.conftest import MODEL, PROTO, Running, pass_body
from tinkex.engine.fake import EOS
from tinkex.engine.protocol import EngineConfig
from tinkex.server.api_keys import hash_key, new_key
from tinkex.server.openai.detokenizer import Detokenizer

BEARER = {"authorization": "Bearer tml-alice"}


def ask(server: Running, path: str, body: Any) -> Any:
    return server.ask("POST", f"/v1/{path}", body, BEARER, key=None)


def complete(server: Running, **more: Any) -> Any:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "seed": 1, **more}
    answer = ask(server, "completions", body)
    assert answer.status == 200, answer.body
    return answer.json


def chunks(raw: bytes) -> list[Any]:
    lines = [line for line in raw.decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# -- whole answers ---------------------------------------------------------------------------------------


def test_models(server: Running) -> None:
    listed = server.ask("GET", "/v1/models", headers=BEARER, key=None).json
    assert [m["id"] for m in listed["data"]] == [MODEL]
    assert server.ask("GET", f"/v1/models/{MODEL}", headers=BEARER, key=None).json["id"] == MODEL
    missing = server.ask("GET", "/v1/models/none", headers=BEARER, key=None)
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


def test_a_completion(server: Running, tokenizer_dir: Any) -> None:
    got = complete(server, logprobs=2, n=2)
    assert got["object"] == "text_completion"
    assert [c["index"] for c in got["choices"]] == [0, 1]
    assert got["usage"]["prompt_tokens"] == len(AutoTokenizer.from_pretrained(tokenizer_dir).encode("hello"))
    assert 2 <= got["usage"]["completion_tokens"] <= 16
    for choice in got["choices"]:
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
        assert all(lp <= 0 for lp in logprobs["token_logprobs"])
        assert choice["finish_reason"] in ("stop", "length")


def test_prompts_may_be_texts_or_tokens_and_several(server: Running, tokenizer_dir: Any) -> None:
    tokens = AutoTokenizer.from_pretrained(tokenizer_dir).encode("hello")
    text = complete(server)["choices"][0]["text"]
    assert complete(server, prompt=tokens)["choices"][0]["text"] == text
    several = complete(server, prompt=["hello", "other", "hello"])["choices"]
    assert [c["index"] for c in several] == [0, 1, 2]
    assert several[0]["text"] == several[2]["text"] == text


def test_an_echo_scores_the_prompt(server: Running) -> None:
    got = complete(server, echo=True, logprobs=0, max_tokens=0)
    (choice,) = got["choices"]
    assert choice["text"] == "hello"
    assert choice["logprobs"]["tokens"] == list("hello")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(lp < 0 for lp in choice["logprobs"]["token_logprobs"][1:])
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert got["usage"]["completion_tokens"] == 0


def test_a_stop_string_is_not_in_the_text(server: Running) -> None:
    text = complete(server, max_tokens=64, temperature=0.7)["choices"][0]["text"]
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    (cut,) = complete(server, max_tokens=64, temperature=0.7, stop=stop, logprobs=0)["choices"]
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"
    assert "".join(cut["logprobs"]["tokens"]).count(stop) == 0


def test_chat(server: Running) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 5,
        "seed": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "user": "ignored",
        "tools": [],
    }
    got = ask(server, "chat/completions", body).json
    assert got["object"] == "chat.completion"
    (choice,) = got["choices"]
    assert choice["message"]["role"] == "assistant"
    content = choice["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    # "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n": 3 special tokens, the rest bytes
    assert got["usage"]["prompt_tokens"] == 3 + len("user\nhi\nassistant\n")


# -- streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": 1}, {"prompt": ["a", "b"], "echo": True}])
def test_the_pieces_of_a_stream_are_the_whole_answer(server: Running, more: dict[str, Any]) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 24, "seed": 5, "temperature": 0.8, **more}
    whole = ask(server, "completions", body).json
    answer = ask(server, "completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, last = chunks(answer.body)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == choice["index"]]
        assert "".join(p["text"] for p in mine) == choice["text"]
        assert [p["finish_reason"] for p in mine if p["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            told = [token for p in mine if p["logprobs"] for token in p["logprobs"]["tokens"]]
            assert told == choice["logprobs"]["tokens"]


def test_a_chat_stream(server: Running) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3}
    whole = ask(server, "chat/completions", body).json["choices"][0]
    first, *rest = chunks(ask(server, "chat/completions", {**body, "stream": True}).body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in rest)
    assert text == whole["message"]["content"]
    assert rest[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "none"}, "none"),
        ({"model": 3}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"n": 0}, "request.n:"),
        ({"n": 10_000}, "request.n:"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1_000_000}, "context window"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"logprobs": 100}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"best_of": 3}, "best_of"),
        ({"tempurature": 1}, "tempurature"),
        ({"stream_options": 1}, "stream_options"),
    ],
)
def test_refusals_name_the_field(server: Running, change: dict[str, Any], named: str) -> None:
    answer = ask(server, "completions", {"model": MODEL, "prompt": "x", **change})
    assert answer.status in (400, 404)
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert named in error["message"]
    if error["message"].startswith(("request.", "the request has no")):
        assert error["param"] == next(iter(change))


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "xml"}},
        {"top_logprobs": 2},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"continue_final_message": True}},
        {"chat_template_kwargs": {"truncation": True, "max_length": 2}},
        {"chat_template_kwargs": {"tokenizer": 1}},
        {"chat_template_kwargs": {"tools": 3}},
    ],
)
def test_chat_refusals(server: Running, change: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **change}
    assert ask(server, "chat/completions", body).status == 400


def test_a_program_of_this_machine_needs_no_key_where_there_are_none(server: Running) -> None:
    run = server.result(
        server.post("save_weights_for_sampler", model_id=server.open_run(), path="a", seq_id=1)
    )
    shared = server.ask(
        "POST",
        f"/api/v1/training_runs/{run.json['path'].split('/')[2]}/checkpoints/sampler_weights/a/publish",
    )
    assert shared.status in (200, 204)
    loaded = {"lora_name": "mine", "lora_path": run.json["path"]}
    assert server.ask("POST", "/v1/load_lora_adapter", loaded, {"x-api-key": "tml-local"}, None).status == 200
    answer = server.ask("POST", "/v1/completions", {"model": "mine", "prompt": "x"}, key=None)
    assert answer.status == 200, answer.json  # an alias of the tenant tml-local


@pytest.mark.parametrize(
    "page", [{"origin": "https://a.example"}, {"sec-fetch-site": "cross-site"}, {"host": "a.example"}]
)
def test_pages_and_other_machines_need_a_key(server: Running, page: dict[str, str]) -> None:
    answer = server.ask("POST", "/v1/completions", {"model": MODEL, "prompt": "x"}, page, key=None)
    assert answer.status == 401
    assert answer.json["error"]["code"] == "invalid_api_key"


def test_a_key_is_needed_where_there_are_some(start: Callable[..., Running]) -> None:
    server = start()
    server.server.service.ledger.add_key(
        name="a", note="", hash=hash_key(new_key()), owner="ann", project_id=None, created_at=1.0
    )
    answer = server.ask("POST", "/v1/completions", {"model": MODEL, "prompt": "x"}, key=None)
    assert answer.status == 401


# -- clients that leave, weights that change -------------------------------------------------------------


@pytest.fixture
def endless(start: Callable[..., Running]) -> Running:
    return start(engine=EngineConfig("", kind="fake", max_context=1_000_000))


def must_stop(server: Running) -> None:
    deadline = time.monotonic() + 10
    while server.server.service.samplers.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.server.service.samplers.running


@pytest.mark.parametrize("more", [{}, {"n": 3, "prompt": ["a", "b"]}, {"logprobs": 1}])
def test_a_client_that_does_not_wait_for_the_whole_answer_stops_the_work(
    endless: Running, more: dict[str, Any]
) -> None:
    connection = endless.connect()
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 900_000, "temperature": 0.001, **more}
    connection.request("POST", "/v1/completions", json.dumps(body), BEARER)
    while not endless.server.service.samplers.running:
        time.sleep(0.01)
    connection.close()
    must_stop(endless)


def test_a_prompt_that_fails_ends_those_beside_it(endless: Running) -> None:
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 900_000, "temperature": 0.001}
    connection = endless.connect()
    connection.request("POST", "/v1/completions", json.dumps(body), BEARER)
    running = endless.server.service.samplers._running
    while len(running) < 3:
        time.sleep(0.01)
    assert endless.ask("POST", "/api/v1/cancel_future", {"request_id": max(running)}).status == 204
    response = connection.getresponse()
    assert (response.status, json.load(response)["error"]["message"]) == (400, "cancelled")
    connection.close()
    must_stop(endless)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"n": 3, "prompt": ["a", "b"]}, {"logprobs": 1}])
def test_a_client_that_leaves_a_stream_stops_the_work_and_is_no_error(
    endless: Running, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 900_000, "temperature": 0.001, **more}
    for _ in range(5):
        connection = endless.connect()
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), BEARER)
        response = connection.getresponse()
        assert response.status == 200
        response.close()
        connection.close()
        must_stop(endless)
    endless.stop()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("prompt", ["hello", ["a", "b"]])
def test_a_stream_that_cannot_be_sent_at_all_stops_the_work(endless: Running, prompt: Any) -> None:
    """Its client may be gone before the first byte, and then nobody reads the events."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 900_000, "temperature": 0.001, "stream": True}
    received, sent = asyncio.Event(), []

    async def receive() -> Any:
        if received.is_set():
            await asyncio.Future()
        received.set()
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        raise OSError("nobody is there")

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "scheme": "http",
        "headers": [(b"authorization", b"Bearer tml-alice")], "asgi": {"spec_version": "2.4"},
    }  # fmt: skip
    app = endless.server._uvicorn.config.app
    assert endless.loop is not None
    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(app(scope, receive, send), endless.loop).result(30)
    assert sent == ["http.response.start"]
    must_stop(endless)


def test_a_path_means_the_weights_that_are_there_now(server: Running) -> None:
    """One saved anew under its name, one taken back by its owner, one that is deleted."""
    run = server.open_run()

    def save(name: str, seq_id: int) -> str:
        request = {"model_id": run, "path": name, "seq_id": seq_id, "overwrite": True}
        return server.result(server.post("save_weights", **request)).json["path"]

    def score(path: str, key: dict[str, str] = BEARER) -> Any:
        asked = {"model": path, "prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = server.ask("POST", "/v1/completions", asked, key, key=None)
        return answer.json["choices"][0]["logprobs"]["token_logprobs"] if answer.status == 200 else answer

    path = save("latest", 1)
    before = score(path)
    server.ask("POST", "/api/v1/forward_backward", pass_body(run, 2), PROTO)
    server.result(server.post("optim_step", model_id=run, seq_id=3, adam_params={"learning_rate": 1.0}))
    assert save("latest", 4) == path
    after = score(save("other", 5))
    assert after != before
    assert score(path) == after

    place, bob = (
        f"/api/v1/training_runs/{run}/checkpoints/weights/latest",
        {"authorization": "Bearer tml-bob"},
    )
    assert server.ask("POST", f"{place}/publish").status == 204
    assert score(path, bob) == after
    assert server.ask("DELETE", f"{place}/publish").status == 204
    assert score(path, bob).status == 404
    assert server.ask("DELETE", place).status == 204
    assert score(path).status == 404


# -- OpenAI's own client ---------------------------------------------------------------------------------


def test_the_real_client(server: Running) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-alice", max_retries=0)
    assert [m.id for m in client.models.list()] == [MODEL]
    messages = [{"role": "user", "content": "hi"}]
    settings = {"model": MODEL, "messages": messages, "max_tokens": 9, "seed": 4}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=3)
    assert whole.choices[0].logprobs.content[0].top_logprobs
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    pieces = list(
        client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage
    done = client.completions.create(model=MODEL, prompt="hi", max_tokens=3, echo=True, logprobs=1)
    assert done.choices[0].text.startswith("hi")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context window"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=1_000_000)
    assert client.with_options(api_key="EMPTY").models.list().data


# -- text ------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


@given(
    st.text(max_size=40), st.lists(st.integers(1, 9)), st.lists(st.text(min_size=1, max_size=3), max_size=2)
)
def test_pieces_joined_are_the_text_up_to_the_stop(text: str, cuts: list[int], stop: list[str]) -> None:
    tokens, stream, said = list(text.encode()), Detokenizer(Bytes(), stop), []
    rest = tokens
    for cut in cuts:
        said.append(stream.add(rest[:cut]))
        rest = rest[cut:]
    said += [stream.add(rest), stream.finish()]
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    assert "".join(said) == text[: min(ends, default=len(text))]
    assert stream.text == "".join(said)


# -- the end of a sequence -------------------------------------------------------------------------------


def test_the_end_of_sequence_token_is_in_no_text_though_no_special_one(
    server: Running, tokenizer_dir: Any
) -> None:
    end = AutoTokenizer.from_pretrained(tokenizer_dir).decode([EOS], skip_special_tokens=True)
    assert end  # the tokenizer would show it
    asked = {"max_tokens": 200, "n": 16}
    choices = complete(server, **asked)["choices"]
    ended = [choice["index"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert not any(end in choice["text"] for choice in choices)
    body = {"model": MODEL, "prompt": "hello", "seed": 1, "stream": True, **asked}
    said: dict[int, str] = {}
    for chunk in chunks(ask(server, "completions", body).body):
        for choice in chunk["choices"]:
            said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    assert said == {choice["index"]: choice["text"] for choice in choices}
