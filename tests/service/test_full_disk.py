"""A disk with 0 bytes free: the server starts, and checkpoints can be deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import User, found, name_of, serving
from tinkex.service import home as home_module
from tinkex.service.ledger_file import LedgerFullError
from tinkex.types import checkpoints
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or os.name != "posix":
        pytest.skip("this system has no mount")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True)
    if made.returncode:
        pytest.skip("only root can mount a file system")
    monkeypatch.setattr(home_module, "DISK_RESERVE", 2 << 20)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> None:
    """Leave not a byte."""
    with (place / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    assert shutil.disk_usage(place).free == 0


async def delete(user: User, path: str) -> int:
    return await user.status_of(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(path)))


async def test_a_server_starts_and_deletes_on_a_full_disk(small_disk: Path):
    home = small_disk / "home"
    async with serving(home) as service:
        user = User(service)
        run = await user.run(rank=1024)
        saved = [await user.save(run, n, f"c{n}") for n in range(1, 4)]
        fill(small_disk)
        assert await delete(user, saved[0]) == 200
        assert len(found(home, "weights/c*")) == 2
        fill(small_disk)
    fill(small_disk)
    async with serving(home) as service:
        user = User(service)
        fill(small_disk)
        for path in saved[1:]:
            assert await delete(user, path) == 200
            fill(small_disk)
        assert found(home, "weights/c*") == []
        listed = await user.call(
            ops.LIST_CHECKPOINTS, checkpoints.ListCheckpointsRequest(training_run_id=run)
        )
        assert listed.checkpoints == []
        (small_disk / "filler").unlink()
        await service.upkeep.tick()
        assert await user.save(run, 4, "c4")


async def test_the_files_make_room_for_the_rows_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with serving(tmp_path / "home") as service:
        user = User(service)
        path = await user.save(await user.run(), 1, "c")
        delete_row = service.ledger.delete_checkpoint

        def full(*key: str) -> Any:
            if found(tmp_path, "weights/c"):
                raise LedgerFullError("no space left")
            return delete_row(*key)

        monkeypatch.setattr(service.ledger, "delete_checkpoint", full)
        assert await delete(user, path) == 200
        assert found(tmp_path, "weights/c") == []


async def test_the_spare_file_is_given_up_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = home_module.Home(tmp_path)
    home.keep_spare()
    assert (tmp_path / "spare").stat().st_size == home_module.SPARE_BYTES
    home_module.free_spare(tmp_path)
    assert (tmp_path / "spare").exists()  # there is room
    monkeypatch.setattr(home_module, "SPARE_BYTES", 1 << 62)
    home_module.free_spare(tmp_path)
    assert not (tmp_path / "spare").exists()
