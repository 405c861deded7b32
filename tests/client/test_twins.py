"""Methods made from others: what help(), inspect and type hints say of them; and help() of the main one."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import re
import typing

import pytest

from tests.client.surface import Call, calls
from tinkex import InvalidInputError, RestClient, ServiceClient, TrainingClient
from tinkex.client.future import APIFuture, completed
from tinkex.client.twins import awaited, blocking, queued


class Greeter:
    """One method of each kind."""

    def greet(self, name: str, times: int = 1) -> APIFuture[str]:
        """Greet somebody."""
        return completed(f"hello {name}" * times)

    greet_async = awaited(greet)
    queued_greet = queued(greet)

    @blocking
    def shout(self, name: str) -> APIFuture[str]:
        """Greet loudly."""
        return completed(f"HELLO {name}")

    shout_async = awaited(shout)


class Polite(Greeter):
    def greet(self, name: str, times: int = 1) -> APIFuture[str]:
        return completed(f"good morning {name}")


def test_they_give_what_the_method_gives() -> None:
    greeter = Greeter()
    assert greeter.shout("you", timeout=1) == "HELLO you"
    assert asyncio.run(greeter.shout_async("you")) == "HELLO you"
    assert asyncio.run(greeter.greet_async("you", times=2, timeout=1)) == "hello youhello you"
    assert asyncio.run(greeter.queued_greet("you")).result() == "hello you"


def test_they_call_what_a_subclass_overrides() -> None:
    assert asyncio.run(Polite().greet_async("you")) == "good morning you"
    assert asyncio.run(Polite().queued_greet("you")).result() == "good morning you"


def test_a_wrong_timeout_is_refused_before_the_call() -> None:
    class Never(Greeter):
        def greet(self, name: str, times: int = 1) -> APIFuture[str]:
            raise AssertionError("it was called")

    with pytest.raises(InvalidInputError, match="timeout must be a number of seconds"):
        asyncio.run(Never().greet_async("you", timeout="soon"))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", list(calls()), ids=str)
def test_help_names_every_method_and_says_what_it_does(call: Call) -> None:
    text = pydoc.plain(pydoc.render_doc(call.function))
    assert re.search(rf"^(async )?{call.name}\(.*\) -> ", text, re.MULTILINE)
    assert call.function.__doc__
    assert call.function.__name__ == call.name
    assert call.function.__module__.startswith("tinkex.")


def test_type_hints_can_be_resolved() -> None:
    hints = typing.get_type_hints(RestClient.get_session_async)
    assert (hints["session_id"], hints["timeout"]) == (str, float | None)
    assert inspect.signature(ServiceClient.create_lora_training_client).return_annotation == "TrainingClient"


def test_help_of_forward_backward_describes_its_parameters_and_shows_an_example() -> None:
    text = inspect.getdoc(TrainingClient.forward_backward) or ""
    for name in inspect.signature(TrainingClient.forward_backward).parameters:
        assert name == "self" or re.search(rf"^{name}: \w.*\.$|^{name}: \w.*…$", text, re.MULTILINE), name
    assert '>>> future = run.forward_backward(data, "cross_entropy")' in text
