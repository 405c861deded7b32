"""A stub server, clients of it, and a clean environment for every client test."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stub import Stub
from tinkex import Datum, ModelInput, SamplingParams, ServiceClient, TensorData, Timeouts

QUICK = Timeouts(connect=10, unreachable=1, close=2)
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no stored key of whoever runs the tests reaches a client."""
    for name in ("API_KEY", "BASE_URL", "CREDENTIAL_CMD", "PROJECT_ID", "TAGS", "TELEMETRY", "LOG"):
        monkeypatch.delenv(f"TINKER_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        server.gap_seconds = 5
        yield server


@pytest.fixture
def service(stub: Stub) -> Iterator[ServiceClient]:
    client = ServiceClient(base_url=stub.url, timeouts=QUICK)
    fast_retries(client)
    yield client
    close(client)


@pytest.fixture
def run(service: ServiceClient) -> Any:
    return service.create_lora_training_client("stub/base", timeout=30)


@pytest.fixture
def sampler(service: ServiceClient) -> Any:
    return service.create_sampling_client(base_model="stub/base", timeout=30)


def fast_retries(service: ServiceClient, **changes: Any) -> None:
    """Let a client's retries wait milliseconds, with the policy otherwise as it is."""
    transport: Any = service._connection.transport
    transport.policy = replace(transport.policy, **{"base": 0.02, "cap": 0.05, **changes})


def close(service: ServiceClient) -> None:
    try:
        service.close().result(20)
    except Exception:
        pass  # the test broke the server on purpose


def datum(length: int = 4, **inputs: Any) -> Datum:
    tokens = np.arange(length)
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": TensorData(tokens + 1), **inputs})


def eventually(condition: Callable[[], Any], timeout: float = 20.0) -> None:
    """Wait until something is true; fail if it never is."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
