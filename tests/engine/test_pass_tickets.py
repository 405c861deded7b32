"""Batches of passes under way: what is left of one whose micro-batch raises."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tinkex.engine.pass_tickets import PassTickets
from tinkex.engine.protocol import Failure, PassProgress


@dataclass
class Running:
    run: str
    failure: Failure | None = None


def test_a_micro_batch_that_raises_leaves_no_pass_under_way():
    """Or the run's next step would be refused, and its good gradients discarded."""

    def compute(passes: object, batch: str) -> None:
        if batch == "bad":
            raise RuntimeError("out of memory")

    tickets: PassTickets[Running, str] = PassTickets(compute, lambda one: Failure("server", one.run))
    progress = tickets.begin([Running("r")], ["good", "bad"])
    assert isinstance(progress, PassProgress)
    assert tickets.under_way("r")
    with pytest.raises(RuntimeError, match="out of memory"):
        tickets.advance(progress.ticket)
    assert not tickets.under_way("r")
