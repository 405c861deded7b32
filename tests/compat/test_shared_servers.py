"""The newest official SDK against servers on one Postgres and one S3 store.

Two of them behind a load balancer; and one whose engine is on a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cloud.members import balancer
from tests.cloud.servers import control_plane
from tests.compat import reference
from tests.compat.clients.report import MODEL
from tests.compat.conftest import Served, serving
from tests.compat.environments import interpreter

close = pytest.approx


@pytest.fixture(params=["two servers", "a cluster"])
def shared(request: pytest.FixtureRequest, tmp_path: Path, model_directory: Path) -> Iterator[Served]:
    interpreter("tinker-0.36.0")  # skips before anything is started
    with ExitStack() as stack:
        options = stack.enter_context(control_plane(tmp_path))
        if request.param == "a cluster":
            placed = Path(f"{model_directory},trainers=1,data=2,samplers=2")
            started = serving({MODEL: placed}, tmp_path / "home", "--cluster", "auto", *options)
            yield Served(stack.enter_context(started)[0], model_directory)
            return
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
