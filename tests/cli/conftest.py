"""Two places with the same things in them: a server, and a home that a process on this machine is using."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.server.conftest import Running
from tests.service.harness import MODEL, config, datum
from tinkex import AdamParams, ServiceClient
from tinkex.cli import main
from tinkex.client import loop as background
from tinkex.client.server_connection import ServerConnection
from tinkex.engine.fake import FakeEngine
from tinkex.local import LocalTransport
from tinkex.server.serve import ServerConfig
from tinkex.service.service import Service
from tinkex.wire import ops

SECONDS, STEPS = 20.0, 4
TINKER = ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD", "TINKEX_HOME")


@dataclass
class Place:
    """Where commands go, and what was left there: one run with a history and three checkpoints."""

    env: dict[str, str]
    run: str = ""
    paths: dict[str, str] = field(default_factory=dict)  # of checkpoints, by kind
    running: Running | None = None

    def has_no(self, operation: str) -> None:
        """From now on the server does not know an operation, as hosted Tinker does not know those of ours."""
        assert self.running is not None
        del self.running.server.service._methods[ops.OPS[operation]]

    @property
    def session(self) -> str:
        return self.run.partition(":")[0]

    def invoke(self, *arguments: str, stdin: str = "", **env: str) -> Result:
        everything = dict.fromkeys(TINKER) | self.env | env
        return CliRunner().invoke(main, list(arguments), input=stdin, env=everything)

    def says(self, *arguments: str, **more: Any) -> str:
        """What a command that succeeds prints."""
        done = self.invoke(*arguments, **more)
        assert done.exit_code == 0, done.output
        return done.stdout

    def json(self, *arguments: str, **more: Any) -> Any:
        return json.loads(self.says("-f", "json", *arguments, **more))

    def fails(self, *arguments: str, code: int = 1, **more: Any) -> str:
        """The one line on stderr of a command that fails."""
        done = self.invoke(*arguments, **more)
        assert done.exit_code == code, done.output
        assert done.stdout == ""
        *notes, line = done.stderr.strip().splitlines()
        assert line.startswith("Error: "), done.stderr
        assert not any(note.startswith("Error") for note in notes)
        return line.removeprefix("Error: ")


@pytest.fixture(params=["served", "embedded"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in TINKER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = config(tmp_path / "home")
    if request.param == "served":
        running = Running(ServerConfig(settings, port=0, drain_seconds=0.1))
        place = Place({"TINKER_BASE_URL": running.url, "TINKER_API_KEY": "tml-ann"}, running=running)
        client = ServiceClient(base_url=running.url, api_key="tml-ann")
        stop = running.stop
    else:
        service = Service(settings, FakeEngine)
        transport = LocalTransport(service)
        monkeypatch.setattr("tinkex.local.connection", lambda given: ServerConnection(transport, given))
        place, client = Place({"TINKEX_HOME": str(tmp_path / "home")}), ServiceClient()
        stop = lambda: _on_loop(service.stop)  # noqa: E731
    train(client, place)
    yield place  # whoever trained is still there: a home is looked at beside its owner
    client.close().result(SECONDS)
    stop()


def _on_loop(function: Callable) -> None:
    asyncio.run_coroutine_threadsafe(function(), background.get_loop()).result(SECONDS)


def train(client: ServiceClient, place: Place) -> None:
    run = client.create_lora_training_client(MODEL, rank=4, seed=1, user_metadata={"note": "first"})
    for step in range(STEPS):
        run.forward_backward([datum(step)], "cross_entropy")
        run.forward_backward([datum(step + 100), datum(step + 200)], "cross_entropy")
        run.optim_step(AdamParams(learning_rate=0.05))
    place.paths["weights"] = run.save_state("final").result(SECONDS).path
    place.paths["sampler_weights"] = run.save_weights_for_sampler("final").result(SECONDS).path
    place.paths["external_weights"] = run.save_weights_external("final").result(SECONDS).path
    place.run = run.model_id
