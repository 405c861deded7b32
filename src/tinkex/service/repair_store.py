"""Rebuilds rows of a ledger from a store: of saved adapters, and of the runs in the logs of its servers.

Existing rows are never changed, and nothing in the store is deleted. Recovered rows belong to the given
owner. All commit logs are sealed first, which stops servers that still run; the next server to start takes
the sessions over. Files are listed, not read: checksums are verified when they are loaded.
"""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple, cast

from tinkex import store
from tinkex.errors import InvalidInputError
from tinkex.service import commit_log
from tinkex.service.home import TAG
from tinkex.service.ledger import Ledger
from tinkex.service.ledger_mirror import MirroredLedger
from tinkex.service.ledger_postgres import SharedDatabase, Statement
from tinkex.service.rows import CheckpointKind, CheckpointRow, RunRow, SessionRow
from tinkex.service.runs.journal import Restored, restore
from tinkex.service.runs.segments import JournalError
from tinkex.service.runs.snapshots import STORED
from tinkex.types.checkpoints import FOLDERS
from tinkex.types.params import LoraConfig

LOST = (
    "lost, unless {}: API keys, and for what was found in {} its owner, project, names, tags, times to live "
    "and publication; also samplers, uploaded losses, usage and the audit log"
)


class _Saved(NamedTuple):
    """A saved adapter in a store: its run, kind and name, and the sizes of its files."""

    run_id: str
    kind: str
    name: str
    place: str
    sizes: dict[str, int]


def repair_shared(url: str, root: str, owner: str) -> Iterator[str]:
    """Add rows to a Postgres database for what its store holds; yields what was done, line by line."""
    database, written = SharedDatabase(url), list[Statement]()
    try:
        if live := database.live():
            raise InvalidInputError(f"{database.name} has servers that run: stop {', '.join(live)} first")
        ended = uuid.uuid4().hex[:12]  # the owner of the sessions that are in no log
        with tempfile.TemporaryDirectory(prefix="tinkex-") as place:
            ledger = MirroredLedger(Path(place), ended, written.extend)
            try:
                ledger.fill(database.load()[0])
                servers = yield from _from_logs(ledger, root, owner, ended)
                yield from from_store(ledger, root, owner)
            finally:
                ledger.close()
        if not written:
            yield f"{database.name} has a row for everything in {root}: nothing was changed"
            return
        database.rebuild(written, [ended, *servers])
        yield f"the next server that starts with --ledger and --store {root} goes on with these runs"
        yield LOST.format("Postgres still has it", "the store")
    finally:
        database.close()


def from_store(ledger: Ledger, root: str, owner: str) -> Iterator[str]:
    """Add rows of the adapters that were saved in a store, and of their runs if they have none."""
    runs = added = 0
    for saved in _saved(root):
        if ledger.checkpoint(saved.run_id, saved.kind, saved.name) is not None:
            continue
        where, row = store.join(root, saved.place), ledger.run(saved.run_id)
        try:
            missing = _listed(where).difference(saved.sizes)
            if missing:
                raise ValueError(f"{', '.join(sorted(missing))} is missing")
            encrypted = any(name.endswith(".age") for name in saved.sizes)
            if encrypted and row is None:
                raise ValueError("it is encrypted, and nothing else tells of its run")
            facts = (row.base_model, row.lora) if encrypted and row is not None else saved_facts(where)
        except (OSError, ValueError) as error:
            yield f"{where} cannot be rebuilt, and stays where it is: {error}"
            continue
        made = store.modified(store.join(where, store.CHECKSUMS))
        if row is None:
            row = add_run(ledger, saved.run_id, owner, *facts, made=made, state="closed")
            runs += 1
        kind = cast("CheckpointKind", saved.kind)
        added += ledger.add_checkpoint(
            CheckpointRow(
                row.run_id, kind, saved.name, row.owner, *facts, saved.place, sum(saved.sizes.values()),
                made, "optimizer.safetensors" in saved.sizes, encrypted=encrypted,
            )
        )  # fmt: skip
    yield f"from {root}, as {owner!r}'s or their run's: {runs} runs, {added} checkpoints"


def _saved(root: str) -> list[_Saved]:
    """The newest adapter of each name whose list of checksums is there: it is written last."""
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size in store.files(store.join(root, "runs")).items():
        place, _, file = name.rpartition("/")
        sizes[place][file] = size
    found: dict[tuple[str, str, str], _Saved] = {}
    for place, files in sorted(sizes.items()):
        session, *rest = place.split("/")
        if store.CHECKSUMS not in files or len(rest) != 3 or rest[1] not in FOLDERS:
            continue
        number, kind, name = rest
        one = _Saved(
            f"{session}:train:{number.removeprefix('train-')}", kind, name.partition(TAG)[0],
            f"runs/{place}", files,
        )  # fmt: skip
        before = found.get(one[:3])
        if before is None or _made(root, one) > _made(root, before):
            found[one[:3]] = one
    return list(found.values())


def _made(root: str, saved: _Saved) -> float:
    return store.modified(store.join(root, f"{saved.place}/{store.CHECKSUMS}"))


def _listed(where: str) -> set[str]:
    """The files that a saved adapter should have."""
    text = store.read_file(store.join(where, store.CHECKSUMS)).decode("utf-8", "replace")
    return {line.partition("  ")[2] for line in text.splitlines()}


def saved_facts(where: str) -> tuple[str, LoraConfig]:
    """The base model's name and the adapter's shape, as its files have them."""
    try:
        config = json.loads(store.read_file(store.join(where, "adapter_config.json")))
        if "tinkex" not in config:
            config["tinkex"] = json.loads(store.read_file(store.join(where, "tinkex.json")))["lora"]
        return str(config["base_model_name_or_path"]), LoraConfig(**config["tinkex"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it does not say what it is: {error}") from None


# -- the logs of servers ---------------------------------------------------------------------------------


def _from_logs(ledger: MirroredLedger, root: str, owner: str, by: str) -> Generator[str, None, list[str]]:
    """Add rows of the runs in all logs; returns their servers, those with the longest logs last."""
    names = {name.partition("/")[0] for name in store.files(store.join(root, "journal"))}
    with tempfile.TemporaryDirectory(prefix="tinkex-") as place:
        homes: dict[str, Path] = {}
        for server in sorted(names):
            try:
                pieces = commit_log.seal(root, server, by)
            except JournalError as error:
                yield f"the log of server {server} cannot be read, and stays where it is: {error}"
                continue
            if kept := [piece for piece in pieces if piece.path.startswith("runs/")]:
                homes[server] = Path(place, server)
                commit_log.write_pieces(homes[server], kept)
        # A log that a takeover had not forgotten yet is continued by another one, which has more.
        servers = sorted(homes, key=lambda server: store.directory_bytes(homes[server]))
        runs = 0
        for server in reversed(servers):
            for directory in sorted((homes[server] / "runs").glob("*/train-*")):
                run_id = f"{directory.parent.name}:train:{directory.name.removeprefix('train-')}"
                if ledger.run(run_id) is not None:
                    continue
                try:
                    facts = _journaled(directory, root)
                except (OSError, ValueError, JournalError) as error:
                    yield f"run {run_id} cannot be rebuilt, and stays in the log: {error}"
                    continue
                add_run(ledger, run_id, owner, *facts, made=time.time(), state="live", server=server)
                runs += 1
    yield f"from the logs of {len(servers)} servers, as {owner!r}'s: {runs} runs"
    return servers


def _journaled(directory: Path, root: str) -> tuple[str, LoraConfig]:
    """What a run was made with, by its journal or its last snapshot."""
    restored = restore(directory / "journal")
    if facts := created_with(restored):
        return facts
    if restored.snapshot is None or not (restored.snapshot / STORED).exists():
        raise ValueError("neither its journal nor a snapshot says what it was made with")
    return saved_facts(store.join(root, (restored.snapshot / STORED).read_text()))


def created_with(restored: Restored) -> tuple[str, LoraConfig] | None:
    """The base model and the adapter of a run, if its journal still has its creation."""
    for entry in restored.entries:
        if entry.op == "create_model" and entry.request.lora_config is not None:
            return entry.request.base_model, entry.request.lora_config
    return None


def add_run(
    ledger: Ledger, run_id: str, owner: str, base_model: str, lora: LoraConfig, *,
    made: float, state: str, server: str = "",
) -> RunRow:  # fmt: skip
    session_id, _, number = run_id.rpartition(":train:")
    session = ledger.session(session_id)
    if session is None:
        session = SessionRow(session_id, owner, made, time.time())
        if isinstance(ledger, MirroredLedger) and server:
            ledger.add_session(session, server)
        else:
            ledger.add_session(session)
    row = RunRow(
        run_id, session_id, int(number), session.owner, base_model, lora, made, made, state=state  # type: ignore[arg-type]
    )  # fmt: skip
    ledger.add_run(row)
    return row
