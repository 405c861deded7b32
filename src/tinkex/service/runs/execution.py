"""What a request does when its turn comes, for the first time or again after a restart.

Replaying an answered request repeats only its effect on the run: a pass that failed still fails its step, and
a save is not written again. A barrier (create, step, save, load) sees exactly the requests before it;
repeated after a crash, it gives the same result. A checkpoint's files are complete before its
row exists, and its row before its future resolves. A pass with an uploaded loss during which two processes
died fails instead of being begun a third time; the second time its batch has no other pass.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from tinkex import tracing
from tinkex.engine import protocol
from tinkex.engine.protocol import Engine, EngineError, Pass
from tinkex.service.access import Access
from tinkex.service.custom_losses import find_loss
from tinkex.service.futures import Future
from tinkex.service.ledger import Ledger
from tinkex.service.rows import RunRow
from tinkex.service.runs.journal import JournalEntry, JournalError
from tinkex.service.runs.lifecycle import Run
from tinkex.service.runs.saving import SAVES, Saves
from tinkex.service.saved_files import SavedFiles
from tinkex.service.scheduler import QueuedRequest
from tinkex.service.served_models import execute
from tinkex.types import training
from tinkex.types.checkpoints import LoadWeightsResponse
from tinkex.types.chunks import EncodedTextChunk

REFUSED = "refused"  # the op of an Unreadable that was refused at once: it only uses up its seq id
LARGE_PASS, MANY_DATUMS = 64 * 1024, 256  # tokens or datums from which threads write, digest and free a pass
MOST_TRIES = 2  # of a pass with an uploaded loss, in processes that died meanwhile


@dataclass(frozen=True)
class Unreadable:
    """Journaled in place of a request that was accepted only to fail in its turn."""

    type: ClassVar[str] = "unreadable"  # the op of its journal entry
    op: str
    message: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Execution(QueuedRequest):
    """One request as the training loop executes it: a pass, a barrier, or nothing but its known failure."""

    run: Run
    op: str
    request: Any
    future: Future
    replayed: bool  # its outcome is known: only the effect on the run is computed again
    one_pass: Pass | None = None
    backward: bool = False  # a pass with gradients: if it fails, so must the next step of its run
    refusal: str | None = None  # fail with this message, executing nothing
    skip: bool = False  # it was done before, and what it wrote is there
    may_be_done_since: float = math.inf  # when it was accepted, if a killed process may have executed it
    hop: tracing.Hop | None = None  # its wait for its turn, when tracing is on

    @property
    def must_succeed(self) -> bool:
        """It succeeded before: a failure now means that the run cannot be restored."""
        return self.replayed and self.refusal is None

    @property
    def suspect(self) -> bool:
        """It may end the process that executes it: a pass with an uploaded loss, never finished before."""
        work = self.one_pass
        return work is not None and work.custom_loss is not None and not work.finished

    @property
    def is_large(self) -> bool:
        """Its request, or its result, takes milliseconds to write or to free."""
        return self.one_pass is not None and (
            self.tokens >= LARGE_PASS or len(self.one_pass.data) >= MANY_DATUMS
        )

    def begin(self) -> None:
        """Just before a part of it is computed: journal that, if it is suspect."""
        if self.suspect:
            self.run.journal.begin(self.request_id)

    def pause(self) -> None:
        """A part of it was computed, and other passes run next: a crash now is not counted against it."""
        if self.suspect:
            with contextlib.suppress(JournalError):  # a full disk
                self.run.journal.interrupt(self.request_id)

    def resume(self) -> None:
        with contextlib.suppress(JournalError):
            self.begin()


@dataclass(frozen=True)
class Past:
    """What earlier processes did with a journaled request."""

    again: bool = False  # one may have executed it, and not answered
    finished: bool = False  # one executed it to its end, and answered
    tries: int = 0  # how many began it, and died before its end


def plan(run: Run, entry: JournalEntry, future: Future, ledger: Ledger, past: Past) -> Execution:
    """What a journaled request does."""
    request, op, replayed = entry.request, entry.op, future.done
    refusal = future.outcome.error if replayed and future.failed else None
    backward, one_pass, alone = False, None, False
    if isinstance(request, Unreadable):
        op, refusal, backward = request.op, request.message, request.op == "forward_backward"
    skip = replayed and refusal is None and op in SAVES
    if isinstance(request, training.ForwardBackwardRequest):
        backward = not request.forward_only
        skip = replayed and refusal is None and not backward
        if refusal is None and not skip:
            one_pass = _pass(run, request, ledger, finished=replayed or past.finished)
            alone = bool(past.tries)
            if one_pass.custom_loss is not None and past.tries >= MOST_TRIES and not one_pass.finished:
                one_pass = None
                refusal = (
                    f"the server ended {past.tries} times while it computed this pass, whose loss is an "
                    "uploaded one: it is not computed again. Send fewer datums in a pass, or another loss"
                )
    return Execution(
        run.id, entry.seq_id, entry.request_id, one_pass is not None, tokens_of(request), entry.digest,
        op == "optim_step", alone, run=run, op=op, request=request, future=future, replayed=replayed,
        one_pass=one_pass, backward=backward, refusal=refusal, skip=skip,
        may_be_done_since=entry.accepted_at if past.again else math.inf,
        hop=None if replayed else tracing.begin(f"scheduler {op}"),
    )  # fmt: skip


def _pass(run: Run, request: training.ForwardBackwardRequest, ledger: Ledger, *, finished: bool) -> Pass:
    work, custom = request.forward_backward_input, None
    config = dict(work.loss_fn_config or {})
    if work.loss_fn == "custom":
        custom = find_loss(ledger, str(config.pop("loss_id", "")), run.row.owner)
    return Pass(run.id, work.data, work.loss_fn, config, not request.forward_only, custom, finished)


def tokens_of(request: Any) -> int:
    """How many tokens a pass has; 0 for any other request."""
    if not isinstance(request, training.ForwardBackwardRequest):
        return 0
    return sum(
        chunk.length if isinstance(chunk, EncodedTextChunk) else 1
        for datum in request.forward_backward_input.data
        for chunk in datum.model_input.chunks
    )


@dataclass(eq=False)
class Barriers:
    """Creates, steps, loads and saves."""

    saves: Saves
    files: SavedFiles
    access: Access

    async def execute(self, engine: Engine, work: Execution) -> Any:
        """The result of a barrier, for the first time or replayed."""
        if work.refusal is not None:
            raise EngineError(work.refusal, "user")
        if work.skip:
            return None
        run, request = work.run.row, work.request
        match work.op:
            case "create_model":
                await execute(engine, protocol.CreateAdapter(run.run_id, run.lora))
                return training.CreateModelResponse(model_id=run.run_id)
            case "optim_step":
                metrics = await execute(engine, protocol.OptimStep(run.run_id, request.optim_params))
                # JSON has no NaN, and official clients take no null for a metric.
                finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
                return training.OptimStepResponse(metrics=finite)
            case "load_weights":
                return await self._load(engine, run, request.path, request.optimizer)
            case _:
                return await self.saves.save(engine, run, work)

    async def _load(self, engine: Engine, run: RunRow, path: str, optimizer: bool) -> LoadWeightsResponse:
        checkpoint = self.access.any_checkpoint(path)  # accept.py checked that it may be read
        if checkpoint is None:
            raise EngineError(f"{path} does not exist any more", "user")
        if checkpoint.encrypted:
            raise EngineError(f"{path} is encrypted: only its recipients can read it", "user")
        if checkpoint.base_model != run.base_model:
            raise EngineError(
                f"{path} is for {checkpoint.base_model}, this run is on {run.base_model}", "user"
            )
        if optimizer and not checkpoint.with_optimizer:
            raise EngineError(f"{path} was saved without optimizer state; load it without", "user")
        async with self.files.read(checkpoint.directory) as directory:
            await execute(engine, protocol.LoadAdapter(run.run_id, str(directory), optimizer=optimizer))
        return LoadWeightsResponse(path=path, model_id=run.run_id, type="load_weights")
