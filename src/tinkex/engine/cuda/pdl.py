# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Programmatic dependent launch (PDL): a kernel starts while the kernel before it ends (Hopper and newer).

A kernel launched with `**PDL` calls `wait_for_previous` before it touches memory that another kernel of the
same pass or step wrote or may still read. It may load weights, adapters and tables before that: a torch
operation, which is never launched so, always lies between their last write and the first kernel that reads
them. On older devices and in the interpreter both do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
PDL = {"launch_pdl": True} if _ABLE and not triton.knobs.runtime.interpret else {}
CLUSTERS = {"clusters": True} if PDL else {}  # see `launch.Launcher`

if PDL:

    @triton.jit
    def wait_for_previous():
        gdc_launch_dependents()
        gdc_wait()

else:

    @triton.jit
    def wait_for_previous():
        tl.static_assert(True)
