"""The allow-list of operations that an uploaded loss may use, and `call`, which executes one.

The tables are built once, from the names below: no name that a client sends reaches getattr. `call` refuses
what they cannot: Python containers and huge integers in arithmetic, and math functions of tensors. In-place
methods, random numbers, results whose shape depends on values, and all that touches files, devices or other
code are not on the list.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.request import user_error

# Both torch functions and tensor methods.
_BOTH = """
abs absolute acos acosh add addcdiv addcmul all amax amin any argmax argmin asin asinh atan atan2 atanh
bitwise_and bitwise_not bitwise_or bitwise_xor bmm ceil chunk clamp clamp_max clamp_min clip clone cos cosh
cummax cummin cumprod cumsum deg2rad detach diff div divide dot eq erf erfc exp exp2 expm1 fix flatten flip
floor floor_divide fmax fmin fmod frac gather ge gt heaviside hypot index_select inner isclose isfinite
isinf isnan isneginf isposinf kthvalue le lerp log log10 log1p log2 log_softmax logaddexp logaddexp2
logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill matmul max
maximum mean median min minimum mm movedim mul multiply mv nan_to_num nanmean nansum narrow ne neg negative
norm numel outer permute positive pow prod quantile reciprocal relu remainder reshape roll round rsqrt
scatter scatter_add select sgn sigmoid sign sin sinh softmax sort split sqrt square squeeze std sub subtract
sum swapaxes t take take_along_dim tan tanh tile topk transpose tril triu true_divide trunc unbind unflatten
unsqueeze var where xlogy
"""
_FUNCTIONS = """
arange atleast_1d broadcast_to cat concat full full_like linspace ones ones_like stack scalar_tensor
std_mean var_mean zeros zeros_like is_tensor is_floating_point hstack vstack
"""
_METHODS = """
bool contiguous dim double expand expand_as float int long new_full new_ones new_zeros ndimension repeat
reshape_as size stride sum_to_size to type_as view view_as broadcast_to
"""
_FUNCTIONAL = """
binary_cross_entropy binary_cross_entropy_with_logits celu elu gelu hardtanh huber_loss kl_div l1_loss
leaky_relu logsigmoid log_softmax mse_loss normalize pad relu relu6 selu sigmoid silu smooth_l1_loss softmax
softmin softplus softsign tanh threshold
"""
_OPERATORS = """
abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor
"""
_MATH = """
acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc exp expm1 fabs floor fmod hypot
isfinite isinf isnan ldexp log log10 log1p log2 pow sin sinh sqrt tan tanh trunc
"""

# Functions that create a tensor: their device is set, or the check of sizes would allocate memory.
FACTORIES = ("arange", "full", "linspace", "ones", "scalar_tensor", "zeros")
ATTRIBUTES = ("shape", "ndim", "dtype", "device", "T", "mT", "values", "indices")


def _read_attribute(value: Any, name: str) -> Any:
    """builtins.getattr of one of ATTRIBUTES, which the reader has checked."""
    assert name in ATTRIBUTES
    if name in ("values", "indices"):  # of what max, sort, topk and the like return
        if not isinstance(value, tuple) or len(value) != 2:
            raise user_error(f"{type(value).__name__} has no {name}")
        return value[name == "indices"]
    if not isinstance(value, Tensor):
        raise user_error(f"{name} may be read of tensors, not of {type(value).__name__}")
    return getattr(value, name)


def _item(container: Any, index: Any) -> Any:
    """container[index]. On the meta device a mask counts as choosing all of its rows."""
    if isinstance(container, Tensor) and container.is_meta:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts):
            index = tuple(_without_mask(part) for part in parts)
    elif not isinstance(container, Tensor | tuple):
        raise user_error(f"tensors and tuples may be indexed, not {type(container).__name__}")
    return container[cast(Any, index)]


def _without_mask(part: Any) -> Any:
    if not isinstance(part, Tensor) or part.dtype != torch.bool:
        return part
    if part.dim() != 1:
        raise user_error(f"a mask used as an index must have one dimension, got {part.dim()}")
    return torch.empty(part.shape, dtype=torch.int64, device="meta")


def _table(prefix: str, owner: Any, *names: str) -> dict[str, Any]:
    return {prefix + name: getattr(owner, name) for text in names for name in text.split()}


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to, only for dtypes: all tensors are on one device, by whatever name a client calls it."""
    return tensor.to(*(a for a in args if not isinstance(a, str)), **kwargs)


DTYPES: dict[str, torch.dtype] = _table("", torch, "float16 bfloat16 float32 float64 int32 int64 bool")
LAYOUTS: dict[str, Any] = _table("", torch, "strided contiguous_format preserve_format")
METHODS: dict[str, Callable[..., Any]] = _table("", Tensor, _BOTH, _METHODS) | {"to": _to}
NAMED: dict[str, Callable[..., Any]] = (
    _table("torch.", torch, _BOTH, _FUNCTIONS)
    | _table("torch.nn.functional.", F, _FUNCTIONAL)
    | _table("torch.special.", torch.special, "entr expit log_softmax logit softmax xlogy")
    | _table("operator.", operator, _OPERATORS)
    | _table("math.", math, _MATH)
    | {"getattr": _read_attribute, "builtins.getattr": _read_attribute, "operator.getitem": _item}
)
# Clients name a function after the module that defines it: torch._C._nn.softplus, torch.functional.norm
FUNCTIONS = NAMED | {f"{f.__module__}.{f.__name__}": f for n, f in NAMED.items() if n.startswith("torch.")}
_SCALAR_ONLY = {f for name, f in FUNCTIONS.items() if name.startswith("math.")}
_ARITHMETIC = _SCALAR_ONLY | {f for name, f in FUNCTIONS.items() if name.startswith("operator.")} - {_item}
MAX_COUNT = 4096  # tensors that a node returns, orders of a difference


def _pieces(tensor: Tensor, size: Any = None, dim: int = 0, **names: Any) -> int:
    size = names.get("split_size", names.get("split_size_or_sections", size))
    return len(size) if isinstance(size, tuple | list) else -(-tensor.shape[dim] // size)


# Where one number says how often something is done, and the meta device does it as often: that number.
_COUNTS: dict[str, Callable[..., int]] = {
    "unbind": lambda input, dim=0: input.shape[dim],
    "chunk": lambda input, chunks, dim=0: min(chunks, input.shape[dim]),
    "split": _pieces,
    "diff": lambda input, n=1, *_, **__: n,
}
_COUNTED = {getattr(owner, name): count for name, count in _COUNTS.items() for owner in (torch, Tensor)}


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function in _ARITHMETIC:
        _check_arithmetic(function, args)
    if function in _COUNTED and (count := _COUNTED[function](*args, **kwargs)) > MAX_COUNT:
        raise user_error(f"too large: {count} results or repetitions; allowed: {MAX_COUNT}")
    result = function(*args, **kwargs)
    if isinstance(result, int) and abs(result) >= 2**63:
        raise user_error("the result is too large a number")
    return result


def _check_arithmetic(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for value in args:
        if not isinstance(value, Tensor | int | float):
            raise user_error(f"takes tensors and numbers, got {type(value).__name__}")
        if isinstance(value, Tensor) and function in _SCALAR_ONLY:
            raise user_error("takes numbers; use the torch function of that name for tensors")
    if function is operator.pow and all(isinstance(v, int) for v in args) and abs(args[1]) > 62:
        raise user_error(f"the exponent {args[1]} is too large for whole numbers")
