"""Custom losses: their gradients, the thread they run in, and the calls they may make."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.client.conftest import PARAMS, PROMPT, close, datum
from tests.stub import Stub
from tinkex import ForwardBackwardOutput, InvalidInputError, ModelInput, ServiceClient, Timeouts, TinkerError
from tinkex.client import custom_loss
from tinkex.types import TensorData


def squares(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return sum((each**2).sum() for each in logprobs), {"mine": 3}  # type: ignore[return-value]


def test_the_weights_are_the_gradient_of_the_loss() -> None:
    """Against the derivative done by hand: d/dx of Σx² is 2x, and the weights are its negative."""
    values = [np.array([-0.5, -2.0], np.float32), np.array([-1.5], np.float32)]
    outputs = [{"logprobs": TensorData.from_numpy(value)} for value in values]
    forward = ForwardBackwardOutput("tensors", outputs, {})
    gradients = custom_loss.differentiate(squares, [datum(2), datum(1)], forward)
    for weights, value in zip(gradients.weights, values, strict=True):
        np.testing.assert_allclose(weights, -2 * value)
    assert gradients.loss == pytest.approx(0.25 + 4 + 2.25)
    assert gradients.metrics == {"mine": 3.0}


def test_a_custom_pass_is_a_forward_and_a_backward_in_one_turn(stub: Stub, run: Any) -> None:
    future = run.forward_backward_custom([datum(3), datum(2)], squares)
    step = run.optim_step()
    output = future.result(20)
    step.result(20)
    assert [op for _, _, op in stub.executed] == ["forward", "forward_backward", "optim_step"]
    assert output.metrics["loss:sum"] == pytest.approx(5 * 0.25)
    assert output.metrics["surrogate_loss:sum"] == 1.5
    assert output.metrics["mine"] == 3


def test_what_was_given_back_before_is_not_changed() -> None:
    """The user's loss and metrics go into a result of its own; the backward pass's stays as it was."""
    backward = ForwardBackwardOutput("tensors", [], {"loss:sum": 1.5, "n:sum": 2.0})
    gradients = custom_loss.Gradients([], 7.0, {"mine": 3.0})
    output = custom_loss.finished(backward, gradients)
    assert output.metrics == {"loss:sum": 7.0, "surrogate_loss:sum": 1.5, "n:sum": 2.0, "mine": 3.0}
    assert backward.metrics == {"loss:sum": 1.5, "n:sum": 2.0}
    with pytest.raises(AttributeError):
        backward.metrics = {}  # type: ignore[misc]


def test_async_and_the_ignored_argument(stub: Stub, run: Any) -> None:
    async def scenario() -> Any:
        return await (await run.forward_backward_custom_async([datum()], squares, loss_type_input="logprobs"))

    assert asyncio.run(scenario()).metrics["mine"] == 3


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda d, l: l[0].sum(), "returns \\(loss, metrics\\); this one returned Tensor"),
        (lambda d, l: (l[0].sum(), [1, 2]), "metrics must be a dict of numbers, got list"),
        (lambda d, l: (l[0].sum(), "ab"), "metrics must be a dict of numbers, got str"),
        (lambda d, l: (l[0].sum(), {"a": "high"}), r"metrics\['a'\] must be a number, got 'high'"),
        (lambda d, l: (l[0].sum(), {"a": None}), r"metrics\['a'\] must be a number, got None"),
        (lambda d, l: (l[0].sum(), {"a": l[0]}), r"metrics\['a'\] must be a number, got tensor"),
        (lambda d, l: (l[0], {}), "a tensor with one element"),
        (lambda d, l: (1.0, {}), "a tensor with one element"),
        (lambda d, l: (l[0].sum() * float("nan"), {}), "not a finite number"),
        (lambda d, l: (torch.sqrt((l[0] * 0).sum()), {}), "gradient that is not finite, for data\\[0\\]"),
    ],
)
def test_what_a_loss_returns_is_checked(stub: Stub, run: Any, loss: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        run.forward_backward_custom([datum()], loss).result(10)
    run.forward_backward([datum()], "cross_entropy").result(20)
    run.optim_step().result(20)
    assert [op for _, _, op in stub.executed] == ["forward", "forward_backward", "optim_step"]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_a_loss_that_raises_fails_its_pass_alone(stub: Stub, run: Any, error: BaseException) -> None:
    def loss(data: Any, logprobs: Any) -> Any:
        raise error

    with pytest.raises(ValueError if isinstance(error, ValueError) else TinkerError):
        run.forward_backward_custom([datum()], loss).result(10)
    run.optim_step().result(20)


def test_a_loss_runs_beside_the_loop(stub: Stub) -> None:
    """Hearts beat and other runs train while it computes."""
    service = ServiceClient(base_url=stub.url, timeouts=Timeouts(heartbeat_interval=0.05))
    run, other = (service.create_lora_training_client("stub/base") for _ in range(2))
    inside, release = threading.Event(), threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        inside.set()
        assert release.wait(20)
        return squares(data, logprobs)

    future = run.forward_backward_custom([datum()], slow)
    assert inside.wait(20)
    stub.wait_for("session_heartbeat", stub.count("session_heartbeat") + 3)
    other.forward_backward([datum()], "cross_entropy").result(20)
    assert not future.done()
    release.set()
    future.result(10)
    close(service)


def test_a_loss_may_sample(stub: Stub, run: Any, sampler: Any) -> None:
    """The official client deadlocks."""
    drawn: list[Any] = []

    def loss(data: Any, logprobs: Any) -> Any:
        drawn.append(sampler.sample(PROMPT, 1, PARAMS).result(20))
        drawn.append(run.get_info(timeout=20))
        return squares(data, logprobs)

    run.forward_backward_custom([datum()], loss).result(10)
    assert len(drawn) == 2


def test_many_losses_may_sample_big_prompts_at_once(stub: Stub, service: ServiceClient, sampler: Any) -> None:
    """Big bodies need a worker thread: losses that wait for them must not occupy them all."""
    prompt = ModelInput.from_ints(np.zeros(60_000, np.int64))
    together = threading.Barrier(6)

    def loss(data: Any, logprobs: Any) -> Any:
        together.wait(20)
        sampler.sample(prompt, 1, PARAMS).result(10)
        return squares(data, logprobs)

    runs = [service.create_lora_training_client("stub/base") for _ in range(6)]
    for future in [run.forward_backward_custom([datum()], loss) for run in runs]:
        future.result(20)


def test_a_loss_that_calls_its_own_run_is_told(stub: Stub, run: Any) -> None:
    """It could only be sent after the pass that waits for it."""

    def loss(data: Any, logprobs: Any) -> Any:
        run.forward([datum()], "cross_entropy").result()
        return squares(data, logprobs)

    with pytest.raises(TinkerError, match="forward was called inside a custom loss of the same run"):
        run.forward_backward_custom([datum()], loss).result(10)
    run.optim_step().result(20)


def test_a_loss_may_use_another_run(stub: Stub, service: ServiceClient, run: Any) -> None:
    other = service.create_lora_training_client("stub/base")

    def loss(data: Any, logprobs: Any) -> Any:
        other.forward_backward_custom([datum()], squares).result(20)
        return squares(data, logprobs)

    run.forward_backward_custom([datum()], loss).result(10)


def test_a_cancelled_custom_pass_sends_no_gradient(stub: Stub, run: Any) -> None:
    inside, release = threading.Event(), threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        inside.set()
        assert release.wait(20)
        return squares(data, logprobs)

    future = run.forward_backward_custom([datum()], slow)
    step = run.optim_step()
    assert inside.wait(20)
    assert future.cancel(), "the gradients have not been sent"
    step.result(20)  # at once: a loss that nobody waits for does not hold the run up
    release.set()
    time.sleep(0.1)
    assert [op for _, _, op in stub.executed] == ["forward", "optim_step"]


def test_a_server_without_logprobs_is_said(stub: Stub, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"loss_fn_output_type": "x", "loss_fn_outputs": [{}], "metrics": {}}
    from tests.stub import status

    stub.script("retrieve_future", status(200, body=empty))
    with pytest.raises(TinkerError, match=r"no logprobs of shape \[4\] for data\[0\]"):
        run.forward_backward_custom([datum()], squares).result(10)


# -- traced losses ---------------------------------------------------------------------------------------


def traced_squares(logprobs: Any, gain: Any) -> Any:
    loss = (logprobs**2 * gain).sum()
    return loss, {"custom/gain:sum": gain.sum(), "custom/loss:mean": loss.detach()}


RANKS: Any = {"logprobs": 1, "gain": 1}


def gaining(*gain: float) -> Any:
    return datum(len(gain), gain=TensorData(np.array(gain, np.float32)))


def test_a_traced_loss_is_uploaded_where_the_server_takes_it() -> None:
    with Stub(custom_loss_server_side=True) as stub:
        service = ServiceClient(base_url=stub.url)
        run = service.create_lora_training_client("stub/base")
        handle = service.create_custom_loss(traced_squares, RANKS).result(10)
        assert (handle.name, handle.loss_id, handle.input_names) == ("traced_squares", "loss-0", ("gain",))
        run.forward_backward_custom([gaining(1, 2), gaining(3, 4, 5)], handle).result(10)
        run.optim_step().result(20)
        assert [op for _, _, op in stub.executed] == ["forward_backward", "optim_step"]
        sent = next(request for request in stub.requests if request.op == "forward_backward")
        assert b"loss-0" in sent.body
        assert b"loss_id" in sent.body
        close(service)


def test_a_traced_loss_runs_here_where_not(stub: Stub, service: ServiceClient, run: Any) -> None:
    """All of the stub's logprobs are -0.5, so the loss is a quarter of the gains."""
    handle = service.create_custom_loss(traced_squares, RANKS).result(10)
    assert handle.loss_id is None
    output = run.forward_backward_custom([gaining(1, 2), gaining(3, 4, 5)], handle).result(10)
    assert [op for _, _, op in stub.executed] == ["forward", "forward_backward"]
    assert stub.count("create_custom_loss") == 0
    assert output.metrics["loss:sum"] == pytest.approx(15 / 4)
    assert output.metrics["custom/gain:sum"] == pytest.approx(15)
    assert output.metrics["custom/loss:mean"] == pytest.approx(15 / 8)


def test_the_same_loss_is_created_once() -> None:
    """The official client refuses the second; here it is the first again."""
    with Stub(custom_loss_server_side=True) as stub:
        service = ServiceClient(base_url=stub.url)
        handles = [service.create_custom_loss(traced_squares, RANKS).result(10) for _ in range(2)]
        assert handles[0] is handles[1]
        assert stub.count("create_custom_loss") == 1
        close(service)


def test_a_loss_belongs_to_its_session(stub: Stub, service: ServiceClient, run: Any) -> None:
    other = ServiceClient(base_url=stub.url)
    handle = other.create_custom_loss(traced_squares, RANKS).result(10)
    with pytest.raises(InvalidInputError, match=f"created in session {handle.session_id}, but this run is"):
        run.forward_backward_custom([gaining(1)], handle)
    close(other)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (datum(3), r"data\[1\]\.loss_fn_inputs has no 'gain'"),
        (datum(3, gain=TensorData(np.ones((3, 1), np.float32))), r"has shape \[3, 1\], but the loss"),
        (datum(3, gain=TensorData.from_numpy(np.array(1.0, np.float32))), r"has shape \[\]"),
    ],
)
def test_datums_that_a_loss_cannot_read_are_refused_at_the_call(
    stub: Stub, service: ServiceClient, run: Any, given: Any, words: str
) -> None:
    handle = service.create_custom_loss(traced_squares, RANKS).result(10)
    with pytest.raises(InvalidInputError, match=words):
        run.forward_backward_custom([gaining(1, 2, 3), given], handle)
    assert stub.executed == []


def test_an_array_loss_needs_no_torch(stub: Stub, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Squares:
        def value_and_gradients(self, data: Any, logprobs: Any) -> Any:
            return sum(float((x**2).sum()) for x in logprobs), [2 * x for x in logprobs], {"n": len(data)}

    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    output = run.forward_backward_custom([datum(3), datum(2)], Squares()).result(10)
    assert output.metrics["loss:sum"] == pytest.approx(5 / 4)
    assert output.metrics["n"] == 2


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ([np.zeros(2)], r"a gradient of shape \[2\] for data\[0\], whose logprobs have \[3\]"),
        ([np.full(3, np.inf)], r"not finite, for data\[0\]"),
    ],
)
def test_an_array_loss_is_checked(stub: Stub, run: Any, gradients: Any, words: str) -> None:
    class Wrong:
        def value_and_gradients(self, data: Any, logprobs: Any) -> Any:
            return 1.0, gradients, {}

    with pytest.raises(InvalidInputError, match=words):
        run.forward_backward_custom([datum(3)], Wrong()).result(10)


def test_what_is_no_loss_at_all_is_refused(stub: Stub, run: Any) -> None:
    with pytest.raises(InvalidInputError, match="a function, a LossHandle or an ArrayLoss, got int"):
        run.forward_backward_custom([datum(3)], 3)


def test_the_example_of_the_docs_works(service: ServiceClient, run: Any) -> None:
    """Ratios of e^-0.5 / e^-1 and 1: one of two is clipped."""
    page = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    scope: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    function, _, _ = next(block for block in blocks if "def clipped" in block).partition("\nservice = ")
    exec(function, scope)  # what follows it has a model of its own: tests/test_docs.py
    ranks = {"logprobs": 1, "old_logprobs": 1, "advantages": 1}
    loss = service.create_custom_loss(scope["clipped"], ranks).result(20)
    old = TensorData(np.array([-1.0, -0.5], np.float32))
    data = [datum(2, old_logprobs=old, advantages=TensorData(np.ones(2, np.float32)))]
    passes = [run.forward_backward_custom(data, loss) for _ in range(2)]
    assert [passed.result(20).metrics["custom/clipped:mean"] for passed in passes] == [0.5, 0.5]
