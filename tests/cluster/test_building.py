"""Actors that die while they are made: another is made in their place, a few times."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.nodes import Nodes
from tinkex.engine.cluster.cluster_engine import MAX_FAILURES, ActorDied, ClusterEngine
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import CreateAdapter, Engine, EngineConfig, Placement
from tinkex.types.params import LoraConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


def dying(marks: Path, role: str, times: int, config: EngineConfig) -> Engine:
    """End the process of the first actors of a role, as when their node is killed."""
    if config.role == role:
        mine = len(list(marks.iterdir()))
        if mine < times:
            (marks / str(mine)).touch()
            os._exit(9)
    return FakeEngine(config)


def config(nodes: Nodes) -> EngineConfig:
    return EngineConfig("fake", kind="fake", max_context=64, placement=Placement(nodes.address))


@pytest.mark.parametrize("role", ["trainer", "sampler"])
def test_an_actor_that_dies_while_it_is_made_is_made_again(tmp_path: Path, ray_nodes: Nodes, role: str):
    engine = ClusterEngine(config(ray_nodes), partial(dying, tmp_path, role, 2))
    try:
        engine.trainer.submit(CreateAdapter("run", LoraConfig(rank=4))).result(60)
        assert engine.heartbeat().alive
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        engine.close()


def test_a_trainer_that_is_lost_is_made_again_if_the_next_one_dies_too(tmp_path: Path, ray_nodes: Nodes):
    (tmp_path / "0").touch()  # the first is made at once
    engine = ClusterEngine(config(ray_nodes), partial(dying, tmp_path, "trainer", 1))
    try:
        (tmp_path / "0").unlink()
        engine.trainer.close("killed")
        part = engine.partition(0)
        part.trainer.submit(CreateAdapter("run", LoraConfig(rank=4))).result(60)
        assert (tmp_path / "0").exists()
    finally:
        engine.close()


def test_actors_that_always_die_are_given_up(tmp_path: Path, ray_nodes: Nodes):
    with pytest.raises(ActorDied, match="died while it was made"):
        ClusterEngine(config(ray_nodes), partial(dying, tmp_path, "trainer", 99))
    assert len(list(tmp_path.iterdir())) == MAX_FAILURES
