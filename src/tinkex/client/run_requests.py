"""One run's requests: numbered in the order of their turns, passes cut into chunks, steps after their passes.

Promises: a seq id is taken when its turn comes, and is free again if nothing with it left this process; one
whose request was not accepted is used up by the next call, so that no server waits for it; a step whose pass
was not wholly accepted is held back, so that nothing is ever applied to a part of a batch. Knows nothing of
what the requests are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np

from tinkex.client import custom_loss, passes
from tinkex.client import loop as background
from tinkex.client.future import APIFuture
from tinkex.client.poller import retrieve
from tinkex.client.queue_state import QueueStats
from tinkex.client.session import Session
from tinkex.client.turns import Send, Turns
from tinkex.errors import (
    BadRequestError,
    ConflictError,
    CredentialError,
    InvalidInputError,
    PassIncompleteError,
    RunLostError,
    TinkerError,
    UnprocessableEntityError,
)
from tinkex.types.data import Datum, ForwardBackwardInput, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.tensor import TensorData
from tinkex.types.training import ForwardBackwardRequest, OptimStepRequest, OptimStepResponse
from tinkex.wire import ops
from tinkex.wire.ops import Op

T = TypeVar("T")
R = TypeVar("R")
LossConfig = Mapping[str, float | str]

# Errors after which a seq id is free again: nothing with it left this process.
NEVER_SENT = (InvalidInputError, CredentialError)


class RunRequests:
    """Where a TrainingClient's requests are queued (from any thread), and then sent, each in its turn."""

    def __init__(self, session: Session, model_id: str) -> None:
        self.session = session
        self._connection = session.connection
        self._model_id = model_id
        self._watch = self._connection.watch(f"run {model_id}")
        self._turns = Turns()
        self._seq = 1  # create_model was 0; only touched in a turn
        self._gaps: list[int] = []  # seq ids whose requests were not accepted, for all we know
        self._incomplete: str | None = None  # why the next step must not be sent: a part of its pass was
        self._failed: str | None = None  # why the pass before came to nothing, which bars steps called before
        self._failures = 0
        self._cause: Exception | None = None  # what either of them came from
        self._lost: RunLostError | None = None

    # -- queueing ----------------------------------------------------------------------------------------

    def enqueue(self, what: str, send: Send[T]) -> APIFuture[T]:
        """Have `send` called when its turn comes."""
        self._connection.check_open()
        if self._lost is not None:
            raise RunLostError(self._lost.run_id, self._lost.reason)
        if custom_loss.running_for() is self:
            raise TinkerError(
                f"{what} was called inside a custom loss of the same run, and could only be sent after it. "
                "Compute the loss from the logprobs alone, or call it after forward_backward_custom"
            )
        return self._turns.enqueue(what, send)

    def submit(
        self, what: str, op: Op[Any, Any], request: Any, convert: Callable[[Any], Any] | None = None
    ) -> APIFuture[Any]:
        """Queue one request; the future's result is what `convert` makes of the server's."""

        async def send() -> Awaitable[Any]:
            waiting = await self.send(op, request)
            return waiting if convert is None else after(waiting, convert)

        return self.enqueue(what, send)

    def submit_pass(
        self, what: str, data: list[Datum], loss_fn: str, config: LossConfig | None, *, forward_only: bool
    ) -> APIFuture[ForwardBackwardOutput]:
        def send() -> Awaitable[Awaitable[ForwardBackwardOutput]]:
            sending = self.send_pass(data, loss_fn, config, forward_only=forward_only)
            return sending if forward_only else self.before_step(sending)

        return self.enqueue(what, send)

    def submit_step(self, request: OptimStepRequest) -> APIFuture[OptimStepResponse]:
        failures = self._failures  # so far: a pass that fails from now on is news to the caller
        return self.enqueue("optim_step", lambda: self._send_step(request, failures))

    def lose(self, error: RunLostError) -> None:
        """The server has lost the run: every later call says so, and sends nothing."""
        self._lost = error

    def queue_stats(self) -> QueueStats:
        return self._watch.stats()

    # -- within a turn -----------------------------------------------------------------------------------

    async def send(self, op: Op[Any, Any], request: Any) -> Awaitable[Any]:
        """Post one request with the next seq id; returns what waits for its result."""
        self._turns.commit()
        seq_id, self._seq = self._seq, self._seq + 1
        try:
            numbered = request.model_copy(update={"seq_id": seq_id})
            promise = await self._connection.call(op, numbered, observe=self._watch.submitting)
        except NEVER_SENT:
            self._seq = seq_id
            raise
        except BaseException:
            self._gaps.append(seq_id)
            raise
        self._fill_gaps()
        return self._result(op, promise.request_id)

    def _fill_gaps(self) -> None:
        """Use up the seq ids that the server may be waiting for, by passes that change nothing.

        Sent after a request that was accepted: the server is there, and may not begin it before these. They
        are retried as any request is, beside the queue; what never arrives goes with the next request.
        """
        gaps, self._gaps = self._gaps, []
        for seq_id in gaps:
            background.spawn(self._fill(seq_id))

    async def _fill(self, seq_id: int) -> None:
        inputs = {"target_tokens": np.zeros(1, np.int64), "weights": np.zeros(1, np.float32)}
        nothing = Datum(ModelInput.from_ints([0]), {name: TensorData(x) for name, x in inputs.items()})
        work = ForwardBackwardInput([nothing], "cross_entropy")
        request = ForwardBackwardRequest(work, self._model_id, seq_id, forward_only=True)
        try:
            await self._connection.transport.call(ops.FORWARD_BACKWARD, request)
        except (BadRequestError, ConflictError, UnprocessableEntityError):
            pass  # its place is taken, as if an answer was all that got lost
        except TinkerError:
            self._gaps.append(seq_id)

    async def _result(self, op: Op[Any, Any], request_id: str) -> Any:
        return await retrieve(self._connection, op, request_id, observe=self._watch, owner=self._model_id)

    async def send_pass(
        self,
        data: list[Datum],
        loss_fn: str,
        config: LossConfig | None,
        *,
        forward_only: bool,
        last: bool = True,
    ) -> Awaitable[ForwardBackwardOutput]:
        """Post a pass in chunks within the server's limits; returns what waits for all of it.

        Until the `last` one of its turn has been sent, a call can be cancelled.
        """
        if last:
            self._turns.commit()
        limits = self._connection.config
        chunks = passes.cut(data, limits.fwdbwd_max_chunk_len, limits.fwdbwd_max_chunk_bytes_count)
        first, self._seq = self._seq, self._seq + len(chunks)
        requests = [
            ForwardBackwardRequest(
                ForwardBackwardInput(chunk, loss_fn, config), self._model_id, first + n, forward_only
            )
            for n, chunk in enumerate(chunks)
        ]
        promises = await self._post_chunks(requests, parallel=limits.parallel_fwdbwd_chunks)
        self._fill_gaps()
        op = ops.FORWARD if forward_only else ops.FORWARD_BACKWARD
        return self._collect_pass(op, [promise.request_id for promise in promises])

    async def _post_chunks(self, requests: list[ForwardBackwardRequest], *, parallel: bool) -> list[Any]:
        """Post all chunks of a pass; if any is refused, say so and remember that the pass is incomplete."""

        def post(request: ForwardBackwardRequest) -> Awaitable[Any]:
            return self._connection.call(ops.FORWARD_BACKWARD, request, observe=self._watch.submitting)

        answers: list[Any] = []
        if parallel:
            # The first chunk last: when it arrives, the server has the whole pass and can batch it.
            rest = await asyncio.gather(*map(post, requests[1:]), return_exceptions=True)
            answers = [*await asyncio.gather(post(requests[0]), return_exceptions=True), *rest]
        else:
            for request in requests:
                answers += await asyncio.gather(post(request), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not errors:
            return answers
        if len(errors) == len(answers) and all(isinstance(e, NEVER_SENT) for e in errors):
            self._seq = requests[0].seq_id
            raise errors[0]
        asked = zip(requests, answers, strict=True)
        self._gaps += [request.seq_id for request, answer in asked if isinstance(answer, BaseException)]
        if not requests[0].forward_only:
            accepted = len(answers) - len(errors)
            self._incomplete = (
                f"{accepted} of {len(answers)} requests of a forward_backward were accepted ({errors[0]})"
            )
        raise errors[0]

    async def _collect_pass(self, op: Op[Any, Any], request_ids: list[str]) -> ForwardBackwardOutput:
        outputs = await asyncio.gather(*(self._result(op, request_id) for request_id in request_ids))
        return passes.join(outputs)

    async def while_wanted(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Await something, unless the future of this turn is cancelled meanwhile."""
        return await self._turns.while_wanted(waiting)

    # -- steps and their passes --------------------------------------------------------------------------

    async def before_step(self, sending: Awaitable[T]) -> T:
        """Send a pass that a step builds on; if it comes to nothing, the step must not be sent."""
        try:
            return await sending
        except Exception as error:
            self._cause = error
            if self._incomplete is None:
                self._failures += 1
                self._failed = str(error) or type(error).__name__
            raise

    async def _send_step(self, request: OptimStepRequest, failures: int) -> Awaitable[OptimStepResponse]:
        """Send a step, unless its pass was not wholly sent.

        `failures` is how many passes had come to nothing when the step was called: one that failed since then
        is news to the caller, one that failed before is not.
        """
        reason, self._incomplete = self._incomplete, None
        failed, self._failed = self._failed, None
        cause, self._cause = self._cause, None
        if reason is None and failed is not None and failures < self._failures:
            reason = f"the forward_backward before it came to nothing ({failed})"
        if reason is not None:
            raise PassIncompleteError(
                f"this optim_step was not sent: {reason}, so it would have applied a part of the batch. Call "
                "optim_step again to apply what was accepted, or load a checkpoint to discard it"
            ) from cause
        return await self.send(ops.OPTIM_STEP, request)


async def after(waiting: Awaitable[T], convert: Callable[[T], R]) -> R:
    """What `convert` makes of a result, once that is there."""
    return convert(await waiting)
