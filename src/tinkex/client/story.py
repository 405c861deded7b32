"""One course of events for threads and event loops alike: a generator that says what it waits for next.

It yields a number of seconds, or a function to call whose future it wants resolved; `drive` does so in this
thread, `drive_async` in the running event loop. Promises: what fails is thrown into it, and it is closed when
whoever drives it is interrupted. Knows nothing of what is going on.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from tinkex.client.future import APIFuture, resolve
from tinkex.errors import InvalidInputError

T = TypeVar("T")
Action = float | Callable[[], Any]
Story = Generator[Action, Any, T]


def drive(story: Story[T]) -> T:
    """Do what a story asks for, one after another, in this thread."""
    tell: Callable[[Any], Action] = story.send
    outcome: Any = None
    try:
        while True:
            action = tell(outcome)
            try:
                outcome, tell = _do(action), story.send
            except Exception as error:
                outcome, tell = error, story.throw
    except StopIteration as end:
        return end.value
    finally:
        story.close()  # interrupted: give back what it holds


def _do(action: Action) -> Any:
    if not callable(action):
        time.sleep(action)
        return None
    value = action()
    if isinstance(value, APIFuture):
        return value.result()  # pyright: ignore[reportUnknownVariableType]  # of what, the story knows
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise InvalidInputError("this takes plain functions; use run_async for coroutine functions")
    return value


async def drive_async(story: Story[T]) -> T:
    """The same in an event loop."""
    tell: Callable[[Any], Action] = story.send
    outcome: Any = None
    try:
        while True:
            action = tell(outcome)
            try:
                outcome, tell = await _do_async(action), story.send
            except Exception as error:
                outcome, tell = error, story.throw
    except StopIteration as end:
        return end.value
    finally:
        story.close()


async def _do_async(action: Action) -> Any:
    if not callable(action):
        await asyncio.sleep(action)
        return None
    value = action()
    return await value if inspect.isawaitable(value) else value


class Slots:
    """So many at a time, in the order in which they asked; from any thread, waited for as futures."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[APIFuture[None]] = deque()
        self._lock = threading.Lock()

    def take(self) -> APIFuture[None]:
        slot: APIFuture[None] = APIFuture("slot")
        with self._lock:
            if self._free:
                self._free -= 1
                slot.set_result(None)
            else:
                self._waiting.append(slot)
        return slot

    def give_back(self, slot: APIFuture[None]) -> None:
        """Let the next one in; a slot that was never granted is just forgotten."""
        with self._lock:
            if not slot.done():
                self._waiting.remove(slot)
            elif self._waiting:
                resolve(self._waiting.popleft(), None)
            else:
                self._free += 1
