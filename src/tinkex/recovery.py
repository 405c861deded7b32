"""Recovery: a training loop that resumes from its last checkpoint when the server loses its run.

    policy = RecoveryPolicy(on_event=print)
    policy.run(service, create, train)          # create() makes the run, train(run, step) is your loop

`train` is called with step 0. When the server has lost the run, it is called again with a new run, resumed
from the latest checkpoint (weights and optimizer state), and with that checkpoint's step. Promises: nothing
is resumed unless the run is lost; every loss, attempt and resumption is an event; a loop that makes no
progress is given up. Steps after the checkpoint are repeated.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from tinkex.client.future import APIFuture, owned, resolve, start
from tinkex.client.loop import in_own_thread
from tinkex.client.rest import RestClient
from tinkex.client.run_watch import RunWatch
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
    TinkerError,
    is_user_error,
)
from tinkex.types.checkpoints import Checkpoint, ParsedCheckpointTinkerPath

log = logging.getLogger("tinkex")
T = TypeVar("T")
P = ParamSpec("P")
PAGE = 1000
# Another attempt would fail in the same way.
_PERMANENT = (RecoveryFailedError, InvalidInputError, ClientClosedError, CredentialError, AuthenticationError)
_random = random.Random()


# -- events ------------------------------------------------------------------------------------------------


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
    runs may be resuming at the same time. `start_over`: a run without any checkpoint begins anew. `watch`:
    poll the run every so many seconds, so that a loss is noticed though the loop makes no call (None: it is
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
    _permits: _Semaphore = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("attempts", self.attempts), ("concurrent", self.concurrent)):
            if type(value) is not int or value < 1:
                raise InvalidInputError(
                    f"RecoveryPolicy.{name} must be a whole number from 1 on, got {value!r}"
                )
        for name, value in (("backoff", self.backoff), ("max_backoff", self.max_backoff)):
            if not _is_number(value) or not value >= 0:
                raise InvalidInputError(f"RecoveryPolicy.{name} must be seconds from 0 on, got {value!r}")
        if self.watch is not None and not (_is_number(self.watch) and self.watch > 0):
            raise InvalidInputError(
                f"RecoveryPolicy.watch must be seconds above 0, or None, got {self.watch!r}"
            )
        object.__setattr__(self, "_permits", _Semaphore(self.concurrent))

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
        loop = _RecoveredLoop(self, service, checkpoint)
        client, step = _plain(create()), 0
        while True:
            watch = loop.watch(client)
            try:
                return _plain(train(client, step))
            except TinkerError as error:
                if not loop.is_lost(client, error, _wait(loop.why_lost, client, error, watch)):
                    raise
                lost = error
            finally:
                loop.stop(watch)
            for delay in loop.attempts(client.model_id, lost):
                time.sleep(delay)
                permit = self._permits.request()
                try:
                    permit.result()
                    resumed = _wait(loop.resume, client.model_id)
                    client, step = loop.go_on(client.model_id, resumed or (_plain(create()), None, 0))
                    break
                except (TinkerError, TimeoutError) as error:
                    loop.failure = error
                finally:
                    self._permits.release(permit)

    async def run_async(
        self,
        service: RemoteServiceClient,
        create: Callable[[], Awaitable[TrainingClient]],
        train: Callable[[TrainingClient, int], Awaitable[T]],
        *,
        checkpoint: str | None = None,
    ) -> T:
        """Like `run`, for coroutine functions."""
        loop = _RecoveredLoop(self, service, checkpoint)
        client, step = await _awaited(create()), 0
        while True:
            watch = loop.watch(client)
            try:
                return await _awaited(train(client, step))
            except TinkerError as error:
                if not loop.is_lost(client, error, await _start(loop.why_lost, client, error, watch)):
                    raise
                lost = error
            finally:
                loop.stop(watch)
            for delay in loop.attempts(client.model_id, lost):
                await asyncio.sleep(delay)
                permit = self._permits.request()
                try:
                    await permit
                    resumed = await _start(loop.resume, client.model_id)
                    client, step = loop.go_on(client.model_id, resumed or (await _awaited(create()), None, 0))
                    break
                except (TinkerError, TimeoutError) as error:
                    loop.failure = error
                finally:
                    self._permits.release(permit)

    def _delay(self, attempt: int) -> float:
        """Seconds before an attempt: 0 before the first, then exponential backoff with jitter."""
        if attempt == 1:
            return 0.0
        limit = min(self.backoff * 2.0 ** min(attempt - 2, 30), self.max_backoff)
        return limit * (1 - 0.25 * _random.random())

    def _tell(self, event: RecoveryEvent) -> None:
        log.log(logging.INFO if isinstance(event, RecoveryAttempt) else logging.WARNING, "%s", event)
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:  # an error in the user's callback must not end the run
                log.exception("on_event of a RecoveryPolicy failed")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: T) -> T:
    """The value that a plain function returned; a future is waited for, a coroutine is refused."""
    if isinstance(value, APIFuture):
        return value.result()  # pyright: ignore[reportUnknownVariableType]
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise InvalidInputError("this takes plain functions; use run_async for coroutine functions")
    return value


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _wait(function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a coroutine function on the background loop; cancel it if the wait is interrupted."""
    future = start(lambda: function(*args, **kwargs), "recovery")
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _start(function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `_wait`, awaited."""
    return await owned(start(lambda: function(*args, **kwargs), "recovery"), None)


class _Semaphore:
    """A FIFO semaphore whose permits are futures: threads and event loops can both wait for one."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[APIFuture[None]] = deque()
        self._lock = threading.Lock()

    def request(self) -> APIFuture[None]:
        permit: APIFuture[None] = APIFuture("permit")
        with self._lock:
            if self._free:
                self._free -= 1
                permit.set_result(None)
            else:
                self._waiting.append(permit)
        return permit

    def release(self, permit: APIFuture[None]) -> None:
        """Pass a permit on; one that was never granted is withdrawn."""
        with self._lock:
            if not permit.done():
                self._waiting.remove(permit)
            elif self._waiting:
                resolve(self._waiting.popleft(), None)
            else:
                self._free += 1


class _RecoveredLoop:
    """The state of one loop across its runs. Coroutine methods run on the background loop."""

    def __init__(self, policy: RecoveryPolicy, service: RemoteServiceClient, checkpoint: str | None) -> None:
        if checkpoint is not None:
            ParsedCheckpointTinkerPath.from_tinker_path(checkpoint)
        self._policy, self._service, self._checkpoint = policy, service, checkpoint
        self._rest: RestClient = service.create_rest_client()
        self._resumed: Counter[str | None] = Counter()  # how often each checkpoint was resumed from
        self._owner: str | None = None  # the run that saved the checkpoint last resumed from
        self._suspect: set[str] = set()  # checkpoints that failed to load once
        self._unusable: dict[str, Exception] = {}  # checkpoints that will not be tried again, and why
        self.failure: Exception | None = None  # of the last attempt

    def watch(self, client: TrainingClient) -> RunWatch | None:
        every, tell = self._policy.watch, self._policy._tell
        if every is None:
            return None
        return RunWatch(client, every, lambda error: tell(RunLost(error.run_id, error.reason, error)))

    def stop(self, watch: RunWatch | None) -> None:
        if watch is not None:
            watch.stop()

    def is_lost(self, client: TrainingClient, error: TinkerError, reason: str | None) -> bool:
        """Report a loss for which `why_lost` gave a reason; False if the error is the loop's own."""
        if reason:
            self._policy._tell(RunLost(client.model_id, reason, error))
        return reason is not None

    def attempts(self, run_id: str, error: Exception) -> Iterator[float]:
        """The delay before each attempt; raises RecoveryFailedError after the last one."""
        self.failure = error
        for attempt in range(1, self._policy.attempts + 1):
            delay = self._policy._delay(attempt)
            self._policy._tell(RecoveryAttempt(run_id, attempt, self._policy.attempts, delay))
            yield delay
            if isinstance(self.failure, _PERMANENT):
                break
        self._policy._tell(RecoveryGaveUp(run_id, self.failure))
        raise RecoveryFailedError(f"run {run_id} is lost and was given up: {self.failure}") from self.failure

    def go_on(self, lost: str, resumed: tuple[TrainingClient, str | None, int]) -> tuple[TrainingClient, int]:
        client, path, step = resumed
        self._resumed[path] += 1
        if path is not None:
            self._owner = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
        self._policy._tell(RunResumed(lost, client.model_id, path, step))
        return client, step

    async def why_lost(
        self, client: TrainingClient, error: TinkerError, watch: RunWatch | None
    ) -> str | None:
        """Why a run cannot go on; "" if the watch has reported it already, None if it can go on."""
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
            return None if await self._service._session.alive() else f"its session has ended ({error})"
        except NotFoundError:
            return f"the server does not know it ({error})"
        except APIConnectionError:
            return f"its server could not be used ({error})"
        except TinkerError:
            return None  # the loop's own error says more

    async def resume(self, lost: str) -> tuple[TrainingClient, str | None, int] | None:
        """A run resumed from the latest checkpoint, with its path and step; None: start over."""
        await self._service._session.alive()  # opens a new session if the server has ended ours
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
        given = wanted and ParsedCheckpointTinkerPath.from_tinker_path(wanted).training_run_id
        # The lost run may have saved nothing since it was resumed: look at the run before it too.
        saved = await self._saved([given] if given else [i for i in (self._owner, lost) if i is not None])
        if wanted:
            saved = [checkpoint for checkpoint in saved if checkpoint.tinker_path == wanted]
            if not saved:
                raise RecoveryFailedError(f"there is no checkpoint {wanted}")
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

    async def _saved(self, run_ids: list[str]) -> list[Checkpoint]:
        """The training checkpoints of these runs. A server may list those of a run that it has forgotten."""
        saved: list[Checkpoint] = []
        for run_id in run_ids:
            try:
                saved += (await self._rest.list_checkpoints(run_id)).checkpoints
            except NotFoundError:
                listing = self._rest.iter_checkpoints(page_size=PAGE)
                saved += [c async for c in listing if c.tinker_path.startswith(f"tinker://{run_id}/")]
        return [c for c in saved if c.checkpoint_type == "training"]
