"""Power cuts: a service at work whose unsynced writes are dropped at random moments, and what it leaves.

    python -m tests.service.power_cut --cuts 1000 --seed 1

A child process runs a service and some tenants. Its `os.fsync` syncs nothing: it notes what would be on the
disk by then. At a random moment the child is stopped (SIGSTOP) and one legal state of the disk is built: a
file keeps what was synced and any part of what was appended after that; a directory has the entries it had
when it was synced, or those of now, or some of the new ones. A service is started on each such state, and
everything that any tenant had been told must be true there. SQLite syncs its main file by itself, which is
therefore taken as it is; its write-ahead log is not spared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.harness import MODEL, Failed, User, datum, name_of, serving
from tinkex.service import group_commit
from tinkex.service.service import Service
from tinkex.types import checkpoints, training
from tinkex.types.params import LoraConfig
from tinkex.wire import ops

ROOT = Path(__file__).parents[2]
TENANTS = 3
LIFE = 25  # cuts of one child, before the next one goes on with what the last cut left, or with nothing
LEDGER, WAL = "ledger.sqlite", "ledger.sqlite-wal"
APART = ("lock", "ledger.sqlite-shm")  # files that hold nothing


# -- the child: a service at work ------------------------------------------------------------------------


class Recorder:
    """In place of `os.fsync`: notes in the directory `kept` what is on the disk by then."""

    def __init__(self, kept: Path, home: Path) -> None:
        self._kept, self._numbers, self._held = kept, itertools.count(), list[int]()
        self._reading = threading.Lock()
        self._log = os.open(kept / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for directory, _, files in os.walk(home):
            for path in (directory, *(os.path.join(directory, file) for file in files)):
                self._note(path)

    def fsync(self, file: int) -> None:
        number, seen = self._read(os.readlink(f"/proc/self/fd/{file}"))
        time.sleep(random.random() * 0.002)
        self._record(os.fstat(file), number, seen)
        self._held.append(os.dup(file))  # so that no other file gets its inode

    def _note(self, path: str) -> None:
        file = os.open(path, os.O_RDONLY)
        self._record(os.fstat(file), *self._read(path))
        self._held.append(file)

    def _read(self, path: str) -> tuple[int, bytes]:
        """What is there, numbered in the order of reading: of two syncs at once the later one has more."""
        with self._reading:
            number = next(self._numbers)
            if not os.path.isdir(path):
                return number, Path(path).read_bytes()
            entries = {e.name: [e.inode(), e.is_dir()] for e in os.scandir(path)}
            return number, json.dumps(entries).encode()

    def _record(self, about: os.stat_result, number: int, content: bytes) -> None:
        (self._kept / str(number)).write_bytes(content)
        os.write(self._log, f"{about.st_ino} {int(stat.S_ISDIR(about.st_mode))} {number}\n".encode())


def say(**fact: Any) -> None:
    os.write(1, (json.dumps(fact) + "\n").encode())


async def tenant(service: Service, name: str, rng: random.Random) -> None:
    """Train, save, delete; say what one is told, when one is told."""
    user = User(service, name)
    session = await user.session()
    say(fact="session", id=session)
    for number in itertools.count():
        create = training.CreateModelRequest(
            session_id=session, model_seq_id=number, base_model=MODEL, lora_config=LoraConfig(4)
        )
        promise = await user.call(ops.CREATE_MODEL, create)
        say(fact="accepted", id=promise.request_id, user=name)
        run = (await user.result(promise)).model_id
        await work(user, run, rng)


async def work(user: User, run: str, rng: random.Random) -> None:
    seq, saved = itertools.count(1), list[str]()
    for _ in range(rng.randint(4, 20)):
        promises = []
        for _ in range(rng.randint(1, 3)):
            bad = {"weights": np.array([np.nan] * 6, np.float32)} if rng.random() < 0.1 else {}
            promises.append(await user.forward_backward(run, n := next(seq), datum(n, **bad)))
            say(fact="accepted", id=promises[-1].request_id, user=user.caller.user)
        promises.append(await user.step(run, next(seq)))
        say(fact="accepted", id=promises[-1].request_id, user=user.caller.user)
        for promise in promises:
            say(fact="told", id=promise.request_id, value=await outcome(user, promise.request_id))
        if rng.random() < 0.4:
            name = f"s{next(seq)}"
            request = checkpoints.SaveWeightsRequest(model_id=run, path=name, seq_id=int(name[1:]))
            promise = await user.call(ops.SAVE_WEIGHTS, request)
            say(fact="accepted", id=promise.request_id, user=user.caller.user)
            saved.append((await user.result(promise)).path)
            say(fact="saved", id=saved[-1], user=user.caller.user)
        if saved and rng.random() < 0.3:
            gone = saved.pop()
            say(fact="deleting", id=gone)
            await user.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(gone)))
            say(fact="deleted", id=gone)


async def outcome(user: User, request_id: str) -> Any:
    try:
        return dict((await user.result(request_id)).metrics)
    except Failed as failed:
        return str(failed)


async def child(home: Path, kept: Path, durability: str, seed: int) -> None:
    random.seed(seed)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the recorder keeps files open
    os.makedirs(home, exist_ok=True)
    os.fsync = Recorder(kept, home).fsync
    group_commit.LOG_BYTES = 100_000  # it begins anew now and then
    # A long poll does not end while the child is stopped, however long that takes.
    async with serving(home, durability=durability, snapshot_steps=3, long_poll=3600.0) as service:
        tenants = [tenant(service, f"t{n}", random.Random(f"{seed} {n}")) for n in range(TENANTS)]
        await asyncio.gather(*tenants)


class SlowDisk:
    """Syncs only when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.synced = threading.Event(), list[Path]()
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, file: int) -> None:
        assert self.go.wait(60)
        self.synced.append(Path(os.readlink(f"/proc/self/fd/{file}")))


# -- the disk after a power cut --------------------------------------------------------------------------


@dataclass
class Disk:
    """What a stopped child's disk may hold: what is synced for certain, the rest as chance has it."""

    home: Path
    kept: Path
    rng: random.Random
    now: dict[int, Path] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    directories: dict[int, dict[str, list[int]]] = field(default_factory=dict)

    def leave(self, target: Path) -> None:
        """Build one legal state."""
        lines = (self.kept / "log").read_text().splitlines()
        synced = sorted((list(map(int, line.split())) for line in lines), key=lambda line: line[2])
        for inode, is_directory, number in synced:  # in the order of reading: a sync takes nothing back
            content = (self.kept / str(number)).read_bytes()
            if is_directory:
                self.directories[inode] = json.loads(content)
            else:
                self.files[inode] = content
        self.now = {p.stat().st_ino: p for p in (self.home, *self.home.rglob("*"))}
        self._directory(self.home.stat().st_ino, target)

    def _directory(self, inode: int, place: Path) -> None:
        place.mkdir()
        for name, (entry, is_directory) in self._entries(inode).items():
            if is_directory:
                self._directory(entry, place / name)
            elif name not in APART:
                (place / name).write_bytes(self._content(entry, name))

    def _entries(self, inode: int) -> dict[str, list[int]]:
        synced = self.directories.get(inode, {})
        if inode not in self.now:
            return synced
        now = {e.name: [e.inode(), e.is_dir()] for e in os.scandir(self.now[inode])}
        known = {entry for entry, _ in synced.values()}
        match self.rng.randrange(3):
            case 0:
                entries = synced
            case 1:
                entries = now
            case _:
                new = {n: e for n, e in now.items() if e[0] not in known and n not in synced}
                entries = synced | {n: e for n, e in new.items() if self.rng.random() < 0.5}
        return {n: e for n, e in now.items() if n == LEDGER} | entries

    def _content(self, inode: int, name: str) -> bytes:
        synced = self.files.get(inode, b"")
        now = self.now[inode].read_bytes() if inode in self.now else synced
        if name == LEDGER:
            return now
        if not now.startswith(synced):
            # A log that SQLite began anew: all that was in it before is in the main file.
            return now if name == WAL else self.rng.choice([synced, now])
        more = len(now) - len(synced)
        return now[: len(synced) + self.rng.choice([0, more, self.rng.randint(0, more)])]


# -- what must be true afterwards ------------------------------------------------------------------------


async def lies(home: Path, facts: list[dict[str, Any]], rng: random.Random) -> list[str]:
    """What tenants were told and is not so in this home."""
    try:
        return await _lies(home, facts, rng)
    except Exception as error:
        return [f"the home does not open: {error!r}"]


async def _lies(home: Path, facts: list[dict[str, Any]], rng: random.Random) -> list[str]:
    found: list[str] = []
    told = {fact["id"]: fact["value"] for fact in facts if fact["fact"] == "told"}
    deleting = {fact["id"] for fact in facts if fact["fact"] == "deleting"}
    async with serving(home, durability="power", long_poll=60.0) as service:
        for fact in facts:
            try:
                await _check(service, fact, told, deleting)
            except Exception as error:
                found.append(f"{fact}: {error!r}")
        saved = [fact for fact in facts if fact["fact"] == "saved" and fact["id"] not in deleting]
        for fact in rng.sample(saved, min(2, len(saved))):
            user = User(service, fact["user"])
            try:
                await user.load(await user.run(), 1, fact["id"], optimizer=True)
            except Exception as error:
                found.append(f"{fact} cannot be loaded: {error!r}")
    return found


async def _check(service: Service, fact: dict[str, Any], told: dict[str, Any], deleting: set[str]) -> None:
    match fact["fact"]:
        case "session":
            assert service.ledger.session(fact["id"]) is not None, "no such session"
        case "accepted":
            value = await _outcome_of(User(service, fact["user"]), fact["id"])
            assert value == told.get(fact["id"], value), f"now {value}, {told[fact['id']]} before"
        case "saved":
            row = service.access.any_checkpoint(fact["id"])
            assert row is not None or fact["id"] in deleting, "it is not in the ledger"
            assert row is None or any((service.home.root / row.directory).iterdir()), "its files are gone"
        case "deleted":
            assert service.access.any_checkpoint(fact["id"]) is None, "it is there"


async def _outcome_of(user: User, request_id: str) -> Any:
    try:
        result = await user.result(request_id)
    except Failed as failed:
        return str(failed)
    return dict(getattr(result, "metrics", {}))


# -- many cuts -------------------------------------------------------------------------------------------


@dataclass
class Cuts:
    """Power cuts of one child after another."""

    place: Path
    durability: str
    seed: int
    facts: list[dict[str, Any]] = field(default_factory=list)
    promises: int = 0  # facts checked in all

    def run(self, count: int) -> list[str]:
        rng, found, left = random.Random(self.seed), list[str](), None
        for life in range(-(-count // LIFE)):
            begin = self.place / f"life{life}"
            begin.mkdir(parents=True)
            if life % 2 and left is not None:  # what a cut left goes through another one
                left.rename(begin / "home")
            else:
                self.facts.clear()
            found += self._life(begin, min(LIFE, count - life * LIFE), rng, life)
            left = begin / "left"
            sys.stderr.write(
                f"{min(count, (life + 1) * LIFE)} cuts, {self.promises} promises, {len(found)} lies\n"
            )
        return found

    def _life(self, place: Path, count: int, rng: random.Random, life: int) -> list[str]:
        home, kept, found = place / "home", place / "kept", list[str]()
        kept.mkdir()
        command = [sys.executable, "-m", "tests.service.power_cut", "--child", str(home), str(kept)]
        command += [self.durability, "--seed", str(self.seed * 1000 + life)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            self._hear(process.stdout.fileno(), wait=True)
            os.set_blocking(process.stdout.fileno(), False)
            for cut in range(count):
                time.sleep(rng.random() * 0.1)
                os.kill(process.pid, signal.SIGSTOP)
                _, status = os.waitpid(process.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status), "the service ended"
                self._hear(process.stdout.fileno())
                image = place / f"cut{cut}"
                Disk(home, kept, rng).leave(image)
                if cut == count - 1:
                    shutil.copytree(image, place / "left")
                new = asyncio.run(lies(image, self.facts, rng))
                found += [f"life {life}, cut {cut}: {lie}" for lie in new]
                self.promises += len(self.facts)
                shutil.rmtree(image)
                os.kill(process.pid, signal.SIGCONT)
        finally:
            process.kill()
            process.wait()
        return found

    def _hear(self, pipe: int, *, wait: bool = False) -> None:
        text = b""
        while True:
            try:
                more = os.read(pipe, 1 << 20)
            except BlockingIOError:
                break
            text += more
            if not more or (wait and text.endswith(b"\n")):
                break
        self.facts += [json.loads(line) for line in text.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--durability", default="power")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        home, kept, durability = options.child
        asyncio.run(child(Path(home), Path(kept), durability, options.seed))
        return
    with tempfile.TemporaryDirectory() as place:
        cuts = Cuts(Path(place), options.durability, options.seed)
        found = cuts.run(options.cuts)
    sys.stdout.write("".join(f"{lie}\n" for lie in found))
    sys.stdout.write(f"{options.cuts} cuts, {cuts.promises} promises, {len(found)} lies\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
