"""A run's requests wait here, and leave in the order of the calls.

A send has two stages: posting, one at a time in queue order, and waiting for the result, which overlaps with
later posts (pipelining). Promises: a seq id is assigned when a request is posted, so a cancelled one leaves
no gap; a failed post never blocks the posts behind it; a step is refused if its forward_backward was only
partly accepted.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np

from tinkex import tracing
from tinkex.client import loop as background
from tinkex.client import passes
from tinkex.client.future import APIFuture, drive, fail, start, traced
from tinkex.client.polling import QueueStats, retrieve
from tinkex.client.session import Session
from tinkex.client.transport import CallContext
from tinkex.errors import (
    BadRequestError,
    ConflictError,
    CredentialError,
    ExpiredError,
    InvalidInputError,
    NotFoundError,
    PassIncompleteError,
    RunLostError,
    TinkerError,
    UnprocessableEntityError,
)
from tinkex.types.data import Datum, ForwardBackwardInput, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.sessions import SessionHeartbeatRequest
from tinkex.types.tensor import TensorData
from tinkex.types.training import (
    ForwardBackwardRequest,
    GetTrainingRunRequest,
    OptimStepRequest,
    OptimStepResponse,
)
from tinkex.wire import ops
from tinkex.wire.ops import Op

T = TypeVar("T")
R = TypeVar("R")
LossConfig = Mapping[str, float | str]

# Posts a request when it reaches the head of the queue; returns an awaitable of the result.
Send = Callable[[], Awaitable[Awaitable[T]]]

# After these errors the seq id is reused: the request never left this process.
NEVER_SENT = (InvalidInputError, CredentialError)


class SendQueue:
    """A FIFO of sends, of which one posts at a time. `enqueue` may be called from any thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Send[Any], APIFuture[Any], tracing.Hop | None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._head: APIFuture[Any] | None = None  # of the send that is posting now

    def enqueue(self, what: str, send: Send[T]) -> APIFuture[T]:
        """Queue a send; the future resolves to its result."""
        background.check_fork()
        future: APIFuture[T] = APIFuture(what)
        self._waiting.append((send, future, traced(future, what)))
        background.call_soon(self._wake)
        return future

    def _wake(self) -> None:
        if self._task is None and self._waiting:
            self._task = background.spawn(self._post_all())

    async def _post_all(self) -> None:
        try:
            while self._waiting:
                send, future, hop = self._waiting.popleft()
                if future.cancelled():
                    continue
                self._head = future
                with tracing.current(hop):
                    try:
                        waiting = await send()
                    except (Exception, asyncio.CancelledError) as error:
                        fail(future, error)
                    else:
                        background.spawn(drive(waiting, future, hop))
                self._head = None
                del send, future  # do not keep the batch alive until the next send arrives
        finally:
            self._task = None

    def commit(self) -> None:
        """Call in a send before posting: from here on `cancel()` returns False. Raises if cancelled."""
        assert self._head is not None, "no send is at the head of the queue"
        if not self._head.commit():
            raise asyncio.CancelledError

    async def unless_cancelled(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Call in a send: await something, and stop waiting if the send's future is cancelled."""
        assert self._head is not None, "no send is at the head of the queue"
        task = background.spawn(waiting)
        self._head.when_done(lambda f: f.cancelled() and background.call_soon(task.cancel))
        return await task


async def after(waiting: Awaitable[T], convert: Callable[[T], R]) -> R:
    return convert(await waiting)


class RunQueue(SendQueue):
    """The send queue of one run. `submit…` queue a request; `send…` are called by a queued send."""

    def __init__(self, session: Session, model_id: str) -> None:
        super().__init__()
        self.session = session
        self._connection = session.connection
        self.model_id = model_id
        self._watch = session.watch(f"run {model_id}")
        self._submitting = CallContext(source=model_id, observer=self._watch.submitting)
        self._seq = 1  # create_model had seq id 0
        self._gaps: list[int] = []  # seq ids whose requests the server may not have accepted
        self._incomplete: str | None = None  # why the next step is refused: its pass was partly accepted
        self._failed: str | None = None  # why the last pass failed; refuses steps that were called before
        self._failures = 0
        self._cause: Exception | None = None  # the error behind `_incomplete` or `_failed`
        self._lost: RunLostError | None = None  # refuses every later call
        self._loss_threads: set[int] = set()  # threads that run a custom loss of this run

    # -- queueing, from any thread -----------------------------------------------------------------------

    def lose(self, error: RunLostError) -> None:
        """Refuse every later call."""
        self._lost = error

    def enqueue(self, what: str, send: Send[T]) -> APIFuture[T]:
        """Queue a send, unless the client is closed, the run is lost or the call could never be sent."""
        self._connection.check_open()
        if self._lost is not None:
            raise RunLostError(self._lost.run_id, self._lost.reason)
        if threading.get_ident() in self._loss_threads:
            raise TinkerError(
                f"{what} was called inside a custom loss of the same run, and could only be sent after it. "
                "Compute the loss from the logprobs alone, or call it after forward_backward_custom"
            )
        return super().enqueue(what, send)

    def submit(
        self, what: str, op: Op[Any, Any], request: Any, convert: Callable[[Any], Any] | None = None
    ) -> APIFuture[Any]:
        """Queue one request; `convert` turns the server's result into the caller's."""

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
        failures = self._failures
        return self.enqueue("optim_step", lambda: self._send_step(request, failures))

    def queue_stats(self) -> QueueStats:
        return self._watch.stats()

    # -- posting, at the head of the queue ---------------------------------------------------------------

    async def send(self, op: Op[Any, Any], request: Any) -> Awaitable[Any]:
        """Post one request with the next seq id; returns an awaitable of its result."""
        self.commit()
        seq_id, self._seq = self._seq, self._seq + 1
        try:
            numbered = request.model_copy(update={"seq_id": seq_id})
            promise = await self._connection.call(op, numbered, self._submitting)
        except NEVER_SENT:
            self._seq = seq_id
            raise
        except BaseException:
            self._gaps.append(seq_id)
            raise
        self._fill_gaps()
        return self._result(op, promise.request_id)

    async def send_pass(
        self, data: list[Datum], loss_fn: str, config: LossConfig | None, *,
        forward_only: bool, last: bool = True,
    ) -> Awaitable[ForwardBackwardOutput]:  # fmt: skip
        """Post a pass in chunks within the server's limits; returns an awaitable of the joined output.

        `last=False`: the send posts another pass afterwards, and can still be cancelled before that one.
        """
        if last:
            self.commit()
        limits = self._connection.config
        chunks = passes.split(data, limits.fwdbwd_max_chunk_len, limits.fwdbwd_max_chunk_bytes_count)
        first, self._seq = self._seq, self._seq + len(chunks)
        works = (ForwardBackwardInput(chunk, loss_fn, config) for chunk in chunks)
        requests = [
            ForwardBackwardRequest(work, self.model_id, first + n, forward_only)
            for n, work in enumerate(works)
        ]
        promises = await self._post_chunks(requests, parallel=limits.parallel_fwdbwd_chunks)
        self._fill_gaps()
        op = ops.FORWARD if forward_only else ops.FORWARD_BACKWARD
        results = (self._result(op, promise.request_id) for promise in promises)
        return after(asyncio.gather(*results), passes.join)

    async def _post_chunks(self, requests: list[ForwardBackwardRequest], *, parallel: bool) -> list[Any]:
        """Post all chunks of a pass; if the server refuses any, record the pass as incomplete and raise."""

        async def post(request: ForwardBackwardRequest) -> Any:
            try:
                return await self._connection.call(ops.FORWARD_BACKWARD, request, self._submitting)
            except (Exception, asyncio.CancelledError) as error:
                return error

        if parallel:
            # Post the first chunk last: when it arrives, the server has the whole pass and can batch it.
            rest = await asyncio.gather(*map(post, requests[1:]))
            answers = [await post(requests[0]), *rest]
        else:
            answers = [await post(request) for request in requests]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not errors:
            return answers
        if len(errors) == len(answers) and all(isinstance(e, NEVER_SENT) for e in errors):
            self._seq = requests[0].seq_id
            raise errors[0]
        posted = zip(requests, answers, strict=True)
        self._gaps += [request.seq_id for request, answer in posted if isinstance(answer, BaseException)]
        if not requests[0].forward_only:
            accepted = len(answers) - len(errors)
            were = f"{accepted} of {len(answers)} requests of a forward_backward were accepted"
            self._incomplete = f"{were} ({errors[0]})"
        raise errors[0]

    async def _result(self, op: Op[Any, Any], request_id: str) -> Any:
        return await retrieve(self._connection, op, request_id, observe=self._watch, source=self.model_id)

    # -- gaps --------------------------------------------------------------------------------------------

    def _fill_gaps(self) -> None:
        """Use up the seq ids that the server may wait for, with forward passes of one token.

        Called after a post that succeeded: the server is reachable, and may not execute that request before
        these. One that fails is tried again later.
        """
        gaps, self._gaps = self._gaps, []
        for seq_id in gaps:
            background.spawn(self._fill_gap(seq_id))

    async def _fill_gap(self, seq_id: int) -> None:
        inputs = {"target_tokens": np.zeros(1, np.int64), "weights": np.zeros(1, np.float32)}
        nothing = Datum(ModelInput.from_ints([0]), {name: TensorData(x) for name, x in inputs.items()})
        work = ForwardBackwardInput([nothing], "cross_entropy")
        request = ForwardBackwardRequest(work, self.model_id, seq_id, forward_only=True)
        try:
            await self._connection.transport.call(ops.FORWARD_BACKWARD, request)
        except (BadRequestError, ConflictError, UnprocessableEntityError):
            pass  # the original request was accepted after all, and only its answer was lost
        except TinkerError:
            self._gaps.append(seq_id)

    # -- steps and their passes --------------------------------------------------------------------------

    async def before_step(self, sending: Awaitable[T]) -> T:
        """Post a pass whose gradients a step will use; if posting fails, remember to refuse that step."""
        try:
            return await sending
        except Exception as error:
            self._cause = error
            if self._incomplete is None:
                self._failures += 1
                self._failed = str(error) or type(error).__name__
            raise

    async def _send_step(self, request: OptimStepRequest, failures: int) -> Awaitable[OptimStepResponse]:
        """Post a step, unless a pass before it was not wholly accepted.

        `failures` counts the passes that had failed when the step was called. The caller knew of those, so
        only a pass that failed since then refuses the step.
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

    # -- custom losses -----------------------------------------------------------------------------------

    async def run_loss(self, function: Callable[..., T], *args: Any) -> T:
        """Run a custom loss in a thread of its own, where calls to this run are refused."""

        def run() -> T:
            self._loss_threads.add(threading.get_ident())
            try:
                return function(*args)
            finally:
                self._loss_threads.discard(threading.get_ident())

        return await background.in_own_thread(run)


class RunWatch:
    """Polls the run every `every` seconds, to notice without a call that the server has lost it.

    A run is lost only if the server says so after it has known the run; an unreachable or restarting server
    is polled again. `tell` is called once, before the run's next call raises RunLostError.
    """

    def __init__(self, run: RunQueue, every: float, tell: Callable[[RunLostError], object]) -> None:
        self._run, self._every, self._tell = run, every, tell
        self._session_id = run.session.session_id or ""  # of now: the client may open another one
        self._lock = threading.Lock()
        self._stopped = False
        self._known = False  # has the server ever had its record?
        self._lost: RunLostError | None = None
        self.ended = start(self._watch, "run_watch")  # resolves after the callback, or after `stop`

    def stop(self) -> RunLostError | None:
        """Stop; returns why the run is lost, if that was noticed (the callback has run, or is running)."""
        with self._lock:
            self._stopped = True
            if self._lost is None:
                self.ended.cancel()
            return self._lost

    async def _watch(self) -> None:
        while (reason := await self._why_lost()) is None:
            await asyncio.sleep(self._every)
        with self._lock:
            if self._stopped:
                return
            self._lost = RunLostError(self._run.model_id, reason)
        await background.in_own_thread(self._tell, self._lost)
        self._run.lose(self._lost)

    async def _why_lost(self) -> str | None:
        call, run_id = self._run.session.connection.call, self._run.model_id
        try:
            record = await call(ops.GET_TRAINING_RUN, GetTrainingRunRequest(training_run_id=run_id))
            self._known = True
            if record.corrupted:
                return "the server could not restore it"
        except NotFoundError:
            return "the server does not know it any more" if self._known else None
        except TinkerError:
            return None
        try:
            await call(ops.SESSION_HEARTBEAT, SessionHeartbeatRequest(session_id=self._session_id))
        except (ExpiredError, NotFoundError):
            return "its session has ended"
        except TinkerError:
            pass
        return None
