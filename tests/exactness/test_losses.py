"""Every loss through the public client: its value, its logprobs, and the adapter after one step on it.

The reference is a formula in numpy on peft's logits. Its gradient is taken by central differences of the
formula, through peft, into torch.optim.AdamW, whose eps is large so that a step shows the gradient's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.exactness import formulas
from tests.exactness.conftest import MODEL, SECONDS, SEQUENCES, Start, World, plain_data
from tests.exactness.reference import Reference, slopes_of
from tinkex import (
    AdamParams,
    APIFuture,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    ServiceClient,
    TensorData,
    TrainingClient,
)
from tinkex import regularizers as reg

PROMPT = 2  # positions of every datum that are its prompt
LEARNING_RATE, EPS = 0.1, 0.1
STEP = AdamParams(learning_rate=LEARNING_RATE, eps=EPS)
Inputs = dict[str, np.ndarray]
Maker = Callable[[np.random.Generator, Inputs, np.ndarray], Inputs]
Send = Callable[[ServiceClient, TrainingClient, list[Datum]], APIFuture[ForwardBackwardOutput]]


# -- what the datums carry: made of dice, the targets, and the trainer's logprobs of them ------------------


def nothing(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
    return {}


def signed(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
    return {"weights": dice.normal(size=lp.shape) * 2 * after_prompt(lp)}


def after_prompt(lp: np.ndarray) -> np.ndarray:
    return (np.arange(len(lp)) >= PROMPT).reshape(-1, *[1] * (lp.ndim - 1)).astype(float)


def rollout(spread: float, **more: Callable[[np.random.Generator, int], np.ndarray]) -> Maker:
    """What a sampler's logprobs and advantages look like: a prompt has zeros, and targets of no meaning."""

    def make(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
        mask = after_prompt(lp)
        x["target_tokens"][:PROMPT] = 0
        drawn = (lp + spread * dice.normal(size=lp.shape)) * mask
        inputs = {"logprobs": drawn, "advantages": dice.normal(size=lp.shape) * mask}
        return inputs | {key: value(dice, len(lp)) for key, value in more.items()}

    return make


def soft(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
    return {"weights": dice.dirichlet(np.ones(lp.shape[1]), len(lp)) * after_prompt(lp)}


def sparse(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
    """One candidate of many a position: as torch tensors these travel as CSR, empty cells as token 0."""
    weights = np.zeros(lp.shape)
    weights[np.arange(len(lp)), dice.integers(0, lp.shape[1], len(lp))] = dice.normal(size=len(lp))
    x["target_tokens"] = np.where(weights != 0, x["target_tokens"], 0)
    return {"weights": weights}


def teacher(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
    return {"logprobs": np.log(dice.dirichlet(np.ones(9), lp.shape)[..., 0])}


def weighted_teacher(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
    return teacher(dice, x, lp) | signed(dice, x, lp)


def referred(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
    return {"ref_logprobs": lp + 0.3 * dice.normal(size=lp.shape), "weights": after_prompt(lp)}


def own(dice: np.random.Generator, x: Inputs, lp: np.ndarray) -> Inputs:
    return {"old": lp + 0.3 * dice.normal(size=lp.shape), "gain": dice.normal(size=lp.shape)}


# -- losses of one's own, in torch -------------------------------------------------------------------------


def tempered(logprobs: torch.Tensor, old: torch.Tensor, gain: torch.Tensor) -> Any:
    lag = logprobs - old
    loss = -torch.log1p(torch.exp(lag.mean())) * gain.sum() + 0.1 * lag.square().sum()
    return loss, {"custom/lag:mean": lag.mean()}


def preference(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    def margin(i: int) -> torch.Tensor:
        given = {k: v.to_torch() for k, v in data[i].loss_fn_inputs.items()}
        return ((logprobs[i] - given["ref_logprobs"]) * given["weights"]).sum()

    losses = [
        -torch.nn.functional.logsigmoid(0.5 * (margin(i) - margin(i + 1))) for i in range(0, len(data), 2)
    ]
    return torch.stack(losses).mean(), {"pairs": float(len(losses))}


def uploaded(client: ServiceClient, run: TrainingClient, data: list[Datum]) -> Any:
    handle = client.create_custom_loss(tempered, {"logprobs": 1, "old": 1, "gain": 1}).result(SECONDS)
    assert handle.loss_id is not None  # it runs in the engine
    return run.forward_backward_custom(data, handle)


def whole_batch(client: ServiceClient, run: TrainingClient, data: list[Datum]) -> Any:
    return run.forward_backward_custom(data, preference)


def regularized(client: ServiceClient, run: TrainingClient, data: list[Datum]) -> Any:
    return run.forward_backward_custom(
        data, reg.regularized("cross_entropy", [0.1 * reg.l2(around="ref_logprobs")])
    )


def tethered(client: ServiceClient, run: TrainingClient, data: list[Datum]) -> Any:
    near = reg.l2(around="logprobs", mask="advantages")
    return run.forward_backward_custom(data, reg.regularized("ppo", [0.1 * near], NARROW))


# -- the cases ---------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A loss with its settings, the datums' inputs, and what it must come to."""

    loss: str
    inputs: Maker
    formula: formulas.BatchFormula
    config: dict[str, float] = field(default_factory=dict)
    width: int = 0  # K of [N, K] targets
    as_torch: bool = False
    send: Send | None = None

    def sent(self, client: ServiceClient, run: TrainingClient, data: list[Datum]) -> ForwardBackwardOutput:
        if self.send is not None:
            return self.send(client, run, data).result(SECONDS)
        return run.forward_backward(data, self.loss, self.config or None).result(SECONDS)


def computed_here(case: Case) -> Case:
    """The same loss of the server's, by the client's own formula: it must come to the very same."""
    loss = reg.regularized(case.loss, [], case.config)  # type: ignore[arg-type]
    return replace(case, send=lambda client, run, data: run.forward_backward_custom(data, loss))


def positive(low: float, high: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda dice, n: dice.uniform(low, high, n)


def some(dice: np.random.Generator, n: int) -> np.ndarray:
    return (np.arange(n) % 3 != 1).astype(float)


NARROW = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}
OWN_BOUNDS = {"clip_low_threshold": positive(0.3, 0.9), "clip_high_threshold": positive(1.1, 1.6)}
ce, ppo, cispo, gspo, kl = map(
    formulas.summed,
    (formulas.cross_entropy, formulas.ppo, formulas.cispo, formulas.gspo, formulas.kl_divergence),
)
CASES = {
    "cross_entropy without weights": Case("cross_entropy", nothing, ce),
    "cross_entropy of signed weights": Case("cross_entropy", signed, ce),
    "cross_entropy of soft targets": Case("cross_entropy", soft, ce, width=3),
    "cross_entropy of signed soft targets": Case("cross_entropy", signed, ce, width=3),
    "cross_entropy of soft targets without weights": Case("cross_entropy", nothing, ce, width=2),
    "cross_entropy of sparse targets": Case("cross_entropy", sparse, ce, width=12, as_torch=True),
    "importance_sampling": Case(
        "importance_sampling", rollout(0.5), formulas.summed(formulas.importance_sampling)
    ),
    "ppo": Case("ppo", rollout(0.4), ppo),
    "ppo with clips": Case("ppo", rollout(0.4), ppo, NARROW),
    "ppo with clips of each position": Case("ppo", rollout(0.4, **OWN_BOUNDS), ppo),
    "cispo": Case("cispo", rollout(1.5), cispo),
    "cispo with clips": Case("cispo", rollout(0.5), cispo, NARROW),
    "dro": Case("dro", rollout(0.5), formulas.summed(formulas.dro), {"beta": 0.4}),
    "gspo": Case("gspo", rollout(1.0), gspo),
    "gspo with clips and a mask": Case("gspo", rollout(0.2, sequence_ratio_mask=some), gspo, NARROW),
    "kl_divergence": Case("kl_divergence", teacher, kl),
    "kl_divergence of weighted candidates": Case("kl_divergence", weighted_teacher, kl, width=3),
    "a loss uploaded as a graph": Case("custom", own, formulas.summed(formulas.tempered), send=uploaded),
    "a loss of the whole batch": Case("custom", referred, formulas.preference, send=whole_batch),
    "a regularized loss": Case("custom", referred, formulas.summed(formulas.pulled), send=regularized),
    "a regularized ppo": Case("custom", rollout(0.4), formulas.summed(formulas.tethered), send=tethered),
}
CASES |= {f"{name}, computed here": computed_here(case) for name, case in CASES.items() if case.send is None}
PROMPTS = [ids[:-1] for ids in SEQUENCES] + [[7, 200, 7, 101, 33]]  # two pairs


def made(case: Case, reference: Reference) -> list[Inputs]:
    """The inputs of every datum, as float64 numbers that float32 can hold."""
    dice = np.random.default_rng(15)  # a seed whose ratios are beyond both bounds of every clip
    out = []
    for ids in PROMPTS:
        shape = (len(ids), case.width) if case.width else (len(ids),)
        x: Inputs = {"target_tokens": dice.integers(3, 250, shape)}
        x |= case.inputs(dice, x, reference.targets(ids, x["target_tokens"]))
        out.append({k: v if k == "target_tokens" else np.float32(v).astype(np.float64) for k, v in x.items()})
    return out


def as_datum(ids: list[int], x: Inputs, as_torch: bool) -> Datum:
    arrays = {k: v if k == "target_tokens" else v.astype(np.float32) for k, v in x.items()}
    inputs: dict[str, Any] = {
        k: torch.from_numpy(v) if as_torch else TensorData.from_numpy(v) for k, v in arrays.items()
    }
    datum = Datum(ModelInput.from_ints(ids), inputs)
    assert all(tensor.is_sparse == as_torch for tensor in datum.loss_fn_inputs.values())
    return datum


def stepped(reference: Reference, xs: Sequence[Inputs], slopes: Sequence[np.ndarray]) -> float:
    """Take one AdamW step down the slopes; the gradient's norm."""
    for ids, x, slope in zip(PROMPTS, xs, slopes, strict=True):
        reference.accumulate(ids, x["target_tokens"], slope)
    norm = reference.gradient_norm()
    torch.optim.AdamW(reference.parameters.values(), LEARNING_RATE, (0.9, 0.95), EPS, weight_decay=0.0).step()
    return norm


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_formula(
    world: World, client: ServiceClient, run: TrainingClient, start: Start, name: str
) -> None:
    case, reference = CASES[name], Reference(world.model, start.files)
    xs = made(case, reference)
    lps = [reference.targets(ids, x["target_tokens"]) for ids, x in zip(PROMPTS, xs, strict=True)]
    value = case.formula(lps, lps, xs, case.config)
    slopes = slopes_of(lambda moved: case.formula(moved, lps, xs, case.config), lps)
    norm = stepped(reference, xs, slopes)

    data = [as_datum(ids, x, case.as_torch) for ids, x in zip(PROMPTS, xs, strict=True)]
    output = case.sent(client, run, data)
    metrics = run.optim_step(STEP).result(SECONDS).metrics or {}

    rounding = 3e-6 * sum(np.abs(slope).sum() for slope in slopes)  # of logprobs, where terms cancel out
    assert output.metrics["loss:sum"] == pytest.approx(value, rel=1e-5, abs=rounding)
    for record, lp in zip(output.loss_fn_outputs, lps, strict=True):
        np.testing.assert_allclose(record["logprobs"].to_numpy(), lp, rtol=0, atol=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 0.01
    assert reference.difference(world.exported(run)) < 2e-5
    assert Reference(world.model, start.files).difference(world.exported(run)) > 1e-3  # and it did move


def test_a_forward_is_the_same_without_a_gradient(
    world: World, run: TrainingClient, start: Start, reference: Reference
) -> None:
    output = run.forward(plain_data(SEQUENCES), "cross_entropy").result(SECONDS)
    scores = [reference.scores(ids) for ids in SEQUENCES]
    for record, right in zip(output.loss_fn_outputs, scores, strict=True):
        np.testing.assert_allclose(record["logprobs"].to_numpy(), right, rtol=0, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-np.concatenate(scores).sum(), rel=1e-5)
    assert (run.optim_step(STEP).result(SECONDS).metrics or {})["skipped"] == 1.0
    assert reference.difference(world.exported(run)) == 0.0


def test_a_preference_begins_at_ln_2(run: TrainingClient, start: Start) -> None:
    """The reference's logprobs come from a sampler, the policy's from the trainer: they must be the same."""
    data = []
    for ids in SEQUENCES[:2]:
        scored = start.sampler.compute_logprobs(ModelInput.from_ints(ids)).result(SECONDS)
        inputs = {
            "target_tokens": np.array(ids[1:]),
            "ref_logprobs": np.array(scored[1:], np.float32),
            "weights": np.ones(len(ids) - 1),
        }
        data.append(as_datum(ids[:-1], inputs, as_torch=False))
    first = run.forward_backward_custom(data, preference).result(SECONDS).metrics["loss:sum"]
    assert first == pytest.approx(np.log(2), abs=1e-5)
    run.optim_step(STEP)
    assert run.forward_backward_custom(data, preference).result(SECONDS).metrics["loss:sum"] < first - 0.01


def test_a_fresh_adapter_is_the_base_model(world: World, client: ServiceClient) -> None:
    base = Reference(world.model)
    for rank in (1, 16):
        run = client.create_lora_training_client(MODEL, rank=rank, seed=3)
        output = run.forward(plain_data(SEQUENCES), "cross_entropy").result(SECONDS)
        for record, ids in zip(output.loss_fn_outputs, SEQUENCES, strict=True):
            np.testing.assert_allclose(record["logprobs"].to_numpy(), base.scores(ids), rtol=0, atol=1e-5)
