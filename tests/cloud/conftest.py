from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest

from tests.cloud.servers import postgres_server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture
def postgres(postgres_url) -> Iterator[str]:
    """An empty database."""
    name = f"t{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    yield postgres_url.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


@pytest.fixture(params=["disk", "s3"])
def root(request, tmp_path) -> str:
    return str(tmp_path / "store") if request.param == "disk" else request.getfixturevalue("s3")
