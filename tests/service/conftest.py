"""A service for each test, over the fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.harness import User, serving
from tinkex.service.service import Service


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
async def service(home: Path) -> AsyncIterator[Service]:
    async with serving(home) as service:
        yield service


@pytest.fixture
def user(service: Service) -> User:
    return User(service)
