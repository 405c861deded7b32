"""Work for samplers."""

from __future__ import annotations

import numpy as np

from tinkex.engine.protocol import SampleWork
from tinkex.types.params import SamplingParams


def sample_work(seed: int, max_tokens: int, length: int = 8, adapter: str | None = None) -> SampleWork:
    prompt = np.random.default_rng(seed).integers(3, 500, length).astype(np.int32)
    return SampleWork(prompt, SamplingParams(max_tokens=max_tokens, seed=seed, stop=[]), adapter)
