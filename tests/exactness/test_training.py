"""What loops rely on: AdamW's steps, accumulation, exact resumption, published adapters, other tenants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.exactness.conftest import MODEL, SECONDS, SEQUENCES, Start, World, plain_data
from tests.exactness.reference import Reference
from tinkex import (
    AdamParams,
    Datum,
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
    TrainingClient,
)

DATA = plain_data(SEQUENCES)
OLD = -3.0
# With a large eps a step is as exact as its gradient; with a small one it is little more than its sign.
STEP = AdamParams(learning_rate=0.05, eps=0.05)


def submit(run: TrainingClient, params: AdamParams = STEP) -> None:
    """One step on all the data, waited for by nobody."""
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(params)


def rollout(ids: list[int]) -> Datum:
    """Sampled tokens, each of logprob OLD and of advantage 1."""
    ones = np.ones(len(ids) - 1)
    inputs = {"target_tokens": np.array(ids[1:]), "logprobs": OLD * ones, "advantages": ones}
    tensors = {key: TensorData.from_numpy(value) for key, value in inputs.items()}
    return Datum(ModelInput.from_ints(ids[:-1]), tensors)


def adamw(reference: Reference) -> torch.optim.AdamW:
    """PyTorch's, with the settings of STEP."""
    betas = STEP.beta1, STEP.beta2
    return torch.optim.AdamW(
        reference.parameters.values(), STEP.learning_rate, betas, STEP.eps, STEP.weight_decay
    )


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "adapter_model.safetensors")


def same(one: Path, other: Path) -> bool:
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def scores(sampler: SamplingClient) -> np.ndarray:
    futures = [sampler.compute_logprobs(ModelInput.from_ints(ids)) for ids in SEQUENCES]
    return np.concatenate([np.array(future.result(SECONDS)[1:], float) for future in futures])


def trainers(run: TrainingClient) -> np.ndarray:
    """The trainer's logprobs of the same tokens."""
    outputs = run.forward(DATA, "cross_entropy").result(SECONDS).loss_fn_outputs
    return np.concatenate([output["logprobs"].to_numpy() for output in outputs]).astype(float)


# -- steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "settings", "clip"),
    [
        ({}, {"eps": 1e-12}, np.inf),
        ({"eps": 1e-8}, {"eps": 1e-8}, np.inf),
        ({"eps": 1e-3, "beta1": 0.5, "beta2": 0.8}, {"eps": 1e-3, "betas": (0.5, 0.8)}, np.inf),
        ({"eps": 1e-3, "weight_decay": 0.3}, {"eps": 1e-3, "weight_decay": 0.3}, np.inf),
        ({"eps": 1e-3, "grad_clip_norm": 0.5}, {"eps": 1e-3}, 0.5),
        ({"eps": 1e-3, "grad_clip_norm": 1e6}, {"eps": 1e-3}, 1e6),
    ],
)
def test_steps_are_adamws(
    world: World, run: TrainingClient, start: Start, given: dict, settings: dict, clip: float
) -> None:
    reference = Reference(world.model, start.files)
    parameters = list(reference.parameters.values())
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.0, **settings}  # the wire's defaults
    optimizer = torch.optim.AdamW(parameters, 0.02, **settings)
    for _ in range(3):
        optimizer.zero_grad()
        reference.accumulate_nll(SEQUENCES)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip))
        optimizer.step()
        run.forward_backward(DATA, "cross_entropy")
        metrics = run.optim_step(AdamParams(learning_rate=0.02, **given)).result(SECONDS).metrics or {}
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)  # before clipping
    assert reference.difference(world.exported(run)) < 1e-4


def test_passes_accumulate_until_the_step(
    world: World, client: ServiceClient, run: TrainingClient, start: Start
) -> None:
    """Two passes and a step are one pass on all of the data and a step."""
    reference = Reference(world.model, start.files)
    optimizer = adamw(reference)
    together = client.create_training_client_from_state(start.state)
    for _ in range(2):  # twice: a step must leave nothing behind
        optimizer.zero_grad()
        reference.accumulate_nll(SEQUENCES)
        optimizer.step()
        run.forward_backward(DATA[:1], "cross_entropy")
        run.forward_backward(DATA[1:], "cross_entropy")
        run.optim_step(STEP)
        submit(together)
    assert reference.difference(world.exported(run)) < 2e-5
    assert reference.difference(world.exported(together)) < 2e-5
    apart, whole = tensors(world.exported(run)), tensors(world.exported(together))
    assert max(float(np.abs(apart[name] - whole[name]).max()) for name in whole) < 2e-5


def test_passes_of_different_losses_accumulate(world: World, run: TrainingClient, start: Start) -> None:
    reference = Reference(world.model, start.files)
    reference.accumulate_nll(SEQUENCES[:1])
    for ids in SEQUENCES[1:]:
        ratio = np.exp(reference.scores(ids) - OLD)
        reference.accumulate(ids[:-1], np.array(ids[1:]), -ratio)
    adamw(reference).step()
    run.forward_backward(DATA[:1], "cross_entropy")
    run.forward_backward([rollout(ids) for ids in SEQUENCES[1:]], "importance_sampling")
    run.optim_step(STEP)
    assert reference.difference(world.exported(run)) < 2e-5


def test_a_batch_of_several_requests_is_one(run: TrainingClient, reference: Reference) -> None:
    """1100 datums are more than a request takes: outputs keep their order, losses and gradients add up."""
    table = reference.table([65, 66])
    dice = np.random.default_rng(0)
    targets = dice.integers(0, 250, (1100, 2))
    right = table[[0, 1], targets]
    data = [Datum(ModelInput.from_ints([65, 66]), {"target_tokens": row}) for row in targets]
    output = run.forward_backward(data, "cross_entropy").result(SECONDS)
    given = np.stack([record["logprobs"].to_numpy() for record in output.loss_fn_outputs])
    np.testing.assert_allclose(given, right, rtol=0, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-right.sum(), rel=1e-5)

    counts = np.stack([np.bincount(column, minlength=250) for column in targets.T])
    metrics = run.optim_step(STEP).result(SECONDS).metrics or {}
    reference.model.zero_grad()
    reference.accumulate([65, 66], np.tile(np.arange(250), (2, 1)), -counts)
    assert metrics["grad_norm"] == pytest.approx(reference.gradient_norm(), rel=1e-4)
    reference.model.zero_grad()


def test_only_what_is_asked_for_is_trained(world: World, client: ServiceClient) -> None:
    for attn, mlp, unembed, part in (
        (True, False, False, "self_attn"),
        (False, True, False, "mlp"),
        (False, False, True, "lm_head"),
    ):
        run = client.create_lora_training_client(
            MODEL, rank=2, seed=5, train_attn=attn, train_mlp=mlp, train_unembed=unembed
        )
        start = world.exported(run)
        assert all(part in name for name in tensors(start))
        assert all(not tensor.any() for name, tensor in tensors(start).items() if "lora_B" in name)
        reference = Reference(world.model, start)
        reference.accumulate_nll(SEQUENCES)
        adamw(reference).step()
        submit(run)
        assert reference.difference(world.exported(run)) < 2e-5


# -- checkpoints -------------------------------------------------------------------------------------------


def test_a_run_resumes_exactly(world: World, client: ServiceClient, run: TrainingClient) -> None:
    """Adapter, moments and step come back; the save sees the steps called before it, and no more."""
    submit(run)
    submit(run)
    saving = run.save_state("middle")
    middle = world.exported(run)
    submit(run)
    submit(run)
    end = world.exported(run)

    resumed = client.create_training_client_from_state_with_optimizer(saving.result(SECONDS).path)
    assert same(world.exported(resumed), middle)
    submit(resumed)
    submit(resumed)
    assert same(world.exported(resumed), end)


def test_without_its_optimizer_a_run_starts_it_anew(
    world: World, client: ServiceClient, run: TrainingClient
) -> None:
    submit(run)
    saved, middle = run.save_state("alone").result(SECONDS).path, world.exported(run)
    submit(run)
    resumed = client.create_training_client_from_state(saved)
    reference = Reference(world.model, middle)
    reference.accumulate_nll(SEQUENCES)
    adamw(reference).step()
    submit(resumed)
    assert reference.difference(world.exported(resumed)) < 2e-5
    assert reference.difference(world.exported(run)) > 1e-3  # whose moments were kept


def test_a_published_adapter_never_changes(world: World, run: TrainingClient) -> None:
    """Samplers made before, between and after steps keep to the weights of their time."""
    samplers, files = [], []
    for _ in range(3):
        samplers.append(run.save_weights_and_get_sampling_client())
        named = run.save_weights_for_sampler(f"at-{len(samplers)}").result(SECONDS).path
        samplers.append(run.create_sampling_client(named))
        files.append(world.exported(run))
        submit(run)
    rights = [np.concatenate([Reference(world.model, f).scores(ids) for ids in SEQUENCES]) for f in files]
    for i, sampler in enumerate(samplers):
        np.testing.assert_allclose(scores(sampler), rights[i // 2], rtol=0, atol=1e-5)
    assert all(np.abs(a - b).max() > 0.01 for a, b in zip(rights[1:], rights[:-1], strict=True))


# -- sampler and trainer -----------------------------------------------------------------------------------


def test_the_sampler_is_the_trainer(run: TrainingClient) -> None:
    """On policy: KL(sampler ‖ trainer), estimated from samples as recipes do, is nothing at every step."""
    for step in range(3):
        sampler = run.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=20, seed=step, stop=[])
        prompt = SEQUENCES[step]
        drawn = sampler.sample(ModelInput.from_ints(prompt), 8, params).result(SECONDS).sequences
        sequences = [prompt + sequence.tokens for sequence in drawn]
        output = run.forward(plain_data(sequences), "cross_entropy").result(SECONDS)
        lags = []
        for sequence, record in zip(drawn, output.loss_fn_outputs, strict=True):
            lags.append(np.array(sequence.logprobs) - record["logprobs"].to_numpy()[len(prompt) - 1 :])
        lag = np.concatenate(lags)
        assert abs(lag.mean()) < 1e-6
        assert np.abs(lag).max() < 1e-5
        assert (0.5 * lag**2).mean() < 1e-10
        submit(run)


# -- tenants -----------------------------------------------------------------------------------------------


def test_a_run_is_the_same_among_other_tenants(world: World, client: ServiceClient, start: Start) -> None:
    """Other users' runs, of other ranks and losses, share its passes and change nothing in it."""
    alone = client.create_training_client_from_state(start.state)
    for _ in range(3):
        submit(alone)
    right, lone_scores = world.exported(alone), trainers(alone)

    among = client.create_training_client_from_state(start.state)
    bystander = client.create_training_client_from_state(start.state)
    others = [
        world.user(name).create_lora_training_client(MODEL, rank=rank, seed=rank)
        for name, rank in (("bob", 1), ("cem", 4), ("dee", 9))
    ]
    rewarded = [rollout(ids) for ids in SEQUENCES]
    for _ in range(3):
        # While the first is computed, the rest arrives: it is computed together.
        others[0].forward_backward(DATA * 30, "cross_entropy")
        others[1].forward_backward(rewarded, "importance_sampling")
        submit(among)
        others[2].forward_backward(rewarded, "ppo")
        for other in others:
            other.optim_step(AdamParams(learning_rate=0.1))
    crowd = tensors(world.exported(among))
    for name, tensor in tensors(right).items():
        np.testing.assert_allclose(crowd[name], tensor, rtol=0, atol=2e-5)
    np.testing.assert_allclose(trainers(among), lone_scores, rtol=0, atol=1e-5)
    assert same(world.exported(bystander), start.files)
    base = np.concatenate([Reference(world.model).scores(ids) for ids in SEQUENCES])
    assert all(np.abs(trainers(other) - base).max() > 0.1 for other in others)  # who did train meanwhile


def test_a_sampler_is_the_same_among_other_tenants(world: World, client: ServiceClient, start: Start) -> None:
    prompt, params = ModelInput.from_ints([3, 1, 4, 1, 5]), SamplingParams(max_tokens=30, seed=5, stop=[])
    alone = start.sampler.sample(prompt, 2, params).result(SECONDS)
    samplers = [world.user(name).create_sampling_client(base_model=MODEL) for name in ("eve", "fay")]
    crowd = [
        sampler.sample(
            ModelInput.from_ints(ids), 3, SamplingParams(max_tokens=25, seed=n, temperature=0.5 + n)
        )
        for sampler in samplers
        for n, ids in enumerate(SEQUENCES)
    ]
    among = start.sampler.sample(prompt, 2, params).result(SECONDS)
    assert [s.tokens for s in among.sequences] == [s.tokens for s in alone.sequences]
    for one, other in zip(among.sequences, alone.sequences, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)  # type: ignore[arg-type]
    assert all(len(future.result(SECONDS).sequences) == 3 for future in crowd)
