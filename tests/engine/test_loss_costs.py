"""The costs of an uploaded loss's operations: every one has a class, and costs follow what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinkex.engine.torch import loss_graph_costs as costs
from tinkex.engine.torch import loss_graph_ops as ops

pytestmark = pytest.mark.slow

N = 1 << 18


def test_every_operation_of_the_allow_list_has_one_cost_class() -> None:
    allowed = {name.rpartition(".")[2] for name in (*ops.NAMED, *ops.METHODS)}
    classed = [name for names in costs.CLASSES.values() for name in names.split()]
    assert sorted(classed) == sorted(allowed)


def test_every_name_of_the_allow_list_finds_its_cost() -> None:
    number = torch.empty((), device="meta")
    for function in (*ops.FUNCTIONS.values(), *ops.METHODS.values()):
        if function in (torch.norm, torch.Tensor.norm):
            continue
        assert costs.cost(function, (number,), {}, number) >= costs.NODE


EXPENSIVE: list[tuple[str, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = [
    ("norm", (300, 300), (), {"p": "nuc"}),
    ("norm", (900, 40), (), {"p": "nuc"}),
    ("norm", (5000, 3, 3), (), {"p": "nuc", "dim": (1, 2)}),
    ("norm", (N,), (), {"p": 3.3}),
    ("sort", (N,), (), {}),
    ("sort", (512, 512), (0,), {}),
    ("topk", (N,), (N // 2,), {}),
    ("median", (N,), (), {}),
    ("quantile", (N,), (0.3,), {}),
    ("cumsum", (N,), (0,), {}),
    ("cumprod", (N,), (0,), {}),
    ("cummax", (N,), (0,), {}),
    ("logcumsumexp", (N,), (0,), {}),
    ("diff", (N,), (20,), {}),
    ("roll", (N,), ((1,) * 20, (0,) * 20), {}),
    ("pow", (N,), (2.7,), {}),
    ("exp", (N,), (), {}),
    ("asinh", (N,), (), {}),
    ("prod", (N,), (), {}),
    ("unbind", (2000,), (), {}),
    ("logsumexp", (N,), (0,), {}),
    ("take", (N,), (torch.arange(N) * 7919 % N,), {}),
    ("outer", (512,), (torch.ones(512),), {}),
    ("matmul", (512, 512), (torch.ones(512, 512),), {}),
    ("bmm", (16, 128, 128), (torch.ones(16, 128, 128),), {}),
]


def seconds(run: Callable[[], Any]) -> float:
    """The least of three, on one thread."""
    threads, taken = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(3):
            started = time.thread_time()
            run()
            taken.append(time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return min(taken)


@pytest.mark.parametrize(("name", "shape", "args", "kwargs"), EXPENSIVE, ids=lambda v: str(v)[:20])
def test_a_cost_is_near_the_measured_time(name: str, shape: tuple[int, ...], args: Any, kwargs: Any) -> None:
    """In nanoseconds: never much below what forward and backward take, and not absurdly above."""
    values = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
    function = getattr(torch, name)

    def run() -> Any:
        leaf = values.clone().requires_grad_()
        result = function(leaf, *args, **kwargs)
        made = [t for t in costs.tensors(result) if t.is_floating_point()]
        torch.autograd.grad(made, leaf, [torch.ones_like(t) for t in made])
        return result

    cost = costs.cost(function, (values, *args), kwargs, run())
    taken = seconds(run) * 1e9
    assert taken < 4 * cost, f"{name} takes {taken:.0f} ns and costs {cost}"
    assert cost < 100 * taken, f"{name} costs {cost} and takes {taken:.0f} ns"


def test_selecting_counts_its_worst_case() -> None:
    row = torch.empty(1 << 16, device="meta")
    one = costs.cost(torch.kthvalue, (row, 5), {}, torch.kthvalue(row, 5))
    two = costs.cost(torch.kthvalue, (row.expand(2, -1), 5), {}, torch.kthvalue(row.expand(2, -1), 5))
    assert one > len(row) ** 2 // 8
    assert two < 3 * one  # by the row, not by the whole
