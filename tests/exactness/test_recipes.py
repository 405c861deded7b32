"""What recipes build on and no single answer shows: two models at once, a reference that stays, a judge."""

from __future__ import annotations

import numpy as np
import pytest

from tests.exactness.conftest import MODEL, OTHER, SECONDS, SEQUENCES, World, plain_data
from tests.exactness.reference import Reference
from tinkex import AdamParams, ModelInput, SamplingParams, ServiceClient

PROMPT = ModelInput.from_ints([3, 1, 4, 1, 5, 9])
DRAW = SamplingParams(max_tokens=8, seed=3, stop=[])
FAST = AdamParams(learning_rate=2e-2)
close = {"rtol": 0, "atol": 1e-5}


def test_a_player_and_an_answerer_of_another_model(world: World, client: ServiceClient) -> None:
    samplers = {world.model: client.create_sampling_client(base_model=MODEL),
                world.other: client.create_sampling_client(base_model=OTHER)}  # fmt: skip
    turns = [(model, samplers[model].sample(PROMPT, 2, DRAW)) for _ in range(3) for model in samplers]
    for model, turn in turns:
        for sequence in turn.result(SECONDS).sequences:
            ids = [*PROMPT.to_ints(), *sequence.tokens]
            right = Reference(model).scores(ids)[PROMPT.length - 1 :]
            np.testing.assert_allclose(sequence.logprobs, right, **close)  # type: ignore[arg-type]


def test_a_penalty_for_leaving_the_base_model(client: ServiceClient) -> None:
    """It is nothing at first, and afterwards the distance that a policy's own draws tell."""
    base = client.create_sampling_client(base_model=MODEL)
    run = client.create_lora_training_client(MODEL, rank=4, seed=2)
    distances = []
    for _ in range(2):
        policy = run.save_weights_and_get_sampling_client()
        found = []
        for sequence in policy.sample(PROMPT, 16, DRAW).result(SECONDS).sequences:
            whole = ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens])
            scored = base.compute_logprobs(whole).result(SECONDS)[PROMPT.length :]
            found += [mine - theirs for mine, theirs in zip(sequence.logprobs or [], scored, strict=True)]  # type: ignore[operator]
        distances.append(np.mean(found))
        for _ in range(3):
            run.forward_backward(plain_data(SEQUENCES), "cross_entropy")
            run.optim_step(FAST).result(SECONDS)
    assert distances[0] == pytest.approx(0, abs=1e-5)
    assert distances[1] > 0.1


def test_a_judge_stays_what_it_was_while_the_policy_learns(world: World, client: ServiceClient) -> None:
    """One run's sampler, by its path, beside a run that starts from another's state."""
    ids = SEQUENCES[2]
    taught = client.create_lora_training_client(MODEL, rank=4, seed=4)
    taught.forward_backward(plain_data([ids]), "cross_entropy")
    taught.optim_step(FAST)
    path = taught.save_weights_for_sampler("judge").result(SECONDS).path
    right = Reference(world.model, world.exported(taught)).scores(ids)
    state = taught.save_state("policy").result(SECONDS).path
    judge = client.create_sampling_client(model_path=path)
    policy = client.create_training_client_from_state(state)
    for _ in range(3):
        scored = judge.compute_logprobs(ModelInput.from_ints(ids)).result(SECONDS)
        np.testing.assert_allclose(scored[1:], right, **close)  # type: ignore[arg-type]
        policy.forward_backward(plain_data([ids]), "cross_entropy")
        policy.optim_step(FAST).result(SECONDS)
