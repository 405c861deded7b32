"""The newest official SDK against two servers on one Postgres and one S3 store, behind a load balancer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cloud.members import balancer
from tests.cloud.servers import BUCKET, postgres_server, s3_server
from tests.compat import reference
from tests.compat.clients.report import MODEL
from tests.compat.conftest import Served, serving
from tests.compat.environments import interpreter

close = pytest.approx


@pytest.fixture
def shared(tmp_path, model_directory: Path, monkeypatch) -> Iterator[Served]:
    interpreter("tinker-0.36.0")  # skips before anything is started
    with ExitStack() as stack:
        (tmp_path / "s3").mkdir()
        for name, value in stack.enter_context(s3_server(tmp_path / "s3")).items():
            monkeypatch.setenv(name, value)
        database = stack.enter_context(postgres_server())
        options = ("--ledger", database, "--store", f"s3://{BUCKET}/compat")
        servers = [
            stack.enter_context(serving({MODEL: model_directory}, tmp_path / name, *options))
            for name in ("one", "two")
        ]
        ports = [int(url.rpartition(":")[2]) for url, _ in servers]
        yield Served(stack.enter_context(balancer(ports)), model_directory)


def test_the_official_client_trains_on_shared_servers_as_peft_does(shared: Served, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    facts = shared.run("tinker-0.36.0", "training.py", str(out))
    info = facts["info"]
    assert facts["start"]["path"] == f"tinker://{info['run']}/external_weights/start"
    model = reference.adapted(shared.model, out / "start")
    losses, _ = reference.trained(model, 4, weight_decay=0.1, clip=0.5)
    assert facts["steps"]["losses"] == close(losses, rel=1e-4)
    assert reference.same_adapter(model, out / "end", 1e-4)
    for step in ("resumed", "loaded with optimizer"):
        assert facts[step]["losses"] == close(facts["steps"]["losses"][2:], rel=1e-6)
