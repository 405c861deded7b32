"""Losses that the user writes: computed here, turned into weights that any server can train on.

A loss C of the target logprobs is linearised: training with cross_entropy and weights -∂C/∂logprob gives
the very gradients of C. Promises: the user's function runs in a worker thread, and may take its time; what
it returns is checked. Meets torch only when a custom loss is used. Knows nothing of sending.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tinkex.errors import InvalidInputError, TinkerError
from tinkex.types.data import Datum
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.tensor import TensorData

if TYPE_CHECKING:
    import torch

# Called with the datums and, for each, the logprobs of its target tokens; returns a scalar and metrics.
CustomLossFnV1 = Callable[[list[Datum], list["torch.Tensor"]], tuple["torch.Tensor", dict[str, float]]]

_running = threading.local()


def running_for() -> object | None:
    """Whose custom loss this thread is computing just now, if any."""
    return getattr(_running, "owner", None)


class Gradients(NamedTuple):
    """What a custom loss came to: -∂C/∂logprob for each datum, C itself, and the user's metrics."""

    weights: list[np.ndarray]
    loss: float
    metrics: dict[str, float]


def probe(data: Sequence[Datum]) -> list[Datum]:
    """The datums of the forward pass: their target tokens, and the user's weights or none at all."""
    return [_with_weights(datum, datum.loss_fn_inputs.get("weights")) for datum in data]


def linearised(data: Sequence[Datum], weights: Sequence[np.ndarray]) -> list[Datum]:
    """The datums of the backward pass."""
    return [_with_weights(d, TensorData.from_numpy(w)) for d, w in zip(data, weights, strict=True)]


def _with_weights(datum: Datum, weights: TensorData | None) -> Datum:
    target = datum.loss_fn_inputs["target_tokens"]
    if weights is None:
        weights = TensorData.from_numpy(np.zeros(target.dense_shape, np.float32))
    return dataclasses.replace(datum, loss_fn_inputs={"target_tokens": target, "weights": weights})


def differentiate(
    owner: object, loss_fn: CustomLossFnV1, data: Sequence[Datum], forward: ForwardBackwardOutput
) -> Gradients:
    """Run the user's loss on the logprobs of a forward pass. Blocks; call it off the loop."""
    try:
        import torch
    except ImportError:
        raise TinkerError("forward_backward_custom needs torch: pip install torch") from None
    leaves = [
        _leaf(torch, i, d, out) for i, (d, out) in enumerate(zip(data, forward.loss_fn_outputs, strict=True))
    ]
    _running.owner = owner
    try:
        returned = loss_fn(list(data), leaves)
    finally:
        _running.owner = None
    loss, metrics = _checked(torch, returned)
    if loss.requires_grad:
        loss.backward()
    weights = [
        np.zeros(leaf.shape, np.float32) if leaf.grad is None else -leaf.grad.numpy() for leaf in leaves
    ]
    for index, array in enumerate(weights):
        if not np.isfinite(array).all():
            raise InvalidInputError(f"the custom loss has a gradient that is not finite, for data[{index}]")
    return Gradients(weights, float(loss.detach()), metrics)


def _leaf(torch: Any, index: int, datum: Datum, output: Mapping[str, TensorData]) -> Any:
    wanted = datum.loss_fn_inputs["target_tokens"].dense_shape
    if "logprobs" not in output or output["logprobs"].dense_shape != wanted:
        raise TinkerError(
            f"the server's forward pass gave no logprobs of shape {list(wanted)} for data[{index}]"
        )
    return torch.tensor(output["logprobs"].to_numpy(), dtype=torch.float32, requires_grad=True)


def _checked(torch: Any, returned: Any) -> tuple[Any, dict[str, float]]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise InvalidInputError(
            f"a custom loss returns (loss, metrics); this one returned {type(returned).__name__}"
        )
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InvalidInputError("a custom loss's first value must be a tensor with one element")
    if not torch.isfinite(loss).all():
        raise InvalidInputError(f"the custom loss is {float(loss.detach())}, not a finite number")
    return loss.reshape(()), {str(key): float(value) for key, value in dict(metrics or {}).items()}


def finished(output: ForwardBackwardOutput, gradients: Gradients) -> ForwardBackwardOutput:
    """The backward pass's output with the user's loss and metrics in place of the surrogate's."""
    metrics = dict(output.metrics)
    if "loss:sum" in metrics:
        metrics["surrogate_loss:sum"] = metrics["loss:sum"]
    return dataclasses.replace(output, metrics={**metrics, **gradients.metrics, "loss:sum": gradients.loss})
