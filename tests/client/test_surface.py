"""Every public method of every client, found by introspection: it takes a timeout, refuses bad input, returns
what its annotation says, blocks no event loop, and raises once its client is closed."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, QUICK, close, datum
from tests.client.surface import CLIENTS, Call, calls
from tests.stub import Stub, hang
from tinkex import (
    AdminClient,
    APIFuture,
    ClientClosedError,
    InvalidInputError,
    RestClient,
    ResultTimeoutError,
    ServiceClient,
)
from tinkex import types as t

pytestmark = pytest.mark.slow

# These answer from what is at hand.
NEVER_WAIT = {
    "create_rest_client", "from_sampler_handle", "get_console_url", "get_telemetry", "on_queue_state_change",
}  # fmt: skip
# Accepted for the official signature, without effect.
UNUSED = {
    ("forward_backward_custom", "loss_type_input"), ("save_weights_and_get_sampling_client", "name"),
}  # fmt: skip
NAN = float("nan")
EMPTY = t.ModelInput.from_ints([])

# By a word in a parameter's annotation: what it must refuse.
WRONG: dict[str, list[Any]] = {
    "str": [3, ["x"], NAN],
    "int": ["x", 1.5, NAN, 2**70, [1]],
    "bool": ["yes", 2, [1]],
    "list": [3, "x", [3], {"a": 1}],
    "float": ["soon", NAN, True, [1]],
    "dict": [3, "x", ["a"], {3: "x"}, {"a": object()}, {"a": "\ud800"}],
    "Mapping": [3, "x", ["a"], {3: "x"}],
    "Datum": ["x", [], ["x"], 3, {}, [datum(), None], [t.Datum(EMPTY, {"target_tokens": []})]],
    "ModelInput": ["x", [1, 2], t.ModelInput.empty(), EMPTY],
    "SamplingParams": [{}, "x", 3],
    "RetryConfig": [3, {}, "x"],
    "TensorData": [3, "x", [1]],
}


@pytest.fixture
def clients(stub: Stub) -> Iterator[dict[type, Any]]:
    """One of each, all of them in use already."""
    service = ServiceClient(base_url=stub.url, timeouts=QUICK)
    made = {
        "ServiceClient": service,
        "TrainingClient": service.create_lora_training_client("stub/base"),
        "SamplingClient": service.create_sampling_client(base_model="stub/base"),
        "RestClient": service.create_rest_client(),
    }
    made["SamplingClient"].sample(PROMPT, 1, PARAMS).result(20)
    found = {kind: made.get(kind.__name__) or kind(service._connection) for kind in CLIENTS}
    yield found
    stub.unscript()
    close(service)


def do(client: Any, call: Call, **arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated, some experimental
        result = getattr(client, call.name)(**arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result


def named(call: Call) -> str:
    return str(call)


WAITING = [c for c in calls() if c.name not in NEVER_WAIT and not c.gives.startswith("APIFuture")]


@pytest.mark.parametrize("call", WAITING, ids=named)
def test_every_call_that_waits_takes_a_timeout(stub: Stub, clients: dict[type, Any], call: Call) -> None:
    assert call.parameters["timeout"].kind is inspect.Parameter.KEYWORD_ONLY
    stub.script("*", hang(), always=True)
    if call.name == "get_sampler_handle":
        clients[call.client].session._opening = None  # as if it had not been opened yet
    with pytest.raises(ResultTimeoutError):  # a listing, or a stream, waits when its items are wanted
        next(iter(do(clients[call.client], call, **call.arguments(timeout=0.05))))


ASYNC = [
    pytest.param(call, fresh, id=f"{call}-{'fresh' if fresh else 'used'}")
    for call in WAITING
    for fresh in (False, True)
    if call.is_async and (not fresh or call.client in (ServiceClient, RestClient, AdminClient))
]


@pytest.mark.parametrize(("call", "fresh"), ASYNC)
def test_no_async_call_holds_the_users_loop(
    stub: Stub, clients: dict[type, Any], call: Call, fresh: bool
) -> None:
    """One that waited for the server where it was called would be over at its first turn."""
    client = call.client(base_url=stub.url) if fresh else clients[call.client]
    stub.script("*", hang(), always=True)

    async def scenario() -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            task = asyncio.ensure_future(getattr(client, call.name)(**call.arguments(timeout=0.1)))
            await asyncio.sleep(0)
        held = task.done()
        await asyncio.wait([task])
        assert isinstance(task.exception(), ResultTimeoutError)
        return held

    assert not asyncio.run(scenario())


LOCAL = NEVER_WAIT | {"close", "get_sampler_handle"}


@pytest.mark.parametrize("call", [c for c in calls() if c.name not in LOCAL], ids=named)
def test_every_call_of_a_closed_client_says_so(stub: Stub, clients: dict[type, Any], call: Call) -> None:
    """At the call, or from what it gave; and nothing is sent."""
    clients[ServiceClient].close().result(20)
    stub.requests.clear()

    def use() -> None:
        given = do(clients[call.client], call, **call.arguments())
        given.result(20) if hasattr(given, "result") else next(iter(given))

    with pytest.raises(ClientClosedError, match="make a new ServiceClient"):
        use()
    assert stub.requests == []


# -- what they give ----------------------------------------------------------------------------------------


def is_what_it_says(value: Any, annotation: str) -> bool:
    """By the names of its classes: `str | None`, `list[float]`, `TrainingRun`."""
    allowed = {each.partition("[")[0].strip() for each in annotation.split(" | ")}
    return "Any" in allowed or type(value).__name__.replace("NoneType", "None") in allowed


@pytest.fixture
def there(clients: dict[type, Any]) -> dict[str, Any]:
    """What the arguments of calls name, where it must be there for them to succeed."""
    run = clients[CLIENTS[1]]
    saves = (run.save_state, run.save_weights_for_sampler, run.save_weights_external)
    paths = [save("step-1").result(20).path for save in saves]
    return {
        "training_run_id": run.model_id, "session_id": run.model_id.partition(":")[0],
        "sampler_id": clients[CLIENTS[2]]._sampling_session_id, "path": paths[0],
        "model_path": paths[1], "tinker_path": paths[0], "external": paths[2],
    }  # fmt: skip


# They need a tokenizer, a handle, a JWT or a server of ours; each has tests of its own.
NEEDS_MORE = {
    "get_tokenizer", "get_tokenizer_async", "from_sampler_handle", "whoami", "get_run_metrics",
    "get_run_metrics_async", "on_queue_state_change", "import_checkpoint", "import_checkpoint_async",
    "log", "update_training_run",
    "update_training_run_async", "delete_training_run", "delete_training_run_async",
}  # fmt: skip


@pytest.mark.parametrize("call", [c for c in calls() if c.name not in NEEDS_MORE], ids=named)
def test_every_call_gives_what_its_annotation_says(
    clients: dict[type, Any], there: dict[str, Any], call: Call
) -> None:
    """Every future is the one kind of future, and what comes of it is what is written there."""
    arguments = {name: there.get(name, value) for name, value in call.arguments().items()}
    if call.name.startswith("get_external"):
        arguments["tinker_path"] = there["external"]
    given, says = do(clients[call.client], call, **arguments), call.gives
    if says.startswith("APIFuture["):
        assert type(given) is APIFuture
        given, says = given.result(20), says.removeprefix("APIFuture[").removesuffix("]")
    assert is_what_it_says(given, says), f"{type(given)} is not {says}"


def wrong_values(parameter: inspect.Parameter) -> list[Any]:
    annotation = str(parameter.annotation)
    outermost = "Datum" if "[Datum]" in annotation else annotation.partition("[")[0]
    kinds = [kind for kind in WRONG if kind in outermost]
    values = [value for kind in kinds for value in WRONG[kind]] or [3, object()]
    needed = parameter.default is parameter.empty
    return [*values, None] if needed and "None" not in annotation else values


PARAMETERS = [
    pytest.param(call, parameter, id=f"{call}-{name}")
    for call in calls()
    for name, parameter in call.parameters.items()
    if (call.name.removesuffix("_async"), name) not in UNUSED and call.name != "on_queue_state_change"
]


@pytest.mark.parametrize(("call", "parameter"), PARAMETERS)
def test_what_is_wrong_is_refused_at_the_call_and_nothing_is_sent(
    stub: Stub, clients: dict[type, Any], call: Call, parameter: inspect.Parameter
) -> None:
    stub.requests.clear()
    for value in wrong_values(parameter):
        with pytest.raises(InvalidInputError):
            do(clients[call.client], call, **call.arguments(**{parameter.name: value}))
    assert [r.op for r in stub.requests if r.op != "session_heartbeat"] == []
    clients[CLIENTS[1]].forward_backward([datum()], "cross_entropy").result(20)
    clients[CLIENTS[2]].sample(PROMPT, 1, PARAMS).result(20)


def test_a_future_refuses_a_timeout_that_is_none(stub: Stub, clients: dict[type, Any]) -> None:
    future: APIFuture[Any] = clients[CLIENTS[2]].sample(PROMPT, 1, PARAMS)
    for wrong in ("soon", NAN, True, [1]):
        for wait in (future.result, future.exception, lambda w: asyncio.run(future.result_async(w))):
            with pytest.raises(InvalidInputError, match="timeout must be a number of seconds, or None"):
                wait(wrong)  # type: ignore[arg-type]
    future.result(20)
