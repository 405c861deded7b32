"""What cannot be traced is refused at the call, with the line of the function and what to write instead."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinkex import InvalidInputError
from tinkex.client.custom_loss import traced

CAPTURED = torch.ones(3)
SOFT = torch.nn.Softplus()
ONE = {"logprobs": 1}


def branches(logprobs: Any) -> Any:
    if logprobs.sum() > 0:  # line
        return logprobs.sum(), {}
    return -logprobs.sum(), {}


def loops(logprobs: Any) -> Any:
    return sum(each for each in logprobs), {}  # line


def counts(logprobs: Any) -> Any:
    return logprobs.sum() / len(logprobs), {}  # line


def converts(logprobs: Any) -> Any:
    return logprobs.sum() * float(logprobs[0]), {}  # line


def leaves(logprobs: Any) -> Any:
    first = logprobs[0].item()  # line
    return logprobs.sum() * first, {}


def assigns(logprobs: Any) -> Any:
    copy = logprobs.clone()
    copy[0] = 0.0  # line
    return copy.sum(), {}


def uses_numpy(logprobs: Any) -> Any:
    return torch.as_tensor(np.exp(logprobs)).sum(), {}  # line


def captures(logprobs: Any) -> Any:
    return (logprobs * CAPTURED).sum(), {}  # line


def makes(logprobs: Any) -> Any:
    zero = torch.zeros(())
    return logprobs.sum() + zero, {}  # line


def calls_module(logprobs: Any) -> Any:
    return SOFT(logprobs).sum(), {}  # line


def no_gradient(logprobs: Any) -> Any:
    with torch.no_grad():
        ratio = logprobs.exp()  # line
    return (ratio * logprobs).sum(), {}


def no_method(logprobs: Any) -> Any:
    return logprobs.frobnicate(), {}  # line


def goes_back(logprobs: Any) -> Any:
    logprobs.sum().backward()  # line
    return logprobs.sum(), {}


def raises(logprobs: Any) -> Any:
    raise KeyError("mine")  # line


def in_helper(logprobs: Any) -> Any:
    return branches(logprobs)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (branches, r"branches on a tensor's value; use torch\.where"),
        (in_helper, r"branches on a tensor's value; use torch\.where"),
        (loops, "loops over a tensor.*whole-tensor operations"),
        (counts, r"len\(\).*\.shape\[0\]"),
        (converts, r"float\(\) of a tensor needs its value"),
        (leaves, r"\.item\(\), which needs the values; keep it a tensor"),
        (assigns, r"in place; use torch\.where or masked_fill"),
        (uses_numpy, "numpy needs the tensor's values"),
        (captures, "not one of its inputs; put it into loss_fn_inputs"),
        (makes, r"make it from an input \(torch\.zeros_like"),
        (calls_module, r"the module Softplus; use a function of torch\.nn\.functional"),
        (no_gradient, r"no_grad\(\) leaves no mark in a graph; use \.detach\(\)"),
        (no_method, "no method 'frobnicate'"),
        (goes_back, r"\.backward\(\).*return the loss"),
        (raises, "mine"),
    ],
)
def test_what_cannot_be_traced_is_named_with_its_line(fn: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        traced(fn, ONE)  # type: ignore[arg-type]
    source = (branches if fn is in_helper else fn).__code__
    lines = Path(source.co_filename).read_text().splitlines()
    number = next(n for n in range(source.co_firstlineno, len(lines) + 1) if "# line" in lines[n - 1])
    assert f"test_loss_tracing.py:{number} ({lines[number - 1].strip()})" in str(caught.value)
    assert "give forward_backward_custom a function of (data, logprobs)" in str(caught.value)


def test_a_numpy_number_is_an_ordinary_one() -> None:
    def scaled(logprobs: Any) -> Any:
        return (logprobs[: np.int64(4)] * np.float32(0.5)).sum(), {}

    nodes = traced(scaled, ONE).wire.nodes  # type: ignore[arg-type]
    assert nodes[1].args[1] == {"slice": [None, 4, None]}
    assert nodes[2].args[1] == 0.5


def extra(logprobs: Any, weights: Any) -> Any:
    return (logprobs * weights).sum(), {}


@pytest.mark.parametrize(
    ("fn", "ranks", "words"),
    [
        (lambda x: (x.sum(), {}), {"x": 1}, r"must take logprobs first.*it takes \(x\)"),
        (lambda logprobs, W: (W.sum(), {}), {"logprobs": 1, "W": 1}, "'W' of <lambda> must be small letters"),
        (lambda logprobs, b=1: (b, {}), {"logprobs": 1, "b": 0}, "'b' of <lambda> has a default"),
        (lambda logprobs, *a: (a, {}), {"logprobs": 1, "a": 0}, "'a' of <lambda> must be a plain parameter"),
        (extra, {"logprobs": 1}, r"a rank for each of logprobs, weights, got \['logprobs'\]"),
        (extra, {"logprobs": 0, "weights": 1}, r"\['logprobs'\] is 0; allowed: \(1, 2\)"),
        (extra, {"logprobs": 1, "weights": 3}, r"\['weights'\] is 3; allowed: \(0, 1, 2\)"),
        (functools.partial(extra), {}, r"takes a function \(def or lambda\), got partial"),
        (3, {}, "got int"),
        (lambda logprobs: logprobs.sum(), ONE, r"must return \(loss, metrics\)"),
        (lambda logprobs: (logprobs.sum(), None), ONE, r"must return \(loss, metrics\)"),
        (lambda logprobs: (1.0, {}), ONE, "its loss as a tensor, got 1.0"),
        (lambda logprobs: (logprobs.sum(), {"x": logprobs.sum()}), ONE, "custom/NAME:sum"),
        (lambda logprobs: (logprobs.sum(), {"custom/x:sum": 1.0}), ONE, "must be a tensor, got 1.0"),
    ],
)
def test_what_is_no_loss_is_refused(fn: Any, ranks: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        traced(fn, ranks)


def test_too_many_inputs() -> None:
    names = [f"a{i}" for i in range(16)]
    scope: dict[str, Any] = {}
    exec(f"def many(logprobs, {', '.join(names)}): return logprobs.sum(), {{}}", scope)
    with pytest.raises(InvalidInputError, match="takes 17 inputs, at most 16"):
        traced(scope["many"], {"logprobs": 1, **dict.fromkeys(names, 1)})


def test_the_key_is_of_what_is_computed() -> None:
    """Not of its name."""

    def one(logprobs: Any) -> Any:
        return logprobs.sum(), {}

    def other(logprobs: Any) -> Any:
        return logprobs.sum(), {}

    def mean(logprobs: Any) -> Any:
        return logprobs.mean(), {}

    keys = [traced(fn, ONE).key for fn in (one, other, mean)]  # type: ignore[arg-type]
    assert keys[0] == keys[1] != keys[2]
    assert traced(one, {"logprobs": 2}).key != keys[0]


def test_tracing_in_threads() -> None:
    """torch.fx patches the process while it traces."""
    import concurrent.futures
    import math

    def one(logprobs: Any) -> Any:
        return logprobs.sum() * math.sqrt(logprobs.shape[0]), {}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        keys = {handle.key for handle in pool.map(lambda _: traced(one, ONE), range(12))}  # type: ignore[arg-type]
    assert len(keys) == 1
    assert math.sqrt(4.0) == 2.0
