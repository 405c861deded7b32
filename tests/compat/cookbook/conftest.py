"""The hub, a server of its tiny models, and a kitchen for each way to reach them.

These are other people's whole programs, some minutes of work: they run when their directory is named, as
`make compat-cookbook` does, and not with the rest of the suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.conftest import serving
from tests.compat.cookbook import hub
from tests.compat.cookbook.kitchen import EMBEDDED, OFFICIAL, OURS, PATIENCE, Kitchen
from tests.compat.environments import interpreter


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("cookbook" in argument for argument in config.args)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(2 * PATIENCE))  # the first one may build the hub
            if not named:
                item.add_marker(pytest.mark.skip(reason="minutes of work: `make compat-cookbook` runs it"))


@pytest.fixture(scope="session")
def hub_directory() -> Path:
    return hub.hub()


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory, hub_directory: Path) -> Iterator[str]:
    models = {name: hub_directory / name for name in hub.MODELS}
    with serving(models, tmp_path_factory.mktemp("home")) as (url, _):
        yield url


@pytest.fixture(scope="session")
def kitchen(request: pytest.FixtureRequest) -> Kitchen:
    """The official SDK and cookbook, as they come, against our server."""
    return _kitchen(request, OFFICIAL, interpreter("cookbook"))


@pytest.fixture(scope="session", params=[OURS, EMBEDDED])
def ours(request: pytest.FixtureRequest) -> Kitchen:
    """The same cookbook with no `tinker` but ours: against the server, and without one."""
    return _kitchen(request, request.param, interpreter("cookbook-tinkex"))


def _kitchen(request: pytest.FixtureRequest, way: str, python: Path) -> Kitchen:
    """Asks for the rest only now: who has no environment should not wait for a hub either."""
    runs = request.getfixturevalue("tmp_path_factory").mktemp(way)
    url = "" if way == EMBEDDED else request.getfixturevalue("server_url")
    return Kitchen(way, python, request.getfixturevalue("hub_directory"), runs, url)
