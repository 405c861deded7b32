"""tinkex.rl: datums that a trainer finds on-policy, advantages and KL against figures computed by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import tinkex
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tinkex import rl

pytestmark = pytest.mark.slow  # a model


def drawn(tokens: list[int], logprobs: list[float]) -> tinkex.SampledSequence:
    return tinkex.SampledSequence(
        "stop", tokens_np=np.array(tokens, np.int32), logprobs_np=np.array(logprobs, np.float32)
    )


def test_turns_that_continue_each_other_are_one_datum() -> None:
    turns = [([1, 2], drawn([3], [-1.0])), ([1, 2, 3, 4], drawn([5, 6], [-2.0, -3.0]))]
    (datum,) = rl.trajectory_data(turns, 0.5)
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5]
    assert {key: value.tolist() for key, value in datum.loss_fn_inputs.items()} == {
        "target_tokens": [2, 3, 4, 5, 6],
        "logprobs": [0, -1, 0, -2, -3],
        "advantages": [0, 0.5, 0, 0.5, 0.5],
    }
    first, second = rl.trajectory_data([turns[0], ([1, 9], drawn([5], [-2.0]))], [1.0, [2.0]])
    assert first.loss_fn_inputs["advantages"].tolist() == [0, 1]
    assert second.model_input.to_ints() == [1, 9]
    assert second.loss_fn_inputs["advantages"].tolist() == [0, 2]
    by_token = rl.rl_datum([1, 2], drawn([5, 6], [-2.0, -3.0]), np.array([0.25, -1.0]))
    assert by_token.loss_fn_inputs["advantages"].tolist() == [0, 0.25, -1]
    with pytest.raises(tinkex.InvalidInputError, match="3 advantages for 2 turns"):
        rl.trajectory_data(turns, [1, 2, 3])
    with pytest.raises(tinkex.InvalidInputError, match="no logprobs"):
        rl.rl_datum([1], tinkex.SampledSequence("stop", tokens_np=np.array([1])), 1.0)


def test_advantages_are_those_of_the_papers() -> None:
    rewards = [3.0, 1.0, 1.0, 1.0]
    assert rl.group_advantages(rewards).tolist() == [1.5, -0.5, -0.5, -0.5]
    assert rl.group_advantages(rewards, baseline="leave_one_out").tolist() == pytest.approx(
        [3 - 1, 1 - 5 / 3, 1 - 5 / 3, 1 - 5 / 3]
    )
    assert rl.group_advantages(rewards, divide_by_std=True) == pytest.approx(
        [1.5 / 1.0001, -0.5 / 1.0001, -0.5 / 1.0001, -0.5 / 1.0001]
    )
    assert rl.group_advantages([2.0, 1.0], baseline="none").tolist() == [2.0, 1.0]
    with pytest.raises(tinkex.InvalidInputError, match="reward 1 is nan"):
        rl.group_advantages([1.0, float("nan")])
    with pytest.raises(tinkex.InvalidInputError, match="baseline must be"):
        rl.group_advantages([1.0], baseline="median")  # type: ignore[arg-type]


def test_groups_of_equal_rewards_are_left_out() -> None:
    rewards = [[1.0, 1.0], [0.0, 1.0], [0.5], [0.1 + 0.2, 0.3], []]
    assert rl.with_signal(["ones", "mixed", "single", "rounding", "none"], rewards) == (
        ["mixed"],
        [[0.0, 1.0]],
    )
    with pytest.raises(ValueError, match="shorter"):
        rl.with_signal(["one"], [])


def test_pass_at_k_is_the_share_of_draws_that_contain_a_right_answer() -> None:
    for right, k in itertools.product(range(6), range(1, 6)):
        draws = list(itertools.combinations([True] * right + [False] * (5 - right), k))
        assert rl.pass_at_k(right, 5, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_advantages_become_means() -> None:
    data = [rl.rl_datum([1, 2], drawn([3, 4, 5], [-1, -1, -1]), 1.0), rl.rl_datum([1], drawn([3], [-1]), 1.0)]
    by_tokens = [d.loss_fn_inputs["advantages"].to_numpy().sum() for d in rl.mean_advantages(data)]
    assert by_tokens == pytest.approx([0.75, 0.25])
    by_sequences = rl.mean_advantages(data, "sequences")
    assert [d.loss_fn_inputs["advantages"].to_numpy().sum() for d in by_sequences] == pytest.approx(
        [0.5, 0.5]
    )


def test_a_penalty_moves_advantages_towards_the_reference() -> None:
    data = [rl.rl_datum([1], drawn([2, 3], [-1.0, -1.0]), 0.0)]
    changed, mean = rl.with_kl_penalty(data, [[None, -1.0, -3.0]], 0.1)
    assert mean == pytest.approx(1.0)
    assert changed[0].loss_fn_inputs["advantages"].tolist() == pytest.approx([0.1, -0.1])
    with pytest.raises(tinkex.InvalidInputError, match="reference 0 has 1 logprobs"):
        rl.with_kl_penalty(data, [[None]], 0.1)


def test_the_trainer_agrees_with_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On-policy data has a KL near 0; data of another policy does not."""
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    model = tiny_tokenizer(tiny_model(tmp_path, "llama3"))
    with tinkex.ServiceClient(base_url="local") as service:
        run = service.create_lora_training_client(str(model), rank=4, seed=0)
        prompt = [1, 2, 3]
        params = tinkex.SamplingParams(max_tokens=8, seed=1, stop=[])
        sampler = run.save_weights_and_get_sampling_client()
        sequences = sampler.sample(tinkex.ModelInput.from_ints(prompt), 4, params).result().sequences
        rewards = [float(sequence.tokens[0] % 2) for sequence in sequences]
        advantages = rl.group_advantages(rewards)
        data = [rl.rl_datum(prompt, s, float(a)) for s, a in zip(sequences, advantages, strict=True)]
        output = run.forward_backward(data, "importance_sampling").result()
        metrics = rl.kl_metrics(data, output)
        assert abs(metrics["kl_v1"]) < 1e-5
        assert 0 <= metrics["kl_v2"] < 1e-9
        assert metrics["entropy"] > 0
        run.optim_step(tinkex.AdamParams(learning_rate=0.05)).result()
        later = rl.kl_metrics(data, run.forward(data, "importance_sampling").result())
        assert later["kl_v2"] > 1e-4
        scored = sampler.compute_logprobs(rl.whole_sequence(data[0])).result()
        _, apart = rl.with_kl_penalty(data[:1], [scored], 1.0)
        assert apart == pytest.approx(0, abs=1e-5), "the policy that it was sampled from"
