"""Saved weights: names, lifetimes, copies, exports, and a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import re
import shutil
import tarfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from tests.service.harness import MODEL, Failed, User, found, killed_copy, name_of, serving
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import CreateAdapter, EngineConfig, SaveAdapter
from tinkex.service import encryption
from tinkex.service import home as home_module
from tinkex.service import sessions as service_sessions
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.served_models import ServedModels
from tinkex.service.service import Service
from tinkex.types import checkpoints, sessions, training
from tinkex.types.params import LoraConfig
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


def held_up(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, after: int = 0
) -> tuple[threading.Event, threading.Event]:
    """One call of a function, `after` so many, waits: the first event tells of it, the second lets it go."""
    function, calls = getattr(module, name), itertools.count()
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            begun.set()
            go_on.wait(30)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, slowly)
    return begun, go_on


def _size(url: str) -> int:
    return Path(unquote(urlparse(url).path)).stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "a/b", "../x", "/etc", "a\\b", "nul\0", "x" * 300, " a", "a.", "a:b", ".hidden", "a\n"],
)
async def test_names_cannot_leave_their_directory(user: User, home: Path, name: str):
    run = await user.run()
    for op, kind in (
        (ops.SAVE_WEIGHTS, checkpoints.SaveWeightsRequest),
        (ops.SAVE_WEIGHTS_FOR_SAMPLER, checkpoints.SaveWeightsForSamplerRequest),
        (ops.SAVE_WEIGHTS_EXTERNAL, checkpoints.SaveWeightsExternalRequest),
    ):
        before = sorted(home.parent.rglob("*safetensors"))
        assert await user.status_of(op, kind(model_id=run, path=name, seq_id=1)) == 400
        assert sorted(home.parent.rglob("*safetensors")) == before


async def test_names_that_people_use_are_fine(user: User, home: Path):
    run = await user.run()
    for seq_id, name in enumerate(["000080", "step-10", "final_v2.1", "lr=1e-4,bs=8", "état"], 1):
        path = await user.save(run, seq_id, name)
        assert path == f"tinker://{run}/weights/{name}"
        session, number = run.split(":train:")
        assert (home / "runs" / session / f"train-{number}" / "weights" / name).is_dir()


async def test_a_name_that_exists_is_a_failed_future_unless_overwritten(user: User):
    run = await user.run()
    await user.save(run, 1, "c")
    with pytest.raises(Failed, match="exists already") as failed:
        await user.save(run, 2, "c")
    assert failed.value.category == "user"
    await user.train(run, 3, 1)
    path = await user.save(run, 5, "c", overwrite=True)
    other = await user.run()
    await user.load(other, 1, path)
    assert await user.loss(other, 2) == await user.loss(run, 6)


@pytest.mark.parametrize("seconds", [0, 3599, 10 * 366 * 24 * 3600])
async def test_lifetimes_have_bounds(user: User, seconds: int):
    run = await user.run()
    request = checkpoints.SaveWeightsRequest(model_id=run, path="c", seq_id=1, ttl_seconds=seconds)
    assert await user.status_of(ops.SAVE_WEIGHTS, request) == 422
    path = await user.save(run, 2, "d", ttl_seconds=3600)
    bad = checkpoints.SetCheckpointTTLRequest(**name_of(path), ttl_seconds=seconds)
    assert await user.status_of(ops.SET_CHECKPOINT_TTL, bad) == 422


async def test_the_longest_lifetime_is_ten_years_and_none_is_for_ever(user: User):
    run, ten_years = await user.run(), 315_576_000  # of 365.25 days
    for number, (seconds, ends) in enumerate([(3600, True), (ten_years, True), (None, False)], 1):
        path = await user.save(run, number, f"c{number}", ttl_seconds=seconds)
        asked = checkpoints.ListCheckpointsRequest(training_run_id=run)
        [shown] = [
            c for c in (await user.call(ops.LIST_CHECKPOINTS, asked)).checkpoints if c.tinker_path == path
        ]
        assert (shown.expires_at is not None) == ends
        if seconds is not None:
            assert shown.expires_at.timestamp() == pytest.approx(time.time() + seconds, abs=600)
    over = checkpoints.SaveWeightsRequest(model_id=run, path="d", seq_id=4, ttl_seconds=ten_years + 1)
    assert await user.status_of(ops.SAVE_WEIGHTS, over) == 422


async def test_what_has_expired_is_gone_with_its_files(user: User, home: Path):
    run = await user.run()
    path = await user.save(run, 1, "c", ttl_seconds=3600)
    kept = await user.save(run, 2, "d", ttl_seconds=3600)
    await user.call(
        ops.SET_CHECKPOINT_TTL, checkpoints.SetCheckpointTTLRequest(**name_of(kept), ttl_seconds=None)
    )
    ledger = user.service.ledger
    ledger.update_checkpoint(run, "weights", "c", expires_at=time.time() - 1)
    info = checkpoints.WeightsInfoRequest(tinker_path=path)
    assert await user.status_of(ops.GET_WEIGHTS_INFO, info) == 404  # before any upkeep
    await user.service.upkeep.tick()
    assert ledger.checkpoint(run, "weights", "c") is None
    assert [p.name for p in found(home, "weights/*")] == ["d"]


async def test_what_has_expired_hides_nothing_that_has_not(user: User, service: Service):
    """In a home that no process owns it stays for long; a listing ends with a page that is empty."""
    run = await user.run()
    kept = await user.save(run, 1, "kept")
    for number in (2, 3):
        await user.save(run, number, f"c{number}", ttl_seconds=3600)
        service.ledger.update_checkpoint(run, "weights", f"c{number}", expires_at=time.time() - 1)
    page = await user.call(ops.LIST_USER_CHECKPOINTS, checkpoints.ListUserCheckpointsRequest(limit=2))
    assert ([c.tinker_path for c in page.checkpoints], page.cursor.total_count) == ([kept], 1)
    shown = await user.call(ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=run))
    assert shown.last_checkpoint.tinker_path == kept


async def test_the_name_of_what_has_expired_is_free_at_once(user: User, service: Service):
    run = await user.run()
    path = await user.save(run, 1, "c", ttl_seconds=3600)
    service.ledger.update_checkpoint(run, "weights", "c", expires_at=time.time() - 1)  # not yet removed
    assert await user.save(run, 2, "c") == path
    await service.upkeep.tick()
    await user.load(run, 3, path)


async def test_deleting_removes_the_files_and_frees_the_name(user: User, home: Path):
    run = await user.run()
    path = await user.save_for_sampler(run, 1, "s")
    sampler = await user.sampler(run.split(":")[0], 0, path)
    first = await user.result(await user.sample(sampler, 0))
    await user.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(path)))
    assert found(home, "sampler_weights/*") == []
    await user.train(run, 2, 3)
    assert await user.save_for_sampler(run, 8, "s") == path
    # The old sampler keeps its weights; a new one has the new ones.
    assert (await user.result(await user.sample(sampler, 1))).sequences[0].logprobs == first.sequences[
        0
    ].logprobs
    fresh = await user.sampler(run.split(":")[0], 1, path)
    assert (await user.result(await user.sample(fresh))).sequences[0].logprobs != first.sequences[0].logprobs


async def test_a_sampler_never_gets_other_weights_than_it_was_made_from(home: Path, user: User):
    run = await user.run()
    path = await user.save_for_sampler(run, 1, "s")
    sampler = await user.sampler(run.split(":")[0], 0, path)
    await user.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(path)))
    await user.save_for_sampler(run, 2, "s")
    with pytest.raises(Failed, match="deleted or replaced"):
        await user.result(await user.sample(sampler))


async def test_a_copy_is_ones_own(service: Service, home: Path):
    ann, bob = User(service, "ann"), User(service, "bob")
    run = await ann.run()
    await ann.train(run, 1, 2)
    path = await ann.save(run, 5, "c")
    await ann.call(ops.PUBLISH_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(path)))
    session = await bob.session()
    into_session = checkpoints.CopyWeightsRequest(
        source_path=path, session_id=session, model_seq_id=0, ttl_seconds=7200
    )
    copied = (await bob.call(ops.COPY_WEIGHTS, into_session)).tinker_path
    assert copied == f"tinker://{session}:train:0/weights/c"
    assert (await bob.call(ops.COPY_WEIGHTS, into_session)).tinker_path == copied  # repeated
    onto_itself = checkpoints.CopyWeightsRequest(source_path=copied, session_id=session, model_seq_id=0)
    assert (await bob.call(ops.COPY_WEIGHTS, onto_itself)).tinker_path == copied
    into_project = checkpoints.CopyWeightsRequest(source_path=path, destination_project_id="p")
    assert (await bob.call(ops.COPY_WEIGHTS, into_project)).tinker_path.endswith("/weights/c")
    await ann.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(path)))
    theirs = await bob.run(session, 1)
    await bob.load(theirs, 1, copied)
    assert await bob.loss(theirs, 2) == await ann.loss(run, 6)
    nowhere = checkpoints.CopyWeightsRequest(source_path=copied)
    assert await bob.status_of(ops.COPY_WEIGHTS, nowhere) == 422


async def test_a_copy_into_a_project_is_made_once_however_often_it_is_asked_for(service: Service, home: Path):
    user = User(service)
    path = await user.save(await user.run(), 1, "c")
    request = checkpoints.CopyWeightsRequest(source_path=path, destination_project_id="p")

    async def copied(user: str, attempt: str) -> str:
        return (await service.call(ops.COPY_WEIGHTS, request, Caller(user, attempt=attempt))).tinker_path

    first, again = await asyncio.gather(copied("ann", "one"), copied("ann", "one"))
    assert first == again == await copied("ann", "one")
    assert len(found(home, "adapter_model.safetensors")) == 2
    others = {await copied("ann", "two"), await copied("ann", ""), await copied("ann", "")}
    assert len({first, *others}) == 4
    await user.call(ops.PUBLISH_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(path)))
    assert await copied("bob", "one") not in {first, *others}  # another's key means nothing


@pytest.mark.parametrize(("name", "written"), [(MODEL, MODEL), ("mine", "place")])
async def test_an_adapter_names_its_base_model_so_that_others_find_it(home: Path, name: str, written: str):
    config = ServiceConfig(home, models={name: "place"}, engine=EngineConfig("", kind="fake"))
    engine = await ServedModels(config).find(name).load()
    engine.trainer.submit(CreateAdapter("run", LoraConfig(4))).result()
    engine.trainer.submit(SaveAdapter("run", str(home / "saved"))).result()
    peft = json.loads((home / "saved" / "adapter_config.json").read_text())
    assert peft["base_model_name_or_path"] == written


async def test_an_export_has_links_to_its_files(user: User):
    run = await user.run()
    request = checkpoints.SaveWeightsExternalRequest(model_id=run, path="e", seq_id=1)
    saved = await user.result(await user.call(ops.SAVE_WEIGHTS_EXTERNAL, request))
    urls = await user.call(
        ops.GET_EXTERNAL_WEIGHTS_URLS, checkpoints.CheckpointRequest(**name_of(saved.path))
    )
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls.urls)
    assert sum(map(_size, urls.urls.values())) == saved.size_bytes
    weights = await user.save(run, 2, "w")
    not_exported = checkpoints.CheckpointRequest(**name_of(weights))
    assert await user.status_of(ops.GET_EXTERNAL_WEIGHTS_URLS, not_exported) == 400


async def test_an_archive_is_a_file_that_goes_with_its_checkpoint(user: User, home: Path):
    run = await user.run()
    one = checkpoints.CheckpointRequest(**name_of(await user.save_for_sampler(run, 1, "s")))
    other = checkpoints.CheckpointRequest(**name_of(await user.save(run, 2, "w")))
    files = {p.name: p.read_bytes() for p in found(home, "sampler_weights/s/*")}
    for _ in range(3):
        link = await user.call(ops.GET_CHECKPOINT_ARCHIVE_URL, one)
    assert 3500 < link.expires.timestamp() - time.time() <= 3600
    with tarfile.open(unquote(urlparse(link.url).path)) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == files  # type: ignore[union-attr]
    await user.call(ops.GET_CHECKPOINT_ARCHIVE_URL, other)
    assert len(found(home, "archives/*")) == 2
    await user.call(ops.DELETE_CHECKPOINT, one)
    (left,) = found(home, "archives/*")
    os.utime(left, (0, 0))
    await user.service.upkeep.tick()
    assert found(home, "archives/*") == []


async def test_an_archive_that_the_disk_has_no_room_for_is_refused(
    user: User, home: Path, monkeypatch: pytest.MonkeyPatch
):
    path = await user.save(await user.run(), 1, "c")
    monkeypatch.setattr(home_module, "DISK_RESERVE", 1 << 60)
    with pytest.raises(Refusal, match="disk is full") as refused:
        await user.call(ops.GET_CHECKPOINT_ARCHIVE_URL, checkpoints.CheckpointRequest(**name_of(path)))
    assert refused.value.status == 503
    assert found(home, "archives/*") == []


async def test_what_a_killed_process_packed_is_removed_by_the_next(home: Path):
    async with serving(home) as service:
        user = User(service)
        path = await user.save(await user.run(), 1, "c")
        await user.call(ops.GET_CHECKPOINT_ARCHIVE_URL, checkpoints.CheckpointRequest(**name_of(path)))
        left = killed_copy(home)
    assert found(home, "archives/*") == []  # one that stops takes its own along
    for archive in found(left, "archives/*"):
        os.utime(archive, (0, 0))
    async with serving(left):
        assert found(left, "archives/*") == []


async def test_an_encrypted_export_can_be_read_by_its_recipients_alone(user: User, home: Path):
    pyrage = pytest.importorskip("pyrage")
    mine, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    run = await user.run()
    request = checkpoints.SaveWeightsExternalRequest(
        model_id=run, path="e", seq_id=1, age_encryption_recipients=[str(mine.to_public())]
    )
    saved = await user.result(await user.call(ops.SAVE_WEIGHTS_EXTERNAL, request))
    files = {p.name: p for p in found(home, "external_weights/e/*")}
    files.pop("SHA256SUMS")  # of the encrypted files
    assert files
    assert all(name.endswith(".age") for name in files)
    export = checkpoints.CheckpointRequest(**name_of(saved.path))
    offered = (await user.call(ops.GET_EXTERNAL_WEIGHTS_URLS, export)).urls
    assert offered.keys() == files.keys()  # the cookbook refuses anything that is not encrypted
    assert b'"peft_type"' in pyrage.decrypt(files["adapter_config.json.age"].read_bytes(), [mine])
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(files["adapter_config.json.age"].read_bytes(), [other])
    assert found(home, ".*plain*") == []
    with pytest.raises(Failed, match="is encrypted"):
        await user.load(run, 2, saved.path, optimizer=False)
    bad = checkpoints.SaveWeightsExternalRequest(
        model_id=run, path="f", seq_id=3, age_encryption_recipients=["age1nonsense"]
    )
    with pytest.raises(Failed, match="'age1nonsense' is not an age recipient"):
        await user.result(await user.call(ops.SAVE_WEIGHTS_EXTERNAL, bad))
    many = bad.model_copy(update={"seq_id": 4, "age_encryption_recipients": ["x"] * 11})
    assert await user.status_of(ops.SAVE_WEIGHTS_EXTERNAL, many) == 422


async def test_nothing_readable_is_left_of_an_encrypted_export_that_was_killed(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    pyrage = pytest.importorskip("pyrage")
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    async with serving(home) as service:
        user = User(service)
        request = checkpoints.SaveWeightsExternalRequest(
            model_id=await user.run(), path="e", seq_id=1, age_encryption_recipients=[recipient]
        )
        sealing, go_on = held_up(monkeypatch, encryption, "seal")
        promise = await user.call(ops.SAVE_WEIGHTS_EXTERNAL, request)
        await asyncio.to_thread(sealing.wait, 30)
        copy = killed_copy(home)
        go_on.set()
        await user.result(promise)
    async with serving(copy, resume=False):
        assert found(copy, "external_weights/.*") == []


async def test_what_is_saved_while_its_predecessor_is_deleted_stays(
    user: User, home: Path, monkeypatch: pytest.MonkeyPatch
):
    run = await user.run()
    path = await user.save(run, 1, "c")
    deleting, go_on = held_up(monkeypatch, shutil, "rmtree")
    one = checkpoints.CheckpointRequest(training_run_id=run, checkpoint_id="weights/c")
    deletion = asyncio.create_task(user.call(ops.DELETE_CHECKPOINT, one))
    await asyncio.to_thread(deleting.wait, 30)
    saving = asyncio.create_task(user.save(run, 2, "c"))
    await asyncio.wait([saving], timeout=0.5)
    go_on.set()
    await deletion
    assert await saving == path
    await user.load(run, 3, path)


async def test_what_is_saved_anew_while_others_expire_stays(
    user: User, service: Service, monkeypatch: pytest.MonkeyPatch
):
    run = await user.run()
    await user.save(run, 1, "old")
    path = await user.save(run, 2, "rolling", ttl_seconds=3600)
    for n, name in enumerate(("old", "rolling")):
        service.ledger.update_checkpoint(run, "weights", name, expires_at=1.0 + n)
    deleting, go_on = held_up(monkeypatch, shutil, "rmtree")
    tick = asyncio.create_task(service.upkeep.tick())
    await asyncio.to_thread(deleting.wait, 30)
    assert await user.save(run, 3, "rolling", ttl_seconds=3600, overwrite=True) == path
    go_on.set()
    await tick
    await user.load(run, 4, path)


@pytest.mark.parametrize("how", ["copy", "seal"])
async def test_what_is_copied_or_sealed_is_on_the_disk_before_anyone_is_told(
    user: User, home: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    """As a save is: its source may be deleted next."""
    run, sync, synced = await user.run(), os.fsync, set[str]()
    path = await user.save(run, 1, "c")

    def fsync(file: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    if how == "copy":
        request = checkpoints.CopyWeightsRequest(source_path=path, destination_project_id="p")
        made = (await user.call(ops.COPY_WEIGHTS, request)).tinker_path
    else:
        identity = pytest.importorskip("pyrage").x25519.Identity.generate()
        sealing = checkpoints.SaveWeightsExternalRequest(
            model_id=run, path="c", seq_id=2, age_encryption_recipients=[str(identity.to_public())]
        )
        made = (await user.result(await user.call(ops.SAVE_WEIGHTS_EXTERNAL, sealing))).path
    directory = home / user.service.access.any_checkpoint(made).directory  # type: ignore[union-attr]
    names = [file.name for file in directory.iterdir()]
    parts = [path for path in synced if re.fullmatch(rf"{directory.parent}/\.c\.\w+\.tmp", path)]
    assert any(synced >= {f"{part}/{name}" for name in names} for part in parts)
    assert str(directory.parent) in synced


async def test_a_copy_is_of_one_checkpoint_though_it_be_overwritten_meanwhile(
    user: User, home: Path, monkeypatch: pytest.MonkeyPatch
):
    run = await user.run()
    path = await user.save(run, 1, "latest")
    copying, go_on = held_up(monkeypatch, shutil, "copyfile", after=1)  # one file of several is copied
    request = checkpoints.CopyWeightsRequest(source_path=path, destination_project_id="p")
    copied = asyncio.create_task(user.call(ops.COPY_WEIGHTS, request))
    await asyncio.to_thread(copying.wait, 30)
    await user.train(run, 2, 1)
    saving = asyncio.create_task(user.save(run, 4, "latest", overwrite=True))
    await asyncio.wait([saving], timeout=0.5)
    go_on.set()
    copy, _ = (await copied).tinker_path, await saving
    before, after = await user.run(), await user.run()
    await user.train(after, 1, 1)
    states = []
    for name, first in ((before, 1), (after, 3)):
        place = home / "runs" / name.split(":")[0] / "train-0" / "weights" / "twin"
        await user.save(name, first, "twin")
        states.append({file.name: file.read_bytes() for file in place.iterdir()})
    place = home / "runs" / copy.removeprefix("tinker://").split(":")[0] / "train-0" / "weights" / "latest"
    assert {file.name: file.read_bytes() for file in place.iterdir()} in states


async def test_a_full_disk_refuses_new_work_and_loses_nothing(
    service: Service, user: User, monkeypatch: pytest.MonkeyPatch
):
    run, twin = await user.run(), await user.run()
    losses = await user.train(run, 1, 2)
    monkeypatch.setattr(home_module, "DISK_RESERVE", 1 << 60)
    service.home._free = (0.0, 0)
    with pytest.raises(Refusal, match="disk is full") as refused:
        await user.forward_backward(run, 5)
    assert refused.value.status == 503
    monkeypatch.undo()
    assert losses + await user.train(run, 5, 2) == (await user.train(twin, 1, 2)) + (
        await user.train(twin, 5, 2)
    )


async def test_a_disk_that_fills_up_under_way_is_reported(user: User, monkeypatch: pytest.MonkeyPatch):
    """Between the look at the disk and the writing: a 503 with a reason, not a failure of the server's."""
    session = await user.session()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(service_sessions, "_write_trace", full)
    asking = sessions.ExportSessionTraceRequest(session_id=session)
    with pytest.raises(Refusal, match="disk is full") as refused:
        await user.call(ops.EXPORT_SESSION_TRACE, asking)
    assert refused.value.status == 503


async def test_a_save_that_the_engine_cannot_write_fails_and_the_run_goes_on(home: Path):
    class Full(FakeEngine):
        fails = False

    engines: list[Full] = []

    def build(config):
        engine = Full(config)
        run = engine.trainer._execute

        def maybe(command):
            if engine.fails and type(command).__name__ == "SaveAdapter":
                raise OSError(28, "No space left on device")
            return run(command)

        engine.trainer._execute = maybe  # type: ignore[method-assign]
        engines.append(engine)
        return engine

    async with serving(home, build, snapshot_steps=1) as service:
        user = User(service)
        run = await user.run()
        engines[0].fails = True
        with pytest.raises(Failed, match="No space left") as failed:
            await user.save(run, 1, "a")
        assert failed.value.category == "server"
        await user.train(run, 2, 3)  # its snapshots fail, and it does not
        engines[0].fails = False
        await user.train(run, 8, 1)
        await user.save(run, 10, "a")


async def test_what_was_done_is_in_the_audit_log(user: User):
    from tinkex.types.reports import AuditLogRequest

    run = await user.run()
    path = await user.save(run, 1, "c")
    one = checkpoints.CheckpointRequest(**name_of(path))
    for op in (ops.PUBLISH_CHECKPOINT, ops.UNPUBLISH_CHECKPOINT, ops.DELETE_CHECKPOINT):
        await user.call(op, one)
    log = await user.call(ops.GET_AUDIT_LOG, AuditLogRequest(event_type="checkpoints"))
    assert [e.event.split(".")[1] for e in log.entries] == ["save", "publish", "unpublish", "delete"]
    assert {entry.tinker_path for entry in log.entries} == {path}


async def test_a_run_shows_its_last_checkpoints(user: User):
    run = await user.run()
    await user.save(run, 1, "a")
    await user.save(run, 2, "b")
    await user.save_for_sampler(run, 3, "s")
    from tinkex.types.training import GetTrainingRunRequest

    shown = await user.call(ops.GET_TRAINING_RUN, GetTrainingRunRequest(training_run_id=run))
    assert shown.last_checkpoint.checkpoint_id == "weights/b"
    assert shown.last_sampler_checkpoint.checkpoint_id == "sampler_weights/s"
    listed = await user.call(ops.LIST_CHECKPOINTS, checkpoints.ListCheckpointsRequest(training_run_id=run))
    assert len(listed.checkpoints) == 3
    of_session = sessions.GetSessionRequest(session_id=run.split(":")[0])
    assert (await user.call(ops.GET_SESSION, of_session)).training_run_ids == [run]
