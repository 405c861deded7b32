"""APIFuture: one future for threads and event loops alike."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, datum, eventually
from tests.stub import Stub, status
from tinkex import (
    AdminClient,
    APIFuture,
    RestClient,
    ResultTimeoutError,
    SamplingClient,
    ServiceClient,
    TrainingClient,
)
from tinkex.client import future as module
from tinkex.client.future import completed, fail, resolve, start


class Work:
    """A coroutine on the background loop that ends when told."""

    def __init__(self) -> None:
        self.calls = 0
        self.stopped = threading.Event()
        self._go = threading.Event()
        self.future: APIFuture[int] = start(self._run, "work")

    async def _run(self) -> int:
        self.calls += 1
        try:
            while not self._go.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        return 7

    def finish(self) -> None:
        self._go.set()


def failing(error: Exception) -> APIFuture[int]:
    async def run() -> int:
        raise error

    return start(run)


def test_every_way_of_waiting_gives_the_one_cached_result() -> None:
    """Result, result_async and await, any number of times, from several loops; run once."""
    work = Work()
    threading.Timer(0.05, work.finish).start()

    async def both() -> list[int]:
        return [await work.future, await work.future.result_async(), await work.future]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        loops = [pool.submit(asyncio.run, both()) for _ in range(4)]
        assert work.future.result(20) == 7
        assert [loop.result(20) for loop in loops] == [[7, 7, 7]] * 4
    assert work.future.result() == 7
    assert work.future.done()
    assert work.calls == 1


@pytest.mark.parametrize("batch", [False, True])
def test_a_result_is_fetched_once(stub: Stub, service: ServiceClient, batch: bool) -> None:
    """Every kind of wait, repeated, and every other method of the future."""
    stub.config = {"sample_use_retrieve_futures": batch}
    run = service.create_lora_training_client("stub/base", timeout=20)
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    for ask in (run.optim_step, lambda: sampler.sample(PROMPT, 1, PARAMS)):
        future = ask()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = [wait.result(20) for wait in [pool.submit(future.result, 5) for _ in range(4)]]
        before = [r for r in stub.requests if r.op != "session_heartbeat"]
        results += [future.result(), asyncio.run(future.result_async()), asyncio.run(_awaiting(future))]
        assert future.exception() is None
        assert all(result is results[0] for result in results)
        time.sleep(0.05)
        assert [r for r in stub.requests if r.op not in ("session_heartbeat", "retrieve_futures")] == [
            r for r in before if r.op != "retrieve_futures"
        ]


@pytest.mark.slow
def test_a_result_lives_as_long_as_its_future(stub: Stub, service: ServiceClient) -> None:
    """Instead of a cache by request id: nothing else keeps a result, and no call takes such an id."""
    run = service.create_lora_training_client("stub/base", timeout=20)
    future = run.forward_backward([datum(3)], "cross_entropy")
    kept = weakref.ref(future.result(20))
    gc.collect()
    assert kept() is future.result()
    del future
    eventually(lambda: gc.collect() is not None and kept() is None)
    for client in (ServiceClient, TrainingClient, SamplingClient, RestClient, AdminClient):
        for name, method in inspect.getmembers(client, inspect.isfunction):
            assert "request_id" not in inspect.signature(method).parameters, f"{client.__name__}.{name}"


def test_a_future_that_is_taken_for_its_result_says_so() -> None:
    """The first slip of a first loop: `run.forward_backward(…).metrics`."""
    future: Any = APIFuture("forward_backward")
    with pytest.raises(
        AttributeError, match=r"no attribute 'metrics'; it is a future: wait for its \.result"
    ):
        future.metrics
    assert not hasattr(future, "_private")
    assert getattr(future, "metrics", None) is None


def test_what_a_prompt_shows_of_it() -> None:
    future: APIFuture[int] = APIFuture("optim_step")
    assert repr(future) == "<APIFuture of optim_step, pending>"
    resolve(future, 3)
    assert repr(future) == "<APIFuture of optim_step, done: int>"
    failed: APIFuture[int] = APIFuture("optim_step")
    fail(failed, ValueError("no"))
    assert repr(failed) == "<APIFuture of optim_step, failed: ValueError>"
    given_up: APIFuture[int] = APIFuture("optim_step")
    given_up.cancel()
    assert repr(given_up) == "<APIFuture of optim_step, cancelled>"


def test_it_is_a_concurrent_future() -> None:
    works = [Work() for _ in range(3)]
    futures = [work.future for work in works]
    assert all(isinstance(future, concurrent.futures.Future) for future in futures)
    assert futures[0].future() is futures[0]
    done, pending = concurrent.futures.wait(futures, timeout=0.05)
    assert (len(done), len(pending)) == (0, 3)
    works[1].finish()
    assert next(concurrent.futures.as_completed(futures, timeout=20)) is futures[1]
    for work in works:
        work.finish()
    assert concurrent.futures.wait(futures, timeout=20).not_done == set()


def test_a_cancelled_future_ends_a_concurrent_wait() -> None:
    """Wait and as_completed learn of a cancellation, before and while they wait."""
    work, other = Work(), Work()
    threading.Timer(0.05, work.future.cancel).start()
    assert concurrent.futures.wait([work.future], timeout=20).done == {work.future}
    assert other.future.cancel()
    assert other.future.cancel(), "cancelling twice is no error"
    assert list(concurrent.futures.as_completed([other.future], timeout=20)) == [other.future]
    assert work.stopped.wait(5)


def test_asyncio_can_wrap_it() -> None:
    work = Work()
    work.finish()

    async def wrapped() -> int:
        return await asyncio.wrap_future(work.future)

    assert asyncio.run(wrapped()) == 7


def test_gather_and_wait_for_take_it() -> None:
    async def together() -> list[int]:
        return list(await asyncio.gather(completed(1), completed(2), asyncio.wait_for(completed(3), 5)))

    assert asyncio.run(together()) == [1, 2, 3]


def test_done_callbacks_get_the_future() -> None:
    seen: list[Any] = []
    called = threading.Event()
    work = Work()
    work.future.add_done_callback(lambda future: (seen.append(future), called.set()))
    work.finish()
    assert called.wait(5)
    work.future.add_done_callback(seen.append)
    assert seen == [work.future, work.future]


def test_cancelling_stops_the_work_and_every_waiter() -> None:
    work = Work()

    async def waiter() -> int:
        return await work.future

    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(asyncio.run, waiter())
        time.sleep(0.05)
        assert work.future.cancel()
        with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
            waiting.result(20)
    assert work.stopped.wait(5)
    with pytest.raises(concurrent.futures.CancelledError):
        work.future.result()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(waiter())


def test_a_timeout_cancels_nothing() -> None:
    """Neither kind of wait takes the work with it when its time runs out."""
    work = Work()
    with pytest.raises(ResultTimeoutError, match=r"no result of the work after 0.02 s.*waited for again"):
        work.future.result(0.02)
    with pytest.raises(TimeoutError):
        work.future.exception(0.02)

    async def wait() -> int:
        with pytest.raises(ResultTimeoutError):
            await work.future.result_async(timeout=0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work.future, 0.02)
        work.finish()
        return await work.future.result_async(5)

    assert asyncio.run(wait()) == 7
    assert not work.stopped.is_set()


def test_a_cancelled_awaiting_task_leaves_the_shared_request_alone() -> None:
    work = Work()

    async def wait() -> None:
        for wait_once in (work.future.result_async(), asyncio.ensure_future(_awaiting(work.future))):
            task = asyncio.ensure_future(wait_once)
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(wait())
    work.finish()
    assert work.future.result(20) == 7


async def _awaiting(future: APIFuture[int]) -> int:
    return await future


def test_an_abandoned_wait_says_nothing_when_the_request_fails_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A task that was cancelled, in a loop that is gone, is no reason for a traceback in the log."""
    future: APIFuture[int] = APIFuture()

    async def give_up() -> None:
        task = asyncio.ensure_future(future.result_async())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(give_up())
    fail(future, ValueError("late"))
    assert caplog.records == []


def test_errors_are_raised_every_time() -> None:
    future = failing(ValueError("no"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            future.result(20)
    assert str(future.exception()) == "no"
    with pytest.raises(ValueError, match="no"):
        asyncio.run(_awaiting(future))


def test_the_requests_own_timeout_is_not_taken_for_the_waits() -> None:
    future = failing(TimeoutError("the server's"))
    with pytest.raises(TimeoutError, match="the server's") as caught:
        future.result(20)
    assert not isinstance(caught.value, ResultTimeoutError)


def test_a_result_that_comes_just_after_the_wait_ran_out_is_given() -> None:
    class Late(APIFuture[int]):
        """Its result comes when the wait for it is over, and before anything is said of that."""

        def done(self) -> bool:
            if waited and not super().done():
                self.set_result(7)
            return super().done()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    waited: list[float | None] = []
    future = Late("late")
    future._condition = Condition()
    assert future.result(0) == 7
    assert waited == [0]


def test_waiting_on_the_background_thread_raises_instead_of_hanging() -> None:
    """What could only wait for itself is refused."""
    work = Work()
    caught: list[BaseException] = []
    tried = threading.Event()

    def wait(_: Any) -> None:
        try:
            work.future.result()
        except BaseException as error:
            caught.append(error)
        tried.set()

    other = Work()
    other.future.when_done(wait)
    other.finish()
    assert tried.wait(5)
    assert isinstance(caught[0], RuntimeError)
    assert "tinkex's own thread" in str(caught[0])
    work.finish()
    assert work.future.result(20) == 7


def test_late_results_of_a_cancelled_future_are_dropped() -> None:
    future: APIFuture[int] = APIFuture()
    future.cancel()
    resolve(future, 1)
    fail(future, ValueError())
    assert future.cancelled()


def test_a_future_cancelled_before_its_work_began_never_begins() -> None:
    started: list[int] = []

    async def run() -> None:
        started.append(1)

    blocker = Work()
    future = start(run)
    future.cancel()
    blocker.finish()
    blocker.future.result(20)
    assert len(started) <= 1
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(1)


def test_a_slow_callback_of_the_users_holds_nothing_up(stub: Stub, sampler: Any) -> None:
    """ "User code off the event loop": callbacks too."""
    threads: list[str] = []
    done = threading.Event()

    def slow(_: object) -> None:
        threads.append(threading.current_thread().name)
        done.wait(5)

    first = sampler.sample(PROMPT, 1, PARAMS)
    first.add_done_callback(slow)
    first.result(20)
    began = time.monotonic()
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    assert time.monotonic() - began < 2
    eventually(lambda: threads)
    done.set()
    assert threads[0].startswith("tinkex-callback")


def test_threads_that_wait_are_all_woken_and_waits_that_ran_out_leave_nothing_behind() -> None:
    future: APIFuture[int] = APIFuture()
    for _ in range(3):
        with pytest.raises(ResultTimeoutError):
            future.result(0.001)
    assert not future._condition._waiters  # type: ignore[attr-defined]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(future.result, 5) for _ in range(4)]
        waiting += [pool.submit(future.exception, 5) for _ in range(4)]  # type: ignore[arg-type]
        while len(future._condition._waiters) < 8:  # type: ignore[attr-defined]
            time.sleep(0.001)
        future.set_result(3)
        assert [wait.result(20) for wait in waiting] == [3] * 4 + [None] * 4


def test_cancelling_from_another_thread_at_any_moment_stops_the_work() -> None:
    for pause in [0, 0, 0, 0.0005, 0.002, 0.005] * 5:
        work = Work()
        time.sleep(pause)
        assert work.future.cancel()
        assert work.stopped.wait(5) if work.calls else True
        with pytest.raises(concurrent.futures.CancelledError):
            work.future.result(1)


# -- failures that nobody looks at -------------------------------------------------------------------------


def test_a_failure_that_nobody_looks_at_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "UNREAD_PATIENCE", 0.05)
    monkeypatch.setattr(module, "_watching", False)
    module.warn_of_unread()  # what other tests have left
    caplog.clear()

    async def fails() -> None:
        raise ValueError("the gradient is not finite")

    future = start(fails, "optim_step")
    eventually(lambda: "nobody has asked" in caplog.text)
    assert "optim_step failed (ValueError: the gradient is not finite); nobody" in caplog.text
    with pytest.raises(ValueError, match="not finite"):
        future.result(20)


@pytest.mark.parametrize("how", ["result", "exception", "await", "cancel"])
def test_a_failure_that_was_read_is_not_logged_again(how: str, caplog: pytest.LogCaptureFixture) -> None:
    module.warn_of_unread()
    caplog.clear()
    future = failing(ValueError("no"))
    if how == "exception":
        assert str(future.exception(20)) == "no"
    elif how == "cancel":
        pending: APIFuture[int] = APIFuture()
        pending.cancel()
        fail(pending, ValueError("too late"))
        future.exception()
    else:
        with pytest.raises(ValueError, match="no"):
            future.result(20) if how == "result" else asyncio.run(_awaiting(future))
    module.warn_of_unread()
    assert "nobody" not in caplog.text


def test_what_ctrl_c_makes_fail_is_no_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At exit an engine is closed under the steps that were under way."""
    module.warn_of_unread()
    caplog.clear()
    monkeypatch.setattr(sys, "last_type", KeyboardInterrupt, raising=False)  # as a traceback leaves it
    future = failing(ValueError("the engine was closed"))
    eventually(future.done)
    module.warn_of_unread()
    assert "nobody" not in caplog.text
    monkeypatch.setattr(sys, "last_type", ValueError)
    failing(ValueError("another"))
    eventually(lambda: module.warn_of_unread() or "nobody" in caplog.text)


def test_what_fails_after_a_prompts_ctrl_c_is_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a notebook an interrupt ends a cell, and is the last traceback for hours."""
    monkeypatch.setattr(sys, "last_type", KeyboardInterrupt, raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    failing(ValueError("the disk is full"))
    eventually(lambda: module.warn_of_unread() or "the disk is full" in caplog.text)


UNREAD = """
import sys, tinkex
run = tinkex.ServiceClient(base_url=sys.argv[1]).create_lora_training_client("stub/base")
for _ in range(3):
    run.optim_step()
run.save_state("end").result()
"""


@pytest.mark.slow
def test_a_script_that_reads_no_step_hears_of_those_that_failed(stub: Stub) -> None:
    stub.script("optim_step", status(400), status(400))
    done = subprocess.run(
        [sys.executable, "-c", UNREAD, stub.url], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stderr.startswith("optim_step failed (BadRequestError: ")
    assert "and 1 more did; nobody has asked for the result" in done.stderr
