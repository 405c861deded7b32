"""Samplers in other processes: pickles and handles, which never hold a credential."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close
from tests.stub import Stub
from tinkex import CredentialError, InvalidInputError, RetryConfig, SamplingClient, ServiceClient, Timeouts

KEY = "tml-the-very-secret"


@pytest.fixture(params=["pickle", "handle"])
def send(request: pytest.FixtureRequest) -> Any:
    """Both ways for a sampler to travel: (to bytes, from bytes)."""
    if request.param == "pickle":
        return pickle.dumps, pickle.loads
    return (
        lambda sampler: sampler.get_sampler_handle().encode(),
        lambda data: SamplingClient.from_sampler_handle(data.decode()),
    )


def test_a_copy_samples_from_the_same_place_under_numbers_of_its_own(
    stub: Stub, sampler: Any, send: Any
) -> None:
    dump, load = send
    copies = [load(dump(sampler)) for _ in range(2)]
    for each in (sampler, *copies, *copies):
        assert len(each.sample(PROMPT, 1, PARAMS).result(20).sequences) == 1
    bodies = [request.json for request in stub.sent("asample")]
    assert len({body["sampling_session_id"] for body in bodies}) == 1
    assert len({body["seq_id"] for body in bodies}) == 5
    assert stub.count("create_session") == 1, "a copy joins the session it came from"
    assert copies[0].session is copies[1].session, "copies in one process share one heart"


def test_a_copy_gets_its_number_from_a_server_that_gives_one(stub: Stub, service: ServiceClient) -> None:
    stub.config = {"sample_join_sampling_session": True, "sample_use_retrieve_futures": True}
    copy = pickle.loads(pickle.dumps(service.create_sampling_client(base_model="stub/base")))
    copy.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.count("join_sampling_session") == 1
    clone = stub.sent("asample")[0].json["seq_id"] // 1_000_000_000
    assert clone > 0
    assert stub.sent("retrieve_futures")[0].json["target"]["cloned_sampler_id"] == clone


def test_a_copy_that_goes_away_leaves_the_session_open(stub: Stub, sampler: Any) -> None:
    copy = pickle.loads(pickle.dumps(sampler))
    copy.sample(PROMPT, 1, PARAMS).result(20)
    del copy
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.count("sessions/*/finish") == 0


def test_the_retry_config_travels(service: ServiceClient, send: Any) -> None:
    """It was lost."""
    dump, load = send
    config = RetryConfig(max_connections=3, progress_timeout=20, retry_delay_base=0.1)
    sampler = service.create_sampling_client(base_model="stub/base", retry_config=config)
    assert load(dump(sampler)).retry_config == config


def test_headers_and_timeouts_travel_but_no_credential_does(
    stub: Stub, send: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mine = {"X-Team": "red", "Accept-Language": "en"}
    secret = {
        "Authorization": "Bearer sesame", "Cookie": "id=sesame", "X-API-Key": "tml-sesame",
        "CF-Access-Client-Secret": "sesame", "X-Gateway-Token": "sesame", "X-Trace": "Basic sesame",
    }  # fmt: skip
    times = Timeouts(request=7, lost=20)
    service = ServiceClient(base_url=stub.url, default_headers_overrides={**mine, **secret}, timeouts=times)
    dump, load = send
    data = dump(service.create_sampling_client(base_model="stub/base"))
    for form in (data, base64.urlsafe_b64decode(data + b"==") if dump is not pickle.dumps else data):
        assert b"sesame" not in form
    assert "authorization" in caplog.text
    assert "sesame" not in caplog.text
    copy = load(data)
    copy.sample(PROMPT, 1, PARAMS).result(20)
    assert copy._connection.timeouts == times
    sent = stub.sent("asample")[0].headers
    assert {name: sent.get(name.lower()) for name in (*mine, *secret)} == {
        **mine, **dict.fromkeys(secret), "X-API-Key": "tml-local",
    }  # fmt: skip
    close(service)


def test_a_receiver_can_give_the_headers_that_stayed_behind(stub: Stub) -> None:
    mine = {"x-team": "red", "authorization": "Bearer sesame"}
    service = ServiceClient(base_url=stub.url, default_headers_overrides=mine)
    handle = service.create_sampling_client(base_model="stub/base").get_sampler_handle()
    again = {"Authorization": "Bearer other"}
    copy = SamplingClient.from_sampler_handle(handle, default_headers_overrides=again)
    copy.sample(PROMPT, 1, PARAMS).result(20)
    sent = stub.sent("asample")[0].headers
    assert (sent["x-team"], sent["authorization"]) == ("red", "Bearer other")
    with pytest.raises(InvalidInputError, match="'authorization' has a line break"):
        SamplingClient.from_sampler_handle(handle, default_headers_overrides={"authorization": "a\nb"})
    close(service)


def test_a_handle_of_an_older_release_still_works(stub: Stub, sampler: Any) -> None:
    state = json.loads(base64.urlsafe_b64decode(sampler.get_sampler_handle()))
    older = {name: value for name, value in state.items() if name not in ("headers", "timeouts")}
    handle = base64.urlsafe_b64encode(json.dumps(older).encode()).decode()
    SamplingClient.from_sampler_handle(handle).sample(PROMPT, 1, PARAMS).result(20)


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_no_key_is_in_what_travels(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, send: Any, source: str
) -> None:
    """Pickles held it in clear."""
    if source == "environment":
        monkeypatch.setenv("TINKER_API_KEY", KEY)
    service = ServiceClient(base_url=stub.url, api_key=KEY if source == "argument" else None)
    sampler = service.create_sampling_client(base_model="stub/base")
    data = send[0](sampler)
    for form in (data, base64.urlsafe_b64decode(data + b"==") if send[0] is not pickle.dumps else data):
        assert KEY.encode() not in form
    close(service)


def test_the_source_of_the_key_travels_and_the_receiver_looks_there(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, send: Any
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    service = ServiceClient(base_url=stub.url)
    dump, load = send
    data = dump(service.create_sampling_client(base_model="stub/base"))
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-receiver")
    load(data).sample(PROMPT, 1, PARAMS).result(20)
    assert stub.sent("asample")[0].headers["x-api-key"] == "tml-of-the-receiver"
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(CredentialError, match=r"TINKER_API_KEY.*from_sampler_handle\(handle, api_key=…\)"):
        load(data)
    close(service)


def test_a_key_given_as_an_argument_must_be_given_again(stub: Stub, send: Any) -> None:
    service = ServiceClient(base_url=stub.url, api_key=KEY)
    dump, load = send
    sampler = service.create_sampling_client(base_model="stub/base")
    with pytest.raises(
        CredentialError, match=r"keys are never pickled.*from_sampler_handle\(handle, api_key=…\)"
    ):
        load(dump(sampler))
    copy = SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-again")
    copy.sample(PROMPT, 1, PARAMS).result(20)
    assert stub.sent("asample")[0].headers["x-api-key"] == "tml-again"
    close(service)


@pytest.mark.parametrize("handle", ["", "nonsense", base64.urlsafe_b64encode(b"{}").decode(), "é"])
def test_what_is_no_handle_is_refused(handle: str) -> None:
    with pytest.raises(InvalidInputError, match="not a sampler handle"):
        SamplingClient.from_sampler_handle(handle)
