"""What a client sees is the same whatever is between it and the service: nothing, or HTTP."""

from __future__ import annotations

import io
import json
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.loop import SECONDS, on_loop
from tests.server.conftest import Running
from tests.service.harness import MODEL, config, datum
from tinkex import (
    AdamParams,
    APIConnectionError,
    BadRequestError,
    ClientClosedError,
    Datum,
    ImageChunk,
    LoraConfig,
    ModelInput,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
    SamplingParams,
    ServiceClient,
    TrainingClient,
    UnprocessableEntityError,
)
from tinkex.client.server_connection import ServerConnection
from tinkex.engine.fake import FakeEngine
from tinkex.local import LocalTransport
from tinkex.server.serve import ServerConfig
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Caller
from tinkex.service.service import Service
from tinkex.wire import ops
from tinkex.wire.ops import Op

Connect = Callable[[str], ServiceClient]
ADAM = AdamParams(learning_rate=0.05)


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> ServiceConfig:
    """The service's; a test may change some of them by its parameter."""
    return config(tmp_path / "home", **getattr(request, "param", {}))


@pytest.fixture(params=["local", "http"])
def connect(
    request: pytest.FixtureRequest, settings: ServiceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Connect]:
    """The way of a user, by name, to one service that all of them share."""
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    clients: list[ServiceClient] = []

    def remember(client: ServiceClient) -> ServiceClient:
        clients.append(client)
        return client

    if request.param == "http":
        running = Running(ServerConfig(settings, port=0, drain_seconds=0.1))
        yield lambda user: remember(ServiceClient(base_url=running.url, api_key=f"tml-{user}"))
        stop = running.stop
    else:
        service = Service(settings, FakeEngine)
        stop = lambda: on_loop(service.stop) if service.ready else None  # noqa: E731

        def local(user: str) -> ServiceClient:
            transport = LocalTransport(service, Caller(user, same_machine=True))
            monkeypatch.setattr(
                "tinkex.local.connection", lambda settings: ServerConnection(transport, settings)
            )
            return remember(ServiceClient())

        yield local
    for client in clients:
        client.close().result(SECONDS)
    stop()


@pytest.fixture
def client(connect: Connect) -> ServiceClient:
    return connect("ann")


@pytest.fixture
def run(client: ServiceClient) -> TrainingClient:
    return client.create_lora_training_client(MODEL, rank=4, seed=1)


def losses(run: TrainingClient, steps: int) -> list[float]:
    """Sent ahead, fetched at the end."""
    passes = []
    for n in range(steps):
        passes.append(run.forward_backward([datum(n), datum(n + 1)], "cross_entropy"))
        run.optim_step(ADAM)
    return [p.result(SECONDS).metrics["loss:sum"] for p in passes]


def loss(run: TrainingClient) -> float:
    return run.forward([datum(0)], "cross_entropy").result(SECONDS).metrics["loss:sum"]


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"runs_per_user": 1}], indirect=True)
def test_a_429_is_waited_for(client: ServiceClient, run: TrainingClient) -> None:
    with ThreadPoolExecutor() as pool:
        second = pool.submit(client.create_lora_training_client, MODEL, rank=4)
        time.sleep(0.7)  # the first pause is at most half a second
        assert not second.done()
        client.create_rest_client().delete_training_run(run.model_id).result(SECONDS)
        assert loss(second.result(SECONDS)) > 0


# -- training --------------------------------------------------------------------------------------------


def test_requests_that_never_arrived_hold_up_nothing(run: TrainingClient, monkeypatch: pytest.MonkeyPatch):
    """A service waits a minute for a seq id that it has not seen."""
    transport = run.session.connection.transport
    call, lost = transport.call, [ops.OPTIM_STEP, ops.SAVE_WEIGHTS]

    async def losing(op: Op, request: Any, *context: Any) -> Any:
        if op in lost:
            lost.remove(op)
            raise APIConnectionError(message="lost on the way")
        return await call(op, request, *context)

    before = loss(run)
    monkeypatch.setattr(transport, "call", losing)
    with pytest.raises(APIConnectionError):
        run.optim_step(ADAM).result(SECONDS)
    with pytest.raises(APIConnectionError):
        run.save_state("lost").result(SECONDS)
    assert loss(run) == before
    losses(run, 1)
    assert loss(run) < before


def test_the_service_says_what_it_has(client: ServiceClient):
    models = client.get_server_capabilities().supported_models
    assert [model.model_name for model in models] == [MODEL]


def test_training_learns(run: TrainingClient):
    batch = [datum(0)]
    seen = []
    for _ in range(5):
        passed = run.forward_backward(batch, "cross_entropy")
        stepped = run.optim_step(ADAM)
        output = passed.result(SECONDS)
        assert output.loss_fn_outputs[0]["logprobs"].to_numpy().shape == (6,)
        assert stepped.result(SECONDS).metrics["learning_rate"] == 0.05
        seen.append(output.metrics["loss:sum"])
    assert sorted(seen, reverse=True) == seen


def test_a_run_knows_what_it_is(run: TrainingClient, client: ServiceClient):
    info = run.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (MODEL, 4, True)
    shown = client.create_rest_client().get_training_run(run.model_id).result(SECONDS)
    assert (shown.base_model, shown.corrupted) == (MODEL, False)


def test_wrong_content_fails_its_pass_and_its_step_and_nothing_after(
    run: TrainingClient, client: ServiceClient
):
    # A client cannot know how far ids go.
    beyond = Datum(ModelInput.from_ints([10**6]), {"target_tokens": [5]})
    bad = run.forward_backward([beyond], "cross_entropy")
    step = run.optim_step(ADAM)
    with pytest.raises(RequestFailedError, match=r"datum 0: model_input\[0\] is 1000000") as failed:
        bad.result(SECONDS)
    assert failed.value.category is RequestErrorCategory.User
    with pytest.raises(RequestFailedError, match="no step was taken"):
        step.result(SECONDS)
    twin = client.create_lora_training_client(MODEL, rank=4, seed=1)
    assert losses(run, 3) == losses(twin, 3)


def test_what_is_not_offered_is_refused(run: TrainingClient, client: ServiceClient):
    with pytest.raises(NotFoundError, match="no base model is called 'no/such'"):
        client.create_lora_training_client("no/such")
    with pytest.raises(UnprocessableEntityError, match="rank must be at most"):
        client.create_lora_training_client(MODEL, rank=100_000)
    with pytest.raises(RequestFailedError, match="stable_reinforce") as failed:
        run.forward_backward([datum(0)], "stable_reinforce").result(SECONDS)
    assert failed.value.category is RequestErrorCategory.User
    assert losses(run, 1)


# -- checkpoints -----------------------------------------------------------------------------------------


def test_a_state_is_resumed_exactly(run: TrainingClient, client: ServiceClient):
    losses(run, 3)
    path = run.save_state("c").result(SECONDS).path
    assert path == f"tinker://{run.model_id}/weights/c"
    resumed = client.create_training_client_from_state_with_optimizer(path)
    fresh = client.create_training_client_from_state(path)
    assert loss(resumed) == loss(fresh) == loss(run)
    after = losses(run, 3)
    assert losses(resumed, 3) == after
    assert losses(fresh, 3) != after  # Adam's moments began anew
    run.load_state(path).result(SECONDS)
    assert loss(run) == loss(client.create_training_client_from_state(path))
    info = client.create_rest_client().get_weights_info_by_tinker_path(path).result(SECONDS)
    assert (info.base_model, info.lora_rank, info.is_lora) == (MODEL, 4, True)


def test_a_checkpoint_is_looked_after(run: TrainingClient, client: ServiceClient):
    rest = client.create_rest_client()
    path = run.save_state("c", ttl_seconds=7200).result(SECONDS).path
    with pytest.raises(RequestFailedError, match="exists already"):
        run.save_state("c").result(SECONDS)
    for bad in ("../c", "a b "):
        with pytest.raises((BadRequestError, ValueError)):
            run.save_state(bad).result(SECONDS)
    (listed,) = rest.list_checkpoints(run.model_id).result(SECONDS).checkpoints
    assert (listed.tinker_path, listed.checkpoint_type, listed.public) == (path, "training", False)
    assert listed.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(SECONDS)
    rest.publish_checkpoint_from_tinker_path(path).result(SECONDS)
    (listed,) = rest.list_user_checkpoints().result(SECONDS).checkpoints
    assert (listed.public, listed.expires_at) == (True, None)
    rest.unpublish_checkpoint_from_tinker_path(path).result(SECONDS)
    rest.delete_checkpoint_from_tinker_path(path).result(SECONDS)
    with pytest.raises(NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result(SECONDS)
    assert losses(run, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["publish", "ttl", "archive", "external_weights_urls", "checkpoints", "weights", "a+b =@,c", "é"]
)
def test_a_checkpoint_may_have_any_word_for_a_name(run: TrainingClient, client: ServiceClient, name: str):
    """The words of an address among them."""
    rest = client.create_rest_client()
    path = run.save_weights_external(name).result(SECONDS).path
    rest.publish_checkpoint_from_tinker_path(path).result(SECONDS)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(SECONDS)
    (listed,) = rest.list_checkpoints(run.model_id).result(SECONDS).checkpoints
    assert (listed.tinker_path, listed.public, listed.expires_at is None) == (path, True, False)
    rest.unpublish_checkpoint_from_tinker_path(path).result(SECONDS)
    (listed,) = rest.list_checkpoints(run.model_id).result(SECONDS).checkpoints
    assert not listed.public
    link = rest.get_checkpoint_archive_url_from_tinker_path(path).result(SECONDS).url
    urls = rest.get_external_weights_urls(path).result(SECONDS).urls
    for url in (link, *urls.values()):
        with urllib.request.urlopen(url) as answer:
            assert answer.read()
    rest.delete_checkpoint_from_tinker_path(path).result(SECONDS)
    assert rest.list_checkpoints(run.model_id).result(SECONDS).checkpoints == []


def test_an_export_can_be_downloaded(run: TrainingClient, client: ServiceClient):
    path = run.save_weights_external("e").result(SECONDS).path
    urls = client.create_rest_client().get_external_weights_urls(path).result(SECONDS).urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    with urllib.request.urlopen(urls["adapter_config.json"]) as answer:
        peft = json.load(answer)
    assert peft["peft_type"] == "LORA"
    assert peft["base_model_name_or_path"] == MODEL  # not where the server has it on its disk


def test_any_checkpoint_can_be_downloaded_as_one_file(run: TrainingClient, client: ServiceClient):
    path, rest = run.save_state("c").result(SECONDS).path, client.create_rest_client()
    link = rest.get_checkpoint_archive_url_from_tinker_path(path).result(SECONDS)
    with (
        urllib.request.urlopen(link.url) as answer,
        tarfile.open(fileobj=io.BytesIO(answer.read())) as tar,
    ):
        assert all(member.isreg() for member in tar)
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert {*files} >= {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"}
    assert b'"peft_type"' in files["adapter_config.json"]


def test_a_published_checkpoint_can_be_copied_by_others(connect: Connect):
    ann, bob = connect("ann"), connect("bob")
    run = ann.create_lora_training_client(MODEL, rank=4, seed=1)
    losses(run, 2)
    path = run.save_state("c").result(SECONDS).path
    with pytest.raises(NotFoundError):
        bob.copy_weights(path).result(SECONDS)
    ann.create_rest_client().publish_checkpoint_from_tinker_path(path).result(SECONDS)
    copy = bob.copy_weights(path).result(SECONDS)
    assert loss(bob.create_training_client_from_state(copy)) == loss(run)


# -- sampling --------------------------------------------------------------------------------------------


def test_samplers_of_all_kinds(run: TrainingClient, client: ServiceClient):
    losses(run, 4)
    path = run.save_weights_for_sampler("s").result(SECONDS).path
    unnamed = run.save_weights_and_get_sampling_client()
    named, base = (
        client.create_sampling_client(model_path=path),
        client.create_sampling_client(base_model=MODEL),
    )
    params, prompt = SamplingParams(max_tokens=5, seed=2, stop=[]), ModelInput.from_ints([5, 6, 7])
    drawn = {
        sampler: [s.tokens for s in sampler.sample(prompt, 3, params).result(SECONDS).sequences]
        for sampler in (unnamed, named, base)
    }
    assert drawn[unnamed] == drawn[named] != drawn[base]
    assert [len(tokens) for tokens in drawn[base]] == [5, 5, 5]
    assert named.get_base_model() == MODEL


def test_sampled_logprobs_are_the_trainers(run: TrainingClient):
    losses(run, 3)
    sampler = run.save_weights_and_get_sampling_client()
    prompt = datum(0).model_input.to_ints()
    target = int(datum(0).loss_fn_inputs["target_tokens"].to_numpy()[-1])
    scored = sampler.compute_logprobs(ModelInput.from_ints([*prompt, target])).result(SECONDS)
    trained = run.forward([datum(0)], "cross_entropy").result(SECONDS).loss_fn_outputs[0]["logprobs"]
    assert scored[0] is None
    assert np.allclose(scored[1:], trained.to_numpy(), atol=1e-5)


def test_images_are_refused_in_the_same_words_everywhere(run: TrainingClient):
    image = ModelInput([ImageChunk(b"pixels", "png", expected_tokens=2)])
    words = "holds ImageChunk; this base model reads text only"
    with pytest.raises(RequestFailedError, match=words) as failed:
        run.forward_backward([Datum(image, {"target_tokens": [1, 2]})], "cross_entropy").result(SECONDS)
    assert failed.value.category == RequestErrorCategory.User
    sampler = run.save_weights_and_get_sampling_client()
    with pytest.raises(BadRequestError, match=words):
        sampler.sample(image, 1, SamplingParams(max_tokens=2)).result(SECONDS)


def test_a_prompt_that_is_too_long_is_a_400_with_the_hosted_services_words(client: ServiceClient):
    sampler = client.create_sampling_client(base_model=MODEL)
    prompt = ModelInput.from_ints([5] * 60)
    with pytest.raises(
        BadRequestError, match="Prompt length plus max_tokens exceeds the model's context window"
    ):
        sampler.sample(prompt, 1, SamplingParams(max_tokens=30)).result(SECONDS)
    assert sampler.sample(prompt, 1, SamplingParams(max_tokens=2)).result(SECONDS).sequences


def test_many_samples_at_once(client: ServiceClient):
    sampler = client.create_sampling_client(base_model=MODEL)
    prompt, params = ModelInput.from_ints([5]), SamplingParams(max_tokens=3, stop=[])
    waiting = [sampler.sample(prompt, 2, params) for _ in range(100)]
    assert all(len(future.result(SECONDS).sequences) == 2 for future in waiting)


# -- whose, and how long ---------------------------------------------------------------------------------


def test_what_is_anothers_is_not_there(connect: Connect):
    ann, bob = connect("ann"), connect("bob")
    run = ann.create_lora_training_client(MODEL, rank=4)
    path = run.save_weights_for_sampler("s").result(SECONDS).path
    rest = bob.create_rest_client()
    assert rest.list_training_runs().result(SECONDS).training_runs == []
    for ask in (
        lambda: rest.get_training_run(run.model_id).result(SECONDS),
        lambda: rest.list_checkpoints(run.model_id).result(SECONDS),
        lambda: bob.create_sampling_client(model_path=path),
        lambda: bob.create_training_client_from_state(path),
    ):
        with pytest.raises(NotFoundError):
            ask()


def test_two_users_train_side_by_side(connect: Connect):
    runs = [connect(user).create_lora_training_client(MODEL, rank=4, seed=3) for user in ("ann", "bob")]
    first, second = [[run.forward_backward([datum(n)], "cross_entropy") for n in range(3)] for run in runs]
    assert [f.result(SECONDS).metrics for f in first] == [f.result(SECONDS).metrics for f in second]


def test_a_session_is_found_again_and_ends(client: ServiceClient, run: TrainingClient, connect: Connect):
    rest = client.create_rest_client()
    (session,) = rest.list_sessions().result(SECONDS).sessions
    assert rest.get_session(session).result(SECONDS).training_run_ids == [run.model_id]
    client.close().result(SECONDS)
    with pytest.raises(ClientClosedError):
        client.create_lora_training_client(MODEL, rank=LoraConfig(rank=4).rank)
    again = connect("ann").create_rest_client()
    assert again.list_sessions().result(SECONDS).sessions == [session]
