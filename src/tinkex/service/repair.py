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
from tinkex.service.repair_store import LOST, add_run, created_with, from_store, saved_facts
from tinkex.service.rows import CheckpointRow, RunRow
from tinkex.service.runs.journal import restore
from tinkex.service.runs.segments import JournalError
from tinkex.service.runs.snapshots import SNAPSHOT
from tinkex.store import DamagedError, directory_bytes, verify
from tinkex.types.params import LoraConfig


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
        yield LOST.format("listed above", "directories")
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
                facts, state = _made_with(directory)
                made = directory.stat().st_mtime
                row = add_run(ledger, run_id, owner, *facts, made=made, state=state)
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


def _made_with(directory: Path) -> tuple[tuple[str, LoraConfig], str]:
    """A run's base model and adapter, by its journal or else by weights that it saved; and its state."""
    kinds = ("weights", "sampler_weights")
    state, places = "closed", [p for kind in kinds for p in sorted((directory / kind).glob("[!.]*"))]
    if (directory / "journal").is_dir():
        restored = restore(directory / "journal")
        if facts := created_with(restored):
            return facts, "evicted"
        snapshots = [] if restored.snapshot is None else [restored.snapshot / SNAPSHOT]
        state, places = "evicted", snapshots + places
    if not places:
        raise ValueError("neither a journal nor weights say what it was made with")
    return saved_facts(str(places[0])), state


def _checkpoint(home: Home, run: RunRow, kind: Any, place: Path) -> CheckpointRow:
    verify(place)
    encrypted = any(place.glob("*.age"))
    base_model, lora = (run.base_model, run.lora) if encrypted else saved_facts(str(place))
    row = CheckpointRow(
        run.run_id, kind, place.name, run.owner, base_model, lora, home.relative(place),
        directory_bytes(place), place.stat().st_mtime, (place / "optimizer.safetensors").exists(),
    )  # fmt: skip
    return replace(row, encrypted=encrypted)
