"""Rebuilds a lost or damaged ledger: from what its file still holds, and from the run directories.

Nothing is deleted: the damaged file is kept under another name. A run directory does not name its owner, so
what is found only there belongs to the given owner. Keys are only ever taken from the old file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkex.service.group_commit import LOG, replay
from tinkex.service.home import Home, prepare
from tinkex.service.ledger import FILES, Ledger, salvage
from tinkex.service.ledger_file import LedgerError
from tinkex.service.repair_store import from_store, saved_facts
from tinkex.service.rows import CheckpointRow, RunRow, SessionRow
from tinkex.service.runs.journal import restore
from tinkex.service.runs.segments import JournalError
from tinkex.service.runs.snapshots import SNAPSHOT
from tinkex.store import DamagedError, directory_bytes, verify

LOST = (
    "lost, unless listed above: API keys, and for what was found in directories its owner, project, names, "
    "tags, times to live and publication; also samplers, uploaded losses, usage and the audit log"
)


def repair(root: Path, owner: str, location: str = "") -> Iterator[str]:
    """Repair a home that no process serves, and its store's rows; yields what was done, line by line.

    >>> for line in repair(Path("~/.tinkex").expanduser(), owner="ann"):     # doctest: +SKIP
    ...     print(line)
    """
    prepare(root)
    home, place = Home(root), root / FILES[0]
    home.lock()
    try:
        try:
            replay(root)
        except JournalError as error:
            yield str(error)
            for file in sorted(root.glob(f"{LOG}-*.log")):
                file.rename(file.with_suffix(f".damaged-{time.strftime('%Y%m%d-%H%M%S')}"))
                yield f"{file} has another name now, and the server starts without it"
        try:
            with closing(Ledger(place)) as ledger:
                if location:
                    yield from from_store(ledger, location, owner)
                else:
                    yield f"{place} is whole: nothing was changed in it"
            return
        except LedgerError as error:
            yield str(error)
        aside = root / f"ledger.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for name in FILES:
            if (root / name).exists():
                (root / name).rename(aside / name)
        yield f"the old files are in {aside}"
        with closing(Ledger(place, new=True)) as ledger:
            yield from salvage(aside / FILES[0], ledger)
            yield from _from_directories(home, ledger, owner)
            if location:
                yield from from_store(ledger, location, owner)
        yield LOST
        if (root / Ledger.KEYED).exists():
            yield "this server had keys, so it accepts none but those listed by `tinkex server keys list`"
    finally:
        home.unlock()


def _from_directories(home: Home, ledger: Ledger, owner: str) -> Iterator[str]:
    runs = saved = 0
    for directory in sorted((home.root / "runs").glob("*/train-*")):
        number = directory.name.partition("-")[2]
        if not number.isdigit():
            continue
        run_id = f"{directory.parent.name}:train:{number}"
        row = ledger.run(run_id)
        try:
            if row is None:
                session = ledger.session(directory.parent.name)
                row = _run(directory, run_id, owner if session is None else session.owner)
                now = time.time()
                if session is None:
                    ledger.add_session(SessionRow(row.session_id, owner, now, now))
                ledger.add_run(row)
                runs += 1
        except (DamagedError, ValueError) as error:
            yield f"run {run_id} cannot be rebuilt, and its files stay where they are: {error}"
            continue
        for kind in ("weights", "sampler_weights", "external_weights"):
            for place in sorted((directory / kind).glob("[!.]*")):
                try:
                    checkpoint = _checkpoint(home, row, kind, place)
                except (DamagedError, ValueError) as error:
                    yield f"{place} cannot be rebuilt, and stays where it is: {error}"
                else:
                    saved += ledger.add_checkpoint(checkpoint)
    yield f"from the run directories, as {owner!r}'s or their session's: {runs} runs, {saved} checkpoints"


def _run(directory: Path, run_id: str, owner: str) -> RunRow:
    """The run of a directory: its journal says what it was made with, or else a directory of weights."""
    session_id, _, number = run_id.rpartition(":train:")
    state, base_model, lora, snapshot = "closed", "", None, None
    if (directory / "journal").is_dir():
        restored = restore(directory / "journal")
        state, snapshot = "evicted", restored.snapshot
        for entry in restored.entries:
            if entry.op == "create_model":
                base_model, lora = entry.request.base_model, entry.request.lora_config
    places = [snapshot / SNAPSHOT] if snapshot is not None else []
    places += [p for kind in ("weights", "sampler_weights") for p in sorted((directory / kind).glob("[!.]*"))]
    for place in places:
        if lora is None:
            base_model, lora = saved_facts(str(place))
    if lora is None:
        raise ValueError("neither a journal nor weights say what it was made with")
    made = directory.stat().st_mtime
    return RunRow(
        run_id, session_id, int(number), owner, base_model, lora, made, made, state=state  # type: ignore[arg-type]
    )  # fmt: skip


def _checkpoint(home: Home, run: RunRow, kind: Any, place: Path) -> CheckpointRow:
    verify(place)
    encrypted = any(place.glob("*.age"))
    base_model, lora = (run.base_model, run.lora) if encrypted else saved_facts(str(place))
    row = CheckpointRow(
        run.run_id, kind, place.name, run.owner, base_model, lora, home.relative(place),
        directory_bytes(place), place.stat().st_mtime, (place / "optimizer.safetensors").exists(),
    )  # fmt: skip
    return replace(row, encrypted=encrypted)
