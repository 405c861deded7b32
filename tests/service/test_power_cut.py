"""A power cut: what was acknowledged is on the disk, in groups, and the event loop does not wait for it."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path

import pytest

from tests.service.harness import User, name_of, serving
from tests.service.power_cut import Cuts, Disk, Recorder, SlowDisk
from tinkex.cli.serve import serve
from tinkex.config import Settings
from tinkex.local import service_config
from tinkex.types import training
from tinkex.types.checkpoints import CheckpointRequest
from tinkex.types.sessions import DeleteSessionRequest
from tinkex.wire import ops

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def test_nothing_that_was_told_is_lost(tmp_path: Path):
    cuts = Cuts(tmp_path, "power", seed=3)
    assert cuts.run(50) == []
    assert cuts.promises > 500


def test_a_sync_that_takes_long_does_not_take_back_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home, kept, slow, go = tmp_path / "home", tmp_path / "kept", threading.Event(), threading.Event()
    home.mkdir()
    kept.mkdir()
    recorder, directory = Recorder(kept, home), os.open(home, os.O_RDONLY)

    def sleep(seconds: float) -> None:
        if threading.current_thread() is long:
            slow.set()
            assert go.wait(60)

    monkeypatch.setattr(time, "sleep", sleep)
    with (home / "log").open("wb", buffering=0) as log:
        log.write(b"first,")
        long = threading.Thread(target=recorder.fsync, args=[log.fileno()])
        long.start()
        assert slow.wait(60)
        log.write(b"second")
        recorder.fsync(log.fileno())
        recorder.fsync(directory)
        go.set()
        long.join()
    os.close(directory)
    for seed in range(20):
        Disk(home, kept, random.Random(seed)).leave(tmp_path / f"{seed}")
        assert (tmp_path / f"{seed}" / "log").read_bytes() == b"first,second"


def test_without_syncs_it_would_be(tmp_path: Path):
    assert Cuts(tmp_path, "process", seed=3).run(4)


def test_a_server_survives_power_cuts_unless_it_is_told_otherwise(tmp_path: Path):
    (option,) = [param for param in serve.params if param.name == "durability"]
    assert option.default == "power"
    assert service_config(Settings.read()).durability == "process"


async def test_a_request_is_neither_acknowledged_nor_executed_before_it_is_on_the_disk(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(home, durability="power") as service:
        user = User(service)
        run = await user.run()
        disk = SlowDisk(monkeypatch)
        requests = [asyncio.create_task(user.forward_backward(run, n)) for n in range(1, 9)]
        await asyncio.sleep(0.2)
        assert not any(request.done() for request in requests)
        assert not any(service.futures.get(f"{run}#{n}").done for n in range(1, 9))  # type: ignore[union-attr]
        began = time.monotonic()
        await user.call(ops.GET_INFO, training.GetInfoRequest(model_id=run))
        assert time.monotonic() - began < 0.1  # who asks for nothing to be kept does not wait
        disk.go.set()
        for request in requests:
            await user.result(await request)
        assert len([path for path in disk.synced if path.name.startswith("requests")]) <= 2


async def test_a_session_is_on_the_disk_before_its_id_is_told(home: Path, monkeypatch: pytest.MonkeyPatch):
    async with serving(home, durability="power") as service:
        disk = SlowDisk(monkeypatch)
        session = asyncio.create_task(User(service).session())
        await asyncio.sleep(0.1)
        assert not session.done()
        disk.go.set()
        await session
        assert home / "ledger.sqlite-wal" in disk.synced


async def test_a_checkpoint_keeps_its_files_until_its_deletion_is_on_the_disk(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(home, durability="power") as service:
        user = User(service)
        path = await user.save(await user.run(), 1, "s1")
        row = service.access.any_checkpoint(path)
        assert row is not None
        disk = SlowDisk(monkeypatch)
        request = CheckpointRequest(**name_of(path))
        deletion = asyncio.create_task(user.call(ops.DELETE_CHECKPOINT, request))
        await asyncio.sleep(0.2)
        assert not deletion.done()
        assert any((home / row.directory).iterdir())  # a power cut now may leave it listed
        disk.go.set()
        await deletion
        assert not (home / row.directory).exists()


@pytest.mark.parametrize("what", ["run", "sampler", "session"])
async def test_files_stay_until_the_deletion_of_their_row_is_on_the_disk(
    home: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    async with serving(home, durability="power") as service:
        user = User(service)
        session = await user.session()
        run = await user.run(session)
        await user.unnamed_sampler(run, 1, 0)
        row = service.ledger.run(run)
        assert row is not None
        if what == "session":
            assert await service.runs.close(row)
            await service.samplers.clean(session, ended=True)
        disk = SlowDisk(monkeypatch)
        if what == "run":
            place, deleting = service.home.run_dir(run) / "journal", service.runs.close(row)
        elif what == "sampler":
            place = service.home.run_dir(run) / "ephemeral" / "0"
            deleting = service.samplers.clean(session, ended=True)
        else:
            place = home / "runs" / session
            deleting = user.call(ops.DELETE_SESSION, DeleteSessionRequest(session_id=session))
        deletion = asyncio.create_task(deleting)
        await asyncio.sleep(0.3)
        assert not deletion.done()
        assert place.exists()  # a power cut now may leave it listed
        disk.go.set()
        await deletion
        assert not place.exists()
