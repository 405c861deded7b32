"""SampleStream: the tokens of a sample as the server draws them, and the whole response at the end.

Promises: one object for `for` and `async for`, from any thread and event loop; closing it (by `close`, the
end of its `with` block, or garbage collection) cancels the sample on the server at once. A stream that breaks
off after its first token raises an error that holds the received tokens. Knows nothing of HTTP.
"""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from tinkex.client import loop as background
from tinkex.client.future import APIFuture, completed
from tinkex.errors import (
    TinkerError,
)
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.sampling import SampleEvent

Opening = Callable[[], AsyncGenerator[SampleEvent, None]]


class TokenBuffer:
    """A thread-safe queue of tokens between the background loop and the iterating thread or event loop."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a garbage collection inside may end the buffer
        self._ready: deque[NewTokens] = deque()
        self._waiting: deque[APIFuture[NewTokens | None]] = deque()
        self._over = False
        self._all: list[NewTokens] = []

    @property
    def begun(self) -> bool:
        return bool(self._all)

    def put(self, new: NewTokens) -> None:
        with self._lock:
            self._all.append(new)
            self._ready.append(new)
        self._serve()

    def end(self) -> None:
        """Mark the end: later takes return None."""
        with self._lock:
            self._over = True
        self._serve()

    def take(self) -> APIFuture[NewTokens | None]:
        """A future of the next tokens; of None at the end."""
        background.check_fork()
        with self._lock:
            if self._ready and not self._waiting:
                return completed(self._ready.popleft(), "tokens")
            future: APIFuture[NewTokens | None] = APIFuture("next tokens of the stream")
            self._waiting.append(future)
        self._serve()
        return future

    def give_back(self, taken: APIFuture[NewTokens | None]) -> None:
        """Undo a take whose wait was interrupted: its tokens go to the next take."""
        if not taken.cancel() and not taken.exception() and (new := taken.result()) is not None:
            with self._lock:
                self._ready.appendleft(new)
            self._serve()

    def _serve(self) -> None:
        """Resolve waiting takes with the tokens that are ready, outside the lock."""
        while True:
            with self._lock:
                if not self._waiting or not (self._ready or self._over):
                    return
                future, new = self._waiting.popleft(), self._ready.popleft() if self._ready else None
            try:
                future.set_result(new)
            except concurrent.futures.InvalidStateError:  # it was cancelled
                if new is not None:
                    with self._lock:
                        self._ready.appendleft(new)

    def received(self) -> list[NewTokens]:
        """The tokens received so far, concatenated for each sequence."""
        with self._lock:
            parts = list(self._all)
        return [
            NewTokens(
                index,
                np.concatenate([part.tokens_np for part in parts if part.sequence == index]),
                np.concatenate([part.logprobs_np for part in parts if part.sequence == index]),
            )
            for index in sorted({part.sequence for part in parts})
        ]


class SampleStream:
    """A sample in progress: iterate over its tokens, and call `result` for the response.

    >>> with sampler.sample_stream(prompt, SamplingParams(max_tokens=64)) as stream:    # doctest: +SKIP
    ...     for new in stream:
    ...         print(new.sequence, new.tokens, new.logprobs)
    ...     response = stream.result()
    """

    def __init__(
        self, buffer: TokenBuffer, done: APIFuture[SampleResponse], timeout: float | None = None
    ) -> None:
        self._buffer, self._done, self._timeout = buffer, done, timeout
        done.when_done(lambda _: buffer.end())
        finalizer = weakref.finalize(self, _leave, done)
        finalizer.atexit = False

    # -- tokens ------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NewTokens:
        taken = self._buffer.take()
        try:
            new = taken.result(self._timeout)
        except BaseException:
            self._buffer.give_back(taken)
            raise
        if new is None:
            self._raise_if_failed()
            raise StopIteration
        return new

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NewTokens:
        taken = self._buffer.take()
        try:
            new = await taken.result_async(self._timeout)
        except BaseException:
            self._buffer.give_back(taken)
            raise
        if new is None:
            self._raise_if_failed()
            raise StopAsyncIteration
        return new

    def _raise_if_failed(self) -> None:
        if not self._done.cancelled() and (error := self._done.exception()) is not None:
            raise error

    @property
    def received(self) -> list[NewTokens]:
        """The tokens received so far, concatenated for each sequence."""
        return self._buffer.received()

    # -- the response ------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> SampleResponse:
        """The whole response, as `sample()` returns it; the stream need not be iterated."""
        return self._done.result(timeout)

    async def result_async(self, timeout: float | None = None) -> SampleResponse:
        """Like `result`, awaited."""
        return await self._done.result_async(timeout)

    # -- closing -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel the sample if it is still running; received tokens can still be iterated."""
        _leave(self._done)

    async def aclose(self) -> None:
        """Like `close`, for `contextlib.aclosing`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.close()


def _leave(done: APIFuture[SampleResponse]) -> None:
    try:
        background.check_fork()
        done.cancel()
    except (TinkerError, RuntimeError):
        pass  # in a forked child, or while the interpreter exits
