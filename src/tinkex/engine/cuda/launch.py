# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Kernel launches with little host time.

At every call Triton works out which specialisation to use and asks the driver where each tensor lies. That
takes longer than most of our kernels run. `@launched` above `@triton.jit` caches the compiled kernel by the
kinds of its arguments, and from the second call on passes addresses straight to it. Triton's profiler hooks
are not called then. A launch may ask for thread-block clusters of two, which Triton has no option for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor


def launched(kernel: Any) -> Any:
    """`kernel` for `kernel[grid](*arguments, **constants)`; arguments come before constants.

    An argument is a tensor, a tensor descriptor, or a Python int or float (no numpy scalar, no bool).
    """
    return kernel if triton.knobs.runtime.interpret else Launcher(kernel)


class Launcher:
    """One kernel and its compiled specialisations."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names = [param.name for param in kernel.params]
        self._ready: dict[Any, tuple[Callable[..., None], tuple[Any, ...], list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, clusters: bool = False, **constants: Any) -> None:
        """`clusters`: programs are scheduled as clusters of two along the first axis.

        The multiprocessors left over then come in pairs too, which a library's product of clusters needs.
        """
        device = getattr(args[0], "base", args[0]).get_device()
        # Triton specialises on types, on divisibility of numbers and addresses by 16, and on the number 1.
        kinds: list[Any] = [device, clusters, *constants, *constants.values()]
        values: list[Any] = []
        for value in args:
            if type(value) is int:
                kind = 1 if value == 1 else 0 if value & 15 else 16
                kinds.append(kind if value < 1 << 31 else -1 - kind)  # int64 from there on
            elif isinstance(value, Tensor):
                dtype, value = value.dtype, value.data_ptr()
                kinds.append(dtype if value & 15 == 0 else (dtype, "unaligned"))
            elif type(value) is float:
                kinds.append(float)
            else:  # a tensor descriptor
                kinds.append((value.base.dtype, *value.block_shape))
            values.append(value)
        key = tuple(kinds)
        ready = self._ready.get(key)
        if ready is None:
            compiled = self._kernel[grid](*args, **constants)
            rest = [constants[name] for name in self._names[len(args) :]]
            metadata = compiled.packed_metadata
            if clusters:
                warps, _, shared = metadata
                metadata = (warps, 2, shared)
            self._ready[key] = (compiled.run, (compiled.function, metadata, None, None, None), rest)
        else:
            run, how, rest = ready
            x, y, z = (*grid, 1, 1)[:3]
            run(x // 2 if clusters else x, y, z, _stream(device), *how, *values, *rest)


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
