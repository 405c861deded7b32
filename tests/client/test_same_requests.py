"""What our client sends is what the official one was recorded sending, through its whole surface.

tests/golden/flows.py drove SDK 0.36.0 when the recording was made; here it drives ours, under the name
`tinker`. The flow's passes make no sense to a model, so what refuses them is switched off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.golden.recorded import GOLDEN, Recorded, recorded

pytestmark = pytest.mark.slow

DRIVER = f"""
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import tinkex, tinkex.compat
from tinkex.client import passes
tinkex.compat.install()
passes.check_pass = lambda *_: None
sys.path.insert(0, {str(GOLDEN)!r})
import flows, record

wait, sleep = tinkex.APIFuture.result, time.sleep
def result(future, timeout=None):
    try:
        return wait(future, 20)
    except tinkex.TinkerError as error:
        print(error, file=sys.stderr)  # of one canned reply, which lacks what was asked for
tinkex.APIFuture.result = result
time.sleep = lambda seconds: sleep(min(seconds, 0.5))

recorder = record.Recorder()
recorder.read_models = lambda types: None
flows.everything(recorder)
json.dump([record.scrub(row) for row in recorder.stub.seen], sys.stdout)
sys.stdout.flush()
os._exit(0)
"""

# Operations that ours does not do in this flow, or does more often, and why.
OTHERWISE = {
    "get_dynamic_config": "it says whether samples may be cancelled, and ours always are",
    "send_telemetry": "off unless asked for",
    "session_heartbeat": "the flow is over before the first",
    "retrieve_futures": "polls as often as it takes",
}
# Headers that mean something to a server; what accepts an answer and what names a client are one's own.
HEADERS = ("x-sdk-method", "x-tinker-request-type", "x-tinker-weights-access-token", "content-encoding")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    home = str(tmp_path_factory.mktemp("home"))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER", "TINKEX"))}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=100,
        env=kept | {"HOME": home, "TINKER_API_KEY": "tml-test"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [Recorded(row) for row in json.loads(done.stdout)]


def said(requests: list[Recorded]) -> dict[str, list[Any]]:
    """By operation: each request as it is read, without the number of who sent it, each once."""
    by_op: dict[str, list[Any]] = defaultdict(list)
    for each in requests:
        value = each.decode()
        if hasattr(value, "sdk_version"):
            value = value.model_copy(update={"sdk_version": "x"})
        if value not in by_op[each.op.name]:
            by_op[each.op.name].append(value)
    return by_op


OPS = sorted({each.op.name for each in recorded("0.36.0")})


@pytest.mark.parametrize("op", [op for op in OPS if op not in OTHERWISE])
def test_the_same_is_said(ours: list[Recorded], op: str) -> None:
    mine, theirs = said(ours)[op], said(recorded("0.36.0"))[op]
    assert [value for value in theirs if value not in mine] == [], "what ours does not say"
    assert [value for value in mine if value not in theirs] == [], "what the official one does not"


def headers(requests: list[Recorded], op: str) -> set[tuple[str, str | None]]:
    return {(name, each.headers.get(name)) for each in requests if each.op.name == op for name in HEADERS}


@pytest.mark.parametrize("op", [op for op in OPS if op not in OTHERWISE])
def test_the_same_headers_go_with_it(ours: list[Recorded], op: str) -> None:
    assert headers(ours, op) == headers(recorded("0.36.0"), op)


def test_nothing_else_is_called(ours: list[Recorded]) -> None:
    assert {each.op.name for each in ours} - set(OPS) == set()
