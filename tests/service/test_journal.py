"""The journal, killed wherever a process can be killed, against a model of what it acknowledged."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex import store as store_module
from tinkex.service.group_commit import GroupCommit
from tinkex.service.runs import journal as journal_module
from tinkex.service.runs import segments as segments_module
from tinkex.service.runs.journal import (
    Journal,
    JournalEntry,
    JournalError,
    JournalFullError,
    Restored,
    delete,
    restore,
)
from tinkex.types.data import Datum, ForwardBackwardInput, ModelInput
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.params import AdamParams
from tinkex.types.training import ForwardBackwardRequest, OptimStepRequest, OptimStepResponse


def entry(seq_id: int, request: object = None, digest: bytes = b"") -> JournalEntry:
    return JournalEntry(seq_id, f"r{seq_id}", "optim_step", request, 1000.0 + seq_id, digest)


def files(directory: Path, pattern: str = "*.log") -> list[str]:
    return sorted(path.name for path in directory.glob(pattern))


# -- what it keeps ---------------------------------------------------------------------------------------


def test_nothing_is_restored_from_nothing(tmp_path):
    assert restore(tmp_path / "never") == Restored()
    Journal(tmp_path / "empty").close()
    assert restore(tmp_path / "empty") == Restored()


def test_requests_come_back_in_seq_order_with_what_became_of_them(tmp_path):
    journal = Journal(tmp_path)
    for seq_id in (3, 1, 2):
        journal.accept(entry(seq_id, {"n": seq_id}, digest=b"\x00\xff"))
    journal.resolve("r1", "one")
    journal.resolve("r2", "two")
    journal.forget(["r1"])

    restored = restore(tmp_path)
    assert restored.snapshot is None
    assert restored.next_seq == 0
    assert restored.entries == [entry(n, {"n": n}, digest=b"\x00\xff") for n in (1, 2, 3)]
    assert restored.outcomes == {"r2": "two"}
    assert restored.done == {"r1", "r2"}
    assert restored.undelivered == []


def test_after_a_snapshot_only_what_it_does_not_cover_is_replayed(tmp_path):
    journal = Journal(tmp_path)
    for seq_id in (1, 2, 3):
        journal.accept(entry(seq_id, digest=b"d"))
        journal.resolve(f"r{seq_id}", seq_id)
    journal.forget(["r1"])
    part = journal.begin_snapshot(3)
    (part / "adapter").write_text("weights")
    journal.accept(entry(4, "fourth"))
    journal.commit_snapshot(part)

    restored = restore(tmp_path)
    assert restored.snapshot is not None
    assert (restored.snapshot / "adapter").read_text() == "weights"
    assert restored.next_seq == 3
    assert [e.seq_id for e in restored.entries] == [3, 4]
    assert restored.outcomes == {"r2": 2, "r3": 3}
    assert restored.done == {"r3"}
    assert restored.undelivered == [entry(2, None, digest=b"d")]
    assert journal.snapshot == restored.snapshot


def test_real_requests_and_outcomes_survive_exactly(tmp_path):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, 50).astype(np.int32)
    datum = Datum(
        model_input=ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens.astype(np.int64), "weights": rng.random(50, np.float32)},
    )
    a_pass = ForwardBackwardRequest(ForwardBackwardInput([datum], "cross_entropy"), "s:train:0", 1)
    step = OptimStepRequest(optim_params=AdamParams(learning_rate=3e-4), model_id="s:train:0", seq_id=2)
    journal = Journal(tmp_path)
    journal.accept(entry(1, a_pass))
    journal.accept(entry(2, step))
    journal.resolve("r1", RequestFailedResponse(error="no", category="user"))  # type: ignore[arg-type]
    journal.resolve("r2", OptimStepResponse(metrics={"grad_norm": float("nan")}))

    restored = restore(tmp_path)
    again, same_step = (e.request for e in restored.entries)
    (kept,) = again.forward_backward_input.data
    for name, tensor in datum.loss_fn_inputs.items():
        np.testing.assert_array_equal(kept.loss_fn_inputs[name].to_numpy(), tensor.to_numpy())
    assert kept.model_input.to_ints() == tokens.tolist()
    assert same_step == step
    assert restored.outcomes["r1"].error == "no"
    assert np.isnan(restored.outcomes["r2"].metrics["grad_norm"])


def test_the_first_outcome_holds_and_the_forgotten_stays_forgotten(tmp_path):
    journal = Journal(tmp_path)
    journal.accept(entry(1))
    journal.accept(entry(2))
    journal.resolve("r1", "first")
    journal.resolve("r1", "second")
    journal.forget(["r2", "never heard of"])
    journal.resolve("r2", "too late")
    journal.resolve("never heard of", "who?")
    restored = restore(tmp_path)
    assert restored.outcomes == {"r1": "first"}
    assert restored.done == {"r1", "r2"}


def test_a_journal_goes_on_where_it_was_left(tmp_path):
    first = Journal(tmp_path)
    first.accept(entry(1))
    first.close()
    second = Journal(tmp_path)
    second.resolve("r1", "done")
    second.accept(entry(2))
    assert [e.seq_id for e in restore(tmp_path).entries] == [1, 2]
    assert restore(tmp_path).outcomes == {"r1": "done"}


def test_what_lies_below_the_snapshot_is_not_accepted(tmp_path):
    journal = Journal(tmp_path)
    journal.commit_snapshot(journal.begin_snapshot(5))
    with pytest.raises(ValueError, match="seq id 4 is below the snapshot's 5"):
        journal.accept(entry(4))


def test_a_snapshot_waits_for_the_outcomes_that_it_covers(tmp_path):
    journal = Journal(tmp_path)
    journal.accept(entry(1))
    part = journal.begin_snapshot(2)
    with pytest.raises(JournalError, match="covers seq id 1, but r1 has no outcome"):
        journal.commit_snapshot(part)
    assert restore(tmp_path).snapshot is None
    journal.resolve("r1", "now")
    journal.commit_snapshot(part)
    assert restore(tmp_path).next_seq == 2


def test_deleting_leaves_nothing(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.accept(entry(1))
    journal.begin_snapshot(1)
    journal.close()
    delete(journal.directory)
    assert list(tmp_path.iterdir()) == []


# -- trimming --------------------------------------------------------------------------------------------


def test_requests_go_with_the_snapshot_even_if_their_outcomes_stay(tmp_path):
    journal = Journal(tmp_path)
    journal.accept(entry(1, b"x" * 100_000))
    journal.resolve("r1", "small")
    assert journal.replay_bytes > 100_000
    part = journal.begin_snapshot(2)
    journal.accept(entry(2))
    journal.commit_snapshot(part)
    assert journal.replay_bytes < 1_000
    assert restore(tmp_path).outcomes == {"r1": "small"}


def test_only_the_files_of_undelivered_outcomes_stay(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1)  # a file for each record
    for seq_id in range(1, 8):
        journal.accept(entry(seq_id))
        journal.resolve(f"r{seq_id}", seq_id)
    journal.forget([f"r{n}" for n in range(1, 8) if n != 3])
    journal.accept(entry(8))
    journal.resolve("r8", 8)
    journal.commit_snapshot(journal.begin_snapshot(8))
    assert files(tmp_path, "requests-*") == ["requests-000008.log"]
    # r3's outcome, and r8's in the file still being written; the word to forget went with the outcomes.
    assert files(tmp_path, "results-*") == ["results-000003.log", "results-000009.log"]
    assert restore(tmp_path).outcomes == {"r3": 3, "r8": 8}
    journal.forget(["r3", "r8"])
    journal.accept(entry(9))
    journal.resolve("r9", 9)
    journal.commit_snapshot(journal.begin_snapshot(10))
    assert restore(tmp_path).outcomes == {"r9": 9}
    assert files(tmp_path) == ["results-000011.log"]


def test_a_snapshot_lets_go_at_once_of_the_delivered_outcomes_that_it_covers(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1)
    for seq_id in range(1, 5):
        journal.accept(entry(seq_id))
        journal.resolve(f"r{seq_id}", seq_id)
    journal.commit_snapshot(journal.begin_snapshot(3), delivered=["r1", "r2", "r4", "never heard of"])
    assert "results-000001.log" not in files(tmp_path)
    assert "results-000002.log" not in files(tmp_path)
    restored = restore(tmp_path)
    assert restored.outcomes == {"r3": 3, "r4": 4}  # a replay must know what became of r4
    assert restored.done == {"r3", "r4"}


def test_the_word_to_forget_stays_as_long_as_the_outcome_is_there(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1000)
    for seq_id, length in ((1, 100), (2, 2000), (3, 2000)):
        journal.accept(entry(seq_id))
        journal.resolve(f"r{seq_id}", "o" * length)
    journal.forget(["r1"])  # its outcome will stay, because r2's is in the same file
    journal.accept(entry(4))
    journal.resolve("r4", "o" * 2000)
    journal.forget(["r3", "r4"])
    assert files(tmp_path, "results-*") == [f"results-00000{n}.log" for n in (1, 2, 3, 4)]
    journal.commit_snapshot(journal.begin_snapshot(5))
    assert files(tmp_path, "results-*") == [f"results-00000{n}.log" for n in (1, 3, 4)]
    assert restore(tmp_path).outcomes.keys() == {"r2"}


def test_the_newest_snapshot_counts_if_an_older_one_could_not_be_deleted(tmp_path):
    journal = Journal(tmp_path)
    for next_seq in (5, 10, 20):
        journal.commit_snapshot(journal.begin_snapshot(next_seq))
    (tmp_path / "snapshot-000001-5").mkdir()
    assert restore(tmp_path).next_seq == 20


def test_older_snapshots_and_those_never_committed_go(tmp_path):
    journal = Journal(tmp_path)
    journal.commit_snapshot(journal.begin_snapshot(1))
    journal.begin_snapshot(2)
    journal.commit_snapshot(journal.begin_snapshot(3))
    journal.begin_snapshot(4)
    journal.close()
    assert restore(tmp_path).next_seq == 3
    Journal(tmp_path).close()
    assert files(tmp_path, "[sp]*-*-*") == ["snapshot-000002-3"]


# -- damage ----------------------------------------------------------------------------------------------


def _filled(directory: Path) -> Restored:
    journal = Journal(directory)
    for seq_id in (1, 2, 3):
        journal.accept(entry(seq_id, "content"))
        journal.resolve(f"r{seq_id}", "outcome")
    journal.close()
    return restore(directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["requests", "results"])
def test_a_last_record_cut_off_anywhere_is_as_if_it_never_was(tmp_path, name):
    whole = _filled(tmp_path / "whole")
    log = segments_module.SegmentedLog(tmp_path / "whole", name)
    start = log.read()[-2].offset + log.read()[-2].length
    for size in range(start, log.size):
        directory = tmp_path / str(size)
        shutil.copytree(tmp_path / "whole", directory)
        os.truncate(directory / f"{name}-000001.log", size)
        for _ in range(2):  # as it is found, and once it is repaired
            restored = restore(directory)
            if name == "requests":
                assert restored.entries == whole.entries[:2]
            else:
                assert restored.outcomes == {"r1": "outcome", "r2": "outcome"}
            Journal(directory).close()
        journal = Journal(directory)
        journal.accept(entry(4))
        journal.resolve("r4", "fourth")
        assert restore(directory).entries[-1] == entry(4)
        assert restore(directory).outcomes["r4"] == "fourth"
        journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["requests", "results"])
def test_any_byte_that_changed_is_noticed_and_named(tmp_path, name):
    _filled(tmp_path)
    path = tmp_path / f"{name}-000001.log"
    content = path.read_bytes()
    ends = [record.offset + record.length for record in segments_module.SegmentedLog(tmp_path, name).read()]
    starts = [0, len(b"tinkex journal 1\n"), *ends[:-1]]
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(JournalError, match="is damaged at byte") as caught:
            restore(tmp_path)
        assert str(path) in str(caught.value)
        offset = int(str(caught.value).split("at byte ")[1].split(":")[0])
        assert offset == max(start for start in starts if start <= at)
        with pytest.raises(JournalError):
            Journal(tmp_path)
    path.write_bytes(content)
    assert len(restore(tmp_path).entries) == 3


def test_a_record_cut_off_before_the_last_file_is_damage(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1)
    journal.accept(entry(1))
    journal.accept(entry(2))
    journal.close()
    first = tmp_path / "requests-000001.log"
    os.truncate(first, first.stat().st_size - 1)
    with pytest.raises(JournalError, match=r"requests-000001.log is damaged at byte 17: a record is cut off"):
        restore(tmp_path)


def test_zeros_at_the_end_are_what_a_power_cut_leaves(tmp_path):
    whole = _filled(tmp_path)
    with (tmp_path / "requests-000001.log").open("ab") as file:
        file.write(bytes(500))
    assert restore(tmp_path) == whole


def test_a_request_of_another_version_is_reported(tmp_path):
    journal = Journal(tmp_path)
    journal.accept(entry(1, "x"))
    journal._requests.append(["accept", 2, "r2", "op", 0.0, ""], [b"cnowhere\nNothing\n."])
    with pytest.raises(JournalError, match="cannot be read by this version"):
        restore(tmp_path)


def test_a_file_of_the_older_format_is_reported(tmp_path):
    (tmp_path / "requests-000001.log").write_bytes(b"tinkex journal 1\nwhatever")
    with pytest.raises(JournalError, match="from an older version of Tinkex"):
        restore(tmp_path)


def test_arrays_of_every_layout_come_back_as_they_were(tmp_path):
    grid = np.arange(12.0).reshape(3, 4)
    value = {
        "empty": np.zeros((0, 3), np.int32),
        "big": np.arange(300_000),  # longer than what is written at once
        "fortran": np.asfortranarray(grid),
        "strided": grid[:, ::2],
        "read only": np.frombuffer(b"12345678", np.uint8),
        "several": [np.full(n, n, np.float32) for n in range(50)],
    }
    journal = Journal(tmp_path)
    journal.accept(entry(1, value))
    journal.resolve("r1", [grid])
    restored = restore(tmp_path)
    np.testing.assert_equal(restored.entries[0].request, value)
    np.testing.assert_equal(restored.outcomes["r1"], [grid])


# -- a disk that fails, and a process that dies ----------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nothing that comes after has any effect."""


@dataclass
class Disk:
    """Stands in for `os` and `shutil`: carries out so many changes, and fails the next."""

    changes_left: int
    bytes_of_last: int = 0  # how much of a write that fails gets through
    failure: BaseException = field(default_factory=Killed)
    once: bool = False
    opened: list[int] = field(default_factory=list)
    synced: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _spend(self) -> None:
        self.changes_left -= 1
        if self.changes_left == -1 or (self.changes_left < 0 and not self.once):
            raise self.failure

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._spend()
        self.opened.append(os.open(path, flags, mode))
        return self.opened[-1]

    def close(self, file: int) -> None:
        self.opened.remove(file)
        os.close(file)

    def write(self, file: int, content: memoryview) -> int:
        try:
            self._spend()
        except BaseException:
            if self.changes_left == -1:
                os.write(file, content[: self.bytes_of_last])
            raise
        return os.write(file, content)

    def fsync(self, file: int) -> None:
        self.synced += 1
        os.fsync(file)

    def rmtree(self, path: Any, **options: Any) -> None:
        try:
            self._spend()
        except BaseException:
            for inside in list(Path(path).iterdir())[: self.bytes_of_last]:
                inside.unlink()
            raise
        shutil.rmtree(path, **options)

    def _changing(name: str) -> Any:  # type: ignore[misc]
        def change(self: Disk, *args: Any) -> Any:
            self._spend()
            return getattr(os, name)(*args)

        return change

    rename, unlink, mkdir, truncate, ftruncate = map(
        _changing, ("rename", "unlink", "mkdir", "truncate", "ftruncate")
    )

    def __enter__(self) -> Disk:
        journal_module.os = segments_module.os = store_module.os = self  # type: ignore[assignment]
        journal_module.shutil = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        journal_module.os = segments_module.os = store_module.os = os
        journal_module.shutil = shutil
        for file in self.opened:
            os.close(file)


@pytest.mark.parametrize("written", [0, 1, 25])
def test_a_full_disk_loses_nothing_and_is_survived(tmp_path, written):
    full = OSError(errno.ENOSPC, "No space left on device")
    journal = Journal(tmp_path)
    journal.accept(entry(1))
    journal.resolve("r1", "one")
    before = restore(tmp_path)
    for attempt in (lambda: journal.accept(entry(2)), lambda: journal.forget(["r1"])):
        with Disk(0, written, full, once=True), pytest.raises(JournalFullError, match="no space left"):
            attempt()
        assert restore(tmp_path) == before
    with Disk(0, failure=OSError(errno.EIO, "I/O error")), pytest.raises(JournalError, match="I/O error"):
        journal.accept(entry(2))
    with pytest.raises(JournalError, match="restart to go on"):  # it could not even be undone
        journal.accept(entry(3))
    journal.close()
    again = Journal(tmp_path)
    again.accept(entry(2))
    assert [e.seq_id for e in restore(tmp_path).entries] == [1, 2]


@pytest.mark.parametrize("changes", [0, 1])
def test_a_disk_too_full_for_a_new_file_leaves_none(tmp_path, changes):
    journal = Journal(tmp_path)
    with Disk(changes, 5, OSError(errno.ENOSPC, "full"), once=True), pytest.raises(JournalFullError):
        journal.accept(entry(1))
    assert files(tmp_path) == []
    journal.accept(entry(1))
    assert restore(tmp_path).entries == [entry(1)]


class Told:
    """Notes what it is told to bring to the disk."""

    def __init__(self) -> None:
        self.wrote_to: list[Path] = []
        self.data: dict[Path, bytes] = {}

    def wrote(self, path: Path) -> None:
        self.wrote_to.append(path)

    def appended(self, path: Path, at: int, data: bytes) -> None:
        assert at == len(self.data.get(path, b""))
        self.data[path] = self.data.get(path, b"") + data

    def names(self, path: Path) -> bool:
        return path in self.data


def test_whoever_syncs_is_told_what_was_written(tmp_path):
    told, first = Told(), tmp_path / "requests-000001.log"
    with Disk(10**6) as disk:
        journal = Journal(tmp_path, disk=told, segment_bytes=1000)
        journal.accept(entry(1))
        journal.accept(entry(2))
        assert told.wrote_to == [tmp_path]
        assert told.data == {first: first.read_bytes()}
        synced, number = disk.synced, 3
        while len(told.data) < 2:
            assert disk.synced == synced  # that is for others to do, together,
            journal.accept(entry(number))
            number += 1
        assert disk.synced == synced + 1  # except that a segment is on the disk before the next one begins
        journal.accept(entry(number, np.zeros(1 << 19)))
        assert told.wrote_to[-1] == tmp_path / "requests-000002.log"  # too long to be held in memory


def test_a_file_has_no_name_that_a_replay_might_write_to(tmp_path):
    told = Told()
    journal = Journal(tmp_path, disk=told)
    journal.accept(entry(1))
    journal.close()
    delete(tmp_path)
    Journal(tmp_path, disk=told).accept(entry(1))
    assert [path.name for path in told.data] == ["requests-000001.log", "requests-000002.log"]


# -- the model -------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What a journal has acknowledged, in the plainest form."""

    seqs: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, Any] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    next_seq: int = 0
    snapshots: int = 0

    def copy(self) -> Model:
        return Model(dict(self.seqs), dict(self.outcomes), set(self.forgotten), self.next_seq, self.snapshots)

    def done(self, request_id: str) -> bool:
        return request_id in self.outcomes or request_id in self.forgotten

    def expected(self) -> tuple[Any, ...]:
        after = sorted((seq, i) for i, seq in self.seqs.items() if seq >= self.next_seq)
        held = {i: o for i, o in self.outcomes.items() if i not in self.forgotten}
        return (
            f"covers {self.next_seq}" if self.snapshots else None,
            self.next_seq,
            [(seq, i, f"request {i}" * 5) for seq, i in after],
            held,
            {i for _, i in after if self.done(i)},
            {(self.seqs[i], i) for i in held if self.seqs[i] < self.next_seq},
        )


def found(directory: Path) -> tuple[Any, ...]:
    r = restore(directory)
    return (
        None if r.snapshot is None else (r.snapshot / "state").read_text(),
        r.next_seq,
        [(e.seq_id, e.request_id, e.request) for e in r.entries],
        r.outcomes,
        set(r.done),
        {(e.seq_id, e.request_id) for e in r.undelivered},
    )


Action = tuple[str, int, int]


def promised(model: Model, action: Action) -> Model:
    """The model as it is once `action` was acknowledged."""
    (kind, a, b), new, ids = action, model.copy(), list(model.seqs)
    if kind == "accept":
        seq = max(model.next_seq, 1) + a
        if seq not in model.seqs.values():
            new.seqs[f"{seq}/{len(ids)}"] = seq
    elif kind == "resolve" and ids:
        if not model.done(ids[a % len(ids)]):
            new.outcomes[ids[a % len(ids)]] = f"outcome {b}"
    elif kind == "forget" and ids:
        new.forgotten |= {ids[a % len(ids)], ids[b % len(ids)]}
    elif kind == "snapshot":
        open_seqs = [seq for i, seq in model.seqs.items() if not model.done(i) and seq >= model.next_seq]
        limit = min(open_seqs, default=max(model.seqs.values(), default=0) + 1)
        new.next_seq = min(model.next_seq + a, max(limit, model.next_seq))
        new.snapshots += 1
    return new


def perform(journal: Journal, model: Model, new: Model, action: Action) -> None:
    """Do to the journal what leads from one model to the other."""
    (kind, a, b), ids = action, list(model.seqs)
    if kind == "accept":
        for request_id in new.seqs.keys() - model.seqs.keys():
            request = f"request {request_id}" * 5
            journal.accept(JournalEntry(new.seqs[request_id], request_id, "op", request, 0.5))
    elif kind == "resolve" and ids:
        journal.resolve(ids[a % len(ids)], f"outcome {b}")  # a second one, at times
    elif kind == "forget" and ids:
        journal.forget([ids[a % len(ids)], ids[b % len(ids)]])
    elif kind == "snapshot":
        part = journal.begin_snapshot(new.next_seq)
        (part / "state").write_text(f"covers {new.next_seq}")
        (part / "more").write_text("weights")
        journal.commit_snapshot(part)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["accept"] * 4 + ["resolve"] * 4 + ["forget"] * 3 + ["snapshot", "reopen"]),
        st.integers(0, 12),
        st.integers(0, 12),
    ),
    min_size=5,
    max_size=40,
)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as directory:
        yield Path(directory)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    actions=ACTIONS,
    moments=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    partial=st.integers(0, 60),
    second=st.integers(0, 4),
    segment_bytes=st.sampled_from([1, 300, 1 << 20]),
)
def test_whatever_was_acknowledged_survives_a_kill_at_any_point(
    scratch, actions, moments, partial, second, segment_bytes
):
    def killed_after(changes: int) -> int:
        """Live through it all, or as much as there are changes; how many changes were made."""
        directory = Path(tempfile.mkdtemp(dir=scratch))
        with Disk(changes, partial) as disk:
            acknowledged, hoped_for = _live(directory, segment_bytes, actions)
        state = found(directory)
        assert state in (acknowledged.expected(), hoped_for.expected())
        _recover(directory, Disk(second, partial), state)
        survivor = acknowledged if state == acknowledged.expected() else hoped_for
        _go_on(directory, segment_bytes, survivor)
        shutil.rmtree(directory)
        return changes - disk.changes_left

    total = killed_after(10**6)
    for moment in moments:
        killed_after(int(moment * total))


def _live(directory: Path, segment_bytes: int, actions: list[Action]) -> tuple[Model, Model]:
    """What was acknowledged, and what would have been if the kill had come a little later."""
    acknowledged = hoped_for = Model()
    try:
        journal = Journal(directory, segment_bytes=segment_bytes)
        for action in actions:
            if action[0] == "reopen":
                journal.close()
                journal = Journal(directory, segment_bytes=segment_bytes)
            else:
                hoped_for = promised(acknowledged, action)
                perform(journal, acknowledged, hoped_for, action)
                acknowledged = hoped_for
            assert found(directory) == acknowledged.expected()
    except Killed:
        pass
    return acknowledged, hoped_for


def _recover(directory: Path, disk: Disk, state: tuple[Any, ...]) -> None:
    """Opening it again changes nothing, even if that is killed too."""
    with disk:
        try:
            Journal(directory)
        except Killed:
            pass
    assert found(directory) == state


def _go_on(directory: Path, segment_bytes: int, model: Model) -> None:
    journal = Journal(directory, segment_bytes=segment_bytes)
    for action in (("accept", 40, 0), ("resolve", -1, 99), ("snapshot", 3, 0), ("accept", 50, 0)):
        new = promised(model, action)
        perform(journal, model, new, action)
        model = new
        assert found(directory) == model.expected()
    journal.close()


class _Store(GroupCommit):
    """What a store shared by several servers is told, in order; everything is sent at once."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, power=True)
        self.told: list[tuple[str, bool]] = []

    def wrote(self, path: Path) -> None:
        self.told.append((path.name, path.exists()))

    def appended(self, path: Path, at: int, data: bytes) -> None:
        self.wrote(path)


def test_a_store_has_a_snapshot_before_its_requests_are_gone_there(tmp_path: Path) -> None:
    disk = _Store(tmp_path)
    journal = Journal(tmp_path / "journal", segment_bytes=100, disk=disk)
    for n in range(3):
        journal.accept(JournalEntry(n, f"r{n}", "op", b"x" * 200, 0.0))
        journal.resolve(f"r{n}", n)
    part = journal.begin_snapshot(3)
    (part / "state").write_text("3")
    journal.commit_snapshot(part)
    journal.close()
    ended = [number for number, (name, exists) in enumerate(disk.told) if not exists]
    assert ended
    assert disk.told.index(("state", True)) < min(ended)


# -- the real thing --------------------------------------------------------------------------------------

_WRITER = """
    import sys
    from pathlib import Path
    from tinkex.service.runs.journal import JournalEntry, Journal
    journal = Journal(Path(sys.argv[1]), segment_bytes=3000)
    for n in range(1, 10**6):
        journal.accept(JournalEntry(n, f"r{n}", "op", b"x" * 500, 0.0))
        print("accepted", n, flush=True)
        journal.resolve(f"r{n}", n * n)
        print("resolved", n, flush=True)
        if n % 7 == 0:
            part = journal.begin_snapshot(n)
            (part / "state").write_text(str(n))
            journal.commit_snapshot(part)
            print("covered", n, flush=True)
"""


def test_a_process_killed_in_earnest_loses_nothing(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(_WRITER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = [next(writer.stdout).split() for _ in range(150)]
        writer.send_signal(signal.SIGKILL)
        told += [line.split() for line in writer.stdout if line.endswith("\n")]
    said = {verb: [int(n) for v, n in told if v == verb] for verb in ("accepted", "resolved", "covered")}
    restored = restore(tmp_path)
    assert restored.next_seq >= said["covered"][-1]
    assert restored.snapshot is not None
    assert int((restored.snapshot / "state").read_text()) == restored.next_seq
    replayed = [e.seq_id for e in restored.entries]
    assert replayed == list(range(restored.next_seq, replayed[-1] + 1))
    assert replayed[-1] >= said["accepted"][-1]
    assert {f"r{n}": n * n for n in said["resolved"]}.items() <= restored.outcomes.items()
