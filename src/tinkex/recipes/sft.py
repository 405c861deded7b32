"""Supervised fine-tuning on conversations, completions or texts: `tinkex train sft DATA`.

Read `train_sft`: it is a whole training loop over the public SDK, meant to be copied and changed. It trains
on means over tokens, keeps one step in flight, evaluates on held-out examples, and resumes exactly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import tinkex
from tinkex.data import (
    Batches,
    TrainOn,
    chat_data,
    completion_datum,
    learnt_tokens,
    mean_loss,
    text_datum,
)
from tinkex.recipes.conversations import ChatExample, conversation, load
from tinkex.recipes.progress import Progress
from tinkex.recipes.recipe_run import RecipeRun
from tinkex.recipes.run_directory import Outcome, RunDirectory
from tinkex.recipes.settings import ExamplesConfig, option


@dataclass(frozen=True, kw_only=True)
class SftConfig(ExamplesConfig):
    """Settings of supervised fine-tuning."""

    train_on: TrainOn = option("assistant", "Which turns are learnt.")  # noqa: RUF009
    plain: bool = option(False, "Prompts and completions as they are, without the chat template.")
    eval_data: str | None = option(None, "Held-out examples in a file of their own instead.")
    early_stopping: int | None = option(
        None, "Stop after so many evaluations without a better one, and keep the best adapter."
    )
    samples: int = option(2, "Held-out prompts to answer at every evaluation, into samples.jsonl.")


def train_sft(
    config: SftConfig, service: tinkex.ServiceClient | None = None, progress: Progress | None = None
) -> Outcome | None:
    """Train an adapter on examples; None if the batch was only shown.

    >>> train_sft(SftConfig(data="chats.jsonl", out="runs/chats"))  # doctest: +SKIP
    """
    read = load(config.data, conversation, skip_bad=config.skip_bad)
    evals = load(config.eval_data, conversation, skip_bad=config.skip_bad) if config.eval_data else None
    facts = {"data_digest": read.digest, "eval_digest": evals.digest if evals else None}
    with RecipeRun("sft", config.data, config, service, progress, **facts) as run:
        if run.outcome is not None:
            return run.outcome
        directory, client, tokenizer = run.directory, run.client, run.client.get_tokenizer()
        made = read.map(lambda each: sft_data(tokenizer, each, config), skip_bad=config.skip_bad)
        examples = made.items
        if evals is not None:
            tests = evals.map(lambda each: sft_data(tokenizer, each, config), skip_bad=config.skip_bad).items
        else:
            kept, out = config.held_out(len(examples))
            examples, tests = [examples[i] for i in kept], [examples[i] for i in out]
        data = [datum for own in examples for datum in own]
        test_data = [datum for own in tests for datum in own]
        lengths = [datum.model_input.length + 1 for datum in data]
        batches = Batches(lengths, size=config.batch_size, seed=config.seed, shuffle=config.shuffle)
        steps = config.steps or batches.steps(config.epochs)
        if config.show_batch:
            run.progress.batch(tokenizer, [data[i] for i in batches[0]])
            return None
        cut = sum(length >= config.max_length for length in lengths)
        left_out = f"{cut} cut to {config.max_length} tokens, {made.bad} bad rows left out"
        size = f"{len(test_data)} held out; {steps} steps of {config.batch_size}"
        run.begin(f"{len(data)} examples ({left_out}), {size}", steps)

        best = directory.saved.best if directory.saved else None
        if test_data and not directory.rows:
            directory.log(0, {"eval_loss": evaluate_loss(client, test_data)})
        flight: deque[tuple[int, list[tinkex.Datum], Any, Any, float]] = deque()
        step = directory.done
        while step < steps and not stale(directory, config.early_stopping):
            batch = [data[i] for i in batches[step]]
            step += 1
            adam = run.adam(step)
            passed = client.forward_backward(mean_loss(batch), "cross_entropy")
            stepped = client.optim_step(adam)  # queued behind the pass, without waiting for it
            flight.append((step, batch, passed, stepped, adam.learning_rate))
            evaluate = bool(test_data) and (step % config.eval_every == 0 or step == steps)
            stop = run.stopped()
            save = evaluate or step % config.save_every == 0 or step == steps or stop
            while len(flight) > (0 if save else 1):  # one step stays in flight
                report(directory, *flight.popleft())
                if not stop and run.stopped():  # while we waited: begin no further step
                    stop = save = True
            if evaluate:
                loss = evaluate_loss(client, test_data)
                improved = loss < min(row["eval_loss"] for row in directory.rows if "eval_loss" in row)
                directory.log(step, {"eval_loss": loss})
                if improved and config.early_stopping:
                    best = client.save_weights_for_sampler(f"best-{step:06d}").result().path
                write_samples(directory, client, tokenizer, tests[: config.samples], step)
            run.end_step(step, stop=stop, save=save, best=best)
        return run.finish()


def sft_data(tokenizer: Any, example: ChatExample, config: SftConfig) -> list[tinkex.Datum]:
    """An example as datums: by the chat template where there is one, else as plain text."""
    if example.text is not None:
        return [text_datum(tokenizer, example.text, max_length=config.max_length)]
    messages = [
        {**message, "weight": 0} if place < example.prompt else message
        for place, message in enumerate(example.messages)
    ]
    if example.prompt and (config.plain or not tokenizer.chat_template):
        prompt = "".join(str(message["content"]) for message in messages[: example.prompt])
        completion = "".join(str(message["content"]) for message in messages[example.prompt :])
        return [completion_datum(tokenizer, prompt, completion, max_length=config.max_length)]
    tools = {"tools": example.tools} if example.tools else {}
    return chat_data(tokenizer, messages, config.train_on, max_length=config.max_length, **tools)


def evaluate_loss(client: tinkex.TrainingClient, data: list[tinkex.Datum]) -> float:
    """The mean loss of a held-out token."""
    return client.forward(data, "cross_entropy").result().metrics["loss:sum"] / learnt_tokens(data)


def report(
    directory: RunDirectory, step: int, batch: list[tinkex.Datum], passed: Any, stepped: Any, rate: float
) -> None:
    """Wait for a step, and write its metrics."""
    loss = passed.result().metrics["loss:sum"]
    stepped.result()
    tokens = sum(datum.model_input.length for datum in batch)
    directory.log(step, {"loss": loss, "learning_rate": rate}, tokens)


def stale(directory: RunDirectory, patience: int | None) -> bool:
    """Whether the last `patience` evaluations were all worse than one before them."""
    losses = [row["eval_loss"] for row in directory.rows if "eval_loss" in row]
    return bool(patience) and len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])


def write_samples(
    directory: RunDirectory, client: tinkex.TrainingClient, tokenizer: Any, tests: list[list[tinkex.Datum]],
    step: int,
) -> None:  # fmt: skip
    """Greedy answers to held-out prompts, with the expected ones."""
    if not tests:
        return
    sampler = client.save_weights_and_get_sampling_client()
    params = tinkex.SamplingParams(max_tokens=64, temperature=0.0)
    for datum, *_ in tests:
        weights, targets = (datum.loss_fn_inputs[key].to_numpy() for key in ("weights", "target_tokens"))
        start = int((weights > 0).argmax()) + 1
        prompt = datum.model_input.to_ints()[:start]
        (said,) = sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, params).result().sequences
        text = {"prompt": prompt, "text": said.tokens, "expected": targets[start - 1 :].tolist()}
        directory.sample(step, **{key: tokenizer.decode(tokens) for key, tokens in text.items()})
