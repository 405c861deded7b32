"""The HTTP API over a real socket: statuses, content types and headers that old and new clients depend on."""

from __future__ import annotations

import gzip
import io
import json
import re
import socket
import tarfile
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from backports import zstd

from tests.engine.tiny import tiny_model
from tests.server.conftest import KEY, MODEL, OTHER_KEY, PROTO, Running, pass_body, server_config
from tinkex.engine.protocol import EngineConfig
from tinkex.server import bodies
from tinkex.server.api_keys import hash_key
from tinkex.service import archive
from tinkex.service.ledger import Ledger
from tinkex.wire import codec, ops

WANTS_PROTO = {"accept": "application/x-protobuf"}


def sample_body(sampler: str, seq_id: int, **params: object) -> dict[str, object]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": [], **params},
    }


# -- operations ------------------------------------------------------------------------------------------


def test_every_operation_has_a_route(server: Running) -> None:
    for op in ops.OPS.values():
        path = op.path
        for name, _ in op.placeholders.items():
            path = path.replace(f"{{{name}:path}}", "weights/none").replace(f"{{{name}}}", "none")
        answer = server.ask(op.method, path, b"{}", key=None)
        assert answer.status == (200 if op is ops.GET_HEALTH else 401), op.name


def test_health_needs_no_key_and_says_ok(server: Running) -> None:
    answer = server.ask("GET", "/api/v1/healthz", key=None)
    assert (answer.status, answer.json) == (200, {"status": "ok"})


def test_results_are_protobuf_for_those_who_accept_it_and_json_for_the_others(server: Running) -> None:
    promise = server.post("asample", **sample_body(server.open_sampler(), 0))
    assert len(promise["sample_sequence_ids"]) == 1
    as_json = server.result(promise, accept="application/json")
    as_proto = server.result(promise, **WANTS_PROTO)
    assert as_json.headers["content-type"] == "application/json"
    assert as_proto.headers["content-type"] == "application/x-protobuf"
    decoded = codec.decode_result(ops.SAMPLE, 200, as_proto.headers, as_proto.body)
    assert decoded.sequences[0].tokens == as_json.json["sequences"][0]["tokens"]
    assert len(decoded.sequences[0].tokens) == 4


def test_a_result_can_be_fetched_twice(server: Running) -> None:
    promise = server.post("asample", **sample_body(server.open_sampler(), 0))
    assert server.result(promise, **WANTS_PROTO).body == server.result(promise, **WANTS_PROTO).body


def test_training_over_protobuf_and_over_the_json_of_old_clients(server: Running) -> None:
    run = server.open_run()
    new = server.ask("POST", "/api/v1/forward_backward", pass_body(run, 1), PROTO)
    assert new.status == 200
    old = server.post(
        "forward_backward",
        model_id=run,
        seq_id=2,
        forward_backward_input={
            "data": [
                {
                    "model_input": {"chunks": [{"tokens": [1, 2, 3, 4]}]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [4]},
                        "weights": {"data": [1.0] * 4, "dtype": "float32", "shape": [4]},
                    },
                }
            ],
            "loss_fn": "cross_entropy",
            "loss_fn_config": None,
        },
    )
    first = server.result(new.json, accept="application/json").json
    second = server.result(old, accept="application/json").json
    assert first["loss_fn_outputs"][0]["logprobs"] == second["loss_fn_outputs"][0]["logprobs"]
    proto = server.result(old, **WANTS_PROTO)
    output = codec.decode_result(ops.FORWARD_BACKWARD, 200, proto.headers, proto.body)
    assert output.metrics["loss:sum"] == pytest.approx(second["metrics"]["loss:sum"])


def test_a_pending_result_is_a_408_with_a_body(server: Running) -> None:
    run = server.open_run()
    waiting = server.post("optim_step", model_id=run, seq_id=2, adam_params={})  # 1 never comes
    answer = server.ask("POST", "/api/v1/retrieve_future", {"request_id": waiting["request_id"]})
    assert answer.status == 408
    assert answer.json["type"] == "try_again"
    assert answer.json["queue_state"]
    assert int(answer.headers["content-length"]) == len(answer.body)


def test_a_failed_future_is_json_even_for_those_who_want_protobuf(server: Running) -> None:
    run = server.open_run()
    body = pass_body(run, 1).replace(b"cross_entropy", b"cross_entrop?")
    promise = server.ask("POST", "/api/v1/forward_backward", body, PROTO).json
    answer = server.result(promise, **WANTS_PROTO)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["category"] == "user"
    assert "cross_entrop?" in answer.json["error"]


def test_content_that_cannot_be_read_is_accepted_and_fails_with_its_step(server: Running) -> None:
    """A 4xx on one chunk leaves official clients stuck: they never send the step after it."""
    run = server.open_run()
    good = server.ask("POST", "/api/v1/forward_backward", pass_body(run, 1), PROTO)
    assert good.status == 200
    torn = {
        "model_id": run,
        "seq_id": 2,
        "forward_backward_input": {
            "data": [
                {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {"weights": {"data": "x"}}}
            ],
            "loss_fn": "cross_entropy",
        },
    }
    bad = server.ask("POST", "/api/v1/forward_backward", torn)
    assert bad.status == 200, bad.body
    step = server.post("optim_step", model_id=run, seq_id=3, adam_params={})
    failed = server.result(bad.json).json
    assert failed["category"] == "user"
    assert "weights" in failed["error"]
    assert "no step was taken" in server.result(step).json["error"]
    after = server.post("optim_step", model_id=run, seq_id=4, adam_params={})
    assert "error" not in server.result(after).json


def test_unreadable_content_for_another_users_run_is_a_404(server: Running) -> None:
    body = {"model_id": server.open_run(), "seq_id": 1, "adam_params": {"learning_rate": "much"}}
    assert server.ask("POST", "/api/v1/optim_step", body, key=OTHER_KEY).status == 404


def test_void_answers_are_204_and_never_have_a_body(server: Running) -> None:
    session = server.post("create_session", tags=[], user_metadata={}, sdk_version="x")["session_id"]
    answer = server.ask(
        "POST", f"/api/v1/sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}
    )
    assert (answer.status, answer.body) == (204, b"")


def test_an_archive_is_a_302_to_a_link_that_needs_no_key(server: Running) -> None:
    run = server.open_run()
    saved = server.result(server.post("save_weights_for_sampler", model_id=run, seq_id=1, path="w"))
    assert saved.json["path"] == f"tinker://{run}/sampler_weights/w"
    answer = server.ask("GET", f"/api/v1/training_runs/{run}/checkpoints/sampler_weights/w/archive")
    assert answer.status == 302
    assert answer.headers["expires"].endswith("GMT")
    link = answer.headers["location"]
    assert link.startswith(server.url)
    taken = server.ask("GET", link.removeprefix(server.url), key=None)
    assert taken.status == 200
    assert int(taken.headers["content-length"]) == len(taken.body)
    with tarfile.open(fileobj=io.BytesIO(taken.body)) as tar:
        assert "adapter_config.json" in tar.getnames()


def test_asking_how_large_an_archive_is_reads_none_of_it(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = server.open_run()
    server.result(server.post("save_weights_for_sampler", model_id=run, seq_id=1, path="w"))
    answer = server.ask("GET", f"/api/v1/training_runs/{run}/checkpoints/sampler_weights/w/archive")
    link = answer.headers["location"].removeprefix(server.url)
    whole = server.ask("GET", link, key=None)
    read: list[str] = []
    monkeypatch.setattr(archive, "_content", lambda file, size: read.append(file.name) or [bytes(size)])
    connection = server.connect()
    connection.request("HEAD", link)
    head = connection.getresponse()
    assert (head.status, head.read()) == (200, b"")
    for name in ("content-length", "content-type", "content-disposition"):
        assert head.headers[name] == whole.headers[name]
    connection.request("HEAD", "/api/v1/healthz")  # answered once the server has done with the one before
    assert connection.getresponse().status == 200
    connection.close()
    assert read == []


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/nothing", 404),
        ("GET", "/api/v1/healthz/", 404),
        ("GET", "/api/v1/asample", 405),
        ("DELETE", "/api/v1/healthz", 405),
        ("POST", "/api/v1/asample", 422),
        ("POST", "/api/v1/get_info", 422),
        ("GET", "/api/v1/sessions/none", 404),
        ("GET", "/api/v1/sessions?limit=many", 422),
    ],
)
def test_refusals_are_plain_json_with_a_length(server: Running, method: str, path: str, status: int) -> None:
    answer = server.ask(method, path, b"{" if method == "POST" else None, {"accept-encoding": "gzip, zstd"})
    assert answer.status == status
    assert answer.json["detail"]
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert "content-encoding" not in answer.headers


def test_head_and_options(server: Running) -> None:
    head = server.ask("HEAD", "/api/v1/healthz", key=None)
    assert (head.status, head.body) == (200, b"")
    options = server.ask("OPTIONS", "/api/v1/asample", key=None)
    assert (options.status, options.headers["allow"]) == (204, "POST")


def test_a_request_id_is_echoed_or_made(server: Running) -> None:
    assert (
        server.ask("GET", "/api/v1/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"]
        == "mine-1"
    )
    made = [server.ask("GET", "/api/v1/healthz", headers={"x-request-id": "no good"}) for _ in range(2)]
    assert made[0].headers["x-request-id"] != made[1].headers["x-request-id"]
    assert "server" not in made[0].headers


# -- bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_compressed_requests(server: Running, encoding: str) -> None:
    run = server.open_run()
    pack: Callable[[bytes], bytes] = zstd.compress if encoding == "zstd" else gzip.compress
    headers = {**PROTO, "content-encoding": encoding}
    answer = server.ask("POST", "/api/v1/forward_backward", pack(pass_body(run, 1)), headers)
    assert answer.status == 200
    assert "error" not in server.result(answer.json, accept="application/json").json


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "br", "zstd, gzip"])
@pytest.mark.parametrize("body", [b"", b"not packed", "cut"])
def test_bodies_that_cannot_be_unpacked(server: Running, encoding: str, body: bytes | str) -> None:
    whole = zstd.compress(b"{}" * 100) if encoding == "zstd" else gzip.compress(b"{}" * 100)
    content = whole[:-5] if isinstance(body, str) else body
    answer = server.ask("POST", "/api/v1/create_session", content, {"content-encoding": encoding})
    assert answer.status == 422


@pytest.mark.slow
def test_bombs_are_refused(start: Callable[..., Running]) -> None:
    server = start(max_body=1_000_000)
    zeros = bytes(50_000_000)
    squeezed = zlib.compressobj(wbits=31)
    for encoding, bomb in (
        ("zstd", zstd.compress(zeros)),
        ("gzip", squeezed.compress(zeros) + squeezed.flush()),
    ):
        assert len(bomb) < 100_000
        began = time.monotonic()
        answer = server.ask("POST", "/api/v1/forward_backward", bomb, {**PROTO, "content-encoding": encoding})
        assert time.monotonic() - began >= 0.05  # or a flood of them would keep a core busy
        assert answer.status == 422
        assert "1000000" in answer.json["detail"]


def test_a_body_over_the_limit_is_refused_by_its_length_or_by_its_bytes(
    start: Callable[..., Running],
) -> None:
    server = start(max_body=100_000)
    assert server.ask("POST", "/api/v1/create_session", bytes(100_001)).status == 413
    connection = server.connect()
    connection.putrequest("POST", "/api/v1/create_session")
    for name, value in {**KEY, "transfer-encoding": "chunked"}.items():
        connection.putheader(name, value)
    connection.endheaders()
    try:
        for _ in range(40):
            connection.send(b"2710\r\n" + bytes(10_000) + b"\r\n")
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert connection.getresponse().status == 413
    connection.close()


def test_big_results_are_compressed_where_that_is_accepted(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    with closing(Ledger(tmp_path / "home" / "ledger.sqlite")) as ledger:
        ledger.add_key(
            name="alice", note="", hash=hash_key(KEY["x-api-key"]), owner="alice", project_id=None,
            created_at=0.0,
        )  # fmt: skip
    server = start(public_url="http://tinkex.example")  # not only this machine's: bytes are worth packing
    run = server.open_run()
    assert bodies.BIG < 200 * 100 * 4
    answer = server.ask("POST", "/api/v1/forward_backward", pass_body(run, 1, tokens=100, datums=200), PROTO)
    plain = server.result(answer.json, **WANTS_PROTO)
    assert "content-encoding" not in plain.headers
    for encoding, unpack in (("zstd", zstd.decompress), ("gzip", gzip.decompress)):
        packed = server.result(answer.json, **WANTS_PROTO, **{"accept-encoding": f"{encoding};q=0.5, br"})
        assert packed.headers["content-encoding"] == encoding
        assert unpack(packed.body) == plain.body
    unwanted = server.result(answer.json, **WANTS_PROTO, **{"accept-encoding": "zstd;q=0, gzip;q=0.0"})
    assert unwanted.body == plain.body


def test_a_client_that_hangs_up_while_sending_disturbs_nobody(server: Running) -> None:
    head = (
        b"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\nx-api-key: tml-a\r\ncontent-length: 900\r\n\r\n"
    )
    with socket.create_connection(server.server.address) as raw:
        raw.sendall(head + b"{")
    assert server.ask("GET", "/api/v1/healthz").status == 200


def test_health_is_ok_only_while_the_engine_can_work(start: Callable[..., Running]) -> None:
    server = start()
    assert server.ask("GET", "/api/v1/healthz", key=None).json == {"status": "ok"}
    engine = server.server.service.models.find(MODEL).engine
    assert engine is not None
    engine.close()
    sick = server.ask("GET", "/api/v1/healthz", key=None)
    assert sick.status == 503
    assert sick.json["detail"] == f"the engine of the base model {MODEL} has stopped"


# -- starting and stopping -------------------------------------------------------------------------------


@pytest.mark.slow
def test_polls_are_answered_when_the_server_stops_and_the_successor_knows_the_request(
    start: Callable[..., Running],
) -> None:
    first = start(long_poll=30.0, gap_patience=600.0)
    run = first.open_run()
    waiting = first.post("optim_step", model_id=run, seq_id=2, adam_params={})
    answers = []
    poll = threading.Thread(
        target=lambda: answers.append(
            first.ask("POST", "/api/v1/retrieve_future", {"request_id": waiting["request_id"]})
        )
    )
    poll.start()
    time.sleep(0.3)
    first.stop()
    poll.join(10)
    assert answers[0].status == 408
    assert answers[0].headers["connection"] == "close"
    second = start(long_poll=0.2)
    second.post("optim_step", model_id=run, seq_id=1, adam_params={})
    assert "metrics" in second.result(waiting).json


def test_the_greeting_says_what_a_client_must_set(start: Callable[..., Running]) -> None:
    server = start()
    text = "\n".join(server.said)
    assert f"export TINKER_BASE_URL={server.url}" in text
    assert "export TINKER_API_KEY=tml-" in text
    assert MODEL in text


def test_the_greeting_says_how_memory_is_planned(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "qwen3")
    engine = EngineConfig("", device="cpu", threads=1, kv_bytes=3 << 29, adapter_bytes=5 << 29)
    running = Running(server_config(tmp_path / "home", str(model), engine=engine))
    running.stop()
    [line] = [line for line in running.said if line.strip().startswith(MODEL)]
    for use in ("weights", "adapters 2.50", "kv", "activations"):
        assert re.search(rf"· {use}[ 0-9.]* GiB", line), line


def test_metrics_count_what_happened(start: Callable[..., Running]) -> None:
    server = start()
    run = server.open_run()
    server.result(server.ask("POST", "/api/v1/forward_backward", pass_body(run, 1), PROTO).json)
    server.result(server.post("optim_step", model_id=run, seq_id=2, adam_params={}))
    sampler = server.open_sampler()
    server.result(server.post("asample", **sample_body(sampler, 0)))
    wrong = {"prompt": {"chunks": [{"tokens": [100_000]}]}}
    server.result(server.post("asample", **{**sample_body(sampler, 1), **wrong}))
    text = server.ask("GET", "/metrics", key=None).body.decode()
    for line in (
        'tinkex_requests_total{op="forward_backward",status="200"} 1.0',
        'tinkex_work_seconds_count{op="optim_step"} 1.0',
        'tinkex_wait_seconds_count{op="forward_backward"} 1.0',
        'tinkex_tokens_total{kind="training"} 4.0',
        'tinkex_tokens_total{kind="sampled"} 4.0',
        'tinkex_failures_total{category="user"} 1.0',
        'tinkex_sample_seconds_bucket{le="+Inf"} 2.0',
        "tinkex_sample_seconds_count 2.0",
        f'tinkex_queue_depth{{model="{MODEL}"}} 0.0',
        f'tinkex_engine_kv_pages_used{{model="{MODEL}"}} 0.0',
    ):
        assert line in text, line


def test_json_is_what_the_codec_writes(server: Running) -> None:
    answer = server.ask("GET", "/api/v1/get_server_capabilities")
    assert json.loads(answer.body)["supported_models"][0]["model_name"] == MODEL
