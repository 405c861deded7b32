"""Which trainer of a base model a run is on. Pure: no ledger, no engines.

A run stays where it was. Only while it is not in memory may it move, and only if that helps: moving costs
nothing then, because its adapter is loaded from disk anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

UNEVEN = 2  # runs in memory by which a trainer must be ahead of another before one of its runs moves


def choose_trainer(last: int, runs: Sequence[int]) -> int:
    """The trainer for a run that comes into memory, by the runs that each trainer has there.

    `last` is where it was, or any number that is no trainer's.

    >>> choose_trainer(-1, [3, 1]), choose_trainer(0, [2, 1]), choose_trainer(0, [4, 1])
    (1, 0, 1)
    """
    emptiest = min(range(len(runs)), key=runs.__getitem__)
    if not 0 <= last < len(runs) or runs[last] >= runs[emptiest] + UNEVEN:
        return emptiest
    return last
