"""Sessions: opened late, kept alive, and finished however a client ends."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, datum, eventually
from tests.processes import interruptible
from tests.stub import Stub, hang, status
from tinkex import ServiceClient, Timeouts, TinkerError
from tinkex.client import limits, session

pytestmark = pytest.mark.slow

BEATING = Timeouts(heartbeat_interval=0.05, close=2)


def finished(stub: Stub) -> list[str | None]:
    ends = [session["finished"] for session in stub.sessions.values()]
    return [end and end["reason"]["type"] for end in ends]


def test_nothing_is_sent_before_it_is_needed(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url)
    service.get_console_url()
    assert stub.requests == []
    service.get_server_capabilities()
    assert stub.count("create_session") == 0
    service.create_lora_training_client("stub/base", timeout=20)
    service.create_sampling_client(base_model="stub/base", timeout=20)
    assert stub.count("create_session") == 1
    assert stub.count("client/config") == 1
    close(service)


def test_a_session_says_what_it_is_for(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TINKER_TAGS", "b, a,,c")
    monkeypatch.setenv("TINKER_PROJECT_ID", "from-env")
    words = {"info_message": "hello", "warning_message": "soon", "error_message": "now"}
    stub.script("create_session", status(200, body={"session_id": "s", "type": "create_session", **words}))
    service = ServiceClient({"who": "me"}, display_name="mine", base_url=stub.url)
    with caplog.at_level(logging.INFO, "tinkex"):
        service.create_sampling_client(base_model="stub/base", timeout=20)
    body = stub.sent("create_session")[0].json
    assert (body["tags"], body["project_id"]) == (["b", "a", "c"], "from-env")
    assert (body["user_metadata"], body["display_name"]) == ({"who": "me"}, "mine")
    assert [r.levelname for r in caplog.records if r.message in words.values()] == [
        "INFO",
        "WARNING",
        "ERROR",
    ]
    close(service)


def test_it_beats_until_it_is_closed(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url, timeouts=BEATING)
    service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.wait_for("session_heartbeat", 3)
    service.close("errored", "it was me").result(20)
    assert next(iter(stub.sessions.values()))["finished"] == {
        "reason": {"type": "errored"},
        "detail": "it was me",
    }
    beats = stub.count("session_heartbeat")
    time.sleep(0.2)
    assert stub.count("session_heartbeat") == beats


def test_a_failing_heartbeat_goes_on_and_is_said_once_in_a_while(
    stub: Stub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_WARNING", 0.2)
    stub.script("session_heartbeat", status(500), always=True)
    service = ServiceClient(base_url=stub.url, timeouts=BEATING)
    with caplog.at_level(logging.WARNING, "tinkex"):
        service.create_sampling_client(base_model="stub/base", timeout=20)
        stub.wait_for("session_heartbeat", 8)
    assert 1 <= caplog.text.count("no heartbeat for") <= 3
    stub.unscript()
    stub.wait_for("session_heartbeat", 12)
    close(service)


def test_a_heartbeat_that_gets_no_answer_is_not_waited_for_long(stub: Stub) -> None:
    """A request may take a minute; a heartbeat that does has failed, and the next one is due."""
    stub.script("session_heartbeat", hang(), hang())
    service = ServiceClient(base_url=stub.url, timeouts=BEATING)
    service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.wait_for("session_heartbeat", 4, timeout=20)
    close(service)


def test_a_session_the_server_ended_stops_beating(stub: Stub) -> None:
    stub.script("session_heartbeat", status(410), always=True)
    service = ServiceClient(base_url=stub.url, timeouts=BEATING)
    service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.wait_for("session_heartbeat")
    time.sleep(0.2)
    assert stub.count("session_heartbeat") == 1
    close(service)


# -- how it ends -------------------------------------------------------------------------------------------


def test_a_dropped_client_is_collected_and_its_session_finished(stub: Stub) -> None:
    """Service, run and sampler; the heart stops with them."""
    service = ServiceClient(base_url=stub.url, timeouts=BEATING)
    run = service.create_lora_training_client("stub/base", timeout=20)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    run.forward_backward([datum()], "cross_entropy").result(20)
    run.optim_step().result(20)
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    gone = [weakref.ref(each) for each in (service, run, sampler)]
    del service, run
    gc.collect()
    stub.wait_for("session_heartbeat", stub.count("session_heartbeat") + 2)
    assert finished(stub) == [None], "the sampler still needs it"
    del sampler
    eventually(lambda: gc.collect() is not None and all(ref() is None for ref in gone))
    eventually(lambda: finished(stub) == ["success"])
    beats = stub.count("session_heartbeat")
    time.sleep(0.2)
    assert stub.count("session_heartbeat") == beats


def test_nothing_in_the_process_remembers_a_client_that_is_gone(stub: Stub) -> None:
    """No cache, of limits, hosts or sessions, outlives who used it; a closed one no less."""

    def remembered() -> list[str]:
        leased = [lease.connection.base_url for lease in session._leases]
        kept = map(str, [*limits._rate_limits, *limits._hosts, *leased])
        return [each for each in kept if stub.url in each]

    for ends in (close, lambda service: None):
        service = ServiceClient(base_url=stub.url, timeouts=BEATING)
        sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
        sampler.sample(PROMPT, 1, PARAMS).result(20)
        pickle.loads(pickle.dumps(sampler)).sample(PROMPT, 1, PARAMS).result(20)
        assert len(remembered()) >= 3
        ends(service)
        del service, sampler
        eventually(lambda: gc.collect() is not None and remembered() == [])


def test_a_pending_future_keeps_its_client(stub: Stub) -> None:
    stub.hold("optim_step")
    run = ServiceClient(base_url=stub.url).create_lora_training_client("stub/base", timeout=20)
    future = run.optim_step()
    stub.wait_for("optim_step")
    del run
    gc.collect()
    stub.release()
    assert future.result(20).metrics
    del future
    eventually(lambda: gc.collect() is not None and finished(stub) == ["success"])


def test_a_rest_client_outlives_the_session(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url)
    service.create_sampling_client(base_model="stub/base", timeout=20)
    rest = service.create_rest_client()
    del service
    eventually(lambda: gc.collect() is not None and finished(stub) == ["success"])
    assert len(rest.list_sessions().result(20).sessions) == 1


def test_finishing_a_session_of_a_dead_server_takes_no_longer_than_it_may(stub: Stub) -> None:
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(close=0.3))
    service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.stop()
    with pytest.raises(TinkerError, match=r"could not be finished within 0.3 s"):
        service.close().result(20)


ENDINGS = {
    "success": "",
    "errored": "raise ValueError('mine')",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
}
SCRIPT = """
import sys, tinkex
service = tinkex.ServiceClient(base_url=sys.argv[1])
run = service.create_lora_training_client("stub/base")
sampler = service.create_sampling_client(base_model="stub/base")
prompt, params = tinkex.ModelInput.from_ints([1]), tinkex.SamplingParams(max_tokens=1)
sampler.sample(prompt, 1, params).result(10)
{ending}
"""


def script(stub: Stub, code: str, *, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    command = interruptible([sys.executable, "-c", code, stub.url])
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ})


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_ends_finishes_its_session(stub: Stub, ending: str) -> None:
    """Success, an unhandled exception and Ctrl-C, each by its name."""
    done = script(stub, SCRIPT.format(ending=ENDINGS[ending]))
    assert finished(stub) == [ending]
    assert done.returncode == {"success": 0, "errored": 1, "interrupted": -signal.SIGINT}[ending]
    assert ("Traceback" in done.stderr) is (ending != "success")
    assert "tinkex" not in done.stderr.partition("Traceback")[0]


def test_a_process_whose_token_has_to_be_fetched_first_finishes_its_session_too(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-printed")
    script(
        stub,
        "import tinkex.client.credentials as credentials; credentials.COMMAND_TOKEN_LIFE = 0\n"
        + SCRIPT.format(ending=""),
    )
    assert finished(stub) == ["success"]


def test_a_process_ends_with_requests_under_way(stub: Stub) -> None:
    stub.hold("asample", "forward_backward")
    waiting = "futures = [sampler.sample(prompt, 1, params) for _ in range(20)]\nimport time; time.sleep(0.2)"
    stub.config = {"sample_use_retrieve_futures": True}
    code = SCRIPT.format(ending=waiting).replace("sampler.sample(prompt, 1, params).result(10)", "")
    done = script(stub, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert finished(stub) == ["success"]


def test_a_process_whose_server_is_gone_ends_soon(stub: Stub) -> None:
    code = SCRIPT.format(ending="print('ready', flush=True); input()")
    code = code.replace("sys.argv[1]", "sys.argv[1], timeouts=tinkex.Timeouts(close=0.5)")
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code, stub.url], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    stub.stop()
    _, errors = process.communicate("\n", timeout=10)
    assert (process.returncode, errors) == (0, "")
