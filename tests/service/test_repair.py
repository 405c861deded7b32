"""A ledger that was lost or damaged: nothing starts with it, it lets nobody in, and a repair rebuilds it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.service.harness import MODEL, User, killed_copy, serving, until
from tinkex.cli.server_admin import server as command
from tinkex.server.api_keys import Authenticator, hash_key
from tinkex.service.ledger import FILES, Ledger
from tinkex.service.ledger_file import LedgerError
from tinkex.service.refusal import Refusal
from tinkex.store import CHECKSUMS

Facts = dict[str, object]
LEDGER, WAL, _ = FILES


def _fold(home: Path) -> None:
    Ledger(home / LEDGER).close()  # the last connection folds the log into the file


def missing(home: Path) -> None:
    for name in FILES:
        (home / name).unlink(missing_ok=True)


def emptied(home: Path) -> None:
    missing(home)
    (home / LEDGER).touch()


def zeroed(home: Path) -> None:
    _fold(home)
    (home / LEDGER).write_bytes(bytes((home / LEDGER).stat().st_size))


def first_page_alone(home: Path) -> None:
    """The file as it is before its log is folded into it, without the log."""
    missing(home)
    db = sqlite3.connect(home / LEDGER)
    db.execute("PRAGMA journal_mode = WAL")
    db.close()


def a_page_cut_off(home: Path) -> None:
    _fold(home)
    with (home / LEDGER).open("r+b") as file:
        file.truncate((home / LEDGER).stat().st_size - 4096)


def overwritten(home: Path) -> None:
    _fold(home)
    with (home / LEDGER).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096)


@pytest.fixture
def home(tmp_path: Path) -> tuple[Path, Facts]:
    async def work() -> tuple[Path, Facts]:
        async with serving(tmp_path / "home", snapshot_steps=2) as service:
            service.ledger.add_key(
                name="laptop", note="", hash=hash_key("tml-ann"), owner="ann", project_id=None, created_at=1.0
            )
            user = User(service)
            run = await user.run()
            await user.train(run, 1, 3)
            facts: Facts = {"run": run, "saved": await user.save(run, 7, "kept")}
            facts["sampler"] = await user.save_for_sampler(run, 8, "kept")
            journal = service.runs.get(run).journal  # type: ignore[union-attr]
            await until(lambda: journal.snapshot is not None)
            copy = killed_copy(tmp_path / "home")
            facts["loss"] = await user.loss(run, 9)
            return copy, facts

    return asyncio.run(work())


def a_bit_of_a_row(home: Path) -> None:
    """The run's base model has another name."""
    _fold(home)
    content = (home / LEDGER).read_bytes()
    row = content.rindex(MODEL.encode() + b'{"rank"')
    (home / LEDGER).write_bytes(content[:row] + bytes([content[row] ^ 1]) + content[row + 1 :])


DAMAGES = [missing, emptied, zeroed, first_page_alone, a_page_cut_off, overwritten, a_bit_of_a_row]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_ledger_is_refused_in_a_sentence_and_repaired(
    home: tuple[Path, Facts], damage: Callable[[Path], None]
) -> None:
    place, facts = home
    damage(place)
    before = {p.name: p.read_bytes() for p in place.glob("ledger.sqlite")}
    with pytest.raises(LedgerError, match=r"is (empty or missing|damaged).*tinkex server repair --home"):
        Ledger(place / LEDGER)
    assert {p.name: p.read_bytes() for p in place.glob("ledger.sqlite")} == before

    told = CliRunner().invoke(command, ["repair", "--home", str(place), "--owner", "ann"])
    assert told.exit_code == 0, told.output
    assert "lost, unless listed above: API keys" in told.output
    assert list(place.glob("ledger.damaged-*"))

    async def go_on() -> None:
        async with serving(place, snapshot_steps=2) as service:
            gate = Authenticator(service.ledger, b"s" * 32)
            assert not gate.is_open
            with pytest.raises(Refusal, match="unknown, revoked or expired"):
                gate.identify("tml-anything")
            user = User(service)
            run = str(facts["run"])
            assert await user.loss(run, 9) == facts["loss"]
            other = await user.run(await user.session())
            await user.load(other, 1, str(facts["saved"]), optimizer=True)
            assert await user.loss(other, 2) == facts["loss"]
            sampler = await user.sampler(await user.session(), 0, str(facts["sampler"]))
            assert await user.result(await user.sample(sampler))

    asyncio.run(go_on())
    again = CliRunner().invoke(command, ["repair", "--home", str(place)])
    assert "is whole: nothing was changed" in again.output


def test_what_cannot_be_rebuilt_is_told(home: tuple[Path, Facts]) -> None:
    place, _ = home
    missing(place)
    (weights,) = place.glob("runs/*/train-0/weights/kept/adapter_model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (place / "runs" / "session" / "train-3").mkdir(parents=True)
    told = CliRunner().invoke(command, ["repair", "--home", str(place)]).output
    assert CHECKSUMS in told
    assert "run session:train:3 cannot be rebuilt" in told
    assert "as 'repaired''s" in told or "1 runs, 1 checkpoints" in told


def test_a_lost_ledger_lets_nobody_in(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    assert Authenticator(ledger, b"s" * 32).is_open
    ledger.add_key(name="a", note="", hash="0" * 64, owner="a", project_id=None, created_at=1.0)
    ledger.close()
    emptied(tmp_path)
    with pytest.raises(LedgerError, match="though this home has API keys"):
        Ledger(tmp_path / LEDGER)
    ledger = Ledger(tmp_path / LEDGER, new=True)  # as a repair that found nothing leaves it
    assert not Authenticator(ledger, b"s" * 32).is_open
    ledger.close()


def test_a_home_with_keys_of_an_older_version_is_marked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    ledger.add_key(name="a", note="", hash="0" * 64, owner="a", project_id=None, created_at=1.0)
    ledger.close()
    (tmp_path / Ledger.KEYED).unlink()
    Ledger(tmp_path / LEDGER).close()
    assert (tmp_path / Ledger.KEYED).exists()


def test_repair_leaves_out_a_damaged_row_and_keeps_whose_the_rest_is(home: tuple[Path, Facts]) -> None:
    place, facts = home
    _fold(place)
    with closing(sqlite3.connect(place / LEDGER)) as db:  # not by a Ledger: the checksums stay
        db.execute("UPDATE keys SET revoked_at = 9.0")
        db.execute("UPDATE sessions SET owner = 'eve'")
        db.commit()
    told = CliRunner().invoke(command, ["repair", "--home", str(place), "--owner", "zoe"]).output
    assert "left out: row 1 of keys, which does not match its checksum" in told
    assert "left out: row 1 of sessions" in told
    with closing(Ledger(place / LEDGER)) as ledger:
        assert ledger.keys() == []
        assert ledger.had_keys
        run = ledger.run(str(facts["run"]))
        assert run is not None
        session = ledger.session(run.session_id)
        assert session is not None
        assert run.owner == session.owner == "ann"
