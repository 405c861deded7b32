"""Trainers and samplers that cannot see the server's disk: its home, and the directories of its adapters."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Nodes, actors
from tests.service.harness import MODEL, User, datum, serving
from tinkex.engine.cluster.cluster_engine import ClusterEngine
from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    EngineError,
    LoadAdapter,
    Placement,
    SaveAdapter,
    build_engine,
)
from tinkex.types.params import LoraConfig

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.xdist_group("ray")]


@pytest.fixture(autouse=True)
def server_on_a_node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may well put an actor on this process's node."""
    monkeypatch.setattr("tinkex.engine.cluster.trainer_group.this_node", lambda: "the server's")


def build_blind(home: str, config: EngineConfig) -> Engine:
    """An engine in a process that may not open, make, list or rename anything below the server's home."""

    def forbid(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" or event.startswith(("os.", "shutil.", "tempfile.")):
            for argument in arguments:
                if isinstance(argument, str | bytes | Path) and home in str(argument):
                    raise PermissionError(f"{event} of {argument}: the home is on another machine")

    sys.addaudithook(forbid)
    return build_engine(config)


async def test_runs_are_saved_loaded_sampled_and_restored(tmp_path: Path, ray_nodes: Nodes) -> None:
    told: list[list[Any]] = []
    for blind in (False, True):
        home = tmp_path / f"home-{blind}"
        inside = functools.partial(build_blind, str(home)) if blind else build_engine
        more = {"placements": {MODEL: Placement(ray_nodes.address)}, "snapshot_steps": 2, "long_poll": 80.0}
        async with serving(home, lambda config, b=inside: ClusterEngine(config, b), **more) as service:
            user = User(service)
            run = await user.run(seed=3)
            seen: list[Any] = await user.train(run, 1, 3)
            state = await user.save(run, 7, "state")
            sampler = await user.unnamed_sampler(run, 8, 0)
            for process in actors("TrainerActor"):  # it has the exported bytes: the sampler reads the files
                process.kill()
            await user.load(run, 9, state, optimizer=True)
            seen += await user.train(run, 10, 2)
            drawn = await user.result(await user.sample(sampler, 0))
            seen.append(drawn.sequences[0].tokens)
            seen.append(await user.loss(run, 14, datum(5)))
            told.append(seen)
    assert told[0] == told[1]
    assert list((tmp_path / "home-True").rglob("adapter_model.safetensors")), "the server wrote them"


async def test_an_error_names_the_place_that_was_asked_for(tmp_path: Path, ray_nodes: Nodes) -> None:
    config = EngineConfig("fake", kind="fake", placement=Placement(ray_nodes.address))
    inside = functools.partial(build_blind, str(tmp_path))
    engine = ClusterEngine(config, inside)
    try:
        engine.trainer.submit(CreateAdapter("a", LoraConfig(rank=4, seed=1))).result(60)
        engine.trainer.submit(CreateAdapter("b", LoraConfig(rank=8, seed=1))).result(60)
        assert engine.trainer.submit(SaveAdapter("a", str(tmp_path / "a"))).result(60) > 100
        with pytest.raises(EngineError, match="already exists") as raised:
            engine.trainer.submit(SaveAdapter("a", str(tmp_path / "a"))).result(60)
        assert raised.value.category == "user"
        with pytest.raises(EngineError, match=f"{tmp_path}/a has rank 4") as raised:
            engine.trainer.submit(LoadAdapter("b", str(tmp_path / "a"))).result(60)
        assert raised.value.category == "user"
    finally:
        engine.close()
