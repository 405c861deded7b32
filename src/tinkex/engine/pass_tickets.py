"""Batches of passes under way: what every trainer does between two micro-batches beside computing.

Promises: `advance` computes one micro-batch and skips passes that have failed; abandoning a run fails its
passes and no others. Knows nothing of models, losses or gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tinkex.engine.protocol import EngineError, Failure, PassOutcome, PassProgress


class RunningPass(Protocol):
    """One pass whose content was checked; `failure` is set when it cannot be finished."""

    @property
    def run(self) -> str: ...

    failure: Failure | None


P = TypeVar("P", bound=RunningPass)
B = TypeVar("B")


@dataclass
class _Ticket(Generic[P, B]):
    passes: list[P | Failure]  # a Failure: refused before anything was computed
    batches: list[B]
    done: int = 0

    @property
    def going(self) -> list[P]:
        return [one for one in self.passes if not isinstance(one, Failure) and one.failure is None]


class PassTickets(Generic[P, B]):
    """`compute` does one micro-batch of a ticket's passes; `finish` makes a pass's outcome."""

    def __init__(
        self, compute: Callable[[Sequence[P | Failure], B], None], finish: Callable[[P], PassOutcome]
    ) -> None:
        self._compute, self._finish = compute, finish
        self._tickets: dict[str, _Ticket[P, B]] = {}
        self._serial = itertools.count()

    def begin(self, passes: list[P | Failure], batches: list[B]) -> PassProgress | list[PassOutcome]:
        name = f"pass-{next(self._serial)}"
        self._tickets[name] = _Ticket(passes, batches)
        return self.advance(name)

    def advance(self, name: str) -> PassProgress | list[PassOutcome]:
        """Compute the next micro-batch; the outcomes, if it was the last."""
        ticket = self._tickets.get(name)
        if ticket is None:
            raise EngineError(f"no passes with the ticket {name!r} are under way")
        if ticket.batches:
            try:
                self._compute(ticket.passes, ticket.batches[ticket.done])
            except BaseException:
                del self._tickets[name]  # nobody can continue it
                raise
            ticket.done += 1
        if ticket.done < len(ticket.batches):
            return PassProgress(name, ticket.done, len(ticket.batches))
        del self._tickets[name]
        return [one if isinstance(one, Failure) else self._finish(one) for one in ticket.passes]

    def abandon(self, run: str) -> None:
        """Fail the passes of `run` that are under way; a ticket without others is dropped."""
        for name, ticket in list(self._tickets.items()):
            for one in ticket.going:
                if one.run == run:
                    one.failure = Failure("server", f"the pass of run {run!r} was abandoned")
            if not ticket.going:
                del self._tickets[name]

    def under_way(self, run: str) -> bool:
        return any(one.run == run for ticket in self._tickets.values() for one in ticket.going)
