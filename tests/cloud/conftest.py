from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.cloud.servers import BUCKET, postgres_server, s3_server


@pytest.fixture(scope="session")
def s3_environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture
def s3(s3_environment, monkeypatch) -> str:
    """An empty prefix in an S3 bucket, and this process's environment set to use it."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("pg")) as url:
        yield url
