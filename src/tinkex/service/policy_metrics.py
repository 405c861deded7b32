"""Metrics of a pass that the engine does not compute, derived from the request.

Datums with equal prompts are a group (as in GRPO). For centred advantages it reports the spread of rewards in
a group and, for two-valued rewards, the success rate. A supervised pass gives the share of tokens with a
probability above one half. Large passes are subsampled. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tinkex.types.data import Datum, LossFnOutput

MOST_DATUMS, MOST_TOKENS = 512, 200_000  # of one pass that are looked at: a millisecond or two
_HALF = float(np.log(0.5))  # a token with more than half of the probability is the likeliest


def pass_metrics(data: Sequence[Datum], outputs: Sequence[LossFnOutput]) -> dict[str, float]:
    """Metrics by name; their suffixes say how those of several passes are put together."""
    seen, tokens = list[Datum](), 0
    columns: dict[str, list[np.ndarray]] = {"advantages": [], "logprobs": [], "weights": [], "trained": []}
    for datum, output in zip(data[:MOST_DATUMS], outputs, strict=False):
        found = output.get("logprobs")
        if found is None or not (size := found.values_np.size) or (tokens := tokens + size) > MOST_TOKENS:
            break
        inputs = datum.loss_fn_inputs
        columns["trained"].append(found.values_np)
        seen.append(datum)
        for name in ("advantages", "logprobs", "weights"):
            if (given := inputs.get(name)) is not None and given.values_np.size == size:
                columns[name].append(given.values_np)
    whole = {name: parts for name, parts in columns.items() if seen and len(parts) == len(seen)}
    if "advantages" in whole and "logprobs" in whole:
        return _policy(seen, whole["advantages"], whole["logprobs"], whole["trained"])
    if not seen or "target_tokens" not in seen[0].loss_fn_inputs:
        return {}
    return _targets(whole["trained"], whole.get("weights"))


def _policy(
    data: Sequence[Datum], advantages: list[np.ndarray], drawn: list[np.ndarray], trained: list[np.ndarray]
) -> dict[str, float]:
    """Of answers with advantages. The entropy is estimated by minus the logprobs of the sampled tokens."""
    lengths = np.array([len(one) for one in advantages])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    advantage, sampled, logprob = map(np.concatenate, (advantages, drawn, trained))
    # Tokens of prompts and of tools have no advantage; an answer as good as its group has none either.
    valued = np.logical_or.reduceat(advantage != 0, starts)
    active = np.where(np.repeat(valued, lengths), advantage != 0, sampled != 0)
    count = np.add.reduceat(active, starts, dtype=np.int64)
    answered = count > 0
    if not answered.any():
        return {}
    each = np.add.reduceat(np.where(active, advantage, 0.0), starts)[answered] / count[answered]
    number = float(count.sum())
    found = {
        "entropy:mean": -float(logprob[active].sum()) / number,
        "advantage:mean": float(each.mean()),
        "positive_advantages:mean": float((each > 0).mean()),
        "answer_tokens:mean": float(count[answered].mean()),
    }
    groups: defaultdict[bytes, list[float]] = defaultdict(list)
    places: list[int] = np.flatnonzero(answered).tolist()
    for index, value in zip(places, each.tolist(), strict=True):
        begin = int(active[starts[index] : starts[index] + lengths[index]].argmax())
        prompt = _prompt(data[index], begin)
        if prompt is not None:
            groups[prompt].append(value)
    return found | _groups(groups)


def _prompt(datum: Datum, begin: int) -> bytes | None:
    """The tokens before the first one that was sampled: targets are one position ahead of the input."""
    try:
        return datum.model_input.to_numpy()[: begin + 1].tobytes()
    except ValueError:  # an image: tokens do not describe the whole prompt
        return None


def _groups(groups: Mapping[bytes, list[float]]) -> dict[str, float]:
    """Of the advantages of each group with several answers.

    >>> _groups({b"": [0.75, -0.25, -0.25, -0.25]})
    {'reward_spread:mean': 1.0, 'better_answers:mean': 0.25}
    """
    spreads, shares = list[float](), list[float]()
    for values in groups.values():
        if len(values) < 2:
            continue
        low, high = min(values), max(values)
        spread = high - low
        spreads.append(spread)
        near = 1e-3 * spread
        centred = abs(sum(values)) / len(values) <= near
        if spread > 0 and centred and all(v - low <= near or high - v <= near for v in values):
            shares.append(-low / spread)
    found = {"reward_spread:mean": sum(spreads) / len(spreads)} if spreads else {}
    return found | ({"better_answers:mean": sum(shares) / len(shares)} if shares else {})


def _targets(trained: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None) -> dict[str, float]:
    """How many of the tokens that count for the loss are the likeliest of all, at least."""
    logprobs = np.concatenate(trained)
    if weights is not None:
        logprobs = logprobs[np.concatenate(weights) != 0]
    return {"surely_right:mean": float((logprobs > _HALF).mean())} if logprobs.size else {}
