# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Launches that cost the host little.

At every call Triton works out anew what the kernel must be compiled for, which takes longer than most of ours
run. `@launched` on top of `@triton.jit` remembers that by the arguments' kinds, and from the second call on
goes straight to the compiled kernel. Knows nothing of what kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
from torch import Tensor


def launched(kernel: Any) -> Any:
    """`kernel` for `kernel[grid](*arguments, **constants)`, where arguments come before constants."""
    return kernel if triton.knobs.runtime.interpret else Launcher(kernel)


class Launcher:
    """A kernel and what was compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names = [param.name for param in kernel.params]
        self._compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        key = (args[0].get_device(), *map(_kind, args), *constants.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*args, **constants)
        else:
            rest = [constants[name] for name in self._names[len(args) :]]
            compiled[(*grid, 1, 1)[:3]](*args, *rest)


def _kind(argument: Any) -> Any:
    """What Triton compiles anew for: a type, whether 16 divides a number or an address, and the number 1."""
    if isinstance(argument, Tensor):
        return argument.dtype if argument.data_ptr() % 16 == 0 else (argument.dtype, "unaligned")
    if isinstance(argument, float):
        return float
    return 1 if argument == 1 else 16 if argument % 16 == 0 else 0 if argument < 1 << 31 else -1
