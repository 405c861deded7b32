"""Every engine there is, on the smallest model it can have; a test here holds for all of them.

Most tests do not depend on the family of the model; those that do are marked `every_family`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from tests.engine.tiny import EXPERTS, FAMILIES, HYBRIDS, MORE, SEEING, UNKNOWN, tiny_model
from tinkex.engine.protocol import (
    Command,
    CreateAdapter,
    DropAdapter,
    Engine,
    EngineConfig,
    OptimStep,
    Pass,
    Placement,
    build_engine,
    run_passes,
)
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig

LORA = LoraConfig(rank=4, seed=7)
SECONDS = 60.0  # that anything may take
NEAR = 1e-4  # how far logprobs may be apart that were computed in another order, whatever the family
R = TypeVar("R")
_names = (f"run-{i}" for i in itertools.count())


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


KINDS = [
    "fake",
    "torch",
    pytest.param("hybrid", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("tensor", marks=pytest.mark.slow),
    pytest.param("cluster", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]),
    pytest.param(
        "data", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]
    ),  # two processes of a trainer
]
_PLACES = ("torch", "cuda", "tensor", "cluster", "data")
_TORCH, _HYBRID = "llama3", "qwen3_5"  # the families of those kinds
_OTHERS = (FAMILIES | MORE | HYBRIDS | SEEING | EXPERTS | UNKNOWN).keys() - {_TORCH, _HYBRID}
# On a test that depends on the model itself: it also runs on every other family that we load.
every_family = pytest.mark.parametrize(
    "config",
    [*KINDS, *(pytest.param(family, marks=pytest.mark.slow) for family in sorted(_OTHERS))],
    indirect=True,
    scope="session",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The samplers of `data` are those of `cluster`: its trainer's tests are enough."""
    dropped = [
        item for item in items
        if item.path.parent == Path(__file__).parent and "[data" in item.name
        and item.path.name != "test_trainer.py"
    ]  # fmt: skip
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(scope="session", params=KINDS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    tokenizer = str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    if request.param == "fake":
        return EngineConfig("fake-model", kind="fake", max_context=256, name="m/fake", tokenizer=tokenizer)
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    placement = None
    if request.param == "cluster":
        placement = Placement(request.getfixturevalue("ray_nodes").address, samplers=2, max_samplers=2)
    if request.param == "data":
        placement = Placement(request.getfixturevalue("ray_nodes").address, data=2)
    family = {"hybrid": _HYBRID}.get(request.param, _TORCH if request.param in _PLACES else request.param)
    path = tiny_model(tmp_path_factory.mktemp("model"), family, max_position_embeddings=256)
    device = "cuda" if request.param == "cuda" else "cpu"
    return EngineConfig(
        str(path),
        device=device,
        dtype="float32",
        kv_bytes=2 << 20,
        threads=1,
        name="m/tiny",
        tokenizer=tokenizer,
        placement=placement,
        tensor=2 if request.param == "tensor" else 1,
    )


def write_tokenizer(directory: Path) -> Path:
    """A tokenizer in which token i is spelled "<i>"."""
    vocab = {f"<{i}>": i for i in range(512)}
    Tokenizer(models.WordLevel(vocab, unk_token="<0>")).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    engine = build_engine(config)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine_of_small_batches(config: EngineConfig) -> Iterator[Engine]:
    """Its micro-batches hold two datums of ten tokens, all processes of a trainer together."""
    processes = 1 if config.placement is None else config.placement.data
    engine = build_engine(replace(config, max_pass_tokens=24 // processes))
    yield engine
    engine.close()


@pytest.fixture
def run(engine: Engine) -> Iterator[str]:
    name = new_run(engine)
    yield name
    do(engine, DropAdapter(name))


def do(engine: Engine, command: Command[R]) -> R:
    """Execute one command and wait for it."""
    return engine.trainer.submit(command).result(SECONDS)


def new_run(engine: Engine, lora: LoraConfig = LORA) -> str:
    name = next(_names)
    do(engine, CreateAdapter(name, lora))
    return name


def tokens(engine: Engine, seed: int, length: int) -> np.ndarray:
    """Random token ids, the end-of-sequence one left out."""
    low = max(engine.info.eos_ids) + 1
    return np.random.default_rng(seed).integers(low, engine.info.vocab_size, length).astype(np.int32)


def datum(ids: np.ndarray, **inputs: np.ndarray) -> Datum:
    """Predict each of `ids` from those before it."""
    given = {"target_tokens": ids[1:].astype(np.int64), **inputs}
    return Datum(ModelInput.from_ints(ids[:-1]), given)


def forward_backward(
    engine: Engine, run: str, data: list[Datum], loss_fn: str = "cross_entropy", **more
) -> ForwardBackwardOutput:
    (out,) = run_passes(engine.trainer, [Pass(run, data, loss_fn, **more)])
    assert isinstance(out, ForwardBackwardOutput), out
    return out


def logprobs(engine: Engine, run: str, ids: np.ndarray) -> np.ndarray:
    """The trainer's logprob of each of `ids` but the first."""
    out = forward_backward(engine, run, [datum(ids)], backward=False)
    return out.loss_fn_outputs[0]["logprobs"].to_numpy()


def train(engine: Engine, run: str, ids: np.ndarray, steps: int = 1, learning_rate: float = 1e-2) -> None:
    for _ in range(steps):
        forward_backward(engine, run, [datum(ids)])
        do(engine, OptimStep(run, AdamParams(learning_rate=learning_rate)))


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}
