"""What a reinforcement-learning loop computes around sampling: datums, advantages, filters, KL metrics.

Datums are for the losses "importance_sampling", "ppo", "cispo", "dro" and "gspo": prompts have advantage 0,
sampled tokens have the sampler's logprobs. Needs only numpy; knows no clients, rewards or environments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

from tinkex.data import replaced
from tinkex.errors import InvalidInputError
from tinkex.types.chunks import as_tokens
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput, SampledSequence

Group = TypeVar("Group")
Prompt = ModelInput | Sequence[int] | np.ndarray
Advantage = float | Sequence[float] | np.ndarray  # of a whole sequence, or of each of its tokens


# -- datums ----------------------------------------------------------------------------------------------


def rl_datum(prompt: Prompt, sequence: SampledSequence, advantage: Advantage) -> Datum:
    """One sampled answer as a datum: the prompt has advantage 0, every sampled token `advantage`.

    >>> answer = SampledSequence("stop", tokens_np=np.array([8, 9]), logprobs_np=np.array([-1.0, -0.5]))
    >>> datum = rl_datum([5, 6], answer, 2.0)
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["advantages"].tolist()
    ([5, 6, 8], [0.0, 2.0, 2.0])
    """
    (datum,) = trajectory_data([(prompt, sequence)], [advantage])
    return datum


def trajectory_data(
    turns: Sequence[tuple[Prompt, SampledSequence]], advantage: float | Sequence[Advantage] | np.ndarray
) -> list[Datum]:
    """The turns of one episode as datums; `advantage` is one number, or one for each turn.

    A turn whose prompt continues the tokens so far extends the datum; another one (a template that rewrites
    its history) begins a new datum.
    """
    each: Sequence[Advantage] = (
        [advantage] * len(turns) if isinstance(advantage, float | int) else list(advantage)
    )
    if len(each) != len(turns):
        raise InvalidInputError(f"{len(each)} advantages for {len(turns)} turns")
    data: list[Datum] = []
    tokens, logprobs, advantages = np.empty(0, np.int32), np.empty(0), np.empty(0)
    for (prompt, sequence), worth in zip(turns, each, strict=True):
        asked = _tokens(prompt)
        said, drawn = _sampled(sequence)
        if len(tokens) and not np.array_equal(asked[: len(tokens)], tokens):
            data.append(_ratio_datum(tokens, logprobs, advantages))
            tokens, logprobs, advantages = np.empty(0, np.int32), np.empty(0), np.empty(0)
        read = np.zeros(len(asked) - len(tokens))
        tokens = np.concatenate([asked, said])
        logprobs = np.concatenate([logprobs, read, drawn])
        advantages = np.concatenate([advantages, read, np.broadcast_to(np.asarray(worth, float), said.shape)])
    return [*data, _ratio_datum(tokens, logprobs, advantages)] if len(tokens) else data


def _tokens(prompt: Prompt) -> np.ndarray:
    tokens = prompt.to_numpy() if isinstance(prompt, ModelInput) else as_tokens(prompt)
    if not len(tokens):
        raise InvalidInputError("a prompt needs at least one token")
    return tokens


def _sampled(sequence: SampledSequence) -> tuple[np.ndarray, np.ndarray]:
    if sequence.tokens_np is None or sequence.logprobs_np is None:
        raise InvalidInputError("the sampled sequence has no logprobs: importance ratios need the sampler's")
    return sequence.tokens_np, sequence.logprobs_np


def _ratio_datum(tokens: np.ndarray, logprobs: np.ndarray, advantages: np.ndarray) -> Datum:
    inputs = {"logprobs": logprobs[1:].astype(np.float32), "advantages": advantages[1:].astype(np.float32)}
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **inputs})


# -- advantages ------------------------------------------------------------------------------------------


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    *,
    baseline: Literal["mean", "leave_one_out", "none"] = "mean",
    divide_by_std: bool = False,
) -> np.ndarray:
    """How much better each answer of a group is than the others.

    `divide_by_std` is GRPO's; without it, easy and hard prompts count by their spread of rewards.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0]).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or not len(values):
        raise InvalidInputError(f"rewards must be a non-empty list of numbers, got shape {values.shape}")
    if not np.isfinite(values).all():
        wrong = int(np.argmax(~np.isfinite(values)))
        raise InvalidInputError(f"reward {wrong} is {values[wrong]}: rewards must be finite")
    if baseline == "leave_one_out" and len(values) > 1:
        advantages = (values - values.mean()) * len(values) / (len(values) - 1)
    elif baseline in ("mean", "leave_one_out"):
        advantages = values - values.mean()
    elif baseline == "none":
        advantages = values
    else:
        raise InvalidInputError(f"baseline must be mean, leave_one_out or none, got {baseline!r}")
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return advantages / (spread + 1e-4) if divide_by_std else advantages


def has_signal(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether a group can teach anything: a group of equal rewards has advantages of 0.

    >>> has_signal([1.0, 1.0]), has_signal([1.0, 0.0])
    (False, True)
    """
    values = np.asarray(rewards, np.float64)
    return bool(len(values)) and float(values.max() - values.min()) > 1e-8


def with_signal(
    groups: Sequence[Group], rewards: Sequence[Sequence[float]]
) -> tuple[list[Group], list[Sequence[float]]]:
    """The groups whose rewards differ, and their rewards.

    >>> with_signal(["a", "b"], [[1, 1], [0, 1]])
    (['b'], [[0, 1]])
    """
    kept = [(group, own) for group, own in zip(groups, rewards, strict=True) if has_signal(own)]
    return [group for group, _ in kept], [own for _, own in kept]


def mean_advantages(data: Sequence[Datum], by: Literal["tokens", "sequences"] = "tokens") -> list[Datum]:
    """The same data with advantages divided so that the loss is a mean over sampled tokens, or the mean over
    sequences of their own means.

    Losses are sums; see `tinkex.data.mean_loss`.
    """
    counts = [max(1, int(sampled_positions(datum).sum())) for datum in data]
    if by not in ("tokens", "sequences"):
        raise InvalidInputError(f"by must be tokens or sequences, got {by!r}")
    divisors = [sum(counts)] * len(data) if by == "tokens" else [count * len(data) for count in counts]
    return [
        replaced(datum, "advantages", datum.loss_fn_inputs["advantages"].to_numpy() / divisor)
        for datum, divisor in zip(data, divisors, strict=True)
    ]


def sampled_positions(datum: Datum) -> np.ndarray:
    """True where the target was sampled: prompts have logprob 0 and advantage 0."""
    inputs = datum.loss_fn_inputs
    return (inputs["logprobs"].to_numpy() != 0) | (inputs["advantages"].to_numpy() != 0)


# -- KL divergence ---------------------------------------------------------------------------------------


def kl_metrics(data: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """How far the trainer's logprobs are from those that the data was sampled with.

    `kl_v1` is the mean of log(q/p) over sampled tokens, `kl_v2` half the mean of its square (never negative,
    less noise), `entropy` the mean of -log q. On-policy, the first two are near 0.
    """
    pairs = [
        (datum.loss_fn_inputs["logprobs"].to_numpy(), result["logprobs"].to_numpy(), sampled_positions(datum))
        for datum, result in zip(data, output.loss_fn_outputs, strict=True)
    ]
    drawn = np.concatenate([q[mask] for q, _, mask in pairs] or [np.empty(0)]).astype(np.float64)
    trained = np.concatenate([p[mask] for _, p, mask in pairs] or [np.empty(0)]).astype(np.float64)
    if not len(drawn):
        return {}
    apart = drawn - trained
    return {
        "kl_v1": float(apart.mean()),
        "kl_v2": float(0.5 * np.square(apart).mean()),
        "entropy": float(-drawn.mean()),
    }


def with_kl_penalty(
    data: Sequence[Datum], reference: Sequence[Sequence[float | None]], coefficient: float
) -> tuple[list[Datum], float]:
    """The data with `coefficient` · KL to a reference model taken off the advantages, and the mean KL.

    `reference` has the logprobs of each datum's whole sequence, as `compute_logprobs` of its input and last
    target returns them (None for the first token). The mean KL of the batch is the baseline.
    """
    own: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for number, (datum, scores) in enumerate(zip(data, reference, strict=True)):
        drawn = datum.loss_fn_inputs["logprobs"].to_numpy().astype(np.float64)
        if len(scores) != len(drawn) + 1:
            raise InvalidInputError(
                f"reference {number} has {len(scores)} logprobs, and its datum {len(drawn) + 1} tokens"
            )
        mask = sampled_positions(datum)
        own.append(np.where(mask, drawn - np.array(scores[1:], np.float64), 0.0))
        masks.append(mask)
    count = sum(int(mask.sum()) for mask in masks)
    mean = float(sum(kl.sum() for kl in own) / max(1, count))
    changed = [
        replaced(
            datum,
            "advantages",
            datum.loss_fn_inputs["advantages"].to_numpy() + np.where(mask, coefficient * (mean - kl), 0.0),
        )
        for datum, kl, mask in zip(data, own, masks, strict=True)
    ]
    return changed, mean


def whole_sequence(datum: Datum) -> ModelInput:
    """The datum's input with its last target: what a reference model scores.

    >>> from tinkex.data import weighted_datum
    >>> whole_sequence(weighted_datum([5, 6, 7])).to_ints()
    [5, 6, 7]
    """
    last = int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])
    return ModelInput.from_ints([*datum.model_input.to_ints(), last])


# -- rewards ---------------------------------------------------------------------------------------------


def reward_metrics(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean reward, its spread within groups, and how many groups all got the same.

    >>> reward_metrics([[1.0, 0.0], [1.0, 1.0]])
    {'reward': 0.75, 'reward_std': 0.25, 'groups_equal': 0.5}
    """
    if not groups:
        return {}
    return {
        "reward": float(np.mean([reward for group in groups for reward in group])),
        "reward_std": float(np.mean([np.std(group) for group in groups])),
        "groups_equal": float(np.mean([not has_signal(group) for group in groups])),
    }


def pass_at_k(right: int, of: int, k: int) -> float:
    """The chance that one of `k` answers is right, estimated from `right` of `of`.

    >>> round(pass_at_k(1, 4, 2), 3)
    0.5
    """
    if not 0 <= right <= of or not 1 <= k <= of:
        raise InvalidInputError(f"needs 0 <= right <= of and 1 <= k <= of, got {right}, {of}, {k}")
    return 1.0 - math.comb(of - right, k) / math.comb(of, k)
