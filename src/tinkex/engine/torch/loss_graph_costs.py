"""What each operation of an uploaded loss costs, forward and backward together, by its real complexity.

The unit is about a nanosecond of one core, rounded up. `CLASSES` has every operation of the allow-list, and
importing this module fails if one is missing. Costs are computed from shapes, on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.torch import loss_graph_ops as ops

NODE = 1 << 16  # of any node, however small: the check on the meta device, the call, its backward
PIECE = 1 << 12  # of each tensor that a node returns
_ELEMENT = 4  # of an element that a node reads or writes
_FAST_PRODUCTS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class OpCall:
    """One operation with its arguments and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def first(self) -> Tensor:
        return tensors([*self.args, *self.kwargs.values()])[0]

    @property
    def elements(self) -> int:
        """Read and written. A backward may fill the whole of an input, however small the result is."""
        return sum(t.numel() for t in tensors([*self.args, *self.kwargs.values(), self.result]))

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple | list) else []


def _elementwise(call: OpCall) -> int:
    return _ELEMENT * call.elements


def _slow(call: OpCall) -> int:
    """Functions that are not vectorised, reductions with ties, indices in any order."""
    return 4 * _ELEMENT * call.elements


def _scan(call: OpCall) -> int:
    """Several passes in the backward, each in order."""
    return 12 * _ELEMENT * call.elements


def _sort(call: OpCall) -> int:
    """At most n·log n for n elements, for any dimension."""
    return 2 * _ELEMENT * call.elements * max(1, call.elements).bit_length()


def _select(call: OpCall) -> int:
    """Quickselect: quadratic in a row's length at worst, and inputs can be chosen for that."""
    shape = call.first.shape
    row = shape[call.argument(2, "dim", default=-1)] if shape else 1
    return _sort(call) + call.first.numel() * row // 8


def _product(call: OpCall) -> int:
    """A multiplication for each element of the result and of the dimension summed over."""
    inner = call.first.shape[-1] if call.first.dim() else 1
    multiplications = call.result.numel() * inner
    fast = call.first.dtype in _FAST_PRODUCTS
    return _elementwise(call) + (multiplications // 4 if fast else 2 * multiplications)


def _norm(call: OpCall) -> int:
    """p="nuc" is a singular value decomposition of each matrix: m·n·min(m, n)."""
    if call.argument(1, "p") != "nuc":
        return _slow(call)
    shape, dims = call.first.shape, call.argument(2, "dim")
    m, n = (shape[d] for d in dims) if isinstance(dims, tuple | list) else shape[-2:]
    matrices = call.first.numel() // max(1, m * n)
    return _slow(call) + matrices * (PIECE + m * n * (min(m, n) + 256))


def _difference(call: OpCall) -> int:
    """Computed once for each order of difference."""
    return (NODE + _elementwise(call)) * max(1, call.argument(1, "n", default=1))


def _roll(call: OpCall) -> int:
    """Computed once for each shift."""
    shifts = call.argument(1, "shifts")
    return (NODE + _elementwise(call)) * (len(shifts) if isinstance(shifts, tuple | list) else 1)


CLASSES: dict[Callable[[OpCall], int], str] = {
    _elementwise: """
        abs absolute add addcdiv addcmul all any arange atleast_1d bitwise_and bitwise_not bitwise_or
        bitwise_xor bool broadcast_to cat ceil chunk clamp clamp_max clamp_min clip clone concat contiguous
        copysign deg2rad detach dim div divide double eq exp exp2 expand expand_as expm1 fabs fix flatten flip
        float floor floor_divide floordiv fmod frac full full_like ge getattr gt hardtanh heaviside hstack
        hypot int inv invert isclose isfinite isinf isnan isneginf isposinf ldexp le leaky_relu lerp linspace
        log log10 log1p log2 logical_and logical_not logical_or logical_xor long lt masked_fill mean mod
        movedim mul multiply nan_to_num narrow ndimension ne neg negative new_full new_ones new_zeros numel
        ones ones_like or_ and_ outer pad permute pos positive reciprocal relu relu6 remainder repeat reshape
        reshape_as round rsqrt scalar_tensor select sgn sigmoid sign size softsign split sqrt square squeeze
        stack stride sub subtract sum sum_to_size swapaxes t threshold tile to transpose tril triu truediv
        true_divide trunc type_as unbind unflatten unsqueeze view view_as vstack where xor zeros zeros_like
        is_tensor is_floating_point
    """,
    _slow: """
        acos acosh amax amin argmax argmin asin asinh atan atan2 atanh binary_cross_entropy
        binary_cross_entropy_with_logits celu cos cosh elu entr erf erfc expit fmax fmin gather gelu getitem
        huber_loss index_select kl_div l1_loss log_softmax logaddexp logaddexp2 logit logsigmoid logsumexp max
        maximum min minimum mse_loss nanmean nansum pow prod scatter scatter_add selu silu sin sinh
        smooth_l1_loss softmax softmin softplus std std_mean take take_along_dim tan tanh var var_mean xlogy
    """,
    _scan: "cummax cummin cumprod cumsum logcumsumexp",
    _sort: "median quantile sort topk",
    _select: "kthvalue",
    _product: "bmm dot inner matmul mm mv",
    _norm: "norm normalize",
    _difference: "diff",
    _roll: "roll",
}
_BY_NAME = {name: cost for cost, names in CLASSES.items() for name in names.split()}
_COSTS = {f: _BY_NAME[name.rpartition(".")[2]] for name, f in (ops.NAMED | ops.METHODS).items()}


def cost(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """What a call costs that returned `result`, on any device."""
    call = OpCall(args, kwargs, result)
    return NODE + PIECE * len(tensors(result)) + _COSTS[function](call)
