"""Every page of the console stays small and quick, whatever there is to show."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import orjson
import pytest

from tests.server.conftest import MODEL, Answer, Running, server_config
from tests.server.console_client import Browser, drawn
from tinkex.server.api_keys import hash_key
from tinkex.server.console.console_routes import server_console
from tinkex.service import rollout_files
from tinkex.service.ledger import Ledger
from tinkex.service.rows import AuditRow, CheckpointRow, RunRow, SessionRow, UsageRow
from tinkex.service.run_metrics import MAX_BYTES
from tinkex.service.run_series import STEPS, thinned
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow
KEY, OWNER, SESSION = "tml-" + "k" * 40, "ann", "4e2f1d7c-1111-2222-3333-444444444444"
RUN = f"{SESSION}:train:0"
STEP_COUNT, METRICS, MOST = 100_000, 22, 200_000
OURS = [
    "seconds", "loss", "loss:sum", "tokens:sum", "active:sum", "datums:sum", "surely_right:mean",
    "kl_sample_train_v1:mean", "kl_sample_train_v2:mean", "ratio:mean", "ratio:min", "ratio:max",
    "entropy:mean", "advantage:mean", "positive_advantages:mean", "answer_tokens:mean", "grad_norm",
    "learning_rate", "waiting_seconds", "publishing_seconds", "wall_seconds", "reward_spread:mean",
]  # fmt: skip


def metrics(steps: int, seed: int) -> bytes:
    """So many steps, as a server keeps them; with one great loss among a hundred thousand."""
    data, lines = b"", list[bytes]()
    values = np.abs(np.random.default_rng(seed).normal(size=(steps, METRICS)).round(7))
    values[77_777 % steps, 1] = 1000.0
    for n, row in enumerate(values.tolist()):
        line = {"step": n + 1, "time": 1.7e9 + 3.1 * n, **dict(zip(OURS, row, strict=True))}
        lines.append(orjson.dumps(line) + b"\n")
        if len(lines) == 1000:
            data += b"".join(lines)
            data = thinned(data) if len(data) > MAX_BYTES else data
            lines.clear()
    return data


def fill(home: Path) -> None:
    home.mkdir()
    now, draw = time.time(), np.random.default_rng(2)
    with closing(Ledger(home / "ledger.sqlite")) as ledger:
        with ledger.transaction():
            ledger.add_key(
                name="a",
                note="",
                hash=hash_key(KEY),
                owner=OWNER,
                project_id=None,
                created_at=1.0,
                admin=True,
            )
            for n in range(2000):
                ledger.add_session(SessionRow(f"session {n}", f"owner {n % 20}", now, now))
            ledger.add_session(SessionRow(SESSION, OWNER, now, now))
            first = RunRow(
                RUN, SESSION, 0, OWNER, MODEL, LoraConfig(4, 1), now, now, curve=[1.0] * 60, state="evicted"
            )
            for n in range(10_000):
                many = {"run_id": f"{SESSION}:train:{n}", "model_seq_id": n, "name": f"run {n}", "steps": n}
                parent = None if n % 20 else f"tinker://{RUN}/weights/c{n % 500}"
                ended = "finished" if n > 50 else ""
                ledger.add_run(replace(first, **many, tags=[f"t{n % 7}"], parent=parent, ended=ended))
            for n in range(500):
                saved = f"runs/{SESSION}/train-0/weights/c{n}"
                ledger.add_checkpoint(
                    CheckpointRow(
                        RUN, "weights", f"c{n}", OWNER, MODEL, first.lora, saved, 1000, now - n, True
                    )
                )
            for n in range(20_000):
                ledger.add_audit(AuditRow(now - n, OWNER, "checkpoints.save", run_id=RUN))
            ledger.add_usage(
                UsageRow(
                    now - 3600 * (n % 720),
                    f"owner {n % 20}",
                    "training",
                    5.0,
                    None,
                    f"session {n}",
                    RUN,
                    MODEL,
                )
                for n in range(20_000)
            )
    directory = home / "runs" / SESSION / "train-0"
    for n in range(500):
        place = directory.with_name(f"train-{n}")
        place.mkdir(parents=True)
        if n < 24:
            (place / STEPS).write_bytes(metrics(8_000, n) if n else metrics(STEP_COUNT, 0))
        elif n < 200:
            (place / STEPS).hardlink_to(directory.with_name(f"train-{n % 23 + 1}") / STEPS)
        else:
            (place / STEPS).write_bytes(metrics(100, n))
    records = list[bytes]()
    for n in range(4000):
        tokens, logprobs = draw.integers(0, 250, 200).astype("i4"), draw.normal(size=200).astype("f4")
        sample = {"tokens": tokens, "stop": "length", "logprobs": logprobs}
        prompt = draw.integers(0, 250, 100).astype("i4")
        fields = {"id": n, "step": n // 40, "group": f"{n % 400:012x}", "time": now, "temperature": 1.0}
        record = {"kind": "sample", **fields, "prompt": prompt, "samples": [sample], "sampler": "s"}
        records.append(rollout_files.packed(record))
        joined = {
            "kind": "joined",
            "id": n,
            "sample": 0,
            "step": n // 40,
            "trainer": logprobs,
            "advantage": 0.5,
        }
        records.append(rollout_files.packed(joined))
    rollout_files.write(directory / rollout_files.DIRECTORY, 1 << 28, records)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[Running]:
    """A server that compresses, as one does for clients elsewhere."""
    home = tmp_path_factory.mktemp("full") / "home"
    fill(home)
    running = Running(server_config(home, str(tokenizer_dir), public_url="http://lab.example"))
    assert running.failed is None, running.failed
    seen = running.server.service.activity.seen
    seen.update({f"session {n}": time.time() for n in range(2000)})
    yield running
    running.stop()


def looked_at(browser: Browser, path: str) -> tuple[Answer, float]:
    began = time.perf_counter()
    answer = browser.get(path, accept_encoding="gzip")
    return answer, time.perf_counter() - began


def content(answer: Answer) -> bytes:
    return gzip.decompress(answer.body) if answer.headers.get("content-encoding") == "gzip" else answer.body


def named(numbers: Iterable[int]) -> str:
    return urlencode([("run", f"{SESSION}:train:{n}") for n in numbers])


def addresses(server: Running, group: str) -> list[str]:
    """Every page, with what makes it large."""
    found = list[str]()
    for route in server_console(server.server.gateway, b"s" * 32):
        path = route.path.replace("{run_id}", RUN).replace("{group}", group)
        streams = path.endswith("/events")
        if (
            "GET" in (route.methods or ())
            and not streams
            and not re.search(r"static|download|export|sessions|/training", path)
        ):
            found.append(path)
    one, runs = f"/console/runs/{RUN}", named(range(24))
    more = [
        f"{one}/curves?x=time", f"{one}/curves?low=5000&high=9000", f"{one}/rollouts/{group}/tokens?id=7",
        f"{one}/rollouts?page=5&order=spread", f"{one}/rollouts?text=nowhere", "/console/runs?q=%C3%9Cbung",
        "/console/runs?q=run+99&order=steps", "/console/checkpoints?page=7", "/console/admin?audit=100",
        f"/console/checkpoints?run={RUN}&page=3", f"{one}/export?path=tinker://{RUN}/weights/c7",
        f"/console/compare?{runs}", f"/console/compare/curves?{runs}",
        f"/console/compare/curves?{runs}&x=time",
        "/console/compare?match=1&order=steps&way=up", "/console/compare?match=1&q=run&part=3&page=9",
        f"/console/compare?{named(range(200))}",
    ]  # fmt: skip
    for first in (0, 24, 168):
        some = named(range(first, first + 24))
        more += [f"/console/compare/curves?{some}&first={first}&of={of}" for of in (200, 500)]
        more += [f"/console/compare/curves?{some}&first={first}&of=500&x=time"]
    left = [
        path
        for path in found
        if path not in (f"/console/runs/{RUN}/rollouts/{group}/tokens", "/console/login")
    ]
    assert len(left) >= 14, left
    return [*left, *more]


def test_every_page_is_small_and_quick_with_as_much_as_there_may_be(full: Running) -> None:
    browser = Browser(full, KEY)
    group = f"{7:012x}"
    first = dict[str, float]()
    late = list[tuple[str, float]]()
    for path in addresses(full, group):
        answer, first[path] = looked_at(browser, path)
        assert answer.status in (200, 303), (path, answer.status)
        took = min([looked_at(browser, path)[1] for _ in range(3)])
        size = len(answer.body)
        if path.endswith(".csv"):
            continue
        assert size <= MOST, (path, size)
        if took > 0.1:
            late.append((path[:80], took))
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)  # with what has nothing to do with us
    assert not [one for one in late if not busy or one[1] > 0.4], late
    assert max(first.values()) < 15, "the first look after a start reads everything, here 24 runs"


def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn(full: Running) -> None:
    told = json.loads(content(looked_at(Browser(full, KEY), f"/console/runs/{RUN}/curves")[0]))
    x, y = drawn(told)["loss"]
    assert max(y) == 1000.0
    assert x[y.index(1000.0)] == pytest.approx(77_778, abs=600)
    assert {"wall_seconds", "loss:sum"} & told["curves"].keys() == set()
    assert len(told["x"]) <= 3


def test_nothing_is_compressed_for_a_browser_that_does_not_ask(full: Running) -> None:
    answer = Browser(full, KEY).get("/console/runs")
    assert "content-encoding" not in answer.headers
    assert b"run 99" in answer.body
