"""A seeded rough day: all that was acknowledged is resolved, once and rightly, and nothing leaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny import tiny_model
from tests.soak.hostile import FLOODS
from tests.soak.rough_day import DISTURBANCES, Server, differences, leftovers, rough_work, work
from tests.soak.tenants import VOCABULARY

TENANTS, ACTIONS, KILLS, SEED = 4, 14, 4, 7


@pytest.mark.timeout(1800)
def test_a_rough_day_ends_like_a_quiet_one(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "qwen3", vocab_size=VOCABULARY)
    seeds = range(SEED, SEED + TENANTS)
    with Server(tmp_path / "quiet", model) as quiet:
        expected = work(quiet, seeds, ACTIONS)

    with Server(tmp_path / "rough", model) as server:
        report = rough_work(server, seeds, ACTIONS, KILLS, SEED)
        assert all(report.happened[kind] > 0 for kind in DISTURBANCES), report.happened
        assert report.faults == []
        assert report.resolved == expected.resolved
        assert differences(report, expected) == []

        # The last kill may have left it little to do since; what it loads for good, it loads on the first day
        for day in (100, 200):
            server.settles({"files and sockets": 30})
            before = server.holds()
            rough_work(server, range(SEED + day, SEED + day + TENANTS), ACTIONS // 2, 0, SEED)
        slack = {"files and sockets": 4, "threads": 2, "MB resident": 80}
        limits = {name: held + slack[name] for name, held in before.items() if name in slack}
        nothing = dict.fromkeys(("KV pages", "slots", "published adapters", "queued"), 0)
        assert server.settles({**limits, **nothing}) == {}
    assert leftovers(server.home) == []


@pytest.mark.timeout(1200)
def test_a_tenant_who_floods_changes_nobody_elses_books(tmp_path: Path) -> None:
    """In short; `python -m tests.soak.rough_day --hostile` is longer, and kills the server too."""
    model = tiny_model(tmp_path, "qwen3", vocab_size=VOCABULARY)
    seeds = range(SEED, SEED + 2)
    with Server(tmp_path / "quiet", model) as quiet:
        expected = work(quiet, seeds, ACTIONS // 2)
    with Server(tmp_path / "flooded", model) as server:
        planned = server.holds()["MB resident"]
        report = rough_work(server, seeds, ACTIONS // 2, 0, SEED, flooded=True)
        assert all(report.happened[flood] > 0 for flood in FLOODS), report.happened
        assert report.faults == []
        assert report.resolved == expected.resolved
        assert differences(report, expected) == []
        assert server.holds()["MB resident"] < planned + 1024
        assert server.settles({"KV pages": 0, "slots": 0, "queued": 0}) == {}
    assert leftovers(server.home) == []
