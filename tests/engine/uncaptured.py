"""Captured steps on a CPU: a stand-in takes the place of CUDA's graphs, streams and events.

What it captures, it runs when that is replayed, by Triton's interpreter. So all that a graph would read has
to be where the step looked for it the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tinkex.engine.cuda.decode_graphs import DecodeGraphs


class Replayed:
    """Stands for a graph."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = torch.inference_mode()(step)


class Inline:
    """Stands for streams and events: everything happens at once."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `DecodeGraphs` and `CapturedPrefill` run on the CPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, Inline)
    monkeypatch.setattr(torch.cuda, "current_stream", Inline)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(DecodeGraphs, "_record", lambda self, step: Replayed(step))
