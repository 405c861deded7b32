"""A wall clock that jumps: nothing is deleted by it until it has been steady for an hour."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.service.harness import User, found, serving
from tinkex.service.activity import STEADY

pytestmark = pytest.mark.anyio
DAYS = 8 * 24 * 3600.0


class Clocks:
    """The wall clock and the monotonic one, moved by hand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        wall, ticks = time.time, time.monotonic
        self.ahead = self.later = 0.0
        patch.setattr(time, "time", lambda: wall() + self.ahead + self.later)
        patch.setattr(time, "monotonic", lambda: ticks() + self.later)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


async def test_a_jump_deletes_nothing_and_can_be_undone(
    tmp_path: Path, clocks: Clocks, caplog: pytest.LogCaptureFixture
):
    async with serving(tmp_path / "home") as service:
        user = User(service)
        await user.save(await user.run(), 1, "c", ttl_seconds=7 * 24 * 3600)
        clocks.ahead = DAYS
        await service.upkeep.tick()
        assert found(tmp_path, "weights/c")
        assert "no checkpoint is deleted" in caplog.text
        clocks.ahead = 0.0
        await service.upkeep.tick()
        clocks.later = STEADY + 60
        await service.upkeep.tick()
        assert found(tmp_path, "weights/c")


async def test_what_has_expired_by_a_clock_that_held_is_deleted(tmp_path: Path, clocks: Clocks):
    async with serving(tmp_path / "home") as service:
        user = User(service)
        await user.save(await user.run(), 1, "c", ttl_seconds=7 * 24 * 3600)
        clocks.ahead = DAYS
        await service.upkeep.tick()
        clocks.later = STEADY - 60
        await service.checkpoints.expire()
        assert found(tmp_path, "weights/c")
        clocks.later = STEADY + 1
        await service.checkpoints.expire()
        assert not found(tmp_path, "weights/c")


async def test_a_jump_before_or_shortly_before_a_start_is_noticed(tmp_path: Path, clocks: Clocks):
    async with serving(tmp_path / "home") as service:
        user = User(service)
        session = await user.session()
        await user.save(await user.run(session), 1, "c", ttl_seconds=7 * 24 * 3600)
    clocks.ahead = DAYS
    async with serving(tmp_path / "home") as service:
        await service.upkeep.tick()
        assert found(tmp_path, "weights/c")
        service.activity.heard_of(session)  # the ledger's last time is the false one from now on
        service.activity.flush()
    async with serving(tmp_path / "home") as service:
        await service.upkeep.tick()
        assert found(tmp_path, "weights/c")
