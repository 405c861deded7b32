"""Two `tinkex serve` processes on a real Postgres and a real S3 server: forwarding, kill -9, SIGSTOP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import numpy as np
import psycopg
import pytest

import tinkex
from tests.cloud.members import MODEL, MemberProcess, balancer, eventually
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

pytestmark = pytest.mark.slow
LEASE = 2.0


def datum(seed: int) -> Datum:
    ids = np.random.default_rng(seed).integers(2, 300, 9)
    inputs = {"target_tokens": ids[1:], "weights": np.ones(8, np.float32)}
    return Datum(model_input=ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs)


def train(run: tinkex.TrainingClient, first: int, count: int) -> list[float]:
    losses = []
    for n in range(first, first + count):
        passed = run.forward_backward([datum(n)], "cross_entropy")
        run.optim_step(AdamParams(learning_rate=0.05)).result(timeout=60)
        losses.append(passed.result(timeout=60).metrics["loss:sum"])
    return losses


def new_run(url: str) -> tuple[tinkex.ServiceClient, tinkex.TrainingClient]:
    service = tinkex.ServiceClient(base_url=url, api_key="tml-x")
    return service, service.create_lora_training_client(MODEL, rank=4, seed=5)


@pytest.fixture
def two(postgres, s3, tmp_path):
    options = ("--ledger", postgres, "--store", s3, "--lease", str(LEASE))
    made = [MemberProcess(tmp_path / name, *options) for name in ("a", "b")]
    yield made
    for member in made:
        member.end()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """The losses of one server that nothing happens to."""
    calm = MemberProcess(tmp_path_factory.mktemp("calm") / "home")
    try:
        service, run = new_run(calm.url)
        with service:
            return train(run, 0, 9)
    finally:
        calm.end()


def owner_of(postgres: str, members: list[MemberProcess]) -> tuple[MemberProcess, MemberProcess]:
    """The server that owns the newest session, and the other one."""
    with psycopg.connect(postgres) as db:
        found = db.execute(
            "SELECT server FROM leases JOIN sessions USING (session_id) ORDER BY created_at DESC LIMIT 1"
        ).fetchone()
    owner = next(member for member in members if member.server_id() == found[0])
    return owner, next(member for member in members if member is not owner)


def test_a_killed_server_is_taken_over_and_clients_see_nothing(two, postgres, expected):
    with balancer([member.port for member in two]) as url:
        service, run = new_run(url)
        with service:
            losses = train(run, 0, 3)
            sampler = run.save_weights_and_get_sampling_client()
            prompt, params = ModelInput.from_ints([5, 6, 7]), SamplingParams(max_tokens=4, seed=3)
            told = sampler.sample(prompt, 1, params).result(timeout=60).sequences[0].tokens
            owner, heir = owner_of(postgres, two)
            last = run.forward_backward([datum(3)], "cross_entropy")
            owner.signal(signal.SIGKILL)
            took = eventually(lambda: _owned(postgres, heir), 30)
            assert took <= LEASE + 5
            run.optim_step(AdamParams(learning_rate=0.05)).result(timeout=60)
            losses.append(last.result(timeout=60).metrics["loss:sum"])
            losses += train(run, 4, 2)
            assert sampler.sample(prompt, 1, params).result(timeout=60).sequences[0].tokens == told
            owner.start()  # as a new server: it forwards
            losses += train(run, 6, 1)
            heir.signal(signal.SIGKILL)
            losses += train(run, 7, 2)
            assert losses == expected


def _owned(postgres: str, member: MemberProcess) -> bool:
    with psycopg.connect(postgres) as db:
        found = db.execute(
            "SELECT server FROM leases JOIN sessions USING (session_id) ORDER BY created_at DESC LIMIT 1"
        ).fetchone()
    return found[0] == member.server_id()


def test_an_owner_that_was_asleep_ends_and_what_it_says_does_not_count(two, postgres, expected):
    with balancer([member.port for member in two]) as url:
        service, run = new_run(url)
        with service:
            losses = train(run, 0, 3)
            owner, heir = owner_of(postgres, two)
            owner.signal(signal.SIGSTOP)
            eventually(lambda: _owned(postgres, heir), LEASE + 5)
            owner.signal(signal.SIGCONT)
            losses += train(run, 3, 2)
            owner.process.wait(15)
            assert owner.process.returncode != 0
            assert any("start it again" in line for line in owner.said)
            losses += train(run, 5, 4)
            assert losses == expected


def test_any_server_answers_for_any_session_and_keys_hold_for_all(two, postgres, tmp_path):
    a, b = two
    service, run = new_run(a.url)
    with service:
        train(run, 0, 1)
        path = run.save_state("one").result(timeout=60).path
        there = tinkex.ServiceClient(base_url=b.url, api_key="tml-x")
        with there:
            rest = there.create_rest_client()
            assert rest.get_training_run_by_tinker_path(path).result().training_run_id == run.model_id
            listed = rest.list_user_checkpoints().result().checkpoints
            assert [one.tinker_path for one in listed] == [path]
            rest.publish_checkpoint_from_tinker_path(path).result()  # a's to write
            other = there.create_training_client_from_state_with_optimizer(path)
            assert train(other, 1, 1) == train(run, 1, 1)
    command = [sys.executable, "-m", "tinkex.cli", "server", "keys", "add", "ann", "--ledger", postgres]
    key = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    statuses = {}
    for member in two:
        eventually(lambda member=member: _status(member.url, "tml-x") == 401, 10)
        statuses[member.url] = _status(member.url, key)
    assert set(statuses.values()) == {200}


def test_a_stream_of_another_servers_sampler_passes_through(two):
    service, run = new_run(two[0].url)
    with service:
        sampler = run.save_weights_and_get_sampling_client()
        prompt, params = ModelInput.from_ints([5, 6, 7]), SamplingParams(max_tokens=6, seed=3)
        told = sampler.sample(prompt, 1, params).result(timeout=60).sequences[0].tokens
        asked = {
            "sampling_session_id": sampler._sampling_session_id, "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "sampling_params": {"max_tokens": 6, "seed": 3},
        }  # fmt: skip
        for member in two:
            *tokens, (last, whole) = _events(f"{member.url}/api/v1/stream_sample", asked)
            assert {name for name, _ in tokens} == {"tokens"}
            assert [token for _, event in tokens for token in event["tokens"]] == told
            assert len(tokens) > 1
            assert last == "done"
            assert whole["sequences"][0]["tokens"] == told


def _events(url: str, asked: dict[str, Any]) -> list[tuple[str, Any]]:
    headers = {"X-API-Key": "tml-x", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    found = []
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for block in answer.read().decode().strip().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
            if fields and fields["data"] != "[DONE]":
                found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


def _status(url: str, key: str) -> int:
    request = urllib.request.Request(f"{url}/api/v1/sessions", headers={"X-API-Key": key})
    try:
        with urllib.request.urlopen(request) as answer:
            json.loads(answer.read())
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_that_cannot_reach_its_database_says_so(tmp_path):
    command = [
        sys.executable, "-m", "tinkex.cli", "serve", "--engine", "fake", "--model", "m=fake", "--port", "0",
        "--home", str(tmp_path / "h"), "--ledger", "postgresql://127.0.0.1:1/x", "--store", str(tmp_path),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "cannot be reached" in ended.stderr
    assert "Traceback" not in ended.stderr
