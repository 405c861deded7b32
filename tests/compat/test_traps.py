"""What makes official clients hang, retry for minutes or fail, one by one.

Plain HTTP, so nothing but the server is needed; protobuf is read by its bytes. That the client itself does
not fail either is in the other files. Trap 30 (nobody says that a session is over) is about time, and is
shown where time can be made to pass: tests/service/test_life.py.
"""

from __future__ import annotations

import http.client
import json
import math
import struct
import uuid
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.compat.clients.report import MODEL, PROMPT
from tests.compat.conftest import AT_ONCE, Served

Answer = tuple[int, dict[str, str], bytes]
SAMPLE: dict[str, Any] = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
    "sampling_params": {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
    "num_samples": 1,
}


class Caller:
    """A tenant with one session, who speaks plain HTTP."""

    def __init__(self, served: Served) -> None:
        self.address = urlsplit(served.url).netloc
        self.headers = {"X-API-Key": f"tml-{uuid.uuid4().hex}", "Content-Type": "application/json"}
        self.session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.36.0")[
            "session_id"
        ]

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None,
        *, timeout: float = 60,
    ) -> Answer:  # fmt: skip
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, f"/api/v1/{path}", content, {**self.headers, **(headers or {})})
            reply = connection.getresponse()
            return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def post(self, op: str, /, **fields: Any) -> Any:
        status, _, body = self.ask("POST", op, fields)
        assert status == 200, (status, body)
        return json.loads(body, parse_constant=_not_json)

    def result(self, promise: dict[str, Any]) -> Any:
        return self.post("retrieve_future", request_id=promise["request_id"], allow_metadata_only=True)

    def protobuf(self, promise: dict[str, Any]) -> Message:
        accept = {"Accept": "application/x-protobuf"}
        status, headers, body = self.ask("POST", "retrieve_future", promise, accept)
        assert (status, headers["content-type"]) == (200, "application/x-protobuf")
        return Message(body)

    def run(self, number: int = 0) -> str:
        promise = self.post("create_model", **self.model(number))
        return self.result(promise)["model_id"]

    def model(self, number: int) -> dict[str, Any]:
        lora = {"rank": 2, "train_mlp": True, "train_attn": True, "train_unembed": True}
        return {"session_id": self.session, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}

    def sampler(self) -> str:
        opened = self.post(
            "create_sampling_session", session_id=self.session, sampling_session_seq_id=0, base_model=MODEL
        )
        return opened["sampling_session_id"]


class Message:
    """A protobuf message as its bytes say it: the values of each field, by number, in order."""

    def __init__(self, body: bytes) -> None:
        self.fields: dict[int, list[Any]] = {}
        while body:
            tag, body = _varint(body)
            if tag & 7 == 0:
                value, body = _varint(body)
            else:
                size, body = _varint(body) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], body)
                value, body = body[:size], body[size:]
            self.fields.setdefault(tag >> 3, []).append(value)

    def number(self, field: int) -> int:
        return self.fields.get(field, [0])[-1]

    def raw(self, field: int) -> bytes:
        return self.fields.get(field, [b""])[-1]

    def messages(self, field: int) -> list[Message]:
        return [Message(value) for value in self.fields.get(field, [])]


def _varint(body: bytes) -> tuple[int, bytes]:
    size = next(i for i, byte in enumerate(body) if byte < 128) + 1
    return sum((byte & 127) << 7 * i for i, byte in enumerate(body[:size])), body[size:]


def _not_json(word: str) -> Any:
    raise AssertionError(f"{word} is not JSON")


def _pass(run: str, seq_id: int, *datums: list[int], loss_fn: str = "cross_entropy") -> dict[str, Any]:
    """A pass as old clients write it."""
    content = {"data": [_datum(tokens) for tokens in datums], "loss_fn": loss_fn, "loss_fn_config": None}
    return {"model_id": run, "seq_id": seq_id, "forward_backward_input": content}


def _datum(tokens: list[int]) -> dict[str, Any]:
    targets = {"data": tokens, "dtype": "int64", "shape": [len(tokens)]}
    return {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": {"target_tokens": targets}}


def _step(run: str, seq_id: int) -> dict[str, Any]:
    return {"model_id": run, "seq_id": seq_id, "adam_params": {"learning_rate": 0.01}}


@pytest.fixture
def caller(served: Served) -> Caller:
    return Caller(served)


def test_1_results_of_passes_and_samples_are_protobuf_for_those_who_want_it(caller: Caller) -> None:
    trained = caller.protobuf(caller.post("forward_backward", **_pass(caller.run(), 1, [1, 2, 3])))
    assert len(trained.messages(2)) == 1  # loss_fn_outputs
    sampled = caller.protobuf(
        caller.post("asample", sampling_session_id=caller.sampler(), seq_id=0, **SAMPLE)
    )
    assert len(sampled.messages(1)) == 1  # sequences


def test_2_every_sequence_has_an_id(caller: Caller) -> None:
    promise = caller.post(
        "asample", sampling_session_id=caller.sampler(), seq_id=0, **SAMPLE | {"num_samples": 3}
    )
    assert len(set(promise["sample_sequence_ids"])) == 3


def test_3_metrics_are_named_with_one_reduction(caller: Caller) -> None:
    result = caller.result(caller.post("forward_backward", **_pass(caller.run(), 1, [1, 2, 3])))
    assert "loss:sum" in result["metrics"]
    reductions = {"sum", "min", "max", "mean", "slack", "hash2", "unique"}
    assert all(key.count(":") == 1 and key.split(":")[1] in reductions for key in result["metrics"])


def test_4_and_28_settings_are_there_and_ask_for_no_compression(caller: Caller) -> None:
    assert not caller.post("client/config", sdk_version="0.36.0").get("proto_compress_fwdbwd")
    assert isinstance(caller.post("client/dynamic_config", sdk_version="0.36.0"), dict)


def test_5_telemetry_is_accepted_whatever_it_says(caller: Caller) -> None:
    event = {
        "event": "SOMETHING_NEW",
        "event_id": "1",
        "severity": "INFO",
        "timestamp": "2026-01-01T00:00:00Z",
    }
    fields = {"platform": "Linux", "sdk_version": "9.9.9", "session_id": "sessionless-1"}
    assert caller.post("telemetry", events=[event], **fields) == {"status": "accepted"}


def test_6_a_400_is_plain_and_has_a_length(caller: Caller) -> None:
    long = SAMPLE | {"prompt": {"chunks": [{"tokens": [1] * 300}]}, "sampling_session_id": caller.sampler()}
    accept = {"Accept-Encoding": "gzip, deflate, zstd"}
    status, headers, body = caller.ask("POST", "asample", long | {"seq_id": 0}, accept)
    assert (status, headers["content-length"]) == (400, str(len(body)))
    assert "content-encoding" not in headers
    assert "context window" in json.loads(body)["detail"]


def test_7_a_pending_result_is_waited_for(caller: Caller) -> None:
    promise = caller.post("optim_step", **_step(caller.run(), 2))  # its predecessor never came
    with pytest.raises(TimeoutError):
        caller.ask("POST", "retrieve_future", {"request_id": promise["request_id"]}, timeout=2)


def test_8_a_forgotten_request_and_another_tenants_are_a_410(served: Served, caller: Caller) -> None:
    assert caller.ask("POST", "retrieve_future", {"request_id": "none"})[0] == 410  # samplers ask anew
    promise = caller.post("create_model", **caller.model(0))
    asking = {"request_id": promise["request_id"]}
    assert Caller(served).ask("POST", "retrieve_future", asking)[0] == 410  # as one that never was


def test_9_and_10_results_are_whole_and_their_numbers_are_json(caller: Caller) -> None:
    result = caller.result(caller.post("optim_step", **_step(caller.run(), 1)))  # nothing was accumulated
    assert all(
        isinstance(value, float | int) and math.isfinite(value) for value in result["metrics"].values()
    )


def test_11_a_failures_category_is_in_lower_case(caller: Caller) -> None:
    failed = caller.result(caller.post("forward_backward", **_pass(caller.run(), 1, [1, 100_000])))
    assert failed["category"] == "user"
    assert "100000" in failed["error"]


def test_12_types_are_the_expected_ones_or_absent(caller: Caller) -> None:
    run = caller.run()
    answers = {
        "create_session": caller.post("create_session", tags=[], user_metadata={}, sdk_version="0"),
        "session_heartbeat": caller.post("session_heartbeat", session_id=caller.session),
        "create_model": caller.result(caller.post("create_model", **caller.model(7))),
        "get_info": caller.post("get_info", model_id=run),
        "save_weights": caller.result(caller.post("save_weights", model_id=run, seq_id=1, path="a")),
        "save_weights_for_sampler": caller.result(
            caller.post("save_weights_for_sampler", model_id=run, seq_id=2, path="a")
        ),
        "load_weights": caller.result(
            caller.post(
                "load_weights", model_id=run, seq_id=3, path=f"tinker://{run}/weights/a", optimizer=True
            )
        ),
    }
    for expected, answer in answers.items():
        assert answer.get("type", expected) == expected


def test_13_passes_are_executed_by_number_and_repeats_are_recognised(caller: Caller) -> None:
    run = caller.run()
    second, third = _pass(run, 2, [4, 5, 6]), _step(run, 3)
    promises = [caller.post("forward_backward", **second), caller.post("optim_step", **third)]
    status, _, body = caller.ask("POST", "forward_backward", second, {"X-Idempotency-Key": uuid.uuid4().hex})
    assert (status, json.loads(body)["request_id"]) == (200, promises[0]["request_id"])
    first = caller.post("forward_backward", **_pass(run, 1, [1, 2, 3]))
    assert caller.result(promises[1])["metrics"]["optimizer_step"] == 1
    assert (
        len(caller.result(first)["loss_fn_outputs"])
        == len(caller.result(promises[0])["loss_fn_outputs"])
        == 1
    )


def test_14_a_refused_number_is_not_waited_for(caller: Caller) -> None:
    run = caller.run()
    dimuon = {"model_id": run, "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    assert caller.ask("POST", "optim_step", dimuon)[0] == 422
    promise = caller.post("forward_backward", **_pass(run, 2, [1, 2, 3]))
    asked = {"request_id": promise["request_id"]}
    status, _, _ = caller.ask("POST", "retrieve_future", asked, timeout=AT_ONCE)
    assert status == 200


def test_15_and_16_an_unnamed_save_may_be_repeated_with_another_sampler_number(caller: Caller) -> None:
    run = caller.run()
    promises = [
        caller.post("save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=number)
        for number in (0, 1)
    ]
    assert promises[0]["request_id"] == promises[1]["request_id"]
    assert caller.result(promises[0])["sampling_session_id"]
    named = caller.result(caller.post("save_weights_for_sampler", model_id=run, seq_id=2, path="named"))
    assert named["path"] == f"tinker://{run}/sampler_weights/named"


def test_17_a_sample_ends_for_one_of_two_reasons(caller: Caller) -> None:
    sampler, promises = caller.sampler(), []
    for number, stop in enumerate(([], list(range(256)))):  # never, and at nearly every token
        params = SAMPLE["sampling_params"] | {"stop": stop, "max_tokens": 8}
        asked = SAMPLE | {"sampling_params": params, "num_samples": 8}
        promises.append(caller.post("asample", sampling_session_id=sampler, seq_id=number, **asked))
    reasons = [{s.number(1) for s in caller.protobuf(promise).messages(1)} for promise in promises]
    assert reasons[0] == {1}  # length
    assert 0 in reasons[1]  # stop
    assert reasons[1] <= {0, 1}


def test_18_and_29_outputs_lie_in_the_order_of_the_datums_by_offsets_in_bytes(caller: Caller) -> None:
    datums = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    [record] = caller.protobuf(caller.post("forward_backward", **_pass(caller.run(), 1, *datums))).messages(2)
    assert record.number(3) == 3  # num_datums
    fields = {entry.raw(1).decode(): entry.messages(2)[0] for entry in record.messages(2)}
    logprobs = fields["logprobs"]
    assert logprobs.number(3) == 1  # float32
    offsets = struct.unpack("<4q", logprobs.raw(2))
    assert offsets == (0, 12, 16, 36)
    assert len(logprobs.raw(1)) == 36


def test_19_names_with_slashes_and_colons_are_not_escaped(caller: Caller) -> None:
    run = caller.run()
    assert ":" in run
    caller.result(caller.post("save_weights", model_id=run, seq_id=1, path="a"))
    status, _, body = caller.ask("GET", f"training_runs/{run}/checkpoints/weights/a/archive")
    assert status == 302, body
    assert caller.ask("GET", f"training_runs/{run}")[0] == 200
    assert caller.ask("GET", f"samplers/{caller.sampler()}")[0] == 200
    assert caller.ask("DELETE", f"training_runs/{run}/checkpoints/weights/a")[0] in (200, 204)


def test_20_what_ended_is_told_with_its_state(caller: Caller) -> None:
    sampler, wrong = caller.sampler(), {"prompt": {"chunks": [{"tokens": [100_000]}]}}
    states, cursor = {}, 0
    promises = [
        caller.post("asample", sampling_session_id=sampler, seq_id=number, **SAMPLE | more)
        for number, more in enumerate(({}, wrong))
    ]
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    while len(states) < 2:
        told = caller.post("retrieve_futures", target=target, prev_cursor=cursor)
        states |= {one["request_id"]: one["state"] for one in told["completions"]}
        assert told["cursor"] > cursor
        cursor = told["cursor"]
    assert states == {promises[0]["request_id"]: "finished", promises[1]["request_id"]: "failed"}


def test_21_sampling_numbers_have_64_bits(caller: Caller) -> None:
    number = 999_999_999 * 1_000_000_000 + 7
    promise = caller.post("asample", sampling_session_id=caller.sampler(), seq_id=number, **SAMPLE)
    assert len(caller.result(promise)["sequences"]) == 1


def test_22_a_failed_sample_says_whose_fault_it_was(caller: Caller) -> None:
    wrong = SAMPLE | {"prompt": {"chunks": [{"tokens": [100_000]}]}}
    failed = caller.result(caller.post("asample", sampling_session_id=caller.sampler(), seq_id=0, **wrong))
    assert failed["category"] == "user"


def test_23_scores_of_the_last_tokens_and_alternatives_are_given(caller: Caller) -> None:
    asked = SAMPLE | {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "prompt_alt_tokens_k": 3}
    promise = caller.post("asample", sampling_session_id=caller.sampler(), seq_id=0, **asked)
    result = caller.protobuf(promise)
    scores = struct.unpack(f"<{len(PROMPT)}f", result.raw(2))
    assert [not math.isnan(score) for score in scores] == [False] * (len(PROMPT) - 2) + [True] * 2
    [alternatives] = result.messages(6)
    assert len(alternatives.messages(1)[0].raw(1)) == (len(PROMPT) - 1) * 3 * 8  # int64


def test_24_any_key_will_do_where_none_is_needed_and_the_greeting_says_which(
    served: Served, caller: Caller
) -> None:
    for key in ("sk-1", "EMPTY"):
        assert caller.ask("GET", "get_server_capabilities", None, {"X-API-Key": key})[0] == 200
    greeting = "".join(served.said)
    assert f"TINKER_BASE_URL={served.url}" in greeting
    assert "TINKER_API_KEY=tml-" in greeting


def test_25_a_run_and_a_sampler_may_be_asked_for_twice(caller: Caller) -> None:
    first, second = (caller.post("create_model", **caller.model(0)) for _ in range(2))
    assert caller.result(first)["model_id"] == caller.result(second)["model_id"]
    assert caller.sampler() == caller.sampler()


def test_26_heartbeats_stop_only_when_the_session_ended(caller: Caller) -> None:
    beat = {"session_id": caller.session, "type": "session_heartbeat"}
    assert caller.ask("POST", "session_heartbeat", beat)[0] == 200
    assert caller.ask("POST", "session_heartbeat", {"session_id": "none"})[0] != 410
    ending = {"reason": {"type": "success"}, "detail": None}
    assert caller.ask("POST", f"sessions/{caller.session}/finish", ending)[0] in (200, 204)
    assert caller.ask("POST", "session_heartbeat", beat)[0] == 410


def test_27_what_is_needed_to_resume_is_said(caller: Caller) -> None:
    run = caller.run()
    saved = caller.result(caller.post("save_weights", model_id=run, seq_id=1, path="a"))
    about = caller.post("weights_info", tinker_path=saved["path"])
    assert (about["is_lora"], about["lora_rank"], about["base_model"]) == (True, 2, MODEL)


def test_31_nothing_is_a_409(caller: Caller) -> None:
    run = caller.run()
    caller.result(caller.post("save_weights", model_id=run, seq_id=1, path="a"))
    again = caller.result(caller.post("save_weights", model_id=run, seq_id=2, path="a"))
    assert (again["category"], "exists" in again["error"]) == ("user", True)
    assert caller.ask("POST", "save_weights", {"model_id": run, "seq_id": 2, "path": "b"})[0] == 422
    for _ in range(2):
        assert caller.ask("POST", f"training_runs/{run}/checkpoints/weights/a/publish")[0] in (200, 204)
    for _ in range(2):
        assert caller.ask("DELETE", f"training_runs/{run}/checkpoints/weights/a/publish")[0] in (200, 204)


@pytest.mark.parametrize("spoil", [{"loss_fn": "stable_reinforce"}, {"loss_fn": "no such"}, {"data": 3}])
def test_32_a_wrong_chunk_is_accepted_and_fails_with_its_step(caller: Caller, spoil: dict[str, Any]) -> None:
    run = caller.run()
    good, bad = _pass(run, 1, [1, 2, 3]), _pass(run, 2, [1, 2, 3])
    bad["forward_backward_input"] |= spoil
    promises = [caller.post("forward_backward", **chunk) for chunk in (good, bad)]
    step = caller.post("optim_step", **_step(run, 3))
    assert "metrics" in caller.result(promises[0])
    assert caller.result(promises[1])["category"] == "user"
    assert caller.result(step)["category"] == "user"
    after = [
        caller.post("forward_backward", **_pass(run, 4, [1, 2, 3])),
        caller.post("optim_step", **_step(run, 5)),
    ]
    assert "loss_fn_outputs" in caller.result(after[0])
    assert caller.result(after[1])["metrics"]["optimizer_step"] == 1


def test_33_a_sampler_names_the_base_model_whose_tokenizer_is_its_own(caller: Caller) -> None:
    _, _, body = caller.ask("GET", f"samplers/{caller.sampler()}")
    assert json.loads(body)["base_model"] == MODEL
