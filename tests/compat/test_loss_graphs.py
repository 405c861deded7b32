"""Traced losses: what we upload is what the official client uploads, byte for byte."""

from __future__ import annotations

from pathlib import Path

from tests.compat.clients.traced_losses import LOSSES
from tests.compat.conftest import AT_ONCE, Served
from tests.stub import Stub
from tinkex import ServiceClient


def uploads(stub: Stub) -> list[bytes]:
    (session,) = stub.sessions
    return [r.body.replace(session.encode(), b"S") for r in stub.requests if r.op == "create_custom_loss"]


def test_uploads_are_the_official_ones(tmp_path: Path) -> None:
    with Stub(custom_loss_server_side=True) as stub:
        facts = Served(stub.url, tmp_path / "m" / "base").run("tinker-0.36.0", "loss_graphs.py")
        official = uploads(stub)
    with Stub(custom_loss_server_side=True) as stub:
        service = ServiceClient(base_url=stub.url, api_key="tml-x")
        handles = [service.create_custom_loss(fn, ranks).result(AT_ONCE) for fn, ranks in LOSSES]  # type: ignore[arg-type]
        service.close().result(AT_ONCE)
        ours = uploads(stub)
    assert len(official) == len(LOSSES)
    assert ours == official
    assert {h.name: (h.loss_id, list(h.input_names)) for h in handles} == {
        name: (fact["loss_id"], fact["input_names"]) for name, fact in facts.items()
    }
