# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Dependent launches: a kernel comes up while the one before it ends (Hopper and newer).

Every kernel that is launched `**CHAINED` calls `after_previous` before it touches memory; between small
kernels that hides most of what a launch costs. Elsewhere both do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
CHAINED = {"launch_pdl": True} if _ABLE and not triton.knobs.runtime.interpret else {}

if CHAINED:

    @triton.jit
    def after_previous():
        gdc_launch_dependents()
        gdc_wait()

else:

    @triton.jit
    def after_previous():
        tl.static_assert(True)
