"""The demos' engines compute on one thread: two on a busy machine of two cores are many times slower."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
