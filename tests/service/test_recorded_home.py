"""Home directories that earlier versions left behind, killed in mid-work: the present version opens them.

`record_home.py` made the archives in recorded_home/, one for each engine.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import User
from tests.service.record_home import go_on, opened
from tinkex.service.refusal import Refusal
from tinkex.service.rows import Scope

pytestmark = pytest.mark.anyio
RECORDED = Path(__file__).parent / "recorded_home"


@pytest.fixture(params=["fake", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def recorded(kind: str, tmp_path: Path) -> Path:
    with tarfile.open(RECORDED / f"{kind}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def read(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name).read_text())


async def test_runs_requests_and_checkpoints_go_on(recorded: Path, kind: str):
    facts, expected = read(recorded, "facts.json"), read(recorded, "later.json")
    async with opened(recorded, kind) as service:
        later = await go_on(User(service), facts)
    assert later.keys() == expected.keys()
    tolerance = 1e-9 if kind == "fake" else 1e-4  # torch sums in another order on another CPU
    assert later.pop("unreadable") == expected.pop("unreadable")
    for name, value in expected.items():
        assert later[name] == pytest.approx(value, rel=tolerance), name
    assert later["seen"] == pytest.approx(facts["losses"][4], rel=1e-12)  # as its client was told before


async def test_a_sample_that_the_killed_process_had_not_answered_is_gone(recorded: Path, kind: str):
    facts = read(recorded, "facts.json")
    async with opened(recorded, kind) as service:
        with pytest.raises(Refusal) as refused:
            await User(service).result(facts["requests"]["lost_sample"])
    assert refused.value.status == 410


async def test_the_ledger_holds_what_it_held(recorded: Path, kind: str):
    facts = read(recorded, "facts.json")
    async with opened(recorded, kind) as service:
        ledger = service.ledger
        session = ledger.session(facts["session"])
        assert session is not None
        assert session.display_name == "recorded"
        assert session.tags == ["old"]
        runs = ledger.runs_of_session(facts["session"])
        assert [run.run_id for run in runs] == [facts[name] for name in ("stepped", "waiting", "evicted")]
        assert all(run.lora.rank == 4 and run.fingerprint and not run.corrupted for run in runs)
        kept = ledger.checkpoints_of_run(facts["stepped"])
        assert {row.tinker_path: row.with_optimizer for row in kept} == {
            facts["paths"]["state"]: True,
            facts["paths"]["weights"]: False,
        }
        key = ledger.find_key("0" * 64)
        assert key is not None
        assert (key.name, key.owner) == ("laptop", "ann")
        assert {row.kind for row in ledger.usage(0.0, 1e12, Scope("ann"))} >= {"training", "checkpoint"}
