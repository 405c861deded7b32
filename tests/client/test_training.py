"""One run against a server that refuses, fails, drops and delays requests."""

from __future__ import annotations

import asyncio
import pickle
import time
import warnings
from typing import Any

import pytest

from tests.client.conftest import close, datum, fast_retries
from tests.stub import Stub, delay, drop, fail, hang, read_pass, status
from tinkex import (
    AdamParams,
    APIConnectionError,
    BadRequestError,
    InvalidInputError,
    PassIncompleteError,
    RequestErrorCategory,
    RequestFailedError,
    ResultTimeoutError,
    ServiceClient,
    TinkerError,
)


def executed(stub: Stub) -> list[tuple[int, str]]:
    return [(seq_id, op) for _, seq_id, op in stub.executed]


def train(run: Any) -> None:
    run.forward_backward([datum()], "cross_entropy").result(20)
    run.optim_step().result(20)


def small_chunks(stub: Stub, datums: int = 1, **more: Any) -> Any:
    """A run on a server that takes at most so many datums a request."""
    stub.config = {"fwdbwd_max_chunk_len": datums, **more}
    service = ServiceClient(base_url=stub.url)
    fast_retries(service)
    return service.create_lora_training_client("stub/base", timeout=20)


# -- order -------------------------------------------------------------------------------------------------


def test_requests_are_executed_in_the_order_of_the_calls(stub: Stub, run: Any) -> None:
    """Without the caller waiting for anything."""
    stub.latency = 0.01
    futures: list[Any] = []
    for step in range(5):
        futures += [run.forward_backward([datum()], "cross_entropy"), run.optim_step()]
        futures.append(run.save_state(f"s{step}") if step % 2 else run.forward([datum()], "cross_entropy"))
    for future in futures:
        future.result(10)
    assert [seq_id for seq_id, _ in executed(stub)] == list(range(1, 16))
    ops = [op for _, op in executed(stub)]
    assert ops[:6] == [
        "forward_backward",
        "optim_step",
        "forward",
        "forward_backward",
        "optim_step",
        "save_weights",
    ]


def test_a_step_is_sent_before_the_pass_has_its_result(stub: Stub, run: Any) -> None:
    """Training is pipelined."""
    stub.hold("forward_backward")
    passing = run.forward_backward([datum()], "cross_entropy")
    step = run.optim_step(AdamParams(learning_rate=0.5))
    (request,) = stub.wait_for("optim_step")
    assert request.json["adam_params"]["learning_rate"] == 0.5
    assert request.json["seq_id"] == 2
    assert not passing.done()
    stub.release()
    step.result(20)


def test_the_async_twins_return_futures(stub: Stub, run: Any) -> None:
    """Two awaits for training, as in the official SDK."""

    async def scenario() -> Any:
        passing = await run.forward_backward_async([datum()], "cross_entropy")
        step = await run.optim_step_async(AdamParams())
        saved = await run.save_state_async("one")
        published = await run.save_weights_for_sampler_async("two")
        return await passing, await step, await saved, await published.result_async(5)

    passing, step, saved, published = asyncio.run(scenario())
    assert passing.metrics == {"loss:sum": 1.5}
    assert step.metrics == {"grad_norm": 1.0}
    assert saved.path == f"tinker://{run.model_id}/weights/one"
    assert published.path == f"tinker://{run.model_id}/sampler_weights/two"


def test_the_callers_list_may_change_afterwards(stub: Stub, run: Any) -> None:
    stub.script("optim_step", delay(0.2))
    run.optim_step()
    data = [datum(3), datum(5)]
    future = run.forward_backward(data, "cross_entropy")
    data.clear()
    assert len(future.result(20).loss_fn_outputs) == 2


# -- giving up ---------------------------------------------------------------------------------------------


def test_cancelling_a_queued_request_leaves_no_trace(stub: Stub, run: Any) -> None:
    """It is never sent, takes no seq id, and the rest goes on."""
    stub.script("forward_backward", delay(0.3))
    passing = run.forward_backward([datum()], "cross_entropy")
    queued, after = run.save_state("never"), run.optim_step()
    assert queued.cancel()
    for future in (passing, after):
        future.result(20)
    train(run)
    assert stub.count("save_weights") == 0
    assert [seq_id for seq_id, _ in executed(stub)] == [1, 2, 3, 4]


def test_a_sent_request_cannot_be_cancelled_and_says_so(stub: Stub, run: Any) -> None:
    """The server executes it anyway, so a caller that was told True would send it twice."""
    stub.hold("forward_backward")
    passing = run.forward_backward([datum()], "cross_entropy")
    stub.wait_for("retrieve_future", 2)
    assert not passing.cancel()
    assert passing.running(), "as a function that an executor has begun"
    step = run.optim_step()
    stub.release()
    assert len(passing.result(20).loss_fn_outputs) == 1
    step.result(20)
    assert executed(stub) == [(1, "forward_backward"), (2, "optim_step")]


@pytest.mark.parametrize("call", ["forward", "forward_backward", "optim_step", "save_state"])
def test_what_is_being_sent_cannot_be_cancelled_either(stub: Stub, run: Any, call: str) -> None:
    arguments = {"save_state": ("a",), "optim_step": ()}.get(call, ([datum()], "cross_entropy"))
    op = {"save_state": "save_weights", "optim_step": "optim_step"}.get(call, "forward_backward")
    stub.script(op, delay(0.2))
    future = getattr(run, call)(*arguments)
    stub.wait_for(op)
    assert not future.cancel()
    future.result(20)
    train(run)
    assert [seq_id for seq_id, _ in executed(stub)] == [1, 2, 3]
    assert not future.cancel(), "nor what is done"


def test_a_task_that_is_cancelled_while_it_awaits_a_sent_pass_leaves_it_alone(stub: Stub, run: Any) -> None:
    """Awaiting is not owning; and asyncio's own wrapper asks the future to cancel."""
    stub.hold("forward_backward")
    passing = run.forward_backward([datum()], "cross_entropy")
    stub.wait_for("retrieve_future", 2)

    async def give_up() -> None:
        for waiting in (passing.result_async(), asyncio.wrap_future(passing)):
            task = asyncio.ensure_future(waiting)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())
    stub.release()
    assert len(passing.result(20).loss_fn_outputs) == 1


def test_a_timeout_while_queued_changes_nothing(stub: Stub, run: Any) -> None:
    """For both kinds of wait."""
    stub.script("forward_backward", delay(0.4))
    run.forward_backward([datum()], "cross_entropy")
    queued = run.optim_step()

    async def wait() -> None:
        await queued.result_async(timeout=0.05)

    with pytest.raises(ResultTimeoutError):
        asyncio.run(wait())
    with pytest.raises(ResultTimeoutError):
        queued.result(timeout=0.05)
    assert queued.result(20).metrics == {"grad_norm": 1.0}
    train(run)


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_step_after_a_partly_refused_pass_is_held_back_once(
    stub: Stub, refused: int, parallel: bool
) -> None:
    """The pass fails, the step says why, and the run goes on."""
    run = small_chunks(stub, parallel_fwdbwd_chunks=parallel)
    train(run)
    where = lambda request: read_pass(request.body).seq_id == 2 + refused  # noqa: E731
    stub.script("forward_backward", status(400, body={"detail": "not this one"}), where=where)
    passing = run.forward_backward([datum()] * 3, "cross_entropy")
    step = run.optim_step()
    with pytest.raises(BadRequestError, match="not this one"):
        passing.result(20)
    with pytest.raises(PassIncompleteError, match=r"2 of 3 requests.*not this one.*optim_step again"):
        step.result(20)
    assert stub.count("optim_step") == 1
    run.optim_step().result(20)
    train(run)


def test_a_step_is_held_back_when_its_custom_loss_failed(stub: Stub, run: Any) -> None:
    failed = run.forward_backward_custom([datum()], lambda data, logprobs: 1 / 0)
    step = run.optim_step()
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    with pytest.raises(PassIncompleteError, match="division by zero"):
        step.result(20)
    assert stub.count("optim_step") == 0
    train(run)


def test_a_step_is_held_back_when_its_pass_could_not_be_encoded(stub: Stub, run: Any) -> None:
    failed = run.forward_backward([datum()], "cross_entropy", {"x": 10**400})
    step = run.optim_step()
    with pytest.raises(InvalidInputError):
        failed.result(20)
    with pytest.raises(PassIncompleteError):
        step.result(20)
    train(run)


def test_saving_after_a_partly_refused_pass_does_not_lift_the_guard(stub: Stub, run: Any) -> None:
    train(run)
    stub.script("forward_backward", status(422))
    with pytest.raises(TinkerError):
        run.forward_backward([datum()], "cross_entropy").result(20)
    run.save_state("meanwhile").result(20)
    with pytest.raises(PassIncompleteError, match="0 of 1"):
        run.optim_step().result(20)
    run.optim_step().result(20)


def test_a_refused_forward_holds_nothing_back(stub: Stub, run: Any) -> None:
    train(run)
    stub.script("forward_backward", status(422))
    with pytest.raises(TinkerError):
        run.forward([datum()], "cross_entropy").result(20)
    run.optim_step().result(20)


@pytest.mark.parametrize("op", ["optim_step", "save_weights", "save_weights_for_sampler", "load_weights"])
def test_a_refusal_fails_one_call_and_no_other(stub: Stub, run: Any, op: str) -> None:
    calls = {
        "optim_step": run.optim_step,
        "save_weights": lambda: run.save_state("x"),
        "save_weights_for_sampler": lambda: run.save_weights_for_sampler("x"),
        "load_weights": lambda: run._load(f"tinker://{run.model_id}/weights/x", optimizer=True, token=None),
    }
    stub.script(op, status(400))
    bad, good = calls[op](), calls[op]()
    with pytest.raises(BadRequestError):
        bad.result(20)
    good.result(20)
    train(run)


@pytest.mark.parametrize(("word", "category"), [("User", "user"), ("server", "server"), ("odd", "unknown")])
def test_a_failed_request_is_told_as_it_was_said(stub: Stub, run: Any, word: str, category: str) -> None:
    """The server took it, and failed it; a word that is not known is not lost."""
    stub.script("optim_step", fail("the loss is made of cheese", word))
    with pytest.raises(RequestFailedError, match=r"optim_step failed .*made of cheese") as caught:
        run.optim_step().result(20)
    assert word.lower() in str(caught.value)
    assert caught.value.category is RequestErrorCategory(category)
    assert caught.value.request_id.startswith("r")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.category) == (str(caught.value), caught.value.category)
    train(run)


@pytest.mark.parametrize("name", ["forward", "forward_backward"])
def test_a_failed_pass_is_called_what_it_was(stub: Stub, run: Any, name: str) -> None:
    stub.script("forward_backward", fail("no"))
    with pytest.raises(RequestFailedError, match=f"^{name} failed "):
        getattr(run, name)([datum()], "cross_entropy").result(20)


def test_a_failed_chunk_fails_the_pass(stub: Stub) -> None:
    run = small_chunks(stub)
    where = lambda request: read_pass(request.body).seq_id == 2  # noqa: E731
    stub.script("forward_backward", fail("no"), where=where)
    with pytest.raises(RequestFailedError):
        run.forward_backward([datum()] * 3, "cross_entropy").result(20)
    train(run)


def test_what_was_never_sent_uses_no_seq_id(stub: Stub, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that could not be found, say: no gap that a server would wait for."""
    train(run)
    credential: Any = run.session.connection.transport.credential

    def broken() -> str:
        raise InvalidInputError("no key today")

    for call in (run.optim_step, lambda: run.forward_backward([datum()], "cross_entropy")):
        with monkeypatch.context() as patch:
            patch.setattr(credential, "current", broken)
            with pytest.raises(InvalidInputError, match="no key today"):
                call().result(20)
    train(run)
    assert [seq_id for seq_id, _ in executed(stub)] == [1, 2, 3, 4]


def test_a_submission_lost_for_good_fails_its_call_alone(
    stub: Stub, service: ServiceClient, run: Any
) -> None:
    """The server would wait a minute for the seq id that it never saw."""
    stub.gap_seconds = 1000
    fast_retries(service, lost_budget=0.2)
    stub.script("optim_step", *[drop()] * 50)
    for _ in range(2):
        with pytest.raises(APIConnectionError):
            run.optim_step().result(20)
    stub.unscript()
    train(run)
    assert executed(stub) == [(1, "forward"), (2, "forward"), (3, "forward_backward"), (4, "optim_step")]


def test_what_takes_a_lost_submissions_place_is_sent_until_it_arrives(
    stub: Stub, service: ServiceClient, run: Any
) -> None:
    """A loop that waits for each result makes no further call that could bring it along."""
    stub.gap_seconds = 1000
    fast_retries(service, lost_budget=0.2)
    stub.script("optim_step", *[drop()] * 50)
    with pytest.raises(APIConnectionError):
        run.optim_step().result(20)
    stub.unscript()
    stub.script("forward_backward", status(503), status(429))
    run.optim_step().result(20)
    assert executed(stub) == [(1, "forward"), (2, "optim_step")]


def test_nobody_waits_for_what_takes_a_lost_submissions_place(
    stub: Stub, service: ServiceClient, run: Any
) -> None:
    stub.gap_seconds = 0.1  # as on a server that waits for none
    fast_retries(service, lost_budget=0.2)
    stub.script("optim_step", *[drop()] * 50)
    with pytest.raises(APIConnectionError):
        run.optim_step().result(20)
    stub.unscript()
    stub.script("forward_backward", hang())
    run.optim_step().result(20)
    assert executed(stub) == [(2, "optim_step")]


def test_chunks_lost_for_good_hold_up_nothing_that_comes_after(stub: Stub) -> None:
    stub.gap_seconds = 1000
    run = small_chunks(stub)
    fast_retries(run.queue, lost_budget=0.2)
    where = lambda request: read_pass(request.body).seq_id == 2  # noqa: E731
    stub.script("forward_backward", *[drop()] * 50, where=where)
    with pytest.raises(APIConnectionError):
        run.forward_backward([datum()] * 3, "cross_entropy").result(20)
    stub.unscript()
    run.save_state("a").result(20)
    ops = ["forward_backward", "forward", "forward_backward", "save_weights"]
    assert [op for _, op in executed(stub)] == ops


# -- chunks ------------------------------------------------------------------------------------------------


def test_a_pass_is_cut_by_the_servers_limits_and_its_first_chunk_comes_last(stub: Stub) -> None:
    """So that the server has the whole pass when it can begin."""
    run = small_chunks(stub, 2)
    stub.metrics = lambda given: {"loss:sum": 1.0, "n:unique": float(given.seq_id)}
    output = run.forward_backward([datum(n) for n in range(1, 6)], "cross_entropy").result(20)
    assert [record["logprobs"].dense_shape for record in output.loss_fn_outputs] == [
        (n,) for n in range(1, 6)
    ]
    assert output.metrics == {"loss:sum": 3.0, "n:unique": 1.0, "n:unique_1": 2.0, "n:unique_2": 3.0}
    sent = [read_pass(request.body).seq_id for request in stub.sent("forward_backward")]
    assert sorted(sent) == [1, 2, 3]
    assert sent[-1] == 1
    run.optim_step().result(20)
    assert executed(stub)[-1] == (4, "optim_step")


def test_chunks_by_size(stub: Stub) -> None:
    run = small_chunks(stub, 1000, fwdbwd_max_chunk_bytes_count=1000)
    run.forward_backward([datum(40), datum(40), datum(200), datum(1)], "cross_entropy").result(20)
    assert stub.count("forward_backward") == 3


# -- input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.optim_step({"learning_rat": 1}), "learning_rat"),
        (lambda r: r.optim_step({"learning_rate": -1}), "learning_rate"),
        (lambda r: r.optim_step(AdamParams(), adam_params=AdamParams()), "not both"),
        (lambda r: r.optim_step("fast"), "optim_params"),
        (lambda r: r.save_state(""), "name"),
        (lambda r: r.save_state("a/b"), "without '/'"),
        (lambda r: r.save_state("a", ttl_seconds=0), "ttl_seconds must be a whole number from 1 on"),
        (lambda r: r.save_weights_for_sampler(3), "name"),
        (lambda r: r.save_weights_external("a", ttl_seconds=True), "ttl_seconds"),
        (lambda r: r._load("weights/x", optimizer=True, token=None), "tinker://"),
        (lambda r: r.create_sampling_client("weights/x"), "tinker://"),
        (lambda r: r.forward_backward_custom([datum()], "mine"), "must be a function, .*got str"),
        (lambda r: r.forward_backward_custom([], lambda d, l: None), "data is empty"),
    ],
)
def test_bad_input_is_refused_at_the_call(stub: Stub, run: Any, call: Any, words: str) -> None:
    before = len(stub.requests)
    with pytest.raises(InvalidInputError, match=words):
        call(run)
    assert len(stub.requests) == before
    train(run)


# -- what it is --------------------------------------------------------------------------------------------


def test_saving_loading_and_sampling(stub: Stub, run: Any) -> None:
    saved = run.save_state("a", ttl_seconds=60, overwrite=True, user_metadata={"k": "v"}).result(20)
    (request,) = stub.sent("save_weights")
    wanted = {"path": "a", "ttl_seconds": 60, "overwrite": True, "user_metadata": {"k": "v"}}
    assert {name: request.json[name] for name in wanted} == wanted
    with pytest.warns(DeprecationWarning, match="load_state is deprecated"):
        run.load_state(saved.path).result(20)
    with pytest.warns(DeprecationWarning, match="with_optimizer"):
        run.load_state_with_optimizer(saved.path, weights_access_token="t").result(20)
    assert [r.json["optimizer"] for r in stub.sent("load_weights")] == [False, True]
    published = run.save_weights_for_sampler("p").result(20)
    assert run.create_sampling_client(published.path).get_base_model() == "stub/base"
    external = run.save_weights_external("e", age_encryption_recipients=["age1"]).result(20)
    assert external.path.endswith("/external_weights/e")


def test_deprecation_is_warned_of_at_the_callers_line(stub: Stub, run: Any) -> None:
    saved = run.save_state("a").result(20)

    async def scenario(name: str) -> None:
        await (await getattr(run, name)(saved.path))

    for name in ("load_state", "load_state_with_optimizer"):
        with pytest.warns(DeprecationWarning, match=f"{name} is deprecated") as caught:
            getattr(run, name)(saved.path).result(20)
        assert [warning.filename for warning in caught] == [__file__]
        with pytest.warns(DeprecationWarning, match=f"{name} is deprecated") as caught:
            asyncio.run(scenario(f"{name}_async"))
        assert [warning.filename for warning in caught] == [__file__]
        assert caught[0].lineno == scenario.__code__.co_firstlineno + 1


def test_publishing_sees_every_step_called_before_it(stub: Stub, run: Any) -> None:
    run.optim_step()
    sampler = run.save_weights_and_get_sampling_client("ignored")
    run.optim_step().result(20)
    assert [op for _, op in executed(stub)] == ["optim_step", "save_weights_for_sampler", "optim_step"]
    assert sampler._sampling_session_id in stub.samplers


def test_info_and_console(stub: Stub, run: Any) -> None:
    info = run.get_info(timeout=20)
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == ("stub/base", 32, True)
    assert run.model_id in run.get_console_url()
    assert run.model_id in repr(run)
    assert run.get_telemetry() is None


def test_a_run_cannot_be_pickled_and_says_why(run: Any) -> None:
    with pytest.raises(TypeError, match="one order, in one process"):
        pickle.dumps(run)


def test_nothing_is_warned_of_in_ordinary_use(stub: Stub, run: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run)
        run.forward_backward([datum()], "cross_entropy").cancel()
        train(run)


def test_a_closed_services_run_is_closed(service: ServiceClient, run: Any) -> None:
    close(service)
    with pytest.raises(TinkerError, match="closed"):
        run.optim_step()


def test_cancel_is_true_exactly_if_the_server_never_sees_the_pass(stub: Stub, run: Any) -> None:
    """Whenever it comes: a pass that was posted is executed, so cancel says False and the result arrives."""
    run.forward([datum()], "cross_entropy").result(20)
    stub.executed.clear()
    kept: list[Any] = []
    for n in range(120):
        future = run.forward_backward([datum()], "cross_entropy")
        if n % 2:  # a sleep gives way to the client's thread: on a busy machine none came before it
            time.sleep(0.0001 * (n % 30))
        if not future.cancel():
            kept.append(future)
    run.optim_step().result(20)
    assert all(future.result(20).metrics for future in kept)
    assert [op for _, op in executed(stub)] == ["forward_backward"] * len(kept) + ["optim_step"]
    assert 0 < len(kept) < 120
