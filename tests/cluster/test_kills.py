"""Five times `kill -9`, one of each kind at least; `make kills` does it a hundred times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.kills import check
from tests.cluster.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


def test_kills_of_every_kind_change_nothing(tmp_path: Path, ray_nodes: Nodes):
    check(tmp_path, ray_nodes, kills=5, seed=3)
