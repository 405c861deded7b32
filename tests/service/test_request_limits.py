"""What a request may ask for: a small one never gets a result that fills the server's memory."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from tests.service.harness import Failed, User, datum, killed_copy, serving
from tinkex.engine.protocol import EngineConfig
from tinkex.errors import InvalidInputError
from tinkex.service import samplers
from tinkex.service.refusal import Refusal
from tinkex.service.runs.journal import Journal, JournalFullError
from tinkex.types.base import MAX_LARGE, WIRE, RequestModel
from tinkex.types.data import ModelInput
from tinkex.types.outputs import MAX_SAMPLE_BYTES
from tinkex.types.params import SamplingParams
from tinkex.types.sampling import SampleRequest
from tinkex.types.sessions import CreateSessionRequest
from tinkex.types.tensor import TensorData
from tinkex.wire import ops

pytestmark = pytest.mark.anyio

# Every number in a request, by how much it can make the server hold. A new one must be put into one of these.

# The result grows with it: `types.outputs.sample_bytes` counts it.
GROWS = {
    "SampleRequest.num_samples", "SampleRequest.topk_prompt_logprobs", "SampleRequest.topk_sample_logprobs",
    "SampleRequest.prompt_alt_tokens_k", "SamplingParams.max_tokens",
}  # fmt: skip
# It has a bound of its own: MAX_RANK of accept.py, the ledger's MAX_PAGE, or its type's.
BOUNDED = {
    "LoraConfig.rank", "ListSessionsRequest.limit", "ListTrainingRunsRequest.limit",
    "ListUserCheckpointsRequest.limit", "SessionSearchRequest.limit",
}  # fmt: skip
# It names, orders or sets something; nothing grows with it.
PLAIN = {
    "seq_id", "model_seq_id", "sampling_session_seq_id", "custom_loss_seq_id", "event_session_index",
    "cloned_sampler_id", "prev_cursor", "offset", "length", "timeout", "ttl_seconds", "seed", "stop",
    "temperature", "top_k", "top_p", "prompt_logprobs_last_n", "loss_fn_config", "learning_rate", "beta1",
    "beta2", "eps", "weight_decay", "grad_clip_norm", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_p", "min_tokens", "logit_bias", "step", "metrics",
}  # fmt: skip


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts(inner)


def _numbers(kind: type[Any], seen: set[Any]) -> Iterator[str]:
    """The numeric fields of a request type and of all values in it, as CLASS.FIELD."""
    if not isinstance(kind, type) or kind in seen:
        return
    seen.add(kind)
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    elif issubclass(kind, BaseModel):
        fields = {name: field.annotation for name, field in kind.model_fields.items()}
    for name, annotation in fields.items():
        parts = list(_parts(annotation))
        if int in parts or float in parts:
            yield f"{kind.__name__}.{name}"
        for part in parts:
            yield from _numbers(part, seen)


def test_every_number_of_every_request_is_bounded_or_harmless():
    seen: set[Any] = set()
    numbers = {number for op in ops.OPS.values() for number in _numbers(op.request, seen)}
    assert numbers >= GROWS | BOUNDED, "one of these is no field any more"
    unknown = {n for n in numbers - GROWS - BOUNDED if n.partition(".")[2] not in PLAIN}
    assert not unknown, "say how much a request may ask for with it"


def _texts(kind: type[Any], seen: set[Any]) -> Iterator[tuple[type[Any], str, Any]]:
    """The fields of a request type, and of all requests in it, that hold text or any JSON."""
    if not isinstance(kind, type) or kind in seen or not issubclass(kind, BaseModel):
        return
    seen.add(kind)
    for name, field in kind.model_fields.items():
        parts = list(_parts(field.annotation))
        if str in parts or Any in parts:
            yield kind, name, field.annotation
        for part in parts:
            yield from _texts(part, seen)


@pytest.mark.slow
def test_every_text_of_every_request_is_bounded_on_both_sides():
    seen: set[Any] = set()
    texts = [text for op in ops.OPS.values() for text in _texts(op.request, seen)]
    requests = [(kind, name) for kind, name, _ in texts if issubclass(kind, RequestModel)]
    assert (CreateSessionRequest, "user_metadata") in requests
    for kind, name in requests:
        for large in ("x" * (MAX_LARGE + 1), ["x" * 1024] * 4097, {"a": [{"b" * (MAX_LARGE + 1): 1}]}):
            with pytest.raises(InvalidInputError, match=f"{name} has more than"):
                kind(**{name: large})
            with pytest.raises(ValidationError, match=f"{name} has more than"):
                kind.model_validate({name: large}, context=WIRE)


def test_what_a_user_writes_about_a_session_is_small():
    CreateSessionRequest(tags=["t"] * 256, user_metadata={"notes": "x" * 60_000}, display_name="x" * 1000)
    with pytest.raises(InvalidInputError, match="user_metadata has more than 65536 bytes"):
        CreateSessionRequest(user_metadata={f"note {n}": "x" * 1000 for n in range(70)})
    with pytest.raises(InvalidInputError, match="tags"):
        CreateSessionRequest(tags=["t"] * 257)


def request(length: int, max_tokens: int | None, **fields: Any) -> SampleRequest:
    prompt = ModelInput.from_ints([5] * length)
    return SampleRequest(prompt, SamplingParams(max_tokens=max_tokens, seed=1), **fields)


TARGETS = TensorData.from_numpy(np.zeros((3, 6 << 20), np.int64))


@pytest.mark.parametrize(
    ("length", "max_tokens", "fields", "named"),
    [
        (3, 100, {"num_samples": 64, "topk_sample_logprobs": 49_152}, "at most 1310 for"),
        (3, None, {"num_samples": 64, "topk_sample_logprobs": 1000}, "topk_sample_logprobs must be at most"),
        (4000, 1, {"topk_prompt_logprobs": 49_152}, "topk_prompt_logprobs must be at most"),
        (4000, 1, {"prompt_alt_tokens_k": 49_152}, "prompt_alt_tokens_k must be at most"),
        (3, 4000, {"num_samples": 4096}, "num_samples must be at most"),
        (3, None, {"num_samples": 4096}, "num_samples must be at most"),
        (4, 1, {"target_prompt_logprobs": TARGETS}, "target_prompt_logprobs must be at most"),
    ],
)  # fmt: skip
async def test_a_result_that_would_be_too_large_is_refused_before_anything_is_computed(
    home: Path, length: int, max_tokens: int | None, fields: dict[str, Any], named: str
):
    async with serving(home, engine=EngineConfig("", kind="fake", max_context=4096), preload=True) as service:
        user = User(service)
        asked = request(
            length, max_tokens, sampling_session_id=await user.sampler(await user.session()), **fields
        )
        with pytest.raises(Refusal, match=named) as refused:
            await user.call(ops.SAMPLE, asked)
        assert refused.value.status == 400
        assert str(MAX_SAMPLE_BYTES) in refused.value.message
        assert not service.samplers.running


async def test_what_honest_clients_ask_for_at_once_is_accepted(home: Path):
    """64 prompts with 4 samples of 2,048 tokens each, and 20 likely tokens of every one of them."""
    async with serving(home, engine=EngineConfig("", kind="fake", max_context=4096), preload=True) as service:
        user = User(service)
        sampler = await user.sampler(await user.session())
        fields = {"num_samples": 4, "sampling_session_id": sampler, "topk_sample_logprobs": 20}
        promises = [await user.call(ops.SAMPLE, request(1000, 2048, seq_id=n, **fields)) for n in range(64)]
        assert len({promise.request_id for promise in promises}) == 64


async def test_large_results_that_nobody_fetches_are_bounded_by_owner(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(samplers, "MAX_HELD", 1_000_000)
    monkeypatch.setattr(samplers, "LOST_ANSWER", 0.0)
    async with serving(home, preload=True) as service:
        ann, ben = User(service, "ann"), User(service, "ben")
        session = await ann.session()
        sampler = await ann.sampler(session)
        asked = {"sampling_session_id": sampler, "topk_sample_logprobs": 200, "num_samples": 5}
        fit = 1_000_000 // (5 * 4 * 200 * 128)
        promises = [await ann.call(ops.SAMPLE, request(3, 4, seq_id=n, **asked)) for n in range(fit)]
        with pytest.raises(Refusal, match="fetch their results") as refused:
            await ann.call(ops.SAMPLE, request(3, 4, seq_id=fit, **asked))
        assert refused.value.status == 429
        await ann.sample(sampler, 20)  # a plain one takes nothing of it
        of_ben = {**asked, "sampling_session_id": await ben.sampler(await ben.session())}
        await ben.call(ops.SAMPLE, request(3, 4, seq_id=0, **of_ben))
        await ann.result(promises[0])
        await ann.call(ops.SAMPLE, request(3, 4, seq_id=10, **asked))  # what was fetched makes room


async def test_passes_that_wait_take_bounded_memory_of_each_user(home: Path):
    size = datum(1).nbytes
    async with serving(home, queue_memory_per_user=int(2.5 * size), queue_memory=4 * size) as service:
        ann, bob, cid = User(service), User(service, "bob"), User(service, "cid")
        run, other = await ann.run(), await ann.run()
        waiting = [await ann.forward_backward(run, seq_id) for seq_id in (2, 3)]  # the first is missing
        for refused in ((run, 4), (other, 1)):
            with pytest.raises(Refusal, match=r"bytes of passes .* of one user") as told:
                await ann.forward_backward(*refused)
            assert told.value.status == 429
        mine = await bob.run()
        for seq_id in (2, 3):  # others have room
            await bob.forward_backward(mine, seq_id)
        theirs = await cid.run()
        alone = await cid.forward_backward(theirs, 2)  # the only one of its owner
        with pytest.raises(Refusal, match="of all users"):
            await cid.forward_backward(theirs, 3)
        waiting.append(await ann.forward_backward(run, 1))  # the others wait for it
        for promise in waiting:
            await ann.result(promise)
        await ann.result(await ann.forward_backward(run, 4))
        await cid.forward_backward(theirs, 1)
        await cid.result(alone)
        await bob.forward_backward(mine, 1)
        await bob.result(f"{mine}#3")
        assert service.runs.queued.users == {}


async def test_passes_that_wait_again_after_a_restart_take_room(home: Path):
    limit = int(2.5 * datum(1).nbytes)
    async with serving(home, queue_memory_per_user=limit) as service:
        user = User(service)
        run = await user.run()
        waiting = [await user.forward_backward(run, seq_id) for seq_id in (2, 3)]  # the first is missing
        copy = killed_copy(home)
    async with serving(copy, queue_memory_per_user=limit) as service:
        user = User(service)
        with pytest.raises(Refusal, match=r"bytes of passes .* of one user"):
            await user.forward_backward(run, 4)
        await user.forward_backward(run, 1)
        for promise in waiting:
            await user.result(promise)
        assert service.runs.queued.users == {}


async def test_a_pass_that_fails_or_is_not_journaled_gives_its_room_back(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(home, queue_memory_per_user=1) as service:
        user = User(service)
        run = await user.run()
        with pytest.raises(Failed):
            await user.result(await user.forward_backward(run, 1, datum(1), loss_fn="importance_sampling"))
        assert service.runs.queued.users == {}
        monkeypatch.setattr(Journal, "accept", _full)
        with pytest.raises(Refusal, match="not accepted"):
            await user.forward_backward(run, 2)
        assert service.runs.queued.users == {}


def _full(journal: Journal, entry: Any) -> None:
    raise JournalFullError("no space is left")
