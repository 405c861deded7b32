"""A forward_backward with a loss of the user's own, as requests of its run (hop 1, for custom losses).

A loss that the server has taken (`LossHandle.loss_id`) is named to it, and computed there. Any other is
computed here: a forward pass, the loss's gradients, and a pass on weights that amount to them. Promises: all
of it is one turn, so that what is called after it is sent after its backward half; if it is cancelled while
the loss is being computed, no backward half is sent. The mathematics is custom_loss.py's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from tinkex.client import custom_loss, passes
from tinkex.client.custom_loss import ArrayLoss, CustomLossFnV1, LossChecks, LossHandle
from tinkex.client.future import APIFuture
from tinkex.client.loop import in_own_thread, off_loop
from tinkex.client.run_requests import RunRequests, after
from tinkex.errors import InvalidInputError, RequestFailedError
from tinkex.types.data import Datum
from tinkex.types.outputs import ForwardBackwardOutput

CustomLoss = CustomLossFnV1 | LossHandle | ArrayLoss


def submit(
    requests: RunRequests, given: Sequence[Datum], loss_fn: CustomLoss
) -> APIFuture[ForwardBackwardOutput]:
    """Check the pass, and queue it."""
    if isinstance(loss_fn, LossHandle):
        passes.check_pass(given, "custom", None)
        loss_fn.check(given)
        _check_session(loss_fn, requests.session.session_id)
    else:
        passes.check_pass(given, "cross_entropy", None)
        if not callable(loss_fn) and not isinstance(loss_fn, ArrayLoss):
            raise InvalidInputError(
                f"loss_fn must be a function, a LossHandle or an ArrayLoss, got {type(loss_fn).__name__}"
            )
        if isinstance(loss_fn, ArrayLoss) and isinstance(loss_fn, LossChecks):
            loss_fn.check(given)
    data = list(given)  # the caller may reuse theirs
    return requests.enqueue(
        "forward_backward_custom", lambda: requests.before_step(_send(requests, data, loss_fn))
    )


def _check_session(handle: LossHandle, session_id: str | None) -> None:
    if handle.session_id != session_id:
        raise InvalidInputError(
            f"the loss {handle.name!r} was created in session {handle.session_id}, but this run is of "
            f"session {session_id}: create it with this run's ServiceClient"
        )


def _send(
    requests: RunRequests, data: list[Datum], loss_fn: CustomLoss
) -> Awaitable[Awaitable[ForwardBackwardOutput]]:
    if not isinstance(loss_fn, LossHandle):
        return _send_linearised(requests, data, loss_fn)
    if loss_fn.loss_id is None:
        return _send_linearised(requests, data, loss_fn.run_here)
    return _send_named(requests, data, loss_fn, loss_fn.loss_id)


async def _send_named(
    requests: RunRequests, data: list[Datum], handle: LossHandle, loss_id: str
) -> Awaitable[ForwardBackwardOutput]:
    waiting = await requests.send_pass(data, "custom", {"loss_id": loss_id}, forward_only=False)

    async def finish() -> ForwardBackwardOutput:
        try:
            return await waiting
        except RequestFailedError as error:
            raise handle.explain(error) from None

    return finish()


async def _send_linearised(
    requests: RunRequests, data: list[Datum], loss_fn: CustomLossFnV1 | ArrayLoss
) -> Awaitable[ForwardBackwardOutput]:
    probe = custom_loss.probe(data)
    forward = await requests.send_pass(probe, "cross_entropy", None, forward_only=True, last=False)

    async def differentiate() -> custom_loss.Gradients:
        return await in_own_thread(custom_loss.differentiate, requests, loss_fn, data, await forward)

    gradients = await requests.while_wanted(differentiate())
    surrogate = await off_loop(custom_loss.linearised, data, gradients.weights)
    waiting = await requests.send_pass(surrogate, "cross_entropy", None, forward_only=False)
    return after(waiting, lambda output: custom_loss.finished(output, gradients))
