"""`tinkex console`: the pages of a home that another process uses; and the pages of administrators."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from html import unescape
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.server.conftest import Answer, Running
from tinkex.server.api_keys import hash_key
from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import LedgerError
from tinkex.service.ledger_reader import LedgerReader
from tinkex.service.rows import RunRow, SamplerRow, SessionRow
from tinkex.service.run_series import STEPS
from tinkex.types.params import LoraConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home that a process has open, with runs of two owners."""
    place = tmp_path / "home"
    place.mkdir()
    with closing(Ledger(place / "ledger.sqlite")) as ledger:
        now = time.time()
        for owner, session in (("local", "aaaa"), ("bob", "bbbb")):
            ledger.add_session(SessionRow(session, owner, now, now))
            run = RunRow(
                f"{session}:train:0", session, 0, owner, "tiny", LoraConfig(4, 1), now, now, name=owner
            )
            ledger.add_run(run)
            directory = place / "runs" / session / "train-0"
            directory.mkdir(parents=True)
            (directory / STEPS).write_text(f'{{"step": 1, "time": {now}, "loss": 0.5}}\n')
        yield place


def test_a_reader_of_the_ledger_sees_what_is_written_and_writes_nothing(home: Path) -> None:
    with (
        closing(LedgerReader(home / "ledger.sqlite")) as reader,
        closing(Ledger(home / "ledger.sqlite")) as writer,
    ):
        assert reader.run("aaaa:train:0") is not None
        writer.update_run("aaaa:train:0", name="renamed")
        found = reader.run("aaaa:train:0")
        assert found is not None
        assert found.name == "renamed"
        with pytest.raises(LedgerError, match="readonly"):
            reader.update_run("aaaa:train:0", name="no")
        with pytest.raises(LedgerError, match="readonly"):
            reader.add_sampler(SamplerRow("s", "aaaa", "local", "tiny", 1.0))
    with pytest.raises(LedgerError, match="nothing was trained"):
        LedgerReader(home / "none.sqlite")


@contextmanager
def console(home: Path) -> Iterator[tuple[Getter, str]]:
    """`tinkex console`, and the path that logs in."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
    command = [sys.executable, "-m", "tinkex.cli", "console", "--home", str(home), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        found = re.fullmatch(r"(http://127.0.0.1:(\d+))(/console/login\?key=tml-[\w-]+)", url)
        assert found, url
        yield Getter(int(found[2])), found[3]
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15, 130)


@pytest.mark.slow
def test_tinkex_console_shows_a_home_that_is_in_use_and_takes_no_lock(home: Path) -> None:
    with console(home) as (get, link):
        assert get("/console/runs").status == 303, "nobody comes in without the key"
        assert get("/console/login?key=tml-wrong").status == 401
        welcome = get(link)
        assert (welcome.status, welcome.headers["location"]) == (303, "/console/runs")
        get.cookie = welcome.headers["set-cookie"].partition(";")[0]
        listed = get("/console/runs").body
        assert b"aaaa:0" in listed
        assert b"bbbb:0" in listed
        assert b"0.5" in get("/console/runs/aaaa:train:0/curves").body
        for path in ("runs/aaaa:train:0", "runs/aaaa:train:0/rollouts", "checkpoints", "admin", "admin/disk"):
            assert get(f"/console/{path}").status == 200, path
        assert b"TINKEX_KEEP_ROLLOUTS" in get("/console/runs/aaaa:train:0/rollouts").body
        assert b"Rename" not in get("/console/runs/aaaa:train:0").body
        for path in ("playground", "now", "runs/aaaa:train:0/rename", "runs/aaaa:train:0/delete"):
            assert get(f"/console/{path}").status in (404, 405), path
        with closing(Ledger(home / "ledger.sqlite")) as ledger:
            ledger.update_run("aaaa:train:0", steps=77)
        assert b">77<" in get("/console/runs").body
        assert not (home / "lock").exists()


SCRIPT = """
import sys, tinkex
service = tinkex.ServiceClient(base_url="local")
run = service.create_lora_training_client(sys.argv[1], rank=4, name="embedded")
sampler = run.save_weights_and_get_sampling_client()
params = tinkex.SamplingParams(max_tokens=6, stop=[])
for one in sampler.sample(tinkex.ModelInput.from_ints([5, 6, 7]), 2, params).result().sequences:
    whole, before = [5, 6, 7, *one.tokens], [0.0, 0.0]
    inputs = {"target_tokens": whole[1:], "logprobs": before + one.logprobs, "advantages": before + [0.5] * 6}
    data = [tinkex.Datum(tinkex.ModelInput.from_ints(whole[:-1]), inputs)]
    run.forward_backward(data, "importance_sampling")
run.optim_step(tinkex.AdamParams()).result()
print(run.model_id)
"""


@pytest.mark.slow
def test_rollouts_of_an_embedded_run_are_shown(tmp_path: Path) -> None:
    model, home = tiny_model(tmp_path, "qwen3"), tmp_path / "home"
    tiny_tokenizer(model)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
    environment = clean | {"TINKEX_HOME": str(home), "TINKEX_KEEP_ROLLOUTS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)], capture_output=True, text=True, timeout=100, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rollouts = f"/console/runs/{done.stdout.strip()}/rollouts"
    with console(home) as (get, link):
        get.cookie = get(link).headers["set-cookie"].partition(";")[0]
        (group,) = set(re.findall(rf"{rollouts}/(\w+)", get(rollouts).body.decode()))
        _, second = re.findall(r'data-tokens="([^"]+)"', get(f"{rollouts}/{group}").body.decode())
        told = json.loads(get(unescape(second)).body)
    assert len(told["answer"]) == len(told["logprobs"]) == len(told["trainer"]) == 6
    assert told["logprobs"] == pytest.approx(told["trainer"], abs=1e-3)  # nothing was trained in between
    assert told["advantage"] == 0.5


TRAINING = """
import sys, time, tinkex
service = tinkex.ServiceClient(base_url="local")
run = service.create_lora_training_client(sys.argv[1], rank=4, name="in another process")
data = [tinkex.Datum(tinkex.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
print(run.model_id, flush=True)
sys.stdin.readline()
for step in range(40):
    run.forward_backward(data, "cross_entropy")
    run.optim_step(tinkex.AdamParams()).result()
    run.log({"reward": step / 40}).result()
    time.sleep(0.06)
run.save_state("end").result()
print("trained", flush=True)
"""


@pytest.mark.slow
def test_a_run_is_watched_while_a_script_trains_it_in_another_process(tmp_path: Path) -> None:
    model, home = tiny_model(tmp_path, "qwen3"), tmp_path / "home"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
    script = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(model)], text=True, cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env=clean | {"TINKEX_HOME": str(home), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert script.stdin is not None
    assert script.stdout is not None
    try:
        run = script.stdout.readline().strip()
        with console(home) as (get, link):
            get.cookie = get(link).headers["set-cookie"].partition(";")[0]
            assert b"in another process" in get("/console/runs").body
            growing = get.events(f"/console/runs/{run}/events")
            first = next(growing)
            assert (first["anew"], first["curves"]) == (True, {}), "no step was taken yet"
            script.stdin.write("go\n")
            script.stdin.flush()
            steps, rewards, seen = list[float](), 0, list[float]()
            while len(steps) < 40 or rewards < 40:
                event = next(growing)
                axes = [[round(x) for x in accumulate(axis)] for axis in event["x"]]
                if "loss" in event["curves"]:
                    steps += axes[event["curves"]["loss"][0]]
                    seen.append(len(steps))
                rewards += len(event["curves"].get("reward", (0, []))[1])
            assert steps == list(range(1, 41)), "each once"
            assert len(seen) >= 2, "in more than one piece"
            assert script.stdout.readline() == "trained\n"
            assert b"/weights/end" in get(f"/console/checkpoints?run={run}").body
        assert script.wait(60) == 0, "it took no harm"
    finally:
        script.kill()
        script.communicate()


class Getter:
    """Plain requests, with a cookie."""

    def __init__(self, port: int) -> None:
        self._port, self.cookie = port, ""

    def __call__(self, path: str, form: dict[str, str] | None = None) -> Answer:
        import http.client

        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)) as connection:
            headers = {"accept": "text/html", "cookie": self.cookie}
            body = None
            if form is not None:
                body, headers["content-type"] = urlencode(form), "application/x-www-form-urlencoded"
            connection.request("GET" if form is None else "POST", path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        """The points that a stream sends."""
        import http.client

        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request("GET", path, headers={"accept": "text/event-stream", "cookie": self.cookie})
            response, name = connection.getresponse(), b""
            while line := response.readline():
                name = line if line.startswith(b"event:") else name
                if line.startswith(b"data: ") and name == b"event: points\n":
                    yield json.loads(line[6:])

    def log_in(self, key: str) -> str:
        """Log in; returns the token of forms."""
        self.cookie = self("/console/login", {"key": key}).headers["set-cookie"].partition(";")[0]
        found = re.search(rb'data-form-token="(\w+)"', self("/console/runs").body)
        assert found
        return found[1].decode()


def test_a_server_without_keys_shows_what_scripts_of_its_home_trained(
    start: Callable[..., Running], home: Path
) -> None:
    server = start(home=home)
    anybody = Getter(server.server.address[1])
    anybody.log_in("tml-whatever")
    listed = anybody("/console/runs").body
    assert b"aaaa:train:0" in listed
    assert b"bbbb:train:0" not in listed
    assert [anybody(f"/console/runs/{one}:train:0").status for one in ("aaaa", "bbbb")] == [200, 404]
    key = "tml-" + "a" * 40
    server.server.service.ledger.add_key(
        name="ann", note="", hash=hash_key(key), owner="ann", project_id=None, created_at=time.time()
    )
    ann = Getter(server.server.address[1])
    ann.log_in(key)
    assert b"train:0" not in ann("/console/runs").body
    assert ann("/console/runs/aaaa:train:0").status == 404


def test_only_an_administrators_key_sees_what_is_everybodys(start: Callable[..., Running]) -> None:
    server = start()
    ledger, keys = server.server.service.ledger, {"boss": "tml-" + "b" * 40, "ann": "tml-" + "a" * 40}
    for name, key in keys.items():
        ledger.add_key(
            name=name, note="", hash=hash_key(key), owner=name, project_id=None, created_at=time.time(),
            admin=name == "boss",
        )  # fmt: skip
    now = time.time()
    ledger.add_session(SessionRow("s", "ann", now, now))
    run = RunRow(
        "s:train:0", "s", 0, "ann", "m/base", LoraConfig(4, 1), now, now, name="=cmd()", ended="finished"
    )
    ledger.add_run(run)
    directory = server.server.service.home.run_dir("s:train:0")
    directory.mkdir(parents=True)
    (directory / "big").write_bytes(b"x" * 100_000)
    port = server.server.address[1]
    ann, boss = Getter(port), Getter(port)
    token, own = boss.log_in(keys["boss"]), ann.log_in(keys["ann"])
    assert b"/console/admin" not in ann("/console/runs").body
    for path in ("admin", "admin/usage.csv", "admin/disk"):
        assert ann(f"/console/{path}").status == 403, path
        assert boss(f"/console/{path}").status == 200, path
    forms = {"keys": {"name": "x"}, "keys/revoke": {"key_id": "1"}, "runs/delete": {"run": "s:train:0"}}
    for path, form in forms.items():
        assert ann(f"/console/admin/{path}", {**form, "form_token": own}).status == 403, path
        assert boss(f"/console/admin/{path}", form).status == 403, path
    assert b"97.7 KiB" in boss("/console/admin/disk").body
    made = boss("/console/admin/keys", {"name": "carl", "form_token": token})
    found = re.search(rb"tml-[\w-]{43}", made.body)
    assert found
    Getter(port).log_in(found[0].decode())
    assert boss("/console/admin/keys", {"name": "carl", "form_token": token}).status == 422
    (carl,) = [row for row in ledger.keys() if row.name == "carl"]  # noqa: SIM118
    assert boss("/console/admin/keys/revoke", {"key_id": str(carl.key_id), "form_token": token}).status == 303
    assert boss("/console/admin/runs/delete", {"run": "s:train:0", "form_token": token}).status == 303
    assert not directory.exists()
    log = boss("/console/admin").body
    for event in (b"keys.add", b"keys.revoke", b"runs.delete", b"runs.clean-up"):
        assert event in log
