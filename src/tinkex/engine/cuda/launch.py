# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Launches that cost the host little.

At every call Triton works out anew what the kernel must be compiled for, and asks the driver where each
tensor lies, which takes longer than most of ours run. `@launched` on top of `@triton.jit` remembers the first
by the arguments' kinds, and from the second call on gives the compiled kernel addresses. Triton's hooks for
profilers are not called then. A launch can also ask for its programs `pairs`-wise, which Triton has no word
for. Knows nothing of what kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor


def launched(kernel: Any) -> Any:
    """`kernel` for `kernel[grid](*arguments, **constants)`, where arguments come before constants.

    An argument is a tensor, a descriptor of one, or an int or float of Python's own, not numpy's or a bool.
    """
    return kernel if triton.knobs.runtime.interpret else Launcher(kernel)


class Launcher:
    """A kernel and what was compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names = [param.name for param in kernel.params]
        self._ready: dict[Any, tuple[Callable[..., None], tuple[Any, ...], list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, pairs: bool = False, **constants: Any) -> None:
        """`pairs`: two programs, neighbours along the first axis, always get two multiprocessors that belong
        together (a cluster, on Hopper and newer), so that those which are left can take a library's pairs.
        """
        device = getattr(args[0], "base", args[0]).get_device()
        # What Triton compiles anew for: a type, whether 16 divides a number or an address, and the number 1.
        kinds: list[Any] = [device, pairs, *constants, *constants.values()]
        values: list[Any] = []
        for value in args:
            if type(value) is int:
                kind = 1 if value == 1 else 0 if value & 15 else 16
                kinds.append(kind if value < 1 << 31 else -1 - kind)  # beyond, it is another type
            elif isinstance(value, Tensor):
                dtype, value = value.dtype, value.data_ptr()
                kinds.append(dtype if value & 15 == 0 else (dtype, "unaligned"))
            elif type(value) is float:
                kinds.append(float)
            else:  # a tensor for the copy engine
                kinds.append((value.base.dtype, *value.block_shape))
            values.append(value)
        key = tuple(kinds)
        ready = self._ready.get(key)
        if ready is None:
            compiled = self._kernel[grid](*args, **constants)
            rest = [constants[name] for name in self._names[len(args) :]]
            metadata = compiled.packed_metadata
            if pairs:
                warps, _, shared = metadata
                metadata = (warps, 2, shared)
            self._ready[key] = (compiled.run, (compiled.function, metadata, None, None, None), rest)
        else:
            run, how, rest = ready
            x, y, z = (*grid, 1, 1)[:3]
            run(x // 2 if pairs else x, y, z, _stream(device), *how, *values, *rest)


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
