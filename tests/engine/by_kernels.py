"""Where kernels are tested: on a GPU in bf16; where there is none, in fp32 by Triton's interpreter.

The interpreter (see tests/conftest.py) shows that their logic is right and nothing of their speed. A test
module that imports this is skipped where there is neither.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
MARKS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton"),
    pytest.mark.timeout(600),  # the interpreter takes seconds for what a GPU does in microseconds
]
if importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs Triton", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter multiplies no bf16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)
