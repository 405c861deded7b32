"""A whole server on a free port, in a thread of its own, over the fake engine; and a plain HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import tiny_tokenizer
from tests.server.browser import chromium
from tinkex.engine.protocol import EngineConfig
from tinkex.server.serve import Server, ServerConfig
from tinkex.service.config import ServiceConfig
from tinkex.types.data import Datum, ModelInput
from tinkex.types.training import ForwardBackwardInput, ForwardBackwardRequest
from tinkex.wire import proto_codec

MODEL = "m/base"
KEY = {"x-api-key": "tml-alice"}
OTHER_KEY = {"x-api-key": "tml-bob"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@dataclass
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Running:
    """A server that runs until `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        self.said: list[str] = []
        self.server = Server(config, self.said.append)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.failed: BaseException | None = None
        self.up = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.up.wait(10)
        self.url = self.server.url

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            running = asyncio.create_task(self.server.run())
            while not self.said and not running.done():  # it says what it serves when it is ready
                await asyncio.sleep(0.005)
            if not running.done():
                self.up.set()
            await running

        try:
            asyncio.run(main())
        except BaseException as error:
            self.failed = error
            self.up.set()

    def connect(self, timeout: float = 20.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.server.address, timeout=timeout)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, key: Any = KEY
    ) -> Answer:
        """One request on a connection of its own; a body that is not bytes is sent as JSON."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method, path, content, {**(key or {}), **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, op: str, **fields: Any) -> Any:
        """A call that must succeed."""
        answer = self.ask("POST", f"/api/v1/{op}", fields)
        assert answer.status == 200, (answer.status, answer.body)
        return answer.json

    def result(self, promise: dict[str, Any], **headers: str) -> Answer:
        answer = self.ask("POST", "/api/v1/retrieve_future", {"request_id": promise["request_id"]}, headers)
        while answer.status == 408:
            answer = self.ask(
                "POST", "/api/v1/retrieve_future", {"request_id": promise["request_id"]}, headers
            )
        return answer

    def open_sampler(self) -> str:
        session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.36.0")["session_id"]
        return self.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL
        )["sampling_session_id"]

    def open_run(self) -> str:
        session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.36.0")["session_id"]
        promise = self.post(
            "create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config={"rank": 4}
        )
        return self.result(promise).json["model_id"]

    def stop(self) -> None:
        if self.loop is not None and self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop)
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def server_config(home: Path, model: str, **more: Any) -> ServerConfig:
    service = {k: more.pop(k) for k in list(more) if k in ServiceConfig.__dataclass_fields__}
    settings = {"preload": True, "long_poll": 0.5, "engine": EngineConfig("", kind="fake"), **service}
    return ServerConfig(
        ServiceConfig(home=home, models={MODEL: model}, **settings),
        port=0, drain_seconds=0.3, **more,
    )  # fmt: skip


@pytest.fixture
def start(tmp_path: Path, tokenizer_dir: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers; those still running at the end are stopped."""
    started: list[Running] = []

    def begin(**more: Any) -> Running:
        running = Running(server_config(more.pop("home", tmp_path / "home"), str(tokenizer_dir), **more))
        started.append(running)
        if running.failed is not None:
            raise running.failed
        return running

    yield begin
    for running in started:
        running.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[Running]:
    """One server for a module's tests, which must not disturb each other."""
    running = Running(server_config(tmp_path_factory.mktemp("home"), str(tokenizer_dir)))
    assert running.failed is None, running.failed
    yield running
    running.stop()


PROTO = {"content-type": "application/x-protobuf"}


def pass_body(run: str, seq_id: int, tokens: int = 4, datums: int = 1) -> bytes:
    ids = [1 + i % 500 for i in range(tokens)]
    datum = Datum(
        ModelInput.from_ints(ids), {"target_tokens": np.array(ids), "weights": np.ones(tokens, np.float32)}
    )
    work = ForwardBackwardInput([datum] * datums, "cross_entropy", None)
    return b"".join(proto_codec.write_pass(ForwardBackwardRequest(work, run, seq_id)))
