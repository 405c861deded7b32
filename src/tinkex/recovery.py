"""Recovery: a training loop that goes on from its last checkpoint when its run is lost.

    policy = RecoveryPolicy(on_event=print)
    policy.run(service, create, train)          # create() makes the run, train(run, step) is your loop

`train` is called with step 0; when the server has lost the run, it is called again with a run resumed from
the latest checkpoint (weights, moments and Adam's step) and the step that checkpoint was saved at. Promises:
nothing is resumed unless the run is lost; every loss, attempt and resumption is an event; a loop that gets no
further gives up. Knows nothing of what a loop does: what it computed since that checkpoint, it does again.
"""

from __future__ import annotations

import logging
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tinkex.client.rest import RestClient
from tinkex.client.run_watch import RunWatch
from tinkex.client.service import RemoteServiceClient
from tinkex.client.story import Slots, Story, drive, drive_async
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
PAGE = 1000
# After these another attempt would fail in the same way.
_FOR_GOOD = (RecoveryFailedError, InvalidInputError, ClientClosedError, CredentialError, AuthenticationError)
_dice = random.Random()


# -- what happened -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunLost:
    """A run is lost: its loop failed, or the policy's watch has noticed."""

    run_id: str
    reason: str
    error: Exception

    def __str__(self) -> str:
        return f"run {self.run_id} is lost: {self.reason}"


@dataclass(frozen=True)
class RecoveryAttempt:
    """It is about to be resumed, after a delay."""

    run_id: str
    attempt: int
    attempts: int
    delay: float

    def __str__(self) -> str:
        return f"run {self.run_id}: attempt {self.attempt} of {self.attempts}, in {self.delay:.1f} s"


@dataclass(frozen=True)
class RunResumed:
    """Another run has taken its place; the loop goes on from `step`. No checkpoint: it begins anew."""

    run_id: str
    new_run_id: str
    checkpoint: str | None
    step: int

    def __str__(self) -> str:
        where = f"{self.checkpoint}, at step {self.step}" if self.checkpoint else "the beginning"
        return f"run {self.run_id} goes on as {self.new_run_id} from {where}"


@dataclass(frozen=True)
class RecoveryGaveUp:
    """It will not be resumed."""

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
    ask for the run every so many seconds, so that a loss is told though the loop makes no call (None: it is
    noticed when a call fails). `on_event` is told of everything.
    """

    attempts: int = 5
    backoff: float = 1.0
    max_backoff: float = 60.0
    concurrent: int = 2
    start_over: bool = True
    watch: float | None = None
    on_event: Callable[[RecoveryEvent], object] | None = None
    step_of: Callable[[Checkpoint], int | None] = step_of
    _slots: Slots = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("attempts", "concurrent"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(
                    f"RecoveryPolicy.{name} must be a whole number from 1 on, got {value!r}"
                )
        for name in ("backoff", "max_backoff"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InvalidInputError(f"RecoveryPolicy.{name} must be seconds from 0 on, got {value!r}")
        every = self.watch
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int | float) or not every > 0
        ):
            raise InvalidInputError(f"RecoveryPolicy.watch must be seconds above 0, or None, got {every!r}")
        object.__setattr__(self, "_slots", Slots(self.concurrent))

    def run(
        self,
        service: RemoteServiceClient,
        create: Callable[[], TrainingClient],
        train: Callable[[TrainingClient, int], T],
        *,
        checkpoint: str | None = None,
    ) -> T:
        """Call `train(run, step)` until it returns, resuming its run whenever that is lost.

        `checkpoint` resumes from this path instead of from the latest one.
        """
        return drive(self._life(_Run(service, create, checkpoint), train))

    async def run_async(
        self,
        service: RemoteServiceClient,
        create: Callable[[], Awaitable[TrainingClient]],
        train: Callable[[TrainingClient, int], Awaitable[T]],
        *,
        checkpoint: str | None = None,
    ) -> T:
        """The same for coroutine functions."""
        return await drive_async(self._life(_Run(service, create, checkpoint), train))

    def _life(self, run: _Run, train: Callable[[TrainingClient, int], Any]) -> Story[Any]:
        run.client, step = (yield run.create), 0
        while True:
            client, watch = run.client, self._watched(run.client)
            try:
                return (yield lambda client=client, step=step: train(client, step))
            except TinkerError as error:
                if watch is not None and watch.stop() is not None:
                    yield lambda watch=watch: watch.told
                else:
                    reason = yield from _why_lost(run, error)
                    if reason is None:
                        raise
                    self._tell(RunLost(client.model_id, reason, error))
                step = yield from self._recover(run, error)
            finally:
                if watch is not None:
                    watch.stop()

    def _watched(self, client: TrainingClient) -> RunWatch | None:
        if self.watch is None:
            return None
        return RunWatch(
            client, self.watch, lambda error: self._tell(RunLost(error.run_id, error.reason, error))
        )

    def _recover(self, run: _Run, error: Exception) -> Story[int]:
        """Put another run in the place of the lost one; the step to go on from."""
        lost = run.client.model_id
        for attempt in range(1, self.attempts + 1):
            delay = self._delay(attempt)
            self._tell(RecoveryAttempt(lost, attempt, self.attempts, delay))
            yield delay
            slot = self._slots.take()
            try:
                yield lambda slot=slot: slot
                path, step = yield from self._resume(run)
                self._tell(RunResumed(lost, run.client.model_id, path, step))
                return step
            except (TinkerError, TimeoutError) as failure:
                error = failure
            finally:
                self._slots.give_back(slot)
            if isinstance(error, _FOR_GOOD):
                break
        self._tell(RecoveryGaveUp(lost, error))
        raise RecoveryFailedError(f"run {lost} is lost and was given up: {error}") from error

    def _resume(self, run: _Run) -> Story[tuple[str | None, int]]:
        yield run.service._session_alive  # a new one, if the server has forgotten ours
        path, step = (yield from _latest(run, self.step_of)) or (None, 0)
        if run.resumed[path] >= self.attempts:
            where = f"from {path}" if path else "from the beginning"
            raise RecoveryFailedError(f"it was resumed {where} {self.attempts} times and got no further")
        if path is not None:
            try:
                client = yield lambda: run.service._resume(path, True, None, None, None, None)
            except TinkerError as error:
                run.doubt(path, error)
                raise
        elif self.start_over:
            client = yield run.create
        else:
            raise RecoveryFailedError("it has no checkpoint to go on from")
        run.go_on_with(client, path)
        return path, step

    def _delay(self, attempt: int) -> float:
        """None before the first attempt, then exponential, jittered so that many do not come at once."""
        if attempt == 1:
            return 0.0
        return min(self.backoff * 2.0 ** min(attempt - 2, 30), self.max_backoff) * (1 - 0.25 * _dice.random())

    def _tell(self, event: RecoveryEvent) -> None:
        log.log(logging.INFO if isinstance(event, RecoveryAttempt) else logging.WARNING, "%s", event)
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:  # a user's code: it must not cost the run
                log.exception("on_event of a RecoveryPolicy failed")


class _Run:
    """One loop's run, through all its lives."""

    def __init__(
        self, service: RemoteServiceClient, create: Callable[[], Any], checkpoint: str | None
    ) -> None:
        if checkpoint is not None:
            ParsedCheckpointTinkerPath.from_tinker_path(checkpoint)
        self.service = service
        self.rest: RestClient = service.create_rest_client()
        self.create = create
        self.checkpoint = checkpoint
        self.client: TrainingClient = None  # type: ignore[assignment]  # from its creation on
        self.resumed: Counter[str | None] = Counter()  # how often from each checkpoint
        self.owner: str | None = None  # the run that saved the checkpoint last resumed from
        self.doubted: set[str] = set()
        self.unusable: dict[str, Exception] = {}  # checkpoints, and why

    def doubt(self, path: str, error: TinkerError) -> None:
        """A checkpoint was not loaded: by its own fault, or (the second time) by the server's."""
        failed_again = isinstance(error, RequestFailedError) and path in self.doubted
        self.doubted.add(path)
        if is_user_error(error) or failed_again:
            self.unusable[path] = error  # the next attempt takes the one before it

    def go_on_with(self, client: TrainingClient, path: str | None) -> None:
        self.resumed[path] += 1
        self.client = client
        if path is not None:
            self.owner = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id


# -- noticing ----------------------------------------------------------------------------------------------


def _why_lost(run: _Run, error: TinkerError) -> Story[str | None]:
    """Why a run cannot go on; None if it can, so that the error is the loop's own."""
    if isinstance(error, PassIncompleteError) and isinstance(error.__cause__, TinkerError):
        error = error.__cause__
    if isinstance(error, APIConnectionError | InternalServerError):
        return f"its server could not be used ({error})"
    if isinstance(error, RequestFailedError) and error.category is not RequestErrorCategory.User:
        return f"its server failed a request ({error})"
    asked = getattr(getattr(error, "request", None), "url", "").rpartition("/")[2]
    if isinstance(error, ExpiredError) or (isinstance(error, NotFoundError) and asked == "retrieve_future"):
        return f"one of its requests was forgotten ({error})"
    if not isinstance(error, RequestFailedError | APIStatusError):
        return None
    run_id = run.client.model_id
    try:
        record = yield lambda: run.rest.get_training_run(run_id)
        if record.corrupted:
            return f"the server could not restore it ({error})"
        return None if (yield run.service._session_alive) else f"its session has ended ({error})"
    except NotFoundError:
        return f"the server does not know it ({error})"
    except APIConnectionError:
        return f"its server could not be used ({error})"
    except TinkerError:
        return None  # whatever this is, the loop's own error says more


def _latest(run: _Run, step_of: Callable[[Checkpoint], int | None]) -> Story[tuple[str, int] | None]:
    """The checkpoint to go on from, and its step; None if there never was one."""
    given = run.checkpoint and ParsedCheckpointTinkerPath.from_tinker_path(run.checkpoint).training_run_id
    # Of its own there may be none yet, since it was resumed.
    ids = [given] if given else [i for i in (run.owner, run.client.model_id) if i is not None]
    saved = yield from _training_checkpoints(run.rest, ids)
    if given:
        saved = [checkpoint for checkpoint in saved if checkpoint.tinker_path == run.checkpoint]
        if not saved:
            raise RecoveryFailedError(f"there is no checkpoint {run.checkpoint}")
    steps = {c.tinker_path: step for c in saved if (step := step_of(c)) is not None}
    usable = {path: step for path, step in steps.items() if path not in run.unusable}
    if usable:
        return max(usable.items(), key=lambda item: item[1])
    if run.unusable:  # never begin anew because what there is cannot be read just now
        raise list(run.unusable.values())[-1]
    if saved:
        raise RecoveryFailedError(
            f"the checkpoint {saved[-1].tinker_path} does not say its step: give it a name that ends in it, "
            'or user_metadata={"step": "100"}'
        )
    return None


def _training_checkpoints(rest: RestClient, run_ids: list[str]) -> Story[list[Checkpoint]]:
    """All states saved of these runs. A server that has forgotten a run may still list what it saved."""
    saved: list[Checkpoint] = []
    for run_id in run_ids:
        try:
            page = yield lambda run_id=run_id: rest.list_checkpoints(run_id)
            saved += page.checkpoints
        except NotFoundError:
            for offset in range(0, 100 * PAGE, PAGE):
                page = yield lambda offset=offset: rest.list_user_checkpoints(PAGE, offset)
                saved += [c for c in page.checkpoints if c.tinker_path.startswith(f"tinker://{run_id}/")]
                if len(page.checkpoints) < PAGE:
                    break
    return [c for c in saved if c.checkpoint_type == "training"]
