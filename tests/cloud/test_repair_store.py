"""`tinkex server repair` where rows are lost and the store is not: of Postgres, and of a home's SQLite."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result

from tests.cloud.shared_services import dead, end, member, stall
from tests.service.harness import User, serving
from tinkex import store
from tinkex.cli.server_admin import server as command

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


async def repair(*options: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, command, ["repair", "--owner", "ann", *options])


def empty(postgres: str) -> None:
    """Everything in the database is gone."""
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("DROP SCHEMA public CASCADE")
        db.execute("CREATE SCHEMA public")


async def test_postgres_is_rebuilt_and_its_runs_go_on(tmp_path, postgres, root):
    killed = await dead(tmp_path / "a", postgres, root, snapshot_steps=2)
    user = User(killed)
    run = await user.run()
    await user.train(run, 1, 3)
    path = await user.save(run, 7, "kept")
    expected = await user.loss(run, 8)
    other = await user.run(seed=5)
    pending = await user.forward_backward(other, 1)
    await killed.disk.synced()
    stall(killed)
    await end(killed)
    await asyncio.to_thread(empty, postgres)

    told = await repair("--ledger", postgres, "--store", root)
    assert told.exit_code == 0, told.output
    assert "from the logs of 1 servers, as 'ann''s: 2 runs" in told.output
    assert "0 runs, 1 checkpoints" in told.output
    assert "lost, unless Postgres still has it: API keys" in told.output
    async with member(tmp_path / "b", postgres, root) as service:
        user = User(service)
        assert await user.loss(run, 9) == expected
        assert (await user.result(pending.request_id)).metrics["loss:sum"] > 0, "a client that kept polling"
        third = await user.run()
        await user.load(third, 1, path, optimizer=True)
        assert await user.loss(third, 2) == expected
        refused = await repair("--ledger", postgres, "--store", root)
        assert refused.exit_code != 0
        assert "stop" in str(refused.exception) + refused.output
    again = await repair("--ledger", postgres, "--store", root)
    assert "nothing was changed" in again.output


async def test_what_postgres_still_has_is_not_touched(tmp_path, postgres, root):
    async with member(tmp_path / "a", postgres, root) as service:
        user = User(service, "bob")
        run = await user.run()
        await user.train(run, 1, 1)
        path = await user.save(run, 3, "kept")
        expected = await user.loss(run, 4)
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("DELETE FROM checkpoints")
    told = await repair("--ledger", postgres, "--store", root)
    assert "0 runs, 1 checkpoints" in told.output
    async with member(tmp_path / "b", postgres, root) as service:
        user = User(service, "bob")
        other = await user.run()
        await user.load(other, 1, path, optimizer=True)
        assert await user.loss(other, 2) == expected


async def test_a_lost_home_gets_the_rows_of_its_store(tmp_path: Path, root: str):
    async with serving(tmp_path / "home", store=root) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 2)
        path = await user.save(run, 5, "kept")
        broken = await user.save(run, 6, "broken")
        expected = await user.loss(run, 7)
        gone = service.ledger.checkpoint(run, "weights", "broken")
        assert gone is not None
    shutil.rmtree(tmp_path / "home")
    store.remove_file(store.join(root, f"{gone.directory}/optimizer.safetensors"))
    told = await repair("--home", str(tmp_path / "home"), "--store", root)
    assert told.exit_code == 0, told.output
    assert "1 runs, 1 checkpoints" in told.output
    assert "optimizer.safetensors is missing" in told.output
    async with serving(tmp_path / "home", store=root) as service:
        user = User(service)
        other = await user.run()
        await user.load(other, 1, path, optimizer=True)
        assert await user.loss(other, 2) == expected
        assert service.ledger.checkpoint(run, "weights", broken.rpartition("/")[2]) is None


async def test_a_shared_ledger_is_not_repaired_without_its_store(postgres):
    told = await repair("--ledger", postgres)
    assert told.exit_code == 2
    assert "--ledger needs --store" in told.output
