"""A real `tinkex serve` whose tenant uploads losses that take minutes: refused, ended, quarantined, deleted.

Beside it another tenant trains, whose steps take seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.served import MODEL, Serve
from tests.service.harness import datum
from tinkex import (
    AdamParams,
    Datum,
    NotFoundError,
    RequestFailedError,
    ServiceClient,
    TinkerError,
    TrainingClient,
)
from tinkex.client.custom_loss import LossHandle

pytestmark = pytest.mark.slow

ADAM = AdamParams(learning_rate=1e-2)
LONG = [datum(seed, length=250) for seed in range(160)]
SECONDS = 20.0  # for what takes a second or less on an idle machine, and minutes if a loss holds the engine


def decompositions(repeats: int) -> Callable[[Any], Any]:
    """A loss of six singular value decompositions, of matrices of 250 × `repeats` rows."""

    def loss(logprobs: Any) -> Any:
        square = (logprobs.unsqueeze(0) * logprobs.unsqueeze(1)).repeat(repeats, repeats)
        total = square.norm(p="nuc")
        for _ in range(5):
            square = square * 1.01
            total = total + square.norm(p="nuc")
        return total, {}

    return loss


def cheap(logprobs: Any) -> Any:
    return (logprobs.exp() * logprobs).sum(), {}


class Tenant:
    def __init__(self, url: str, key: str) -> None:
        self.service = ServiceClient(base_url=url, api_key=key)
        self.run = self.create()
        self.session = self.run.model_id.split(":")[0]

    def create(self) -> TrainingClient:
        return self.service.create_lora_training_client(MODEL, rank=4, seed=3)

    def upload(self, loss: Callable[[Any], Any]) -> LossHandle:
        return self.service.create_custom_loss(loss, {"logprobs": 1}).result(60)

    def step(self, data: list[Datum] | None = None) -> float:
        """A pass and its step: how long they took."""
        began = time.monotonic()
        passing = self.run.forward_backward(data or [datum(1)], "cross_entropy")
        self.run.optim_step(ADAM).result(60)
        passing.result(60)
        return time.monotonic() - began


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    server = Serve(tmp_path_factory.mktemp("served"))
    yield server
    server.kill()


@pytest.fixture
def tenants(serve: Serve) -> Iterator[tuple[Tenant, Tenant]]:
    hostile, other = Tenant(serve.url, "tml-hostile"), Tenant(serve.url, "tml-other")
    other.step()
    yield hostile, other
    for tenant in (hostile, other):
        with contextlib.suppress(NotFoundError):  # it was deleted
            tenant.service.close().result(10)


def begun(serve: Serve, run: str) -> int:
    """How often the journal says that a pass of the run was begun."""
    return sum(file.read_bytes().count(b'"begin"') for file in serve.journal(run).glob("requests*"))


def wait_until_begun(serve: Serve, run: str, before: int = 0) -> None:
    end = time.monotonic() + 60
    while begun(serve, run) <= before:
        assert time.monotonic() < end, "the pass was not begun"
        time.sleep(0.05)


def test_a_loss_that_takes_minutes_is_refused_at_once(tenants: tuple[Tenant, Tenant]) -> None:
    hostile, other = tenants
    loss = hostile.upload(decompositions(10))
    promise, began = hostile.run.forward_backward_custom(LONG[:1], loss), time.monotonic()
    assert other.step() < SECONDS
    with pytest.raises(RequestFailedError, match=r"'norm.*too costly: .* allowed: 1073741824") as failed:
        promise.result(60)
    assert time.monotonic() - began < SECONDS
    assert failed.value.category == "user"


def test_others_train_beside_the_costliest_loss_and_its_session_can_be_deleted(
    tenants: tuple[Tenant, Tenant], serve: Serve
) -> None:
    hostile, other = tenants
    promise = hostile.run.forward_backward_custom(LONG, hostile.upload(decompositions(1)))
    step = hostile.run.optim_step(ADAM)
    wait_until_begun(serve, hostile.run.model_id)
    assert max(other.step() for _ in range(3)) < SECONDS
    assert not promise.done()
    began = time.monotonic()
    hostile.service.create_rest_client().delete_session(hostile.session).result(60)
    assert time.monotonic() - began < SECONDS
    assert not serve.journal(hostile.run.model_id).exists()
    for lost in (promise, step):
        with pytest.raises(TinkerError):
            lost.result(60)
    assert other.step() < SECONDS


def test_a_terminated_server_ends_in_time_and_does_not_blame_the_pass(
    tenants: tuple[Tenant, Tenant], serve: Serve
) -> None:
    hostile, other = tenants
    promise = hostile.run.forward_backward_custom(LONG, hostile.upload(decompositions(1)))
    for _ in range(3):
        wait_until_begun(serve, hostile.run.model_id, begun(serve, hostile.run.model_id))
        serve.terminate(SECONDS)
        serve.start()
    wait_until_begun(serve, hostile.run.model_id, begun(serve, hostile.run.model_id))
    assert other.step() < SECONDS  # it was not answered with a failure, and is computed again
    assert not promise.done()
    hostile.service.create_rest_client().delete_session(hostile.session).result(60)


def test_a_pass_that_killed_the_server_twice_is_quarantined(
    tenants: tuple[Tenant, Tenant], serve: Serve
) -> None:
    hostile, other = tenants
    finished = other.run.forward_backward_custom([datum(2)], other.upload(cheap)).result(60)
    promise = hostile.run.forward_backward_custom(LONG, hostile.upload(decompositions(1)))
    step = hostile.run.optim_step(ADAM)
    for _ in range(2):
        wait_until_begun(serve, hostile.run.model_id, begun(serve, hostile.run.model_id))
        serve.kill()
        serve.start()
    with pytest.raises(RequestFailedError, match="ended 2 times while it computed this pass") as failed:
        promise.result(60)
    assert failed.value.category == "user"
    with pytest.raises(RequestFailedError, match="no step was taken"):
        step.result(60)
    hostile.step()  # its run goes on

    # The other tenant's pass, which was finished, counts in its step as if nothing had happened.
    other.run.optim_step(ADAM).result(60)
    after = other.run.forward([datum(2)], "cross_entropy").result(60)
    twin = Tenant(serve.url, "tml-other")
    twin.step()
    again = twin.run.forward_backward_custom([datum(2)], twin.upload(cheap)).result(60)
    twin.run.optim_step(ADAM).result(60)
    undisturbed = twin.run.forward([datum(2)], "cross_entropy").result(60)
    twin.service.close().result(10)
    assert again.metrics == finished.metrics
    one, two = (got.loss_fn_outputs[0]["logprobs"].to_numpy() for got in (after, undisturbed))
    assert one.tobytes() == two.tobytes()
