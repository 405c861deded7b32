"""The public client with an engine in this process, on a tiny model; and its adapters as files.

Everything is fp32 on a CPU, so that answers can be held to transformers' within rounding.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch

from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.exactness.reference import Reference
from tinkex import AdamParams, Datum, ModelInput, SamplingClient, ServiceClient, TensorData, TrainingClient
from tinkex.client import loop as background
from tinkex.client.server_connection import ServerConnection
from tinkex.engine.protocol import EngineConfig, build_engine
from tinkex.local import LocalTransport
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Caller
from tinkex.service.service import Service

MODEL, OTHER = "m/base", "m/other"
SECONDS = 30.0
EOS = 257  # <|im_end|> of the tiny tokenizer, whose ids end at 258: the rest of the vocabulary is padding
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [50, 40, 30, 20, 10], [9, 8, 7, 6, 5, 4, 3, 12, 11]]


@dataclass
class World:
    """One service in this process, and as many users of it as a test wants."""

    model: Path
    other: Path  # another base model, of another family
    service: Service
    clients: list[ServiceClient] = field(default_factory=list)
    names: Iterator[str] = field(default_factory=lambda: (f"c{n}" for n in itertools.count()))

    def user(self, name: str) -> ServiceClient:
        transport = LocalTransport(self.service, Caller(name, same_machine=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tinkex.local.connection", lambda settings: ServerConnection(transport, settings))
            self.clients.append(ServiceClient(base_url="local"))
        return self.clients[-1]

    def exported(self, run: TrainingClient) -> Path:
        """The run's adapter, after everything called so far, as a PEFT directory."""
        saved = run.save_weights_external(next(self.names)).result(SECONDS).path
        rest = self.clients[0].create_rest_client()
        urls = rest.get_external_weights_urls(saved).result(SECONDS).urls
        return Path(unquote(urlsplit(urls["adapter_config.json"]).path)).parent


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("exactness")
    model = tiny_tokenizer(tiny_model(home, "qwen3", eos_token_id=EOS))
    engine = EngineConfig("", device="cpu", dtype="float32", kv_bytes=4 << 20, threads=1)
    other = tiny_tokenizer(tiny_model(home, "llama3", seed=5))
    models = {MODEL: str(model), OTHER: str(other)}
    config = ServiceConfig(home / "state", models=models, engine=engine, offline=True)
    world, threads = World(model, other, Service(config, build_engine)), torch.get_num_threads()
    torch.set_num_threads(1)  # the reference's: on a busy machine more of them are much slower
    yield world
    torch.set_num_threads(threads)
    for client in world.clients:
        client.close().result(SECONDS)
    asyncio.run_coroutine_threadsafe(world.service.stop(), background.get_loop()).result(SECONDS)


@pytest.fixture(scope="session")
def client(world: World) -> ServiceClient:
    return world.user("ann")


@dataclass
class Start:
    """An adapter that has learnt a little, so that neither of its factors is zero; where tests start from."""

    state: str  # its checkpoint
    files: Path  # the same as a PEFT directory
    sampler: SamplingClient


@pytest.fixture(scope="session")
def start(world: World, client: ServiceClient) -> Start:
    run = client.create_lora_training_client(MODEL, rank=4, seed=7)
    for _ in range(2):
        run.forward_backward(plain_data(SEQUENCES), "cross_entropy")
        run.optim_step(AdamParams(learning_rate=2e-2))
    state = run.save_state("start").result(SECONDS).path
    return Start(state, world.exported(run), run.save_weights_and_get_sampling_client())


@pytest.fixture(scope="session")
def reference(world: World, start: Start) -> Reference:
    """The same adapter through peft, never trained any further."""
    return Reference(world.model, start.files)


@pytest.fixture
def run(client: ServiceClient, start: Start) -> TrainingClient:
    """A run that starts from the adapter, with an optimizer that has seen nothing."""
    return client.create_training_client_from_state(start.state)


def plain_data(sequences: list[list[int]]) -> list[Datum]:
    """Predict each token from those before it; every target counts once."""
    targets = [{"target_tokens": TensorData.from_numpy(np.array(ids[1:]))} for ids in sequences]
    return [Datum(ModelInput.from_ints(s[:-1]), t) for s, t in zip(sequences, targets, strict=True)]
