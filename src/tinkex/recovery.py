"""Recovery: a training loop that resumes from its last checkpoint when the server loses its run.

    policy = RecoveryPolicy(on_event=print)
    policy.run(service, create, train)          # create() makes the run, train(run, step) is your loop

`train` is called with step 0. When the server has lost the run, it is called again with a new run, resumed
from the latest checkpoint (weights and optimizer state), and with that checkpoint's step. Promises: nothing
is resumed unless the run is lost; every loss, attempt and resumption is an event; a loop without progress is
stopped. Steps after the checkpoint are repeated.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tinkex.client.future import APIFuture, owned, resolve, start
from tinkex.client.loop import in_own_thread
from tinkex.client.queue import RunWatch
from tinkex.client.rest import RestClient
from tinkex.client.retry import RetryPolicy
from tinkex.client.service import RemoteServiceClient
from tinkex.client.training import TrainingClient
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    AuthenticationError,
    ClientClosedError,
    CredentialError,
    ExpiredError,
    InternalServerError,
    InvalidInputError,
    NotFoundError,
    PassIncompleteError,
    RecoveryFailedError,
    RequestErrorCategory,
    RequestFailedError,
    RunLostError,
    TinkerError,
    is_user_error,
)
from tinkex.types.checkpoints import Checkpoint, ParsedCheckpointTinkerPath

log = logging.getLogger("tinkex")
T = TypeVar("T")
# Another attempt would fail in the same way.
_PERMANENT = (RecoveryFailedError, InvalidInputError, ClientClosedError, CredentialError, AuthenticationError)


# -- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunLost:
    """The server has lost a run: its loop failed, or the policy's watch noticed."""

    run_id: str
    reason: str
    error: Exception

    def __str__(self) -> str:
        return f"run {self.run_id} is lost: {self.reason}"


@dataclass(frozen=True)
class RecoveryAttempt:
    """The policy will try to resume the run after `delay` seconds."""

    run_id: str
    attempt: int
    attempts: int
    delay: float

    def __str__(self) -> str:
        return f"run {self.run_id}: attempt {self.attempt} of {self.attempts}, in {self.delay:.1f} s"


@dataclass(frozen=True)
class RunResumed:
    """A new run replaces the lost one, from `step` on; without a checkpoint it starts from the beginning."""

    run_id: str
    new_run_id: str
    checkpoint: str | None
    step: int

    def __str__(self) -> str:
        where = f"{self.checkpoint}, at step {self.step}" if self.checkpoint else "the beginning"
        return f"run {self.run_id} goes on as {self.new_run_id} from {where}"


@dataclass(frozen=True)
class RecoveryGaveUp:
    """The policy will not try again."""

    run_id: str
    error: Exception

    def __str__(self) -> str:
        return f"run {self.run_id} was given up: {self.error}"


RecoveryEvent = RunLost | RecoveryAttempt | RunResumed | RecoveryGaveUp


# -- the policy --------------------------------------------------------------------------------------------


def step_of(checkpoint: Checkpoint) -> int | None:
    """The step a checkpoint was saved at: `user_metadata["step"]`, or the number that its name ends in."""
    given = (checkpoint.user_metadata or {}).get("step") or checkpoint.tinker_path
    found = re.search(r"\d+$", given)
    return int(found.group()) if found else None


@dataclass(frozen=True)
class RecoveryPolicy:
    """When a lost run is resumed, how often and how many at once; one policy may serve many loops.

    `attempts`: tries to resume before RecoveryFailedError, and how often the same checkpoint may be resumed
    from. Between two tries, `backoff` seconds, doubled each time, up to `max_backoff`. `concurrent`: how many
    runs may be resuming at the same time. `start_over`: a run without any checkpoint starts from the
    beginning. `watch`: seconds between polls, which notice a loss between the loop's calls (None: it is
    noticed when a call fails). `on_event` is called with every event.
    """

    attempts: int = 5
    backoff: float = 1.0
    max_backoff: float = 60.0
    concurrent: int = 2
    start_over: bool = True
    watch: float | None = None
    on_event: Callable[[RecoveryEvent], object] | None = None
    step_of: Callable[[Checkpoint], int | None] = step_of
    _permits: asyncio.Semaphore = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def check(name: str, fits: Callable[[Any], bool], wanted: str) -> None:
            if not fits(value := getattr(self, name)):
                raise InvalidInputError(f"RecoveryPolicy.{name} must be {wanted}, got {value!r}")

        for name in ("attempts", "concurrent"):
            check(name, lambda value: type(value) is int and value >= 1, "a whole number from 1 on")
        for name in ("backoff", "max_backoff"):
            check(name, lambda value: _is_number(value) and value >= 0, "seconds from 0 on")
        check("watch", lambda v: v is None or (_is_number(v) and v > 0), "seconds above 0, or None")
        object.__setattr__(self, "_permits", asyncio.Semaphore(self.concurrent))

    def run(
        self,
        service: RemoteServiceClient,
        create: Callable[[], TrainingClient],
        train: Callable[[TrainingClient, int], T],
        *,
        checkpoint: str | None = None,
    ) -> T:
        """Call `train(run, step)` until it returns, resuming its run whenever the server loses it.

        `checkpoint` resumes from this path instead of from the latest one.
        """
        running = _RecoveredLoop(self, service, checkpoint, _block).run(create, train)
        try:
            running.send(None)  # `_block` never suspends, so this runs it to its end, in this thread
        except StopIteration as end:
            return end.value
        raise AssertionError("unreachable")

    async def run_async(
        self,
        service: RemoteServiceClient,
        create: Callable[[], Awaitable[TrainingClient]],
        train: Callable[[TrainingClient, int], Awaitable[T]],
        *,
        checkpoint: str | None = None,
    ) -> T:
        """Like `run`, for coroutine functions."""
        return await _RecoveredLoop(self, service, checkpoint, _await).run(create, train)

    def _delay(self, attempt: int) -> float:
        """Seconds before an attempt: 0 before the first, then exponential backoff with jitter."""
        policy = RetryPolicy(base=self.backoff, cap=self.max_backoff, jitter=0.25)
        return 0.0 if attempt == 1 else policy.backoff(attempt - 1)

    async def _permit(self, granted: APIFuture[None], done: APIFuture[None]) -> None:
        """Keep one of the `concurrent` permits, from `granted` until `done`. On the background loop."""
        async with self._permits:
            resolve(granted, None)
            await done

    def _tell(self, event: RecoveryEvent) -> None:
        log.log(logging.INFO if isinstance(event, RecoveryAttempt) else logging.WARNING, "%s", event)
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:  # an error in the user's callback must not end the run
                log.exception("on_event of a RecoveryPolicy failed")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


async def _block(value: Any) -> Any:
    """What a plain function returned; a future is waited for, a coroutine is refused."""
    if isinstance(value, APIFuture):
        try:
            return value.result()  # pyright: ignore[reportUnknownVariableType]
        except BaseException:
            value.cancel()
            raise
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise InvalidInputError("this takes plain functions; use run_async for coroutine functions")
    return value


async def _await(value: Any) -> Any:
    """Like `_block`, for coroutine functions."""
    if isinstance(value, APIFuture):
        return await owned(value, None)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return await value if inspect.isawaitable(value) else value


class _RecoveredLoop:
    """The state of one loop across its runs. `wait` blocks the thread, or awaits."""

    def __init__(
        self,
        policy: RecoveryPolicy,
        service: RemoteServiceClient,
        checkpoint: str | None,
        wait: Callable[[Any], Coroutine[Any, Any, Any]],
    ) -> None:
        if checkpoint is not None:
            ParsedCheckpointTinkerPath.from_tinker_path(checkpoint)
        self._policy, self._service, self._checkpoint, self._wait = policy, service, checkpoint, wait
        self._rest: RestClient = service.create_rest_client()
        self._resumed: Counter[str | None] = Counter()  # how often each checkpoint was resumed from
        self._owner: str | None = None  # the run that saved the checkpoint last resumed from
        self._suspect: set[str] = set()  # checkpoints that failed to load once
        self._unusable: dict[str, Exception] = {}  # checkpoints that will not be tried again, and why

    async def run(self, create: Callable[[], Any], train: Callable[[TrainingClient, int], Any]) -> Any:
        client, step = await self._wait(create()), 0
        while True:
            watch = self._watch(client)
            try:
                return await self._wait(train(client, step))
            except TinkerError as error:
                reason = await self._call(self._why_lost, client, error, watch)
                if reason is None:
                    raise
                if reason:
                    self._policy._tell(RunLost(client.model_id, reason, error))
                lost = error
            finally:
                if watch is not None:
                    watch.stop()
            client, step = await self._recover(client.model_id, lost, create)

    async def _recover(
        self, run_id: str, error: Exception, create: Callable[[], Any]
    ) -> tuple[TrainingClient, int]:
        """Another run and its step; raises RecoveryFailedError after the last attempt."""
        policy = self._policy
        for attempt in range(1, policy.attempts + 1):
            delay = policy._delay(attempt)
            policy._tell(RecoveryAttempt(run_id, attempt, policy.attempts, delay))
            await self._call(asyncio.sleep, delay)
            granted, done = APIFuture[None]("permit"), APIFuture[None]("permit")
            start(partial(policy._permit, granted, done))
            try:
                await self._wait(granted)
                resumed = await self._call(self._resume, run_id)
                client, path, step = resumed or (await self._wait(create()), None, 0)
            except (TinkerError, TimeoutError) as failure:
                error = failure
                if isinstance(error, _PERMANENT):
                    break
            else:
                self._resumed[path] += 1
                if path is not None:
                    self._owner = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
                policy._tell(RunResumed(run_id, client.model_id, path, step))
                return client, step
            finally:
                resolve(done, None)
        policy._tell(RecoveryGaveUp(run_id, error))
        raise RecoveryFailedError(f"run {run_id} is lost and was given up: {error}") from error

    async def _call(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        """Run a coroutine function on the background loop."""
        return await self._wait(start(lambda: function(*args), "recovery"))

    def _watch(self, client: TrainingClient) -> RunWatch | None:
        def tell(error: RunLostError) -> None:
            self._policy._tell(RunLost(error.run_id, error.reason, error))

        return RunWatch(client.queue, self._policy.watch, tell) if self._policy.watch else None

    # -- on the background loop --------------------------------------------------------------------------

    async def _why_lost(
        self, client: TrainingClient, error: TinkerError, watch: RunWatch | None
    ) -> str | None:
        """Why a run is lost; "" if the watch has reported it already, None if it is not lost."""
        if watch is not None and watch.stop() is not None:
            await watch.ended
            return ""
        if isinstance(error, PassIncompleteError) and isinstance(error.__cause__, TinkerError):
            error = error.__cause__
        if isinstance(error, APIConnectionError | InternalServerError):
            return f"its server could not be used ({error})"
        if isinstance(error, RequestFailedError) and error.category is not RequestErrorCategory.User:
            return f"its server failed a request ({error})"
        asked = error.request.url if isinstance(error, NotFoundError) and error.request else ""
        if isinstance(error, ExpiredError) or asked.endswith("/retrieve_future"):
            return f"one of its requests was forgotten ({error})"
        if not isinstance(error, RequestFailedError | APIStatusError):
            return None
        try:
            if (await self._rest.get_training_run(client.model_id)).corrupted:
                return f"the server could not restore it ({error})"
            return None if await self._service.session.alive() else f"its session has ended ({error})"
        except NotFoundError:
            return f"the server does not know it ({error})"
        except APIConnectionError:
            return f"its server could not be used ({error})"
        except TinkerError:
            return None  # the loop's own error says more

    async def _resume(self, lost: str) -> tuple[TrainingClient, str | None, int] | None:
        """A run resumed from the latest checkpoint, with its path and step; None: start over."""
        await self._service.session.alive()  # opens a new session if the server has ended ours
        path, step = await self._latest(lost) or (None, 0)
        if self._resumed[path] >= self._policy.attempts:
            where = f"from {path}" if path else "from the beginning"
            raise RecoveryFailedError(
                f"it was resumed {where} {self._policy.attempts} times and got no further"
            )
        if path is None:
            if not self._policy.start_over:
                raise RecoveryFailedError("it has no checkpoint to go on from")
            return None
        try:
            client = await self._service.create_training_client_from_state_with_optimizer_async(path)
        except TinkerError as error:
            # Not loaded: because of the checkpoint, or (if it happens twice) because of the server.
            if is_user_error(error) or (isinstance(error, RequestFailedError) and path in self._suspect):
                self._unusable[path] = error  # the next attempt takes the checkpoint before it
            self._suspect.add(path)
            raise
        return client, path, step

    async def _latest(self, lost: str) -> tuple[str, int] | None:
        """The checkpoint to resume from, and its step; None if nothing was ever saved."""
        wanted = self._checkpoint
        if wanted:
            saved = await self._saved(ParsedCheckpointTinkerPath.from_tinker_path(wanted).training_run_id)
            saved = [checkpoint for checkpoint in saved if checkpoint.tinker_path == wanted]
            if not saved:
                raise RecoveryFailedError(f"there is no checkpoint {wanted}")
        else:  # the lost run may have saved nothing since it was resumed: look at the run before it too
            saved = (await self._saved(self._owner) if self._owner else []) + await self._saved(lost)
        steps = await in_own_thread(lambda: {c.tinker_path: self._policy.step_of(c) for c in saved})
        usable = [(p, step) for p, step in steps.items() if step is not None and p not in self._unusable]
        if usable:
            return max(usable, key=lambda each: each[1])
        if self._unusable:  # never start over because checkpoints cannot be read just now
            raise list(self._unusable.values())[-1]
        if saved:
            raise RecoveryFailedError(
                f"the checkpoint {saved[-1].tinker_path} does not say its step: give it a name that ends in "
                'it, or user_metadata={"step": "100"}'
            )
        return None

    async def _saved(self, run_id: str) -> list[Checkpoint]:
        """The training checkpoints of a run, also of one that the server no longer has."""
        try:
            saved = (await self._rest.list_checkpoints(run_id)).checkpoints
        except NotFoundError:
            listing = self._rest.iter_checkpoints()
            saved = [c async for c in listing if c.tinker_path.startswith(f"tinker://{run_id}/")]
        return [c for c in saved if c.checkpoint_type == "training"]
