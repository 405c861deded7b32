"""429 with Retry-After: the official SDK waits for it on each kind of call, and goes on."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.compat.clients.report import MODEL
from tests.compat.conftest import Served, serving
from tests.stub import Stub, status

WAIT = 1.0  # seconds that the server asks for
KINDS = ("create_model", "forward_backward", "optim_step", "asample", "sessions")


def test_every_kind_of_call_is_sent_again_when_the_limit_says(tmp_path: Path) -> None:
    with Stub() as stub:
        for kind in KINDS:
            stub.script(kind, status(429, {"retry-after": f"{WAIT:g}"}))
        (tmp_path / "models" / "stub").mkdir(parents=True)
        facts = Served(stub.url, tmp_path / "models" / "stub").run("tinker-0.36.0", "limited.py", "stub/base")
        assert set(facts) == set(KINDS)
        for kind in KINDS:
            first, second = stub.sent(kind)[:2]
            assert second.time - first.time >= 0.7 * WAIT, kind
            assert facts[kind]["seconds"] < 30, kind


@pytest.mark.parametrize(
    "limit", ["--requests-per-user=8", "--body-memory-per-user=64KiB", "--queue-memory-per-user=64KiB"]
)
def test_a_burst_beyond_what_one_user_may_have_ends_well(
    tmp_path: Path, model_directory: Path, limit: str
) -> None:
    """What is refused is sent again until it is done, each request once and in order."""
    with serving({MODEL: model_directory}, tmp_path, limit) as (url, _):
        facts = Served(url, model_directory).run("tinker-0.36.0", "burst.py", MODEL)
        with urlopen(f"{url}/metrics") as page:
            refusals = re.findall(r'tinkex_requests_total\{op="(\w+)",status="429"\}', page.read().decode())
    assert {"forward_backward", "sample"} & set(refusals)
    first, *others = facts["passes"]["losses"]
    assert first == sorted(first, reverse=True)
    assert all(losses == pytest.approx(first, rel=1e-4) for losses in others)
    assert len(facts["samples"]["answers"]) == 40
    assert facts["samples"]["seconds"] < 120
