"""Uploaded losses: a graph traced by torch.fx gives what the function gives; anything else is refused."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
import torch.nn.functional as F

from tinkex.engine.protocol import CustomLoss, EngineError
from tinkex.engine.torch.loss_graph import (
    PASS_COST,
    LossClock,
    LossGraph,
    LossInputs,
)
from tinkex.engine.torch.loss_graph_reader import read_loss_graph
from tinkex.types.losses import MAX_NODES
from tinkex.types.tensor import TensorData

Result = tuple[torch.Tensor, dict[str, Any]]


# -- torch.fx to wire form ----------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    match value:
        case torch.fx.Node():
            return {"ref": value.name}
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case list():
            return [encode(item) for item in value]
        case dict():
            return {"dict": {key: encode(item) for key, item in value.items()}}
        case slice():
            return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case _ if value is ...:
            return {"ellipsis": True}
    raise TypeError(value)


def target_name(target: Any) -> str:
    """As official clients name it: after the module that defines it."""
    if isinstance(target, str) or target is getattr:
        return target if isinstance(target, str) else "getattr"
    return f"{target.__module__.replace('_operator', 'operator')}.{target.__name__}"


def trace(loss: Callable[..., Result]) -> CustomLoss:
    graph = torch.fx.symbolic_trace(loss).graph
    nodes: list[dict[str, Any]] = []
    for node in graph.nodes:
        args = [encode(arg) for arg in node.args] if node.op != "placeholder" else []
        kwargs = {key: encode(value) for key, value in node.kwargs.items()}
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": target_name(node.target),
                "args": args,
                "kwargs": kwargs,
            }
        )
    return CustomLoss(tuple(n["target"] for n in nodes if n["op"] == "placeholder"), tuple(nodes))


# -- losses as people write them -----------------------------------------------------------------------


def cross_entropy(logprobs, weights):
    return -(logprobs * weights).sum(), {"custom/mean_lp:mean": logprobs.mean()}


def ppo_with_kl(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.min(ratio * advantages, clipped * advantages).sum()
    kl = (old - logprobs).mean()
    return loss + 0.1 * kl.detach(), {
        "custom/kl:mean": kl,
        "custom/clipped:sum": (ratio != clipped).float().sum(),
    }


def masked_and_indexed(logprobs, weights):
    mask = weights > 0
    chosen = logprobs[mask]
    tail = logprobs[1:] - logprobs[:-1]
    return -chosen.mean() + 0.5 * tail.pow(2).sum() / logprobs.shape[0], {}


def candidates(logprobs, teacher):
    student = torch.log_softmax(logprobs, dim=-1)
    kl = F.kl_div(student, teacher, reduction="none", log_target=True)
    top = kl.max(dim=1)
    return kl.sum() + top.values.sum() * 0 + top[0].sum(), {
        "custom/rows:sum": torch.ones(logprobs.shape[0]).sum()
    }


def many_operations(logprobs, weights):
    x = torch.where(torch.isfinite(logprobs), logprobs, torch.zeros_like(logprobs))
    x = torch.cat([x, x.flip(0)]).reshape(2, -1).t().contiguous().view(-1, 2)
    y = torch.stack([x[..., 0], x[:, 1]], dim=0).unsqueeze(0).squeeze(0).to(torch.float32)
    y = y + torch.norm(y) + torch.special.expit(y) + F.logsigmoid(y)
    z = torch.logsumexp(y, dim=0) + F.softplus(y).mean(0) + torch.sigmoid(y)[0] + math.log(2.0)
    z = z + y.new_zeros(z.shape[0]) + torch.arange(logprobs.shape[0]).sum() - operator.neg(weights.sum())
    return z.cumsum(0).sum() / max(1, 2) + (z @ z) * 0.01, {"custom/n:sum": z.numel()}


def scalar_input(logprobs, beta):
    return -(logprobs * beta).sum() + F.relu(logprobs + 2).sum(), {}


RNG = np.random.default_rng(0)
CASES: list[tuple[Callable[..., Result], tuple[int, ...], dict[str, np.ndarray]]] = [
    (cross_entropy, (5,), {"weights": RNG.normal(size=5).astype(np.float32)}),
    (
        ppo_with_kl,
        (6,),
        {"old": -RNG.random(6).astype(np.float32), "advantages": RNG.normal(size=6).astype(np.float32)},
    ),
    (masked_and_indexed, (7,), {"weights": (np.arange(7) % 3).astype(np.float32)}),
    (candidates, (4, 3), {"teacher": np.log(RNG.dirichlet(np.ones(3), 4)).astype(np.float32)}),
    (many_operations, (8,), {"weights": RNG.normal(size=8).astype(np.float32)}),
    (scalar_input, (5,), {"beta": np.float32(0.3).reshape(())}),
]


def checked(graph: LossGraph, shape: tuple[int, ...], inputs: dict[str, np.ndarray]) -> None:
    graph.check(shape, inputs)


@pytest.mark.parametrize(("loss", "shape", "inputs"), CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_traced_loss_gives_what_the_function_gives(loss, shape, inputs) -> None:
    custom = trace(loss)
    assert custom.inputs == ("logprobs", *inputs)
    graph = read_loss_graph(custom)
    checked(graph, shape, inputs)
    values = -torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 3
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    got, metrics = graph.run(ours, inputs)
    want, want_metrics = loss(theirs, *(torch.from_numpy(np.array(value)) for value in inputs.values()))
    got.backward()
    want.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert metrics == pytest.approx(
        {key: float(torch.as_tensor(value).detach()) for key, value in want_metrics.items()}
    )


# -- refusals ------------------------------------------------------------------------------------------


def build(*nodes: dict[str, Any], output: Any = None, inputs: tuple[str, ...] = ("logprobs",)) -> CustomLoss:
    """A graph around the given nodes, whose last one (or `output`) is the loss."""
    head = [{"op": "placeholder", "name": name, "target": name, "args": [], "kwargs": {}} for name in inputs]
    loss = {"ref": nodes[-1]["name"] if nodes else "logprobs"}
    args = [{"tuple": [loss, {"dict": {}}]}] if output is None else [output]
    tail = {"op": "output", "name": "output", "target": "output", "args": args, "kwargs": {}}
    return CustomLoss(inputs, (*head, *nodes, tail))


def function(target: str, *args: Any, name: str = "n", **kwargs: Any) -> dict[str, Any]:
    return {"op": "call_function", "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def method(target: str, *args: Any, name: str = "n", **kwargs: Any) -> dict[str, Any]:
    return {"op": "call_method", "name": name, "target": target, "args": list(args), "kwargs": kwargs}


LP = {"ref": "logprobs"}
SUM = method("sum", {"ref": "n"}, name="total")


def refused(custom: CustomLoss, shape: tuple[int, ...] = (4,)) -> str:
    with pytest.raises(EngineError) as caught:
        checked(read_loss_graph(custom), shape, {})
    assert caught.value.category == "user"
    return caught.value.message


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "builtins.eval", "builtins.exec", "builtins.__import__", "torch.load", "torch.save",
        "torch.ops.load_library", "torch.hub.load", "torch.manual_seed", "torch.utils.cpp_extension.load",
        "torch.__init__", "torch.classes.load_library", "operator.attrgetter", "operator.methodcaller",
        "operator.setitem", "operator.call", "math.factorial", "subprocess.run", "", "torch", "torch.nonzero",
        "torch.rand", "torch.einsum", "torch.from_file", "torch.compile", "torch.special.__dict__",
    ],
)  # fmt: skip
def test_functions_that_are_not_on_the_list(target: str) -> None:
    message = refused(build(function(target, LP)))
    assert repr(target) in message
    assert "allow-list" in message


@pytest.mark.parametrize(
    "target",
    [
        "backward", "item", "numpy", "tolist", "__class__", "__getattribute__", "__reduce_ex__", "data_ptr",
        "requires_grad_", "add_", "fill_", "register_hook", "share_memory_", "set_", "storage", "apply_",
        "map_", "cuda", "nonzero", "masked_select", "random_", "resize_", "__setitem__", "grad_fn",
    ],
)  # fmt: skip
def test_methods_that_are_not_on_the_list(target: str) -> None:
    assert repr(target) in refused(build(method(target, LP)))


@pytest.mark.parametrize("attribute", ["__class__", "grad_fn", "data", "__dict__", "_backward_hooks", "grad"])
def test_attributes_that_may_not_be_read(attribute: str) -> None:
    assert "may be read" in refused(build(function("getattr", LP, attribute)))
    assert "may be read" in refused(build(function("builtins.getattr", LP, attribute)))
    assert "may be read" in refused(build(function("builtins.getattr", LP, {"ref": "logprobs"})))


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"op": "get_attr", "name": "n", "target": "x", "args": [], "kwargs": {}}, "get_attr"),
        ({"op": "call_module", "name": "n", "target": "x", "args": [], "kwargs": {}}, "call_module"),
        (function("torch.exp", LP, name="logprobs"), "new name"),
        (function("torch.exp", LP, name="no spaces"), "new name"),
        (function("torch.exp", {"ref": "later"}), "not an argument we know"),
        (function("torch.exp", {"code": "print(1)"}), "not an argument we know"),
        (function("torch.exp", {"ref": "logprobs", "tuple": []}), "no known form"),
        (function("torch.exp", LP, out=LP), "'out'"),
        (function("torch.add", LP, 2**80), "too large"),
        (function("torch.add", LP, "x" * 100), "64 characters"),
        (function("torch.stack", [LP] * 1000), "1000 arguments"),
        (method("to", LP, {"dtype": "complex64"}), "not an argument we know"),
    ],
)
def test_nodes_and_arguments_of_a_wrong_form(node: dict[str, Any], words: str) -> None:
    assert words in refused(build(node))


def test_deep_nesting() -> None:
    value: Any = LP
    for _ in range(50):
        value = [value]
    assert "deep" in refused(build(function("torch.stack", value)))


def test_too_many_nodes() -> None:
    nodes = [function("torch.exp", LP, name=f"n{i}") for i in range(MAX_NODES)]
    assert str(MAX_NODES) in refused(build(*nodes))


HUGE = 10**12


@pytest.mark.parametrize(
    "node",
    [
        function("torch.zeros", HUGE),
        function("torch.ones", [HUGE]),
        function("torch.full", {"tuple": [10**6, 10**6]}, 1.0),
        function("torch.arange", HUGE),
        function("torch.arange", HUGE, device={"device": "cpu"}),
        function("torch.zeros", HUGE, device="cpu"),
        function("torch.linspace", 0, 1, 10**10),
        method("repeat", LP, 10**9),
        method("expand", LP, 10**9, 4),
        method("new_zeros", LP, HUGE),
        method("new_full", LP, {"tuple": [HUGE]}, 0.0),
        function("torch.tile", LP, {"tuple": [10**9]}),
        function("torch.broadcast_to", LP, {"tuple": [10**9, 4]}),
        function("torch.nn.functional.pad", LP, {"tuple": [0, HUGE]}),
    ],
)
def test_giant_results_are_refused_before_they_are_made(node: dict[str, Any]) -> None:
    message = refused(build(node, SUM))
    assert "too large" in message or "overflow" in message.lower(), message


def test_many_large_results_and_large_products_are_refused() -> None:
    square = method("expand", LP, 4000, 4000, name="n0")
    adds = [function("torch.add", {"ref": f"n{i}"}, 1.0, name=f"n{i + 1}") for i in range(8)]
    assert "in all" in refused(build(square, *adds), (1,))
    products = [
        function("torch.matmul", {"ref": f"n{i}"}, {"ref": f"n{i}"}, name=f"n{i + 1}") for i in range(8)
    ]
    assert "too costly" in refused(build(square, *products), (1,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "node",
    [
        method("norm", {"ref": "m"}, p="nuc"),
        function("torch.functional.norm", {"ref": "m"}, "nuc"),
        function("torch.nn.functional.normalize", {"ref": "m"}, p="nuc", dim={"tuple": [0, 1]}),
        method("norm", {"ref": "pairs"}, p="nuc", dim={"tuple": [1, 2]}),
        method("kthvalue", {"ref": "flat"}, 5),
        method("diff", {"ref": "flat"}, 4000),
        method("diff", {"ref": "flat"}, n=10**7),
        method("roll", {"ref": "flat"}, {"tuple": [1] * 200}, {"tuple": [0] * 200}),
        method("unbind", {"ref": "flat"}),
        method("split", {"ref": "flat"}, 1),
        function("torch.functional.split", {"ref": "flat"}, split_size_or_sections=2),
        method("chunk", {"ref": "flat"}, 10**6),
        method("matmul", {"ref": "m"}, {"ref": "m"}),
    ],
    ids=lambda node: node["target"],
)
def test_operations_that_take_longer_than_their_result_is_large_are_refused(node: dict[str, Any]) -> None:
    base = [
        method("expand", LP, 2048, 2048, name="m"),
        method("reshape", {"ref": "m"}, -1, name="flat"),
        method("reshape", {"ref": "m"}, -1, 2, 2, name="pairs"),
    ]
    started = time.monotonic()
    assert "too" in refused(build(*base, node), (1,))
    assert time.monotonic() - started < 10  # the check itself is cheap


def test_reading_one_of_many_elements_counts_the_gradient_of_them_all() -> None:
    square = method("expand", LP, 1024, 1024, name="n0")
    reads = [function("operator.getitem", {"ref": "n0"}, {"tuple": [0, i]}, name=f"r{i}") for i in range(100)]
    assert "too costly" in refused(build(square, *reads), (1,))


def test_the_costs_of_a_pass_are_those_of_all_its_datums() -> None:
    square = method("expand", LP, 1024, 1024, name="n")
    reader = LossInputs(
        read_loss_graph(build(square, function("torch.sin", {"ref": "n"}, name="m"), SUM)), LossClock()
    )
    reader.read({}, (1,))
    for _ in range(PASS_COST // reader.costs[0] - 1):
        reader.read({}, (1,))
    with pytest.raises(EngineError, match=f"too costly for so many datums: .* allowed: {PASS_COST}"):
        reader.read({}, (1,))


def test_what_honest_passes_need_is_allowed() -> None:
    """Thousands of datums of a usual loss, and a batch of very long ones."""
    for loss, shape, count in (
        (ppo_with_kl, (2048,), 4096),
        (ppo_with_kl, (32_768,), 128),
        (many_operations, (32_768,), 128),
    ):
        custom = trace(loss)
        reader = LossInputs(read_loss_graph(custom), LossClock())
        inputs = {key: TensorData.from_numpy(np.zeros(shape, np.float32)) for key in custom.inputs[1:]}
        for _ in range(count):
            reader.read(inputs, shape)
        assert len(reader.costs) == count


@pytest.mark.parametrize(
    "node",
    [
        function("operator.pow", 10, 10**9),
        function("operator.mul", [0], 10**9),
        function("operator.mul", "a", 10**9),
        function("operator.add", {"tuple": [1]}, {"tuple": [2]}),
        function("math.exp", LP),
        function("math.exp", 10**6),
    ],
)
def test_python_arithmetic_stays_small(node: dict[str, Any]) -> None:
    refused(build(node, function("torch.add", LP, 1.0, name="m")))


def test_wrong_shapes_are_refused_before_a_pass() -> None:
    custom = build(function("torch.add", LP, {"ref": "weights"}), SUM, inputs=("logprobs", "weights"))
    with pytest.raises(EngineError, match=r"torch\.add"):
        checked(read_loss_graph(custom), (4,), {"weights": np.zeros(5, np.float32)})


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"tuple": [LP]}, "(loss, metrics)"),
        (LP, "(loss, metrics)"),
        ({"tuple": [1.0, {"dict": {}}]}, "a node"),
        ({"tuple": [{"ref": "n"}, {"dict": {"loss": {"ref": "n"}}}]}, "'loss'"),
        ({"tuple": [{"ref": "n"}, {"dict": {"custom/x:max": {"ref": "n"}}}]}, "custom/x:max"),
        ({"tuple": [{"ref": "n"}, {"dict": {"custom/x:sum": LP}}]}, "scalar"),
        ({"tuple": [LP, {"dict": {}}]}, "scalar tensor"),
    ],
)
def test_outputs(output: Any, words: str) -> None:
    assert words in refused(build(method("sum", LP), output=output))


def test_inputs() -> None:
    assert "'logprobs'" in refused(build(method("sum", {"ref": "x"}), inputs=("x",)))
    assert "Bad" in refused(build(method("sum", LP), inputs=("logprobs", "Bad")))
    assert "16" in refused(build(method("sum", LP), inputs=("logprobs", *(f"x{i}" for i in range(16)))))
    custom = build(method("sum", LP))
    assert "placeholders" in refused(CustomLoss(("logprobs", "weights"), custom.nodes))
