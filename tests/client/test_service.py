"""ServiceClient: its arguments, its context managers, and the clients it creates."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, datum
from tests.stub import Stub, fail, status
from tinkex import (
    AdamParams,
    ClientClosedError,
    CredentialError,
    InvalidInputError,
    RequestFailedError,
    ServiceClient,
    TinkerError,
)


def reason(stub: Stub) -> str:
    (session,) = stub.sessions.values()
    return session["finished"]["reason"]["type"]


def test_a_with_block_ends_the_session(stub: Stub) -> None:
    with ServiceClient(base_url=stub.url) as service:
        run = service.create_lora_training_client("stub/base")
    assert reason(stub) == "success"
    with pytest.raises(ClientClosedError):
        run.optim_step()


@pytest.mark.parametrize(("error", "status"), [(ValueError, "errored"), (KeyboardInterrupt, "interrupted")])
@pytest.mark.parametrize("kind", ["with", "async with"])
def test_a_with_block_says_how_it_ended(
    stub: Stub, error: type[BaseException], status: str, kind: str
) -> None:
    async def with_async() -> None:
        async with ServiceClient(base_url=stub.url) as service:
            await service.create_sampling_client_async(base_model="stub/base")
            raise error

    def with_sync() -> None:
        with ServiceClient(base_url=stub.url) as service:
            service.create_sampling_client(base_model="stub/base")
            raise error

    with pytest.raises(error):
        with_sync() if kind == "with" else asyncio.run(with_async())
    assert reason(stub) == status


def test_a_with_block_that_did_nothing_sends_nothing(stub: Stub) -> None:
    with ServiceClient(base_url=stub.url):
        pass
    assert stub.requests == []


def test_a_server_that_is_gone_does_not_spoil_the_end_of_a_with_block(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    from tinkex import Timeouts

    with ServiceClient(base_url=stub.url, timeouts=Timeouts(close=0.2)) as service:
        service.create_sampling_client(base_model="stub/base")
        stub.stop()
    assert "the session could not be finished" in caplog.text


def test_what_is_created_says_what_was_asked(stub: Stub, service: ServiceClient) -> None:
    service.create_lora_training_client("stub/base", 8, 5, False, True, False, {"k": "v"})
    body = stub.sent("create_model")[0].json
    lora = {"rank": 8, "seed": 5, "train_mlp": False, "train_attn": True, "train_unembed": False}
    assert {name: body["lora_config"][name] for name in lora} == lora
    assert (body["user_metadata"], body["model_seq_id"]) == ({"k": "v"}, 0)
    service.create_lora_training_client("stub/base")
    assert stub.sent("create_model")[1].json["model_seq_id"] == 1


@pytest.mark.parametrize("via_load", [False, True])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_going_on_from_a_checkpoint(stub: Stub, via_load: bool, with_optimizer: bool) -> None:
    stub.config = {"create_model_via_load_weights": via_load}
    service = ServiceClient(base_url=stub.url)
    first = service.create_lora_training_client("stub/other", rank=4)
    path = first.save_state("a").result(20).path
    name = "create_training_client_from_state" + ("_with_optimizer" if with_optimizer else "")
    run = getattr(service, name)(path, timeout=20)
    assert run.model_id != first.model_id
    assert stub.sent("load_weights")[0].json["optimizer"] is with_optimizer
    assert stub.runs[run.model_id].base_model == "stub/other"
    run.forward_backward([datum()], "cross_entropy").result(20)
    run.optim_step(AdamParams()).result(20)
    assert asyncio.run(getattr(service, f"{name}_async")(path)).model_id not in (run.model_id, first.model_id)
    close(service)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("token", "asks"), [("tml-theirs", "tml-theirs"), ("a-capability", "tml-mine"), (None, "tml-mine")]
)
@pytest.mark.parametrize("jwt", [False, True])
def test_going_on_from_another_accounts_checkpoint(
    stub: Stub, kind: str, token: str | None, asks: str, jwt: bool
) -> None:
    """What it is, is asked in that account's name; the rest in one's own. Both forms do the same."""
    stub.config = {"pjwt_auth_enabled": jwt}
    service = ServiceClient(base_url=stub.url, api_key="tml-mine")
    path = service.create_lora_training_client("stub/base", rank=4).save_state("a").result(20).path
    if kind == "sync":
        service.create_training_client_from_state(path, weights_access_token=token)
    else:
        asyncio.run(service.create_training_client_from_state_async(path, weights_access_token=token))
    keys = [request.headers["x-api-key"] for request in stub.sent("weights_info")]
    exchanged = [request.headers["x-api-key"] for request in stub.sent("auth/token")]
    assert (exchanged[-1:] if jwt else keys) == [asks]
    (loading,) = stub.sent("load_weights")
    assert loading.json.get("weights_access_token") == token
    assert loading.headers["x-api-key"] == stub.sent("create_session")[0].headers["x-api-key"]
    close(service)


def test_copying_weights(stub: Stub, service: ServiceClient) -> None:
    path = service.create_lora_training_client("stub/base").save_state("a").result(20).path
    assert service.copy_weights(path, ttl_seconds=9).result(20).endswith("/weights/a")
    assert stub.sent("copy_weights")[0].json["ttl_seconds"] == 9
    assert stub.sent("copy_weights")[0].json["session_id"] == next(iter(stub.sessions))


@pytest.mark.parametrize("said", ["argument", "environment"])
def test_a_copy_goes_into_the_clients_project(stub: Stub, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    if said == "environment":
        monkeypatch.setenv("TINKER_PROJECT_ID", "mine")
    service = ServiceClient(base_url=stub.url, project_id="mine" if said == "argument" else None)
    path = service.create_lora_training_client("stub/base").save_state("a").result(20).path
    service.copy_weights(path, ttl_seconds=9, weights_access_token="t").result(20)
    (copy,) = stub.sent("copy_weights")
    assert copy.json == {"source_path": path, "destination_project_id": "mine", "ttl_seconds": 9}
    assert copy.headers["x-tinker-weights-access-token"] == "t"
    close(service)


def test_a_failed_creation_is_raised_and_can_be_repeated(stub: Stub, service: ServiceClient) -> None:
    stub.script("create_model", fail("no room", "server"))
    with pytest.raises(RequestFailedError, match=r"create_model failed .*no room"):
        service.create_lora_training_client("stub/base")
    stub.script("create_session", status(422))
    service.create_lora_training_client("stub/base").optim_step().result(20)


def test_a_session_that_could_not_be_opened_is_opened_later(stub: Stub, service: ServiceClient) -> None:
    stub.script("create_session", status(403))
    with pytest.raises(TinkerError, match="403"):
        service.create_lora_training_client("stub/base")
    service.create_lora_training_client("stub/base")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.create_lora_training_client(""), "base_model must be the name of a base model, got ''"),
        (lambda s: s.create_lora_training_client(5), "base_model must be the name of a base model, got 5"),
        (lambda s: s.create_lora_training_client("m", rank=0), "rank must be positive"),
        (lambda s: s.create_lora_training_client("m", 1, None, False, False, False), "At least one of"),
        (lambda s: s.create_training_client_from_state("weights/a"), "tinker://"),
        (lambda s: s.copy_weights("a"), "tinker://"),
        (lambda s: s.close("fine"), "success, errored or interrupted"),
    ],
)
def test_bad_input_is_refused_at_the_call(stub: Stub, service: ServiceClient, call: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        call(service)
    assert stub.requests == []
    service.create_sampling_client(base_model="stub/base").sample(PROMPT, 1, PARAMS).result(20)


def test_unknown_arguments_are_ignored_with_a_warning(stub: Stub) -> None:
    with pytest.warns(FutureWarning, match="does not know max_retries") as caught:
        ServiceClient(base_url=stub.url, max_retries=3)
    assert caught[0].filename == __file__


def test_a_remote_server_needs_a_key_and_says_every_way_to_give_one() -> None:
    with pytest.raises(CredentialError, match=r"api_key=.*TINKER_API_KEY.*TINKER_CREDENTIAL_CMD"):
        ServiceClient(base_url="https://tinker.example")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"x-trace": "a\r\nx-api-key: b"}, "'x-trace' has a line break"),
        ({"x-trace": "caf\u00e9 \u2603"}, "'x-trace' has a line break in it, or another control character"),
        ({"x trace": "a"}, "'x trace' cannot be the name of a header"),
        ({"x-trace:": "a"}, "cannot be the name"),
        ({"": "a"}, "cannot be the name"),
        ({3: "a"}, "3 cannot be the name"),
        ({"x-trace": 3}, "'x-trace' must be a string, got int"),
        ("x-trace: a", "headers must be a dict of strings, got str"),
    ],
)
def test_what_cannot_be_a_header_is_refused_when_the_client_is_made(wrong: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ServiceClient(base_url="http://127.0.0.1:9", default_headers_overrides=wrong)
    with pytest.raises(InvalidInputError, match=words):
        ServiceClient(default_headers_overrides=wrong)  # in this process, where none would be sent


def test_headers_of_the_users_go_with_every_request_and_win(stub: Stub) -> None:
    mine = {"X-Trace": "a", "User-Agent": "mine/1", "X-API-Key": "tml-of-the-gateway"}
    with ServiceClient(base_url=stub.url, default_headers_overrides=mine) as service:
        service.get_server_capabilities()
    sent = stub.sent("get_server_capabilities")[0]
    assert {name: sent.headers[name.lower()] for name in mine} == mine
    assert sent.head.lower().count(b"x-api-key") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"user_metadata": ["a"]}, {"user_metadata": {"a": object()}}, {"project_id": 3},
        {"display_name": b"\xff"}, {"base_url": 0}, {"api_key": 5}, {"timeouts": 3},
    ],
)  # fmt: skip
def test_a_client_is_not_made_of_the_wrong_things(stub: Stub, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        ServiceClient(**{"base_url": stub.url, **wrong})


def test_a_bad_url_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="base_url must look like"):
        ServiceClient(base_url="tinker.example")


def test_models_console_and_repr(stub: Stub, service: ServiceClient) -> None:
    models = service.get_server_capabilities(timeout=20).supported_models
    assert [model.model_name for model in models] == ["stub/base", "stub/other"]
    assert service.get_console_url() == f"{stub.url}/sessions"
    assert stub.url in repr(service)
    assert service.get_telemetry() is None
