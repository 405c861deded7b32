"""A traced loss, uploaded or run here, embedded or served, trains as its function does by autograd alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.clients.traced_losses import LOSSES
from tests.contract.loop import on_loop
from tests.engine.tiny import tiny_model
from tests.server.conftest import Running
from tinkex import (
    AdamParams,
    Datum,
    InvalidInputError,
    ModelInput,
    RequestFailedError,
    ServiceClient,
    TensorData,
    TrainingClient,
)
from tinkex.client.server_connection import ServerConnection
from tinkex.engine.protocol import EngineConfig, build_engine
from tinkex.local import LocalTransport
from tinkex.server.serve import ServerConfig
from tinkex.service.config import ServiceConfig
from tinkex.service.service import Service

pytestmark = pytest.mark.slow

MODEL = "m/base"
SECONDS = 30.0
ADAM = AdamParams(learning_rate=0.02)


@pytest.fixture(scope="module", params=["embedded", "served", "not offered"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceClient]:
    home = tmp_path_factory.mktemp("home")
    model = tiny_model(home, "qwen3")
    config = ServiceConfig(
        home / "state", models={MODEL: str(model)}, long_poll=2.0,
        custom_losses=request.param != "not offered",
        engine=EngineConfig("", device="cpu", kv_bytes=2 << 20, threads=1),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
            patch.delenv(name, raising=False)
        if request.param == "embedded":
            inside = Service(config, build_engine)
            patch.setattr("tinkex.local.connection", lambda s: ServerConnection(LocalTransport(inside), s))
            client = ServiceClient()
            stop: Callable[[], object] = lambda: on_loop(inside.stop)  # noqa: E731
        else:
            running = Running(ServerConfig(config, port=0, drain_seconds=0.1))
            client, stop = ServiceClient(base_url=running.url, api_key="tml-ann"), running.stop
        yield client
        client.close().result(SECONDS)
        stop()


def data_for(ranks: dict[str, int]) -> list[Datum]:
    dice = np.random.default_rng(3)
    data = []
    for length in (5, 7):
        shape = (length, 3) if ranks["logprobs"] == 2 else (length,)
        inputs: dict[str, Any] = {"target_tokens": dice.integers(3, 60, shape)}
        for key, rank in ranks.items():
            if key != "logprobs":
                inputs[key] = dice.normal(size=(length, 3)[:rank]).astype(np.float32)
        tensors = {key: TensorData.from_numpy(np.asarray(value)) for key, value in inputs.items()}
        data.append(Datum(ModelInput.from_ints(dice.integers(3, 60, length)), tensors))
    return data


def untraced(fn: Callable[..., Any], ranks: dict[str, int]) -> Any:
    """The function as forward_backward_custom has always taken it: run by torch, never traced."""

    def loss(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        losses = []
        for datum, given in zip(data, logprobs, strict=True):
            keys = [key for key in ranks if key != "logprobs"]
            inputs = [torch.from_numpy(datum.loss_fn_inputs[key].to_numpy().copy()) for key in keys]
            losses.append(fn(given, *inputs)[0])
        return torch.stack(losses).sum(), {}

    return loss


def trained(run: TrainingClient, data: list[Datum], loss: Any) -> tuple[list[float], dict[str, float], Any]:
    """Two steps: the losses, the last metrics, and the logprobs after it all."""
    outputs = []
    for _ in range(2):
        passing = run.forward_backward_custom(data, loss)
        run.optim_step(ADAM)
        outputs.append(passing.result(SECONDS))
    plain = [Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in data]
    after = run.forward(plain, "cross_entropy").result(SECONDS)
    logprobs = np.concatenate([o["logprobs"].to_numpy().ravel() for o in after.loss_fn_outputs])
    return [o.metrics["loss:sum"] for o in outputs], dict(outputs[-1].metrics), logprobs


@pytest.mark.parametrize(("fn", "ranks"), LOSSES, ids=[fn.__name__ for fn, _ in LOSSES])
def test_traced_is_as_untraced(service: ServiceClient, fn: Any, ranks: Any, request: Any) -> None:
    data = data_for(ranks)
    handle = service.create_custom_loss(fn, ranks).result(SECONDS)
    assert (handle.loss_id is None) == ("not offered" in request.node.name)
    runs = [service.create_lora_training_client(MODEL, rank=4, seed=7) for _ in range(2)]
    losses, metrics, after = trained(runs[0], data, handle)
    right_losses, _, right_after = trained(runs[1], data, untraced(fn, ranks))
    assert losses == pytest.approx(right_losses, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(after, right_after, rtol=1e-4, atol=2e-5)
    assert right_losses[0] != right_losses[1]
    if fn.__name__ == "weighted":
        mean = np.mean([d.loss_fn_inputs["weights"].to_numpy().mean() for d in data])
        assert metrics["custom/nll:sum"] == pytest.approx(losses[-1], rel=1e-5)
        assert metrics["custom/weight:mean"] == pytest.approx(mean, abs=1e-6)


def test_what_a_server_refuses_is_told_with_its_line(service: ServiceClient, request: Any) -> None:
    """In-place operations are traced, and run here; our server does not allow them."""

    def in_place(logprobs: torch.Tensor) -> Any:
        doubled = logprobs.clone()
        doubled.mul_(2)
        return doubled.sum(), {}

    creating = service.create_custom_loss(in_place, {"logprobs": 1})
    if "not offered" in request.node.name:
        run = service.create_lora_training_client(MODEL, rank=4, seed=7)
        passing = run.forward_backward_custom(data_for({"logprobs": 1}), creating.result(SECONDS))
        assert passing.result(SECONDS).metrics["loss:sum"] < 0
        return
    with pytest.raises(RequestFailedError, match=r"'mul_' is not on the allow-list.*doubled\.mul_\(2\)"):
        creating.result(SECONDS)


def test_a_loss_that_does_not_fit_its_data(service: ServiceClient) -> None:
    def stretched(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
        return (logprobs * weights[:2]).sum(), {}

    ranks = {"logprobs": 1, "weights": 1}
    handle = service.create_custom_loss(stretched, ranks).result(SECONDS)  # type: ignore[arg-type]
    run = service.create_lora_training_client(MODEL, rank=4, seed=7)
    with pytest.raises((InvalidInputError, RequestFailedError), match=r"weights\[:2\]"):
        run.forward_backward_custom(data_for(ranks), handle).result(SECONDS)
