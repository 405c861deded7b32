"""SampleStream: the tokens of a sample as the server draws them, and the whole response at the end.

Promises: one object for `for` and `async for`, from any thread and event loop; closing it, or dropping it,
cancels the sample on the server at once. A stream that breaks off raises an error with the received tokens.
"""

from __future__ import annotations

import threading
import weakref
from typing import Self

import numpy as np

from tinkex.client import loop as background
from tinkex.client.future import APIFuture, resolve
from tinkex.errors import TinkerError
from tinkex.types.outputs import NewTokens, SampleResponse


class TokenBuffer:
    """The tokens of a stream, between the background loop and the thread or event loop that iterates."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a garbage collection inside may end the buffer
        self._all: list[NewTokens] = []
        self._taken = 0
        self._over = False
        self._more: APIFuture[None] = APIFuture("next tokens of the stream")

    @property
    def begun(self) -> bool:
        return bool(self._all)

    def put(self, new: NewTokens | None) -> None:
        """Append tokens; None: there are no more."""
        with self._lock:
            if new is None:
                self._over = True
            else:
                self._all.append(new)
            more, self._more = self._more, APIFuture("next tokens of the stream")
        resolve(more, None)

    def take(self) -> NewTokens | APIFuture[None] | None:
        """The next tokens, or a future to wait for until there may be some; None at the end."""
        background.check_fork()
        with self._lock:
            if self._taken < len(self._all):
                self._taken += 1
                return self._all[self._taken - 1]
            return None if self._over else self._more

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
        done.when_done(lambda _: buffer.put(None))
        finalizer = weakref.finalize(self, _leave, done)
        finalizer.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NewTokens:
        while isinstance(new := self._buffer.take(), APIFuture):
            new.result(self._timeout)
        if new is None:
            self._raise_if_failed()
            raise StopIteration
        return new

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NewTokens:
        while isinstance(new := self._buffer.take(), APIFuture):
            await new.result_async(self._timeout)
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

    def result(self, timeout: float | None = None) -> SampleResponse:
        """The whole response, as `sample()` returns it; the stream need not be iterated."""
        return self._done.result(timeout)

    async def result_async(self, timeout: float | None = None) -> SampleResponse:
        """Like `result`, awaited."""
        return await self._done.result_async(timeout)

    def close(self) -> None:
        """Cancel the sample if it is still running; received tokens can still be iterated."""
        _leave(self._done)

    async def aclose(self) -> None:
        """Like `close`, for `contextlib.aclosing`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _leave(done: APIFuture[SampleResponse]) -> None:
    try:
        background.check_fork()
        done.cancel()
    except (TinkerError, RuntimeError):
        pass  # in a forked child, or while the interpreter exits
