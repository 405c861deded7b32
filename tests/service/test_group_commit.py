"""Group commit: writers share syncs and a log, and a replay of the log gives files what a power cut took."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.service.harness import User, found, killed_copy, serving
from tests.service.power_cut import SlowDisk
from tinkex.cli.server_admin import server as command
from tinkex.service import group_commit
from tinkex.service.group_commit import GroupCommit, replay
from tinkex.service.refusal import Refusal
from tinkex.service.runs.segments import JournalError, JournalFullError, SegmentedLog

pytestmark = pytest.mark.anyio


async def test_writers_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, commits = SlowDisk(monkeypatch), GroupCommit(tmp_path, power=True)
    for name in ("first", "0", "1", "2"):
        (tmp_path / name).touch()
    commits.wrote(tmp_path / "first")
    first = asyncio.create_task(commits.synced())
    await asyncio.sleep(0)
    for n in range(100):
        commits.wrote(tmp_path / f"{n % 3}")
    others = [asyncio.create_task(commits.synced()) for _ in range(100)]
    disk.go.set()
    await asyncio.gather(first, *others)
    assert disk.synced[0] == tmp_path / "first"
    assert sorted(disk.synced[1:]) == [tmp_path / name for name in "012"]
    await commits.synced()  # nothing is left to do
    assert len(disk.synced) == 4
    commits.close()


async def test_after_a_failed_sync_nothing_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    commits = GroupCommit(tmp_path, power=True)
    commits.wrote(tmp_path)
    with pytest.raises(Refusal, match="disk failed"):
        await commits.synced()
    monkeypatch.undo()
    commits.wrote(tmp_path)  # the kernel would now call it a success
    with pytest.raises(Refusal, match="disk failed"):
        await commits.synced()
    commits.close()


async def test_without_power_nothing_is_synced(tmp_path: Path):
    commits = GroupCommit(tmp_path, power=False)
    commits.wrote(tmp_path / "nowhere")
    assert commits.mark() == 0
    await commits.synced()
    commits.close()


# -- the log ---------------------------------------------------------------------------------------------


@pytest.fixture
def commits(tmp_path: Path) -> Iterator[GroupCommit]:
    commits = GroupCommit(tmp_path, power=True)
    yield commits
    commits.close()


def append(commits: GroupCommit, path: Path, data: bytes) -> None:
    at = path.stat().st_size if path.exists() else 0
    with path.open("ab") as file:
        file.write(data)
    commits.appended(path, at, data)


class Syncs(SlowDisk):
    """The names of what is synced, by a disk that is not slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.go.set()

    def take(self) -> list[str]:
        names = sorted(path.name for path in self.synced)
        self.synced.clear()
        return names


async def test_many_files_take_one_sync(tmp_path: Path, commits: GroupCommit, monkeypatch: Any):
    paths, synced = [tmp_path / f"{n}" for n in range(32)], Syncs(monkeypatch)
    for path in paths:
        append(commits, path, b"one")
    await commits.synced()
    assert synced.take() == ["commits-000001.log", tmp_path.name]
    for path in paths:
        append(commits, path, b"two")
    await commits.synced()
    assert synced.take() == ["commits-000001.log"]
    append(commits, paths[0], b"alone")
    await commits.synced()
    assert synced.take() == ["0"]  # the log would save nothing
    append(commits, paths[0], b"short")
    append(commits, paths[1], b"short")
    append(commits, paths[2], b"long" * group_commit.LOGGED_BYTES)
    await commits.synced()
    assert synced.take() == ["2", "commits-000001.log"]


@pytest.mark.parametrize("left", [0, 3, 6])
async def test_a_replay_gives_a_file_what_a_power_cut_took(tmp_path: Path, commits: GroupCommit, left: int):
    for data in (b"one", b"two"):
        for name in "abc":
            append(commits, tmp_path / name, data)
        await commits.synced()
    home = killed_copy(tmp_path)
    paths = [home / name for name in "abc"]
    os.truncate(paths[0], left)
    paths[2].unlink()
    replay(home)
    assert [path.read_bytes() for path in paths[:2]] == [b"onetwo"] * 2
    assert not paths[2].exists()  # it was deleted on purpose: its name was on the disk
    assert found(home, "*.log") == []


async def test_the_log_begins_anew_once_its_files_are_synced(
    tmp_path: Path, commits: GroupCommit, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(group_commit, "LOG_BYTES", 1000)
    paths, synced = [tmp_path / name for name in "abcd"], Syncs(monkeypatch)
    for path in paths:
        append(commits, path, b"x" * 300)
    await commits.synced()
    synced.take()
    assert all(commits.names(path) for path in paths)
    for path in paths[2:]:
        append(commits, path, b"y")
    await commits.synced()
    assert synced.take() == ["a", "b", "c", "commits-000002.log", "d", tmp_path.name, tmp_path.name]
    assert [commits.names(path) for path in paths] == [False, False, True, True]
    assert found(tmp_path, "*.log") == [tmp_path / "commits-000002.log"]


async def test_what_nobody_waits_for_takes_no_memory(tmp_path: Path, commits: GroupCommit, monkeypatch: Any):
    monkeypatch.setattr(group_commit, "WAITING_BYTES", 1000)
    synced = Syncs(monkeypatch)
    for path in (tmp_path / name for name in "abcd"):
        append(commits, path, b"x" * 400)
    await commits.synced()
    assert {"c", "d"} <= set(synced.take())


async def test_without_room_for_the_log_the_files_are_synced(
    tmp_path: Path, commits: GroupCommit, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> None:
        raise JournalFullError("no space") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(SegmentedLog, "append", full)
    synced = Syncs(monkeypatch)
    for path in (tmp_path / name for name in "ab"):
        append(commits, path, b"x")
    await commits.synced()
    assert synced.take() == ["a", "b"]


async def test_a_damaged_log_prevents_a_start_by_name_until_a_repair(home: Path):
    async with serving(home, durability="power") as service:
        user = User(service)
        runs = [await user.run() for _ in range(3)]
        await asyncio.gather(*(user.loss(run, 1) for run in runs))
        copy = killed_copy(home)
    assert not found(home, "commits*")  # a server that ended needs none
    (log,) = found(copy, "commits*")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 4
    log.write_bytes(content)
    with pytest.raises(JournalError, match=r"commits-000001.log is damaged at byte \d+.*server repair"):
        async with serving(copy):
            pass
    assert log.read_bytes() == content
    said = CliRunner().invoke(command, ["repair", "--home", str(copy)])
    assert said.exit_code == 0, said.output
    assert "starts without it" in said.output
    assert [path.read_bytes() for path in found(copy, "commits*")] == [content]
    async with serving(copy) as service:
        for run in runs:
            await User(service).loss(run, 2)
