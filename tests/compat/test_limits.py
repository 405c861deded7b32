"""429 with Retry-After: the official SDK waits for it on each kind of call, and goes on."""

from __future__ import annotations

from pathlib import Path

from tests.compat.conftest import Served
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
