"""Every engine test computes on one thread: two on a busy machine of two cores are many times slower."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[NO_GPU, pytest.mark.gpu])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """For what is tested on both."""
    return torch.device(request.param)
