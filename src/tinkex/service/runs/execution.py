"""What a journaled request does when its turn comes: for the first time, or again after a restart.

Replaying an answered request repeats its effect and nothing else. A pass that failed is not computed again
and still fails its step. A save is not written again. A checkpoint that was deleted stays deleted. Knows
nothing of order; barriers.py executes everything that is not a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinkex import tracing
from tinkex.engine.protocol import Pass
from tinkex.service.custom_losses import find_loss
from tinkex.service.futures import Future
from tinkex.service.ledger import Ledger
from tinkex.service.rows import RunRow
from tinkex.service.runs.journal import JournalEntry
from tinkex.service.runs.lifecycle import Run
from tinkex.types.data import EncodedTextChunk
from tinkex.types.training import ForwardBackwardRequest

SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
UNREADABLE = "unreadable"  # the op of an entry whose request could not be read
REFUSED = "refused"  # the op of an Unreadable whose client was told at once: it only uses up its seq id


@dataclass(frozen=True)
class Unreadable:
    """Journaled in place of a request that was accepted only to fail in its turn."""

    op: str
    message: str


@dataclass(frozen=True)
class Execution:
    """One request as the training loop executes it: a pass, a barrier, or nothing but its known failure."""

    run: Run
    op: str
    request: Any
    future: Future | None  # None: the outcome is known, and only the effect on the run is computed again
    one_pass: Pass | None = None
    refusal: str | None = None  # fail with this message, executing nothing
    skip: bool = False  # it was done before, and what it wrote is there
    breaks_window: bool = False  # if it fails, so must the next step of its run
    accepted_at: float | None = None  # set if a killed process may have executed it
    hop: tracing.Hop | None = None  # its wait for its turn, when tracing is on

    @property
    def replayed(self) -> bool:
        return self.future is None

    @property
    def must_succeed(self) -> bool:
        """It succeeded before: a failure now means that the run cannot be restored."""
        return self.replayed and self.refusal is None


@dataclass(frozen=True)
class FinishedWork:
    """What observers are told of an executed request; replayed ones are not reported."""

    row: RunRow
    op: str
    seq_id: int
    tokens: int
    seconds: float
    future: Future
    is_pass: bool
    backward: bool


def plan(
    run: Run, entry: JournalEntry, future: Future, ledger: Ledger, accepted_at: float | None = None
) -> Execution:
    """What an unanswered request does; with `accepted_at` if a killed process may have executed it."""
    request, op = entry.request, entry.op
    if isinstance(request, Unreadable):
        breaks = request.op == "forward_backward"
        return Execution(run, request.op, request, future, refusal=request.message, breaks_window=breaks)
    if op == "forward_backward":
        one_pass = _pass(run, request, ledger)
        return Execution(run, op, request, future, one_pass, breaks_window=one_pass.backward)
    return Execution(run, op, request, future, accepted_at=accepted_at)


def plan_replay(run: Run, entry: JournalEntry, answered: Future, ledger: Ledger) -> Execution:
    """What an answered request does for the run to become what it was."""
    request, op = entry.request, entry.op
    backward = isinstance(request, ForwardBackwardRequest) and not request.forward_only
    if isinstance(request, Unreadable):
        breaks = request.op == "forward_backward"
        return Execution(run, request.op, request, None, refusal=request.message, breaks_window=breaks)
    if answered.failed:
        return Execution(run, op, request, None, refusal=answered.outcome.error, breaks_window=backward)
    if op in SAVES or (op == "forward_backward" and not backward):
        return Execution(run, op, request, None, skip=True)
    one_pass = _pass(run, request, ledger) if op == "forward_backward" else None
    return Execution(run, op, request, None, one_pass, breaks_window=backward)


def _pass(run: Run, request: ForwardBackwardRequest, ledger: Ledger) -> Pass:
    work, custom = request.forward_backward_input, None
    config = dict(work.loss_fn_config or {})
    if work.loss_fn == "custom":
        custom = find_loss(ledger, str(config.pop("loss_id", "")), run.row.owner)
    return Pass(run.id, work.data, work.loss_fn, config, not request.forward_only, custom)


def tokens_of(request: Any) -> int:
    """How many tokens a pass has; 0 for any other request."""
    if not isinstance(request, ForwardBackwardRequest):
        return 0
    return sum(
        chunk.length if isinstance(chunk, EncodedTextChunk) else 1
        for datum in request.forward_backward_input.data
        for chunk in datum.model_input.chunks
    )
