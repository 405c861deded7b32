"""The stub server, checked with plain http.client and the protocol's own messages."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.stub import Stub, delay, drop, fail, garbage, hang, status
from tinkex.wire import tinkex_pb2 as pb2

PROTOBUF = {"accept": "application/x-protobuf"}


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


class Client:
    """The least HTTP client: one keep-alive connection, JSON in, (status, body) out."""

    def __init__(self, stub: Stub) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", stub.port, timeout=10)

    def send(self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST"):
        data = body if isinstance(body, bytes) else json.dumps(body or {})
        self.connection.request(method, "/api/v1/" + path, data, headers or {})
        response = self.connection.getresponse()
        self.headers = response.headers
        return response.status, response.read()

    def json(self, path: str, body: Any = None, method: str = "POST") -> Any:
        code, data = self.send(path, body, method=method)
        assert code == 200, data
        return json.loads(data)

    def run(self) -> str:
        """Create a session and a run; return the run's id."""
        session = self.json("create_session", {"tags": []})["session_id"]
        made = self.json(
            "create_model", {"session_id": session, "model_seq_id": 0, "base_model": "stub/base"}
        )
        return self.result(made)["model_id"]

    def result(self, promise: dict[str, Any]) -> Any:
        return self.json("retrieve_future", {"request_id": promise["request_id"]})

    def step(self, model_id: str, seq_id: int) -> dict[str, Any]:
        return self.json("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})


@pytest.fixture
def client(stub: Stub) -> Client:
    return Client(stub)


def sample_body(seq_id: int = 0, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [7, 8, 9]}]}
    known = {"sampling_session_id": "s", "seq_id": seq_id, "num_samples": 2, "prompt": prompt}
    return {**known, "sampling_params": {"max_tokens": 4}, **more}


def pass_body(model_id: str, seq_id: int, *shapes: tuple[int, ...]) -> bytes:
    request = pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for shape in shapes:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.zeros(shape[0], np.int32).tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = np.zeros(shape, np.int64).tobytes(), pb2.DTYPE_INT64
        tensor.shape.extend(shape)
    return request.SerializeToString()


def test_a_pass_gets_logprobs_shaped_like_its_targets(client: Client) -> None:
    run = client.run()
    body = pass_body(run, 1, (3,), (5,), (2, 4))
    code, promise = client.send("forward_backward", body, {"content-type": "application/x-protobuf"})
    assert code == 200
    _, data = client.send("retrieve_future", json.loads(promise), PROTOBUF)
    output = pb2.ForwardBackwardOutput.FromString(data)
    assert output.metrics == {"loss:sum": 1.5}
    flat, deep = (record.fields["logprobs"] for record in output.loss_fn_outputs)
    assert np.frombuffer(flat.offsets, np.int64).tolist() == [0, 12, 32]
    assert np.frombuffer(flat.data, np.float32).tolist() == [-0.5] * 8
    assert list(deep.trailing_shape) == [4]
    assert len(deep.data) == 4 * 8


def test_a_sample_returns_what_was_asked_for(client: Client) -> None:
    body = sample_body(prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=1)
    promise = client.json("asample", body)
    assert len(promise["sample_sequence_ids"]) == 2
    _, data = client.send("retrieve_future", promise, PROTOBUF)
    assert client.headers["content-type"] == "application/x-protobuf"
    response = pb2.SampleResponse.FromString(data)
    assert [np.frombuffer(one.tokens, np.int32).tolist() for one in response.sequences] == [[1, 2, 3, 4]] * 2
    assert np.isnan(np.frombuffer(response.prompt_logprobs, np.float32)).tolist() == [True, True, False]
    assert (response.topk_prompt_logprobs.k, response.topk_prompt_logprobs.length) == (2, 3)


def test_a_client_that_takes_only_json_gets_json(client: Client) -> None:
    promise = client.json("asample", sample_body())
    assert client.result(promise)["sequences"][0]["tokens"] == [1, 2, 3, 4]


def test_work_of_a_run_goes_by_seq_id_and_a_repeat_is_the_same_request(stub: Stub, client: Client) -> None:
    run = client.run()
    late, again = client.step(run, 2), client.step(run, 2)
    assert again == late
    first = client.step(run, 1)
    assert client.result(late) == client.result(first)
    assert [seq_id for _, seq_id, _ in stub.executed] == [1, 2]


def test_a_gap_is_waited_for_and_then_given_up(stub: Stub, client: Client) -> None:
    stub.gap_seconds = 0.05
    run = client.run()
    assert client.result(client.step(run, 3)) == {"metrics": {"grad_norm": 1.0}}


def test_a_refused_request_uses_up_its_seq_id(stub: Stub, client: Client) -> None:
    stub.gap_seconds = 1000
    run = client.run()
    stub.script("optim_step", status(422))
    assert client.send("optim_step", {"model_id": run, "seq_id": 1})[0] == 422
    client.result(client.step(run, 2))
    assert [seq_id for _, seq_id, _ in stub.executed] == [2]


def test_held_results_stay_pending_until_released(stub: Stub, client: Client) -> None:
    stub.poll_seconds = 0.02
    stub.hold("asample")
    promise = client.json("asample", sample_body())
    code, pending = client.send("retrieve_future", promise)
    assert (code, json.loads(pending)["queue_state"]) == (408, "active")
    stub.poll_seconds = 30
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.result, promise)
        stub.wait_for("retrieve_future", 2)
        stub.release("asample")
        assert len(waiting.result(timeout=10)["sequences"]) == 2


def test_batch_retrieval_reports_each_completion_once(stub: Stub, client: Client) -> None:
    def poll(cursor: int) -> Any:
        target = {"type": "sampling_session", "sampling_session_id": "s", "cloned_sampler_id": 0}
        body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": []}
        return client.json("retrieve_futures", body)

    promises = [client.json("asample", sample_body(seq_id)) for seq_id in range(2)]
    answer = poll(0)
    assert [each["request_id"] for each in answer["completions"]] == [each["request_id"] for each in promises]
    stub.script("asample", fail("no"))
    failed = client.json("asample", sample_body(2))
    assert poll(answer["cursor"])["completions"] == [{"state": "failed", "request_id": failed["request_id"]}]
    assert client.result(failed) == {"error": "no", "category": "user"}


def test_scripted_statuses_headers_and_garbage_come_in_order_then_the_default(
    stub: Stub, client: Client
) -> None:
    stub.script(
        "healthz", status(503, {"retry-after-ms": "7"}), garbage(), delay(0.01, status(200, body={"a": 1}))
    )
    assert client.send("healthz", method="GET")[0] == 503
    assert client.headers["retry-after-ms"] == "7"
    assert not client.send("healthz", method="GET")[1].startswith(b"{")
    assert client.json("healthz", method="GET") == {"a": 1}
    assert client.json("healthz", method="GET") == {"status": "ok"}


def test_a_dropped_request_gets_no_answer_with_or_without_effect(stub: Stub, client: Client) -> None:
    run = client.run()
    for effect, executed in ((False, 0), (True, 1)):
        stub.script("optim_step", drop(effect=effect))
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            client.step(run, 1)
        client.connection.close()
        assert len(stub.executed) == executed
    assert client.result(client.step(run, 1)) == {"metrics": {"grad_norm": 1.0}}
    assert len(stub.executed) == 1


def test_a_hanging_request_keeps_its_connection_open(stub: Stub, client: Client) -> None:
    stub.script("healthz", hang())
    client.connection.timeout = 0.1
    with pytest.raises(TimeoutError):
        client.send("healthz", method="GET")
    assert stub.connections == 1


def test_rules_match_globs_and_predicates_and_go_on_for_ever_when_told(stub: Stub, client: Client) -> None:
    stub.script("sessions/*/finish", status(500), always=True)
    stub.script("optim_step", status(402), where=lambda request: request.json["seq_id"] == 2)
    run = client.run()
    session = run.partition(":")[0]
    assert [client.send(f"sessions/{session}/finish")[0] for _ in range(3)] == [500] * 3
    client.step(run, 1)
    assert client.send("optim_step", {"model_id": run, "seq_id": 2})[0] == 402
    stub.unscript()
    assert client.send(f"sessions/{session}/finish", {"reason": {"type": "success"}})[0] == 204
    assert stub.sessions[session]["finished"] == {"reason": {"type": "success"}}


def test_a_restart_breaks_connections_and_keeps_port_and_state(stub: Stub, client: Client) -> None:
    run = client.run()
    promise, port = client.step(run, 1), stub.port
    stub.stop()
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        client.send("healthz", method="GET")
    stub.start()
    assert stub.port == port
    client.connection.close()
    assert client.result(promise) == {"metrics": {"grad_norm": 1.0}}
    stub.forget_results()
    assert client.send("retrieve_future", promise)[0] == 410
    assert client.send("retrieve_future", {"request_id": "never"})[0] == 404


def test_requests_and_connections_are_recorded(stub: Stub, client: Client) -> None:
    client.send("client/config", {"sdk_version": "0"}, {"X-API-Key": "tml-k"})
    others = [Client(stub) for _ in range(3)]
    for other in others:
        other.json("healthz", method="GET")
    (request,) = stub.sent("client/config")
    assert (request.method, request.json, request.headers["x-api-key"]) == (
        "POST",
        {"sdk_version": "0"},
        "tml-k",
    )
    assert len({each.connection for each in stub.requests}) == 4
    assert stub.peak_connections == 4


def test_wait_for_returns_when_the_requests_have_come(stub: Stub, client: Client) -> None:
    with pytest.raises(TimeoutError, match="0 of 1"):
        stub.wait_for("healthz", timeout=0.01)
    thread = threading.Thread(target=client.send, args=("healthz",), kwargs={"method": "GET"})
    thread.start()
    assert stub.wait_for("healthz")[0].path == "/api/v1/healthz"
    thread.join()


def test_checkpoints_are_listed_published_and_deleted(client: Client) -> None:
    run = client.run()
    body = {"model_id": run, "seq_id": 1, "path": "one"}
    path = client.result(client.json("save_weights", body))["path"]
    assert path == f"tinker://{run}/weights/one"
    at = f"training_runs/{run}/checkpoints"
    assert client.send(f"{at}/weights/one/publish")[0] == 204
    (found,) = client.json(at, method="GET")["checkpoints"]
    assert (found["tinker_path"], found["public"]) == (path, True)
    assert client.send(f"{at}/weights/one", method="DELETE")[0] == 204
    assert client.json("checkpoints?limit=5", method="GET")["checkpoints"] == []


def test_chunked_bodies_are_refused(stub: Stub, client: Client) -> None:
    client.connection.request("POST", "/api/v1/healthz", iter([b"a"]), encode_chunked=True)
    assert client.connection.getresponse().status == 411
