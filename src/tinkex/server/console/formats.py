"""How pages show values: numbers, sizes, times, shares of a line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from tinkex.service.run_listing import since


def number(value: float | None) -> str:
    """A number in few characters.

    >>> [number(v) for v in (None, 0, 12, 0.12345, 1234567, 2e-5)]
    ['–', '0', '12', '0.1235', '1.23M', '2e-05']
    """
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            size = 1e3 if unit == "k" else size
            return f"{value / size:.3g}{unit}"
    return f"{int(value)}" if value == int(value) else f"{value:.4g}"


def bytes_size(value: float | None) -> str:
    """A number of bytes.

    >>> bytes_size(123), bytes_size(5_000_000)
    ('123 B', '4.8 MiB')
    """
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float | None) -> str:
    """A length of time.

    >>> duration(0.0123), duration(4.2), duration(3700)
    ('12 ms', '4.2 s', '1 h')
    """
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else since(seconds)


def ago(at: float | None) -> str:
    if at is None:
        return "–"
    seconds = time.time() - at
    if seconds < -1:
        return f"in {since(-seconds)}"
    return "just now" if seconds < 10 else f"{since(seconds // 10 * 10 if seconds < 60 else seconds)} ago"


def moment(at: float | None) -> str:
    return "–" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def spark(values: Sequence[float]) -> str:
    """The points of a sparkline in a box of 100 × 24.

    >>> spark([1, 2, 1])
    '0,22 50,2 100,22'
    """
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = 20 / (high - low) if high > low else 0.0
    step = 100 / (len(finite) - 1)
    return " ".join(f"{i * step:.3g},{22 - (v - low) * scale:.3g}" for i, v in enumerate(finite))


def short(run_id: str) -> str:
    """An id as a list shows it: its beginning, and the run's number.

    >>> short("4e2f1d7c-1111-2222-3333-444444444444:train:0")
    '4e2f1d7c:0'
    """
    session, _, run = run_id.partition(":train:")
    return f"{session[:8]}:{run}" if run else run_id[:12]


FILTERS: dict[str, Callable[..., Any]] = {
    "number": number, "bytes": bytes_size, "duration": duration, "ago": ago, "moment": moment, "iso": iso,
    "spark": spark, "short": short,
}  # fmt: skip
