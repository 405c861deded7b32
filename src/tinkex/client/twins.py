"""Makes a method's second form: the one that blocks, or the one to await.

    def get_session(self, session_id: str) -> APIFuture[GetSessionResponse]: …
    get_session_async = awaited(get_session)        # await rest.get_session_async("s-1", timeout=5)

Promises: it has the name, signature and docstring that it would have if it were written out; one that waits
takes `timeout`, and refuses a bad one before anything is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from tinkex.client.future import APIFuture, check_timeout, owned

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Client = TypeVar("Client")
_TIMEOUT = inspect.Parameter(
    "timeout", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="float | None"
)


class Waiting(Protocol[P, T_co]):
    """A method that waits: it takes what the method takes that it was made from, and `timeout`."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(self, *args: Any, timeout: float | None, **kwargs: Any) -> T_co: ...


def blocking(method: Callable[Concatenate[Any, P], APIFuture[T]]) -> Waiting[P, T]:
    """Decorates a method that returns a future: it waits for the result instead."""

    def wait(self: Any, *args: Any, timeout: float | None = None, **kwargs: Any) -> T:
        check_timeout(timeout)
        return method(self, *args, **kwargs).result(timeout)

    return _described(wait, method, waits=True)


@overload
def awaited(method: Waiting[P, T]) -> Waiting[P, Coroutine[Any, Any, T]]: ...
@overload
def awaited(
    method: Callable[Concatenate[Any, P], APIFuture[T]], *, cancels: bool = False
) -> Waiting[P, Coroutine[Any, Any, T]]: ...
def awaited(method: Any, *, cancels: bool = False) -> Any:
    """A coroutine method for the result of `method`, which is `blocking` or returns a future.

    `cancels`: cancelling the task that awaits it cancels the request.
    """
    started = getattr(method, "__wrapped__", None)  # a blocking method's own future
    name = method.__name__

    async def wait(self: Any, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        check_timeout(timeout)
        # By name, here and in `queued`: a subclass may override the method.
        future = started(self, *args, **kwargs) if started else getattr(self, name)(*args, **kwargs)
        return await (owned(future, timeout) if cancels else future.result_async(timeout))

    more = "; cancelling the task that awaits it cancels the request" if cancels else ""
    return _described(wait, method, f"awaited{more}.", waits=True)


def queued(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[Client, P], Coroutine[Any, Any, T]]:
    """A coroutine method that returns the future of `method`, as the official client has it."""
    name = method.__name__

    async def call(self: Any, *args: Any, **kwargs: Any) -> T:
        return getattr(self, name)(*args, **kwargs)

    return _described(call, method, "to await twice: this call, then the future that it returns.")


def _described(made: Any, method: Callable[..., Any], like: str = "", *, waits: bool = False) -> Any:
    """`made`, with a signature and a docstring. A twin's docstring says how it is `like` its method."""
    signature, name = inspect.signature(method), method.__name__
    update_wrapper(made, method)
    if like:
        made.__doc__ = f"Like `{name}`, {like}"
        made.__name__, made.__qualname__ = f"{name}_async", f"{method.__qualname__}_async"
    if waits and "timeout" not in signature.parameters:
        result = str(signature.return_annotation).removeprefix("APIFuture[").removesuffix("]")
        parameters = [*signature.parameters.values(), _TIMEOUT]
        signature = signature.replace(parameters=parameters, return_annotation=result)
    made.__signature__ = signature
    made.__annotations__ = {p.name: p.annotation for p in signature.parameters.values() if p.name != "self"}
    made.__annotations__["return"] = signature.return_annotation
    return made
