"""Losses in numpy: their gradients are torch's, and what has no gradient is refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.conftest import datum
from tinkex import InvalidInputError, autograd
from tinkex import regularizers as reg

# The same in numpy and in torch: x and y of shape [4, 3], z of shape [3], all above zero.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add, subtract": (lambda x, y, z: 2 + x - y - z + 1, lambda x, y, z: 2 + x - y - z + 1),
    "multiply, divide": (lambda x, y, z: 3 * x * y / z, lambda x, y, z: 3 * x * y / z),
    "divided numbers": (lambda x, y, z: 1 / z - x, lambda x, y, z: 1 / z - x),
    "power": (lambda x, y, z: x**y + z**3 + 2**x, lambda x, y, z: x**y + z**3 + 2**x),
    "unary": (lambda x, y, z: abs(-x) + (+y), lambda x, y, z: x + y),
    "absolute": (lambda x, y, z: np.abs(x - y), lambda x, y, z: (x - y).abs()),
    "minimum, maximum": (
        lambda x, y, z: np.minimum(x, y) + np.maximum(y, z),
        lambda x, y, z: torch.minimum(x, y) + torch.maximum(y, z),
    ),
    "ties": (lambda x, y, z: np.minimum(x, x * 1) * y, lambda x, y, z: torch.minimum(x, x * 1) * y),
    "exp, log": (
        lambda x, y, z: np.exp(-x) + np.log(y) * np.expm1(z) + np.log1p(x),
        lambda x, y, z: torch.exp(-x) + torch.log(y) * torch.expm1(z) + torch.log1p(x),
    ),
    "sqrt, square, tanh": (
        lambda x, y, z: np.sqrt(x) * np.square(y) + np.tanh(z),
        lambda x, y, z: torch.sqrt(x) * torch.square(y) + torch.tanh(z),
    ),
    "softplus": (
        lambda x, y, z: np.logaddexp(0, x - y) + np.logaddexp(z, y),
        lambda x, y, z: torch.nn.functional.softplus(x - y) + torch.logaddexp(z, y),
    ),
    "where": (
        lambda x, y, z: np.where(x > y, x * y, z) + np.where(y > 1, 0.0, y),
        lambda x, y, z: torch.where(x > y, x * y, z) + torch.where(y > 1, 0.0, y),
    ),
    "clip": (lambda x, y, z: np.clip(x, 0.5, 1.5) * y, lambda x, y, z: torch.clamp(x, 0.5, 1.5) * y),
    "sum": (
        lambda x, y, z: x.sum(axis=0) * z + np.sum(y, axis=0) + x.sum(1, keepdims=True) + np.sum(z),
        lambda x, y, z: x.sum(0) * z + y.sum(0) + x.sum(1, keepdim=True) + z.sum(),
    ),
    "mean": (
        lambda x, y, z: x.mean() * y + np.mean(y, axis=1, keepdims=True) * z,
        lambda x, y, z: x.mean() * y + y.mean(1, keepdim=True) * z,
    ),
    "indices": (
        lambda x, y, z: x[1:3] * y[np.array([0, 0])] + z[0] + x[:2][:, None][0],
        lambda x, y, z: x[1:3] * y[[0, 0]] + z[0] + x[:2][:, None][0],
    ),
    "stack, concatenate": (
        lambda x, y, z: np.stack([z, z * 2, np.ones(3)]) * np.concatenate([x, y])[2:5],
        lambda x, y, z: torch.stack([z, z * 2, torch.ones(3)]) * torch.cat([x, y])[2:5],
    ),
    "no gradient": (lambda x, y, z: x.value * y + np.sign(z), lambda x, y, z: x.detach() * y + torch.sign(z)),
    "in place": (lambda x, y, z: accumulated(x, y, z), lambda x, y, z: ((x + z) * 2) * (x * y)),
}


def accumulated(x: Any, y: Any, z: Any) -> Any:
    """What `+=` made anew must not reach what was made of the old."""
    total, before = 0.0, x * 1.0
    kept = before * y
    before += z
    total += before
    total *= 2.0
    return total * kept


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_gradients_are_torchs(name: str, seed: int) -> None:
    ours, theirs = CASES[name]
    dice = np.random.default_rng(seed)
    given_arrays = [0.05 + 2 * dice.random(shape) for shape in ((4, 3), (4, 3), (3,))]
    tracked = [autograd.Tracked(x) for x in given_arrays]
    leaves = [torch.tensor(x, requires_grad=True) for x in given_arrays]
    out = theirs(*leaves)
    spread = dice.normal(size=tuple(out.shape))
    (out * torch.tensor(spread)).sum().backward()
    found = ours(*tracked)
    np.testing.assert_allclose(found.value, out.detach().numpy(), rtol=1e-12)
    for slope, leaf in zip(autograd.gradients((found * spread).sum(), tracked), leaves, strict=True):
        right = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        np.testing.assert_allclose(slope, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: np.sort(x).sum(), "through np.sort. Known: absolute, add, .*where"),
        (lambda x: np.sin(x).sum(), "through np.sin"),
        (lambda x: np.maximum.reduce(x), "through np.maximum.reduce"),
        (lambda x: np.add(x, 1, out=x).sum(), "through np.add"),
        (lambda x: np.asarray(x).sum(), "into a plain array"),
        (lambda x: float(x[0]), r"through float\(\)"),
        (lambda x: x, "one number of the logprobs"),
        (lambda x: 1.0, "one number of the logprobs, got 1.0"),
    ],
)
def test_what_has_no_gradient_is_refused(wrong: Any, words: str) -> None:
    """Never a gradient that silently lacks a part."""
    loss = autograd.loss(lambda data, logprobs: (wrong(logprobs[0]), {}))
    with pytest.raises(InvalidInputError, match=words):
        loss.value_and_gradients([datum(3)], [np.zeros(3)])


def test_a_loss_returns_a_value_and_metrics() -> None:
    with pytest.raises(InvalidInputError, match=r"returns \(loss, metrics\); this one returned Tracked"):
        autograd.loss(lambda data, xs: xs[0].sum()).value_and_gradients([datum(3)], [np.zeros(3)])  # type: ignore
    told = autograd.loss(lambda data, xs: (xs[0].sum(), {"seen": xs[0].mean(), "n": 3}))
    assert told.value_and_gradients([datum(3)], [np.full(3, -2.0)])[2] == {"seen": -2.0, "n": 3.0}


def test_a_long_loop_is_no_deep_recursion() -> None:
    def slow(data: Any, logprobs: Any) -> Any:
        total = logprobs[0].sum()
        for _ in range(5000):
            total = total + 1.0
        return total, {}

    value, (slope,), _ = autograd.loss(slow).value_and_gradients([datum(3)], [np.zeros(3)])
    assert (value, slope.tolist()) == (5000.0, [1.0, 1.0, 1.0])


def test_it_can_be_regularized_and_be_a_regularizer() -> None:
    cubes = autograd.loss(lambda data, xs: (sum((x**3).sum() for x in xs), {}))
    quarts = reg.from_numpy("quarts", lambda data, xs: sum((x**4).sum() for x in xs))
    x = np.array([-1.0, -2.0], np.float32)
    value, (slope,), metrics = reg.regularized(cubes, [0.1 * quarts]).value_and_gradients([datum(2)], [x])
    assert value == pytest.approx(-9 + 1.7)
    np.testing.assert_allclose(slope, 3 * x**2 + 0.4 * x**3)
    assert metrics["reg/quarts/value"] == pytest.approx(17.0)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from tests.client.conftest import datum
from tests.stub import Stub
from tinkex import ServiceClient, autograd
with Stub() as stub, ServiceClient(base_url=stub.url) as service:
    run = service.create_lora_training_client("stub/base")
    loss = autograd.loss(lambda data, xs: (sum((x**2).sum() for x in xs), {"n": len(xs)}))
    output = run.forward_backward_custom([datum(3), datum(2)], loss).result(10)
    print(output.metrics["loss:sum"], output.metrics["n"])
"""


def test_no_torch_is_needed() -> None:
    """The stub's logprobs are all -0.5, so that the loss is 5 · 0.25."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1.25", "2.0"]
