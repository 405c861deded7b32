"""Every index that a client sends is checked before the device sees it: a bad one loses a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.commands import do
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    CustomLoss,
    EngineConfig,
    EngineError,
    Failure,
    ForwardBackward,
    Pass,
    SampleWork,
    build_engine,
)
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.loss_graph import LossGraph
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LoraConfig, SamplingParams
from tinkex.types.tensor import TensorData

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAR = 10**6  # beyond any vocabulary here
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=NO_CUDA)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    path: Path = tiny_model(tmp_path_factory.mktemp("model"), "llama3")
    engine = build_engine(EngineConfig(str(path), device=request.param, kv_bytes=1 << 22))
    assert isinstance(engine, TorchEngine)
    do(engine.trainer, CreateAdapter("run", LoraConfig(2, seed=1)))
    yield engine
    engine.close()


def datum(ids: list[int] = IDS, targets: list[int] = IDS, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(ids), {"target_tokens": np.array(targets), **inputs})


def refusal(engine: TorchEngine, work: Pass) -> str:
    """What a pass fails with; the engine must go on."""
    (failure,) = do(engine.trainer, ForwardBackward((work,)))
    assert isinstance(failure, Failure)
    assert failure.category == "user", failure.message
    (good,) = do(engine.trainer, ForwardBackward((Pass("run", [datum()], "cross_entropy"),)))
    assert isinstance(good, ForwardBackwardOutput)
    assert engine.heartbeat().alive
    return failure.message


def test_tokens_and_targets_of_a_pass(engine: TorchEngine) -> None:
    assert str(FAR) in refusal(engine, Pass("run", [datum([5, FAR, 7, 8])], "cross_entropy"))
    for bad in (FAR, -1):
        assert str(bad) in refusal(engine, Pass("run", [datum(targets=[5, bad, 7, 8])], "cross_entropy"))
        listed = [[5, 6], [bad, 7], [7, 8], [8, 9]]
        assert str(bad) in refusal(engine, Pass("run", [datum(targets=listed)], "cross_entropy"))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [FAR, -5])
async def test_prompts_and_the_targets_of_their_logprobs(engine: TorchEngine, bad: int) -> None:
    params = SamplingParams(max_tokens=2, stop=[], seed=1)
    prompt, scored = np.array([5, bad, 7], np.int32), np.array([[5, 6], [bad, 7]])
    with pytest.raises(EngineError, match=str(bad)):
        await engine.sampler.sample(SampleWork(prompt, params))
    good = np.array([5, 6, 7], np.int32)
    targets = TensorData.from_numpy(scored)
    with pytest.raises(EngineError, match=str(bad)):
        await engine.sampler.sample(SampleWork(good, params, target_prompt_logprobs=targets))
    assert (await engine.sampler.sample(SampleWork(good, params))).sequences


def indexing(target: str, *args: Any) -> CustomLoss:
    """A loss that reads its logprobs at the datum's `at`."""

    def node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    kind = "call_function" if target.startswith("operator.") else "call_method"
    nodes = (
        node("placeholder", "logprobs", "logprobs"),
        node("placeholder", "at", "at"),
        node(kind, "read", target, {"ref": "logprobs"}, *args),
        node("call_method", "loss", "sum", {"ref": "read"}),
        node("output", "output", "output", {"tuple": [{"ref": "loss"}, {"dict": {}}]}),
    )
    return CustomLoss(("logprobs", "at"), nodes)


AT = {"ref": "at"}
INDEXING = [  # take_along_dim is not among them: it takes an index modulo the size
    ("gather", (0, AT)),
    ("index_select", (0, AT)),
    ("take", (AT,)),
    ("operator.getitem", (AT,)),
    ("scatter", (0, AT, 1.0)),
    ("scatter_add", (0, AT, {"ref": "logprobs"})),
]


@pytest.mark.parametrize(("target", "args"), INDEXING, ids=[name for name, _ in INDEXING])
def test_indices_of_uploaded_losses_stay_on_the_cpu(
    engine: TorchEngine, target: str, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []
    gradient = LossGraph.gradient

    def spied(graph: LossGraph, logprobs: torch.Tensor, *rest: Any) -> Any:
        devices.append(logprobs.device.type)
        return gradient(graph, logprobs, *rest)

    monkeypatch.setattr(LossGraph, "gradient", spied)
    loss = indexing(target, *args)
    for bad in (FAR, -FAR):
        at = np.array([0, 1, bad, 2])
        message = refusal(engine, Pass("run", [datum(at=at)], "custom", custom_loss=loss))
        assert target in message
    (good,) = do(
        engine.trainer,
        ForwardBackward((Pass("run", [datum(at=np.array([0, 1, 3, 2]))], "custom", custom_loss=loss),)),
    )
    assert isinstance(good, ForwardBackwardOutput)
    assert devices == ["cpu"] * 3
