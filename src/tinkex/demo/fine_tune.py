"""`tinkex demo`: supervised fine-tuning of a LoRA adapter.

Read `train` first: it is a whole training loop. Around it, the base model and the adapter answer the same
questions, and a program says which answers are right.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinkex
from tinkex.client.download import download_archive, new_directory
from tinkex.demo.bookmark import Bookmark, ctrl_c, open_run, save_bookmark
from tinkex.demo.screen import CheckedAnswer, Screen
from tinkex.demo.tasks import SupervisedTask


@dataclass(frozen=True)
class FineTunePlan:
    """How the demo trains, and where its files go."""

    model: str
    out: Path
    steps: int = 14
    batch: int = 8
    rank: int = 16
    learning_rate: float = 1e-3


def demo(
    task: SupervisedTask, plan: FineTunePlan, screen: Screen, bookmark: Bookmark | None = None
) -> bool | None:
    """Did the model learn the task? None if Ctrl-C stopped it: then there is a bookmark in `plan.out`."""
    if bookmark is not None:
        plan = replace(plan, model=bookmark.model, steps=bookmark.steps)
    losses: list[float] = list(bookmark.curve) if bookmark else []
    with tinkex.ServiceClient(base_url="local") as service:
        run = open_run(service, plan.model, plan.rank, bookmark)
        tokenizer = run.get_tokenizer()
        screen.heading("Before: questions that are not among the examples")
        before = ask(service.create_sampling_client(base_model=plan.model), tokenizer, task)
        screen.answers(before, task.rule)
        finished = train(run, tokenizer, task, plan, losses, screen)
        save_bookmark(run, task.name, plan.model, plan.steps, losses, plan.out, "sft")
        if not finished:
            return None
        try:
            screen.heading("After: the same questions")
            path = run.save_weights_for_sampler(task.name).result().path
            after = ask(service.create_sampling_client(model_path=path), tokenizer, task)
            screen.answers(after, task.rule)
            screen.curve("loss", losses, plan.out / "loss.png")
            screen.adapter(path, download_adapter(plan.out / task.name, service, path))
        except KeyboardInterrupt:
            return None
    Bookmark.delete(plan.out, "sft")
    right, wanted = [sum(answer.right for answer in answers) for answers in (before, after)], len(after)
    learned = right[1] - right[0] >= wanted / 2
    screen.verdict(learned, f"{right[0]} of {wanted} right before, {right[1]} of {wanted} after")
    return learned


def train(
    run: tinkex.TrainingClient,
    tokenizer: Any,
    task: SupervisedTask,
    plan: FineTunePlan,
    losses: list[float],
    screen: Screen,
) -> bool:
    """Take the remaining steps, appending to `losses`; False if Ctrl-C stopped it."""
    data = [datum(tokenizer, question, answer) for question, answer in task.examples]
    random.Random(1).shuffle(data)
    screen.begin(f"Training: {plan.steps} steps of {plan.batch} examples", plan.steps, len(losses))
    with ctrl_c() as stopped:
        for step in range(len(losses), plan.steps):
            began = time.perf_counter()
            batch = [data[(step * plan.batch + i) % len(data)] for i in range(plan.batch)]
            decayed = plan.learning_rate * (1 - 0.8 * step / plan.steps)
            passed = run.forward_backward(batch, "cross_entropy")
            run.optim_step(tinkex.AdamParams(learning_rate=decayed)).result()
            losses.append(passed.result().metrics["loss:sum"] / sum(map(answer_length, batch)))
            tokens = sum(datum.model_input.length for datum in batch)
            screen.step(step, "loss", losses[-1], tokens / (time.perf_counter() - began))
            if stopped():
                return False
    return True


def datum(tokenizer: Any, question: str, answer: str) -> tinkex.Datum:
    """One example: the conversation, with weight 1 on the answer's tokens and 0 before them."""
    prompt = tinkex.render_chat(tokenizer, [{"role": "user", "content": question}])
    said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + said
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(said)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights}
    return tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs)


def answer_length(datum: tinkex.Datum) -> float:
    return float(sum(datum.loss_fn_inputs["weights"].data))


def ask(sampler: tinkex.SamplingClient, tokenizer: Any, task: SupervisedTask) -> list[CheckedAnswer]:
    """The model's answers to the test questions, and whether they are right."""
    params = tinkex.SamplingParams(max_tokens=40, temperature=0.0, stop=[tokenizer.eos_token_id])
    waiting: list[tinkex.APIFuture[tinkex.SampleResponse]] = []
    for question, _ in task.held_out:
        prompt = tinkex.render_chat(tokenizer, [{"role": "user", "content": question}])
        waiting.append(sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, params))
    answers: list[CheckedAnswer] = []
    for (question, fact), future in zip(task.held_out, waiting, strict=True):
        (sequence,) = future.result().sequences
        text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
        answers.append(CheckedAnswer(question, text, task.check(text, fact)))
    return answers


def download_adapter(place: Path, service: tinkex.ServiceClient, path: str) -> Path:
    """Download a checkpoint's files into the directory `place`, replacing those of the last demo."""
    url = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result().url
    with new_directory(place, overwrite=True) as directory:
        download_archive(url, directory)
    return place
