"""Run a coroutine on the client's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tinkex.client import loop as background

SECONDS = 20.0


def on_loop(function: Callable) -> None:
    asyncio.run_coroutine_threadsafe(function(), background.get_loop()).result(SECONDS)
