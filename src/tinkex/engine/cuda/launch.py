# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""How kernels are launched: with little host time, and before the kernel before them has ended.

At every call Triton works out which specialisation to use and asks the driver where each tensor lies, which
takes longer than most of our kernels run. `@launched` above `@triton.jit` caches the compiled kernel by the
kinds of its arguments, and from the second call on passes addresses straight to it, past Triton's profiler.

Programmatic dependent launch (PDL, Hopper and newer): a kernel launched with `**PDL` starts while the one
before it ends, and calls `wait_for_previous` before it touches memory that another kernel of the same pass or
step wrote or may still read. It may load weights, adapters and tables before that: a torch operation, which
is never launched so, lies between their last write and the first kernel that reads them. Elsewhere both do
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MULTIPROCESSORS = 132  # of an H100 or H200, on which tile shapes were measured
_ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
PDL = {"launch_pdl": True} if _ABLE and not triton.knobs.runtime.interpret else {}
CLUSTERS = {"clusters": True} if PDL else {}

if PDL:

    @triton.jit
    def wait_for_previous():
        gdc_launch_dependents()
        gdc_wait()

else:

    @triton.jit
    def wait_for_previous():
        tl.static_assert(True)


@triton.jit
def load(place, have):
    """Zeros where there is nothing."""
    return tl.load(place, mask=have, other=0.0)


@triton.jit
def load_fp32(place, have):
    return tl.load(place, mask=have, other=0.0).to(tl.float32)


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
        """`clusters`: programs are scheduled in clusters of two along the first axis, an option Triton lacks.

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
                metadata = (metadata[0], 2, metadata[2])
            self._ready[key] = (compiled.run, (compiled.function, metadata, None, None, None), rest)
        else:
            run, how, rest = ready
            x, y, z = (*grid, 1, 1)[:3]
            run(x // 2 if clusters else x, y, z, _stream(device), *how, *values, *rest)


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


# -- sizes: Triton's own functions of these names take longer on the host than the rest of a launch ------


def cdiv(size: int, block: int) -> int:
    """The number of blocks that hold `size` elements."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The smallest power of two that is not smaller than `size`."""
    return 1 << (size - 1).bit_length()


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use: 227 KB on Hopper, 163 or 99 KB on others."""
    if device.type != "cuda":  # the interpreter, as if on Hopper
        return 232_448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
