"""What the official SDKs are made to say: each through its whole surface, once. See record.py."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

PNG = b"\x89PNG\r\n\x1a\n fake"
DMEL = bytes([1, 2, 3, 4]) + b"rest"
PATH = "tinker://S:train:0/weights/c1"
SUPERVISED = {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]}
SCORED = {"target_tokens": [2, 3, 4], "logprobs": [-0.5, -1.0, -1.5], "advantages": [1.0, 0.0, -1.0]}


def datum(types: Any, inputs: dict[str, Any], prompt: Any = None) -> Any:
    return types.Datum(model_input=prompt or types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)


def passes(types: Any) -> Iterator[tuple[str, list[Any], dict[str, Any] | None]]:
    """A pass for each loss that every SDK knows."""
    yield "cross_entropy", [datum(types, SUPERVISED)], None
    yield "importance_sampling", [datum(types, SCORED)] * 2, None
    yield "ppo", [datum(types, SCORED)], {"clip_low_threshold": 0.8, "clip_high_threshold": 1.25}


def json_only(recorder: Any) -> None:
    """0.4.1 and 0.13.1: JSON alone."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(
        base_url=recorder.stub.url, api_key="tml-test", user_metadata={"who": "me"}
    )
    service.get_server_capabilities()
    run = service.create_lora_training_client("m/base", rank=8, seed=1, train_unembed=False)
    for loss, data, config in passes(types):
        run.forward_backward(data, loss, config).result()
        run.forward(data, loss, config).result()
    run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    run.save_state("c1").result()
    run.save_weights_for_sampler("s1").result()
    run.load_state(PATH).result()
    run.get_info()
    sampler = service.create_sampling_client(model_path="tinker://S:train:0/sampler_weights/s1")
    prompt = types.ModelInput.from_ints([1, 2, 3])
    sampler.sample(prompt, 2, types.SamplingParams(max_tokens=5, stop=["\n"]), True, 2).result()
    sampler.sample(prompt, 1, types.SamplingParams(temperature=0.0, seed=4, stop=[7, 8])).result()
    sampler.compute_logprobs(prompt).result()
    recorder.read_results(
        lambda: run.forward(data, loss).result(),
        lambda count, _: sampler.sample(prompt, count, types.SamplingParams(max_tokens=1), True, 2).result(),
    )
    rest = service.create_rest_client()
    for call in (
        lambda: rest.list_training_runs().result(),
        lambda: rest.get_training_run("S:train:0").result(),
        lambda: rest.list_checkpoints("S:train:0").result(),
        lambda: rest.list_user_checkpoints().result(),
        lambda: rest.publish_checkpoint_from_tinker_path(PATH).result(),
        lambda: rest.unpublish_checkpoint_from_tinker_path(PATH).result(),
        lambda: rest.get_checkpoint_archive_url_from_tinker_path(PATH).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(PATH).result(),
        lambda: service.create_training_client_from_state(PATH),
    ):
        try:
            call()
        except Exception as error:
            print("skipped:", repr(error)[:200])  # not every version has every call
    recorder.read_models(types)


def everything(recorder: Any) -> None:
    """0.36.0: everything it can say."""
    import tinker
    from tinker import types

    stub = recorder.stub

    def client(**flags: Any) -> Any:
        stub.flags = flags
        return tinker.ServiceClient(
            base_url=stub.url,
            api_key="tml-test",
            user_metadata={"who": "me"},
            project_id="p1",
            display_name="d",
        )

    service = client(custom_loss_server_side=True)
    service.get_server_capabilities()
    run = service.create_lora_training_client("m/base", rank=8, seed=1, user_metadata={"a": "b"})
    _training(run, service, types)
    sampler = run.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    _sampling(sampler, types)
    recorder.read_results(
        lambda: run.forward([datum(types, SUPERVISED)], "cross_entropy").result(),
        lambda count, rich: sampler.sample(
            prompt, count, types.SamplingParams(max_tokens=1), True, prompt_alt_tokens_k=2 if rich else 0
        ).result(),
    )
    recorder.read_models(types)
    service.create_sampling_client(base_model="m/base")
    service.create_training_client_from_state_with_optimizer(PATH)
    service.copy_weights(PATH, ttl_seconds=3600, weights_access_token="secret").result()
    dimuon = service.create_lora_training_client("m/base", optimizer=types.DimuonOptimizerConfig())
    dimuon.optim_step(types.DimuonParams(learning_rate=0.1)).result()
    _rest(tinker, stub.url, types)
    _flagged(client, types, stub)
    service.close("success").result()


def _training(run: Any, service: Any, types: Any) -> None:
    import numpy as np
    import torch

    rich = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[1]),
            types.ImageChunk(data=PNG, format="png", expected_tokens=4),
            types.DmelChunk(dmel=DMEL),
        ]
    )
    sparse = torch.zeros(6, 8)
    sparse[2, 3] = 1.5
    spans = [
        types.PromptProvenanceSpan(sequence_id="q", offset=0, length=1),
        types.SampledProvenanceSpan(sequence_id="q", offset=0, length=2),
    ]
    scored = {**SCORED, "logprobs": np.array([-0.5, -1.0, -1.5])}
    with_spans = datum(types, scored).with_provenance(spans, spans)
    for loss, data, config in passes(types):
        run.forward_backward(data, loss, config).result()
        run.forward(data, loss, config).result()
    for loss, example, config in (
        ("cross_entropy", datum(types, {"target_tokens": sparse.long() * 9, "weights": sparse}), None),
        ("cross_entropy", datum(types, {"target_tokens": [1]}, rich), None),
        ("cispo", datum(types, scored), {"clip_low_threshold": 0.0}),
        ("dro", datum(types, scored), {"beta": 0.05}),
        ("gspo", datum(types, {**scored, "sequence_ratio_mask": [1.0, 1.0, 0.0]}), None),
        ("stable_reinforce", with_spans, {"kl_coeff": 0.5, "mode": "text"}),
    ):
        run.forward_backward([example], loss, config).result()

    def loss_fn(logprobs: Any, advantages: Any) -> Any:
        ratio = torch.clamp(torch.exp(logprobs), 0.0, 2.0)
        return -(ratio * advantages).sum(), {"custom/ratio:mean": ratio.mean()}

    handle = service.create_custom_loss(loss_fn, {"logprobs": 1, "advantages": 1}).result()
    run.forward_backward_custom([datum(types, scored)], handle).result()
    run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    run.save_state("c1", ttl_seconds=3600, overwrite=True, user_metadata={"a": "b"}).result()
    run.save_state("c2").result()
    run.save_weights_for_sampler("s1", ttl_seconds=3600).result()
    run.save_weights_external("e1", age_encryption_recipients=["age1x"]).result()
    run.load_state(PATH, weights_access_token="secret").result()
    run.load_state_with_optimizer(PATH).result()
    run.get_info()


def _sampling(sampler: Any, types: Any) -> None:
    import numpy as np

    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams
    busy = params(max_tokens=5, seed=3, stop="\n", temperature=0.5, top_k=7, top_p=0.9)
    sampler.sample(prompt, 2, busy, True, 2, 3).result()
    for stop in (["\n", "END"], [7, 8], []):
        sampler.sample(prompt, 1, params(max_tokens=5, stop=stop)).result()
    target = types.TensorData.from_numpy(np.array([[5, -1], [6, 7]]))
    sampler.sample(prompt, 1, params(), target_prompt_logprobs=target).result()
    sparse = types.TensorData(
        data=[5], dtype="int64", shape=[2, 4], sparse_crow_indices=[0, 0, 1], sparse_col_indices=[3]
    )
    sampler.sample(prompt, 1, params(), target_prompt_logprobs=sparse).result()
    rich = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[1]),
            types.ImageChunk(data=PNG, format="png"),
            types.ImageAssetPointerChunk(location="asset://1", format="jpeg", expected_tokens=4),
            types.DmelChunk(dmel=DMEL),
        ]
    )
    sampler.sample(rich, 1, params(max_tokens=1)).result()
    sampler.compute_logprobs(prompt).result()
    sampler.get_base_model()


def _rest(tinker: Any, url: str, types: Any) -> None:
    from datetime import UTC, date, datetime

    rest = tinker.RestClient(base_url=url, api_key="tml-test")
    sampled = "tinker://S:train:0/sampler_weights/s1"
    rest.list_training_runs(limit=5, offset=2, access_scope="accessible", project_id="p1").result()
    rest.get_training_run("S:train:0").result()
    rest.get_training_run_by_tinker_path(PATH).result()
    rest.get_weights_info_by_tinker_path(PATH).result()
    rest.list_checkpoints("S:train:0").result()
    rest.list_user_checkpoints(limit=5).result()
    rest.get_external_weights_urls("tinker://S:train:0/external_weights/e1").result()
    rest.delete_checkpoint("S:train:0", "weights/c1").result()
    rest.delete_checkpoint_from_tinker_path(sampled).result()
    rest.publish_checkpoint_from_tinker_path(PATH).result()
    rest.unpublish_checkpoint_from_tinker_path(PATH).result()
    rest.set_checkpoint_ttl_from_tinker_path(PATH, 3600).result()
    rest.set_checkpoint_ttl_from_tinker_path(PATH, None).result()
    rest.copy_weights(PATH, "p2", weights_access_token="secret").result()
    rest.get_session("S", access_scope="accessible").result()
    rest.list_sessions().result()
    rest.assign_session_project("S", "p2").result()
    rest.export_session_trace("S").result()
    rest.get_sampler("S:sample:0").result()
    search = types.SessionSearchRequest(
        project_ids=["p1"],
        user_metadata={"a": "b"},
        owner=types.UserSearchOwner(owner_urns=["u"]),
        statuses=[
            types.ActiveSessionStatusQuery(),
            types.ClientFinishedSessionStatusQuery(reasons=["success"]),
        ],
        cursor=types.SessionSearchCursor(
            last_created_at=datetime(2026, 1, 2, tzinfo=UTC), last_session_id="S"
        ),
    )
    rest.search_sessions(search).result()
    rest.search_sessions(types.SessionSearchRequest()).result()
    admin = tinker.AdminClient(base_url=url, api_key="tml-test")
    admin.get_audit_log("checkpoints", day=date(2026, 1, 2)).result()
    admin.get_audit_log().result()
    admin.get_billing_usage(datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC)).result()
    admin.get_current_checkpoint_storage_usage("p1").result()


def _flagged(client: Callable[..., Any], types: Any, stub: Any) -> None:
    """What is only said when the server asks for it."""
    prompt = types.ModelInput.from_ints([1, 2, 3])
    packed = client(proto_compress_fwdbwd=True, pjwt_auth_enabled=True, create_model_via_load_weights=True)
    packed.create_lora_training_client("m/base").forward_backward(
        [datum(types, SUPERVISED)], "cross_entropy"
    ).result()
    packed.create_training_client_from_state(PATH, base_model="m/base", user_metadata={"a": "b"})
    batched = client(sample_use_retrieve_futures=True, sample_join_sampling_session=True)
    sampler = batched.create_sampling_client(base_model="m/base")
    sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    os.environ.update(TINKER_BASE_URL=stub.url, TINKER_API_KEY="tml-test")
    clone = pickle.loads(pickle.dumps(sampler))
    clone.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    stub.dynamic = {"sample_cancel_enabled": True}
    stub.hold_samples = True
    future = client().create_sampling_client(base_model="m/base").sample(prompt, 1, types.SamplingParams())
    time.sleep(2)  # so that it is on its way
    future.cancel()
    time.sleep(2)
    stub.hold_samples = False
