"""Five times `kill -9`, one of each kind at least, and of two servers; `make kills` does it more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cloud.servers import control_plane
from tests.cluster.kills import check
from tests.cluster.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


def test_kills_of_every_kind_change_nothing(tmp_path: Path, ray_nodes: Nodes):
    check(tmp_path, ray_nodes, kills=5, seed=3)


def test_a_killed_servers_runs_go_on_on_the_other_one(tmp_path: Path, ray_nodes: Nodes):
    """Two servers, each with its engines, on one Postgres and one S3 store."""
    with control_plane(tmp_path) as (_, database, _, root):
        check(tmp_path, ray_nodes, kills=4, seed=5, shared=(database, root))
