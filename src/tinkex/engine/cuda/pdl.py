# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Dependent launches: a kernel comes up while the one before it ends (Hopper and newer).

Every kernel that is launched `**PDL` calls `wait_for_previous` before it touches memory that another kernel
of the same pass or step wrote, or may read; between small kernels that hides most of what a launch costs.
Weights, adapters and tables it may read earlier: between whatever wrote those and the first kernel that reads
them there is always a torch operation, which is never launched so. Elsewhere both do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
PDL = {"launch_pdl": True} if _ABLE and not triton.knobs.runtime.interpret else {}
CLUSTERS = {"pairs": True} if PDL else {}  # see `launch.Launcher`

if PDL:

    @triton.jit
    def wait_for_previous():
        gdc_launch_dependents()
        gdc_wait()

else:

    @triton.jit
    def wait_for_previous():
        tl.static_assert(True)
