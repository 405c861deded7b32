"""Two recipes against a server whose engine is on a Ray cluster, its ledger on Postgres, its files on S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud.servers import control_plane
from tests.compat.conftest import serving
from tests.compat.cookbook.checks import check_rl_loop
from tests.compat.cookbook.kitchen import OFFICIAL, Kitchen
from tests.compat.environments import interpreter

MODEL = "Qwen/Qwen3.5-9B-Base"  # the default of both recipes


@pytest.fixture(scope="module")
def on_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    """The official SDK and cookbook; two trainers, two samplers."""
    python = interpreter("cookbook")  # skips before anything is started
    hub: Path = request.getfixturevalue("hub_directory")
    placed = {MODEL: Path(f"{hub / MODEL},trainers=2,samplers=2")}
    home, runs = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("cluster")
    with (
        control_plane(tmp_path_factory.mktemp("servers")) as options,
        serving(placed, home, "--cluster", "auto", *options) as (url, _),
    ):
        yield Kitchen(OFFICIAL, python, hub, runs, url)


def test_sl_loop(on_cluster: Kitchen) -> None:
    options = {"batch_size": 32, "max_steps": 8, "learning_rate": 5e-3, "lora_rank": 8, "save_every": 4}
    run = on_cluster.cook("recipes.sl_loop", **options)
    nll = run.series("train_mean_nll")
    assert len(nll) == 8
    assert nll[-1] <= 0.85 * nll[0]
    assert [saved["name"] for saved in run.checkpoints] == ["000004", "final"]


def test_rl_loop(on_cluster: Kitchen) -> None:
    check_rl_loop(on_cluster)
