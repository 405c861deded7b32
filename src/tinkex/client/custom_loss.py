"""Losses that the user writes, computed on the client and trained on any server.

A loss C of the target logprobs is linearised: a cross_entropy pass with weights -∂C/∂logprob has exactly the
gradients of C. So a custom pass is a forward pass, the user's function in a thread of its own, and a
forward_backward on those weights, all in one entry of the run's queue. A traced loss (`LossHandle`) that the
server has accepted is computed there instead. Imports torch only when a loss needs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tinkex.client import passes
from tinkex.client.future import APIFuture
from tinkex.client.loop import off_loop
from tinkex.client.queue import RunQueue, after
from tinkex.errors import InvalidInputError, RequestFailedError, TinkerError
from tinkex.types.data import Datum
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.tensor import TensorData
from tinkex.types.training import CustomLossGraph, CustomLossInput

if TYPE_CHECKING:
    import torch

# Called with the datums and, for each, the logprobs of its target tokens; returns a scalar and metrics.
CustomLossFnV1 = Callable[[list[Datum], list["torch.Tensor"]], tuple["torch.Tensor", dict[str, float]]]

# Traced: called with one datum's target logprobs and the loss_fn_inputs that its parameters name.
PerDatumLossFn = Callable[
    Concatenate["torch.Tensor", ...], tuple["torch.Tensor", Mapping[str, "torch.Tensor"]]
]


@runtime_checkable
class ArrayLoss(Protocol):
    """A loss that computes its own gradients in numpy, without torch."""

    def value_and_gradients(
        self, data: Sequence[Datum], logprobs: Sequence[np.ndarray]
    ) -> tuple[float, list[np.ndarray], dict[str, float]]:
        """The loss, its derivative by each datum's logprobs, and metrics."""
        ...


@runtime_checkable
class LossChecks(Protocol):
    """A loss that can refuse datums before anything is sent."""

    def check(self, data: Sequence[Datum]) -> None:
        """Raise InvalidInputError for datums that the loss cannot be computed on."""
        ...


@dataclass(frozen=True)
class LossHandle:
    """A traced loss, from `ServiceClient.create_custom_loss`; pass it to `forward_backward_custom`.

    `loss_id` is the server's id of the uploaded loss; None: the client computes it. A handle belongs to one
    session.
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    loss_id: str | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        """The keys of loss_fn_inputs that the loss reads."""
        return tuple(item.name for item in self.inputs[1:])

    @cached_property
    def wire(self) -> CustomLossGraph:
        from tinkex.client import loss_tracing

        return loss_tracing.to_wire(self.name, self.graph)

    @cached_property
    def key(self) -> str:
        """A hash of the graph and its inputs: equal for equal losses, even under other names."""
        parts = [item.model_dump_json() for item in self.inputs] + [self.wire.model_dump_json()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def check(self, data: Sequence[Datum]) -> None:
        """Raise InvalidInputError for datums that lack an input, or have one of another rank."""
        for index, datum in enumerate(data):
            for item in self.inputs:
                key = "target_tokens" if item.name == "logprobs" else item.name
                if key not in datum.loss_fn_inputs:
                    raise InvalidInputError(
                        f"data[{index}].loss_fn_inputs has no {key!r}, which the loss {self.name!r} reads"
                    )
                shape = datum.loss_fn_inputs[key].dense_shape
                if len(shape) != item.rank:
                    raise InvalidInputError(
                        f"data[{index}].loss_fn_inputs[{key!r}] has shape {list(shape)}, but the loss "
                        f"{self.name!r} was created with rank {item.rank} for {item.name}"
                    )

    def run_here(
        self, data: list[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss as a server would: per datum, summed; metrics are reduced by their suffix."""
        import torch

        from tinkex.client import loss_tracing

        losses: list[torch.Tensor] = []
        reported: list[tuple[dict[str, float], int]] = []
        for datum, given in zip(data, logprobs, strict=True):
            inputs = [torch.tensor(datum.loss_fn_inputs[key].to_numpy()) for key in self.input_names]
            loss, metrics = loss_tracing.run(self.name, self.graph, [given, *inputs])
            losses.append(loss)
            reported.append(({key: float(value.detach()) for key, value in metrics.items()}, 1))
        return torch.stack(losses).sum(), passes.reduce_metrics(reported)

    def explain(self, error: RequestFailedError) -> RequestFailedError:
        """Add the user's source line to an error that names a node of the graph."""
        for node in self.graph.graph.nodes:
            if f"node {node.name!r}" in error.message and node.meta.get("line"):
                message = f"{error.message} [in {self.name}, {node.meta['line']}]"
                return RequestFailedError(message, error.request_id, error.category)
        return error


def traced(fn: PerDatumLossFn, input_ranks: Mapping[str, int]) -> LossHandle:
    """Trace a loss that belongs to no session yet; InvalidInputError for what cannot be traced."""
    try:
        from tinkex.client import loss_tracing
    except ImportError:
        raise TinkerError("create_custom_loss needs torch: pip install torch") from None
    name, inputs, graph = loss_tracing.trace(fn, input_ranks)
    handle = LossHandle(name, tuple(inputs), "", graph)
    handle.wire  # noqa: B018  # built here, so that what has no wire form is refused at the call
    return handle


# -- as requests of a run --------------------------------------------------------------------------------

CustomLoss = CustomLossFnV1 | LossHandle | ArrayLoss


def submit(queue: RunQueue, given: Sequence[Datum], loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
    if not callable(loss_fn) and not isinstance(loss_fn, LossHandle | ArrayLoss):
        raise InvalidInputError(
            f"loss_fn must be a function, a LossHandle or an ArrayLoss, got {type(loss_fn).__name__}"
        )
    passes.check_pass(given, "custom" if isinstance(loss_fn, LossHandle) else "cross_entropy", None)
    if isinstance(loss_fn, LossHandle | ArrayLoss) and isinstance(loss_fn, LossChecks):
        loss_fn.check(given)
    if isinstance(loss_fn, LossHandle) and loss_fn.session_id != (session_id := queue.session.session_id):
        raise InvalidInputError(
            f"the loss {loss_fn.name!r} was created in session {loss_fn.session_id}, but this run is of "
            f"session {session_id}: create it with this run's ServiceClient"
        )
    data = list(given)  # the caller may change theirs
    return queue.enqueue("forward_backward_custom", lambda: queue.before_step(_send(queue, data, loss_fn)))


async def _send(queue: RunQueue, data: list[Datum], loss_fn: CustomLoss) -> Awaitable[ForwardBackwardOutput]:
    if isinstance(loss_fn, LossHandle) and loss_fn.loss_id is not None:
        config = {"loss_id": loss_fn.loss_id}
        return _explained(loss_fn, await queue.send_pass(data, "custom", config, forward_only=False))
    fn = loss_fn.run_here if isinstance(loss_fn, LossHandle) else loss_fn
    forward = await queue.send_pass(
        [_with_weights(datum) for datum in data], "cross_entropy", None, forward_only=True, last=False
    )

    async def compute() -> Gradients:
        return await queue.run_loss(differentiate, fn, data, await forward)

    gradients = await queue.unless_cancelled(compute())
    surrogate = await off_loop(linearised, data, gradients.weights)
    waiting = await queue.send_pass(surrogate, "cross_entropy", None, forward_only=False)
    return after(waiting, lambda output: finished(output, gradients))


async def _explained(handle: LossHandle, waiting: Awaitable[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    try:
        return await waiting
    except RequestFailedError as error:
        raise handle.explain(error) from None


# -- the mathematics -------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """The outcome of a custom loss C: -∂C/∂logprob for each datum, C itself, and the user's metrics."""

    weights: list[np.ndarray]
    loss: float
    metrics: dict[str, float]


def _with_weights(datum: Datum, weights: np.ndarray | None = None) -> Datum:
    """The datum of one of the two passes: target tokens, and `weights`, else the user's, else zeros."""
    inputs = datum.loss_fn_inputs
    target = inputs["target_tokens"]
    tensor = inputs.get("weights") if weights is None else TensorData.from_numpy(weights)
    if tensor is None:
        tensor = TensorData.from_numpy(np.zeros(target.dense_shape, np.float32))
    return dataclasses.replace(datum, loss_fn_inputs={"target_tokens": target, "weights": tensor})


def linearised(data: Sequence[Datum], weights: Sequence[np.ndarray]) -> list[Datum]:
    """The datums of the backward pass, with the weights that linearise the loss."""
    return [_with_weights(datum, each) for datum, each in zip(data, weights, strict=True)]


def differentiate(
    loss_fn: CustomLossFnV1 | ArrayLoss, data: Sequence[Datum], forward: ForwardBackwardOutput
) -> Gradients:
    """Run the user's loss on the logprobs of a forward pass and check what it returns. Blocks."""
    given = [
        _logprobs(i, d, out) for i, (d, out) in enumerate(zip(data, forward.loss_fn_outputs, strict=True))
    ]
    if isinstance(loss_fn, ArrayLoss):
        loss, gradients, metrics = loss_fn.value_and_gradients(list(data), given)
    else:
        loss, gradients, metrics = torch_gradients(loss_fn, data, given)
    if not np.isfinite(loss):
        raise InvalidInputError(f"the custom loss is {loss}, not a finite number")
    weights = [-np.asarray(array, np.float32) for array in gradients]
    for index, (array, right) in enumerate(zip(weights, given, strict=True)):
        if array.shape != right.shape:
            raise InvalidInputError(
                f"the custom loss has a gradient of shape {list(array.shape)} for data[{index}], whose "
                f"logprobs have {list(right.shape)}"
            )
        if not np.isfinite(array).all():
            raise InvalidInputError(f"the custom loss has a gradient that is not finite, for data[{index}]")
    return Gradients(weights, float(loss), _checked_metrics(metrics))


def _logprobs(index: int, datum: Datum, output: Mapping[str, TensorData]) -> np.ndarray:
    wanted = datum.loss_fn_inputs["target_tokens"].dense_shape
    if "logprobs" not in output or output["logprobs"].dense_shape != wanted:
        raise TinkerError(
            f"the server's forward pass gave no logprobs of shape {list(wanted)} for data[{index}]"
        )
    return output["logprobs"].to_numpy()


def torch_gradients(
    loss_fn: CustomLossFnV1, data: Sequence[Datum], logprobs: Sequence[np.ndarray]
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """Run a torch loss; returns it, its derivative by each datum's logprobs, and its metrics."""
    try:
        import torch
    except ImportError:
        raise TinkerError("this custom loss needs torch: pip install torch") from None
    leaves = [torch.tensor(array, dtype=torch.float32, requires_grad=True) for array in logprobs]
    returned = loss_fn(list(data), leaves)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise InvalidInputError(
            f"a custom loss returns (loss, metrics); this one returned {type(returned).__name__}"
        )
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InvalidInputError("a custom loss's first value must be a tensor with one element")
    if loss.requires_grad:
        loss.reshape(()).backward()  # pyright: ignore[reportUnknownMemberType]
    gradients = [
        np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy() for leaf in leaves
    ]
    return float(loss.detach()), gradients, metrics


def _checked_metrics(metrics: Mapping[Any, Any] | None) -> dict[str, float]:
    """Metrics as floats; None counts as no metrics."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise InvalidInputError(
            f"a custom loss's metrics must be a dict of numbers, got {type(metrics).__name__}"
        )
    checked: dict[str, float] = {}
    for key, value in (metrics or {}).items():
        try:
            checked[str(key)] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidInputError(
                f"a custom loss's metrics[{key!r}] must be a number, got {value!r:.80}"
            ) from None
    return checked


def finished(output: ForwardBackwardOutput, gradients: Gradients) -> ForwardBackwardOutput:
    """The output of the backward pass, with the user's loss and metrics replacing the surrogate's."""
    metrics = dict(output.metrics)
    if "loss:sum" in metrics:
        metrics["surrogate_loss:sum"] = metrics["loss:sum"]
    return dataclasses.replace(output, metrics={**metrics, **gradients.metrics, "loss:sum": gradients.loss})
