"""One bit is flipped in every kind of file that a home holds: whoever reads the file is refused, by name."""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Awaitable, Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import Failed, User, datum, found, killed_copy, name_of, serving, until
from tinkex.client.download import download_archive
from tinkex.service.futures import Completions
from tinkex.service.refusal import Refusal
from tinkex.store import CHECKSUMS, DamagedError, add_checksums, atomic_directory, verify
from tinkex.types import checkpoints
from tinkex.wire import ops

pytestmark = pytest.mark.anyio
Facts = dict[str, str]


def flip(file: Path, at: float = 0.6, bit: int = 2) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 1 << bit
    file.write_bytes(content)


async def archive(user: User, facts: Facts, kind: str) -> None:
    request = checkpoints.CheckpointRequest(**name_of(facts[kind]))
    await user.call(ops.GET_CHECKPOINT_ARCHIVE_URL, request)


async def copy(user: User, facts: Facts, kind: str) -> None:
    request = checkpoints.CopyWeightsRequest(source_path=facts[kind], destination_project_id="p")
    await user.call(ops.COPY_WEIGHTS, request)


async def load(user: User, facts: Facts, kind: str) -> None:
    run = await user.run(await user.session())
    await user.load(run, 1, facts[kind], optimizer=kind == "weights")


async def sample(user: User, facts: Facts, kind: str) -> None:
    sampler = facts["unnamed"]
    if kind == "sampler_weights":
        sampler = await user.sampler(await user.session(), 0, facts[kind])
    await user.result(await user.sample(sampler))


async def go_on(user: User, facts: Facts, kind: str) -> None:
    await user.loss(facts["run"], 13)


Use = Callable[[User, Facts, str], Awaitable[None]]
CHECKPOINT = "runs/*/train-0/{}/kept/*"
# Which files, and who reads them.
USES: list[tuple[str, str, list[Use]]] = [
    ("weights", CHECKPOINT.format("weights"), [load, archive, copy]),
    ("sampler_weights", CHECKPOINT.format("sampler_weights"), [sample, archive, copy]),
    ("external_weights", CHECKPOINT.format("external_weights"), [archive]),
    ("unnamed", "runs/*/train-0/ephemeral/0/*", [sample]),
    ("snapshot", "runs/*/train-0/journal/snapshot-*/adapter/*", [go_on]),
    ("journal", "runs/*/train-0/journal/*.log", [go_on]),
]
# Tested elsewhere (the ledger; `samples` below), never read (the lock, the spare file), or shown to people.
OTHERS = ["ledger.sqlite*", "samples", "lock", "spare", "runs/*/train-0/metrics.jsonl"]


@pytest.fixture
async def recorded(tmp_path: Path) -> tuple[Path, Facts]:
    """A home with files of every kind."""
    async with serving(tmp_path / "home", snapshot_steps=3) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 3)
        journal = service.runs.get(run).journal  # type: ignore[union-attr]
        await until(lambda: journal.snapshot is not None)  # the only one: none is written while it is copied
        facts = {"run": run, "weights": await user.save(run, 7, "kept")}
        facts["sampler_weights"] = await user.save_for_sampler(run, 8, "kept")
        export = checkpoints.SaveWeightsExternalRequest(model_id=run, path="kept", seq_id=9)
        facts["external_weights"] = (
            await user.result(await user.call(ops.SAVE_WEIGHTS_EXTERNAL, export))
        ).path
        facts["unnamed"] = await user.unnamed_sampler(run, 10, 0)
        await user.result(await user.forward_backward(run, 11, datum(7), forward_only=True))
        await user.step(run, 12)
        return killed_copy(tmp_path / "home", "killed"), facts


@pytest.mark.slow
async def test_a_flipped_bit_in_any_file_is_refused_by_name(recorded: tuple[Path, Facts], tmp_path: Path):
    home, facts = recorded
    names = [p.relative_to(home).as_posix() for p in found(home, "*") if p.is_file()]
    assert [n for n in names if not any(fnmatch(n, p) for p in [*OTHERS, *(u[1] for u in USES)])] == []
    for kind, pattern, uses in USES:
        files = [name for name in names if fnmatch(name, pattern)]
        assert len(files) >= 2, f"there is no {kind}"
        for name in files:
            damaged = tmp_path / "damaged"
            shutil.copytree(home, damaged)
            flip(damaged / name)
            async with serving(damaged, snapshot_steps=2) as service:
                for use in uses:
                    with pytest.raises((Failed, Refusal)) as refused:
                        await use(User(service), facts, kind)
                    message = str(refused.value)
                    assert "damaged" in message, f"{name}: {use.__name__}: {message}"
                    assert Path(name).name in message, f"{name}: {use.__name__}: {message}"
            shutil.rmtree(damaged)


async def test_what_is_whole_is_not_refused(recorded: tuple[Path, Facts], tmp_path: Path):
    home, facts = recorded
    async with serving(home, snapshot_steps=2) as service:
        for kind, _, uses in USES:
            for use in uses:
                await use(User(service), facts, kind)
        (copied,) = [p for p in found(home, "weights/kept") if facts["run"].partition(":")[0] not in str(p)]
        assert (copied / CHECKSUMS).exists()


async def test_directories_of_older_versions_have_no_checksums(recorded: tuple[Path, Facts]):
    home, facts = recorded
    for file in found(home, CHECKSUMS):
        file.unlink()
    async with serving(home, snapshot_steps=2) as service:
        for kind, _, uses in USES:
            for use in uses:
                await use(User(service), facts, kind)
    assert facts


@pytest.mark.slow
def test_every_single_bit_counts(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "d") as part:
        (part / "a.json").write_text("{}")
        (part / "b").write_bytes(b"")
    place = tmp_path / "d"
    verify(place)
    assert re.fullmatch(r"[0-9a-f]{64}  a\.json\n[0-9a-f]{64}  b\n", (place / CHECKSUMS).read_text())
    for name in ("a.json", CHECKSUMS):
        whole = (place / name).read_bytes()
        for at in range(8 * len(whole)):
            flip(place / name, at // 8 / len(whole) + 1e-9, at % 8)
            with pytest.raises(DamagedError, match="damaged"):
                verify(place)
            (place / name).write_bytes(whole)
    (place / "b").unlink()
    with pytest.raises(DamagedError, match="d/b is damaged: it is missing"):
        verify(place)
    (place / "b").write_bytes(b"")
    (place / CHECKSUMS).write_bytes(b"")
    with pytest.raises(DamagedError, match=r"a.json is damaged: SHA256SUMS does not list it"):
        verify(place, ["a.json"])


async def test_a_damaged_archive_is_refused_where_it_is_unpacked(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "weights").write_bytes(b"w" * 2000)
    add_checksums(tmp_path / "d")
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for file in found(tmp_path / "d", "*"):
            tar.add(file, file.name)
    (tmp_path / "out").mkdir()
    download_archive((tmp_path / "t.tar").as_uri(), tmp_path / "out")
    content = (tmp_path / "t.tar").read_bytes()
    (tmp_path / "t.tar").write_bytes(content.replace(b"wwww", b"wxww", 1))
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(DamagedError, match="out/weights is damaged"):
        download_archive((tmp_path / "t.tar").as_uri(), tmp_path / "out")


async def test_a_damaged_line_of_the_samples_is_told_and_left_out(tmp_path: Path, caplog: Any):
    first = Completions(tmp_path / "samples")
    first.restore()
    for name in ("one", "two", "three"):
        first.begin("feed", name)
    first.close()
    content = (tmp_path / "samples").read_bytes()
    (tmp_path / "samples").write_bytes(content.replace(b"two", b"twn"))
    again = Completions(tmp_path / "samples")
    again.restore()
    ended, _ = await again.poll("feed", 0, 0.0)
    assert [event.request_id for event in ended] == ["one", "three"]
    assert f"{tmp_path / 'samples'} is damaged in line 2" in caplog.text
