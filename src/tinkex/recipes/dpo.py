"""Direct preference optimisation on pairs of answers: `tinkex train dpo DATA`.

Read `train_dpo`. The reference is the model that training starts from; its logprobs are computed once for
each pair. The loss, −log σ(β · margin), has its gradient in numpy, so that no torch is needed on the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import tinkex
from tinkex.data import Batches, chat_datum, completion_datum
from tinkex.recipes.conversations import Pair, load, pair
from tinkex.recipes.progress import Progress
from tinkex.recipes.recipe_run import RecipeRun
from tinkex.recipes.run_directory import Outcome
from tinkex.recipes.settings import ExamplesConfig, option
from tinkex.rl import whole_sequence


@dataclass(frozen=True, kw_only=True)
class DpoConfig(ExamplesConfig):
    """Settings of direct preference optimisation; an example is a pair of answers."""

    beta: float = option(0.1, "How strongly the policy is held to the reference.")
    batch_size: int = option(8, "Pairs of a step.")
    epochs: float = option(1.0, "Passes over the data, unless --steps is given.")


def train_dpo(
    config: DpoConfig, service: tinkex.ServiceClient | None = None, progress: Progress | None = None
) -> Outcome | None:
    """Train an adapter to prefer the chosen answers; None if the batch was only shown.

    >>> train_dpo(DpoConfig(data="pairs.jsonl", out="runs/pairs"))  # doctest: +SKIP
    """
    read = load(config.data, pair, skip_bad=config.skip_bad)
    with RecipeRun("dpo", config.data, config, service, progress, data_digest=read.digest) as run:
        if run.outcome is not None:
            return run.outcome
        client, tokenizer = run.client, run.client.get_tokenizer()
        made = read.map(lambda each: pair_data(tokenizer, each, config), skip_bad=config.skip_bad)
        kept, out = config.held_out(len(made.items))
        pairs, tests = [made.items[i] for i in kept], [made.items[i] for i in out]
        lengths = [sum(datum.model_input.length for datum in each) for each in pairs]
        batches = Batches(lengths, size=config.batch_size, seed=config.seed, shuffle=config.shuffle)
        steps = config.steps or batches.steps(config.epochs)
        if config.show_batch:
            run.progress.batch(tokenizer, [datum for i in batches[0] for datum in pairs[i]])
            return None
        size = f"{steps} steps of {config.batch_size}, beta {config.beta:g}"
        run.begin(f"{len(pairs)} pairs ({made.bad} bad rows left out), {len(tests)} held out; {size}", steps)

        reference = Reference(config.reference(run.service))
        if tests and not run.directory.rows:
            run.directory.log(0, evaluate_pairs(client, tests, reference, config.beta))
        for step in run:
            batch = [datum for i in batches[step - 1] for datum in pairs[i]]
            loss = PreferenceLoss(reference.sums(batch), config.beta)
            adam = run.adam(step)
            passed = client.forward_backward_custom(batch, loss)
            client.optim_step(adam).result()
            found = passed.result().metrics
            row = {name: found[name] for name in ("margin", "accuracy", "chosen", "rejected")}
            tokens = sum(datum.model_input.length for datum in batch)
            row = {"loss": found["loss:sum"], **row, "learning_rate": adam.learning_rate}
            run.directory.log(step, row, tokens)
            if tests and (step % config.eval_every == 0 or step == steps):
                run.directory.log(step, evaluate_pairs(client, tests, reference, config.beta))
        return run.finish()


def pair_data(tokenizer: Any, each: Pair, config: DpoConfig) -> tuple[tinkex.Datum, tinkex.Datum]:
    """The chosen and the rejected answer after the prompt, with weight 1 on the answer."""
    prompt = [{**message, "weight": 0} for message in each.prompt]
    if tokenizer.chat_template:
        chosen, rejected = (
            chat_datum(tokenizer, [*prompt, *answer], max_length=config.max_length)
            for answer in (each.chosen, each.rejected)
        )
        return chosen, rejected
    asked = "".join(str(message["content"]) for message in each.prompt)
    chosen, rejected = (
        completion_datum(
            tokenizer, asked, "".join(str(m["content"]) for m in answer), max_length=config.max_length
        )
        for answer in (each.chosen, each.rejected)
    )
    return chosen, rejected


class Reference:
    """The reference model's logprobs of answers, each computed once."""

    def __init__(self, sampler: tinkex.SamplingClient) -> None:
        self._sampler = sampler
        self._known: dict[int, tuple[tinkex.Datum, float]] = {}  # by identity; the datum is kept alive

    def sums(self, data: Sequence[tinkex.Datum]) -> np.ndarray:
        """The logprob of each datum's learnt tokens."""
        new = [datum for datum in data if id(datum) not in self._known]
        asked = [self._sampler.compute_logprobs(whole_sequence(datum)) for datum in new]
        for datum, future in zip(new, asked, strict=True):
            scores = np.array(future.result()[1:], np.float64)
            self._known[id(datum)] = datum, float(scores @ datum.loss_fn_inputs["weights"].to_numpy())
        return np.array([self._known[id(datum)][1] for datum in data])


@dataclass(frozen=True, eq=False)
class PreferenceLoss:
    """The mean of −log σ(β · margin) over pairs; datums are chosen, rejected, chosen, rejected, …"""

    references: np.ndarray  # the reference's logprob of each datum
    beta: float

    def value_and_gradients(
        self, data: Sequence[tinkex.Datum], logprobs: Sequence[np.ndarray]
    ) -> tuple[float, list[np.ndarray], dict[str, float]]:
        weights = [datum.loss_fn_inputs["weights"].to_numpy().astype(np.float64) for datum in data]
        sums = np.array([lp.astype(np.float64) @ w for lp, w in zip(logprobs, weights, strict=True)])
        ratios = self.beta * (sums - self.references)
        margins = ratios[::2] - ratios[1::2]
        loss = float(np.logaddexp(0, -margins).mean())
        push = self.beta / (1 + np.exp(margins)) / len(margins)  # −dL/d(chosen), +dL/d(rejected)
        signed = np.stack([-push, push], axis=1).reshape(-1)
        gradients = [(sign * w).astype(np.float32) for sign, w in zip(signed, weights, strict=True)]
        means = {"chosen": float(ratios[::2].mean()), "rejected": float(ratios[1::2].mean())}
        wins = {"margin": float(margins.mean()), "accuracy": float((margins > 0).mean())}
        return loss, gradients, {**wins, **means}


def evaluate_pairs(
    client: tinkex.TrainingClient,
    pairs: Sequence[tuple[tinkex.Datum, tinkex.Datum]],
    reference: Reference,
    beta: float,
) -> dict[str, float]:
    """Loss and accuracy on held-out pairs."""
    data = [datum for each in pairs for datum in each]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    loss = PreferenceLoss(reference.sums(data), beta)
    logprobs = [output["logprobs"].to_numpy() for output in outputs]
    value, _, metrics = loss.value_and_gradients(data, logprobs)
    return {"eval_loss": value, "eval_accuracy": metrics["accuracy"], "eval_margin": metrics["margin"]}
