"""`tinkex demo`: supervised fine-tuning, from a base model that does not to an adapter that does.

Read `train` first: it is a whole training loop. Around it the same questions are put to the base model and to
the adapter, and a program, not an eye, says which answers are right.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinkex
from tinkex.client.download import download_archive, new_directory
from tinkex.demo.bookmark import Bookmark, ctrl_c
from tinkex.demo.pirate import Task
from tinkex.demo.screen import Answer, Screen


@dataclass(frozen=True)
class Plan:
    """How a demo trains, and where it leaves what it made."""

    model: str
    out: Path
    steps: int = 14
    batch: int = 8
    rank: int = 16
    learning_rate: float = 1e-3


def demo(task: Task, plan: Plan, screen: Screen, bookmark: Bookmark | None = None) -> bool | None:
    """Did the model learn it? None if it was stopped on the way: then a bookmark is left in `plan.out`."""
    with tinkex.ServiceClient(base_url="local") as service:
        if bookmark is None:
            # PEFT and vLLM load such an adapter as it is; one with an unembedding is for PEFT alone.
            run = service.create_lora_training_client(plan.model, plan.rank, seed=1, train_unembed=False)
            losses: list[float] = []
        else:
            plan = replace(plan, model=bookmark.model, steps=bookmark.steps)
            run = service.create_training_client_from_state_with_optimizer(bookmark.checkpoint)
            losses = bookmark.curve
        tokenizer = run.get_tokenizer()

        screen.heading("Before: questions that are not among the examples")
        before = ask(service.create_sampling_client(base_model=plan.model), tokenizer, task)
        screen.answers(before, task.rule)
        if not train(run, tokenizer, task, plan, losses, screen):
            saved = run.save_state(f"{task.name}-{len(losses)}", ttl_seconds=7 * 24 * 3600).result()
            Bookmark(plan.model, saved.path, plan.steps, losses).write(plan.out, "sft")
            return None

        screen.heading("After: the same questions")
        path = run.save_weights_for_sampler(task.name).result().path
        after = ask(service.create_sampling_client(model_path=path), tokenizer, task)
        screen.answers(after, task.rule)
        screen.curve("loss", losses, plan.out / "loss.png")
        screen.adapter(path, adapter_at(plan.out / task.name, service, path))
    Bookmark.forget(plan.out, "sft")
    right, wanted = [sum(answer.good for answer in answers) for answers in (before, after)], len(after)
    learned = right[1] - right[0] >= wanted / 2
    screen.verdict(learned, f"{right[0]} of {wanted} right before, {right[1]} of {wanted} after")
    return learned


def train(
    run: tinkex.TrainingClient, tokenizer: Any, task: Task, plan: Plan, losses: list[float], screen: Screen
) -> bool:
    """Take the steps that are left, adding to `losses`; False if Ctrl-C came before the last."""
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
            if stopped() and step + 1 < plan.steps:
                return False
    return True


def datum(tokenizer: Any, question: str, answer: str) -> tinkex.Datum:
    """One example: the conversation, with a weight of 1 on each token of the answer and 0 before it."""
    prompt = tinkex.render_chat(tokenizer, [{"role": "user", "content": question}])
    said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + said
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(said)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights}
    return tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs)


def answer_length(datum: tinkex.Datum) -> float:
    return float(sum(datum.loss_fn_inputs["weights"].data))


def ask(sampler: tinkex.SamplingClient, tokenizer: Any, task: Task) -> list[Answer]:
    """The model's own answers to the questions it is tested with, and whether they are right."""
    params = tinkex.SamplingParams(max_tokens=40, temperature=0.0, stop=[tokenizer.eos_token_id])
    waiting: list[tinkex.APIFuture[tinkex.SampleResponse]] = []
    for question, _ in task.held_out:
        prompt = tinkex.render_chat(tokenizer, [{"role": "user", "content": question}])
        waiting.append(sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, params))
    answers: list[Answer] = []
    for (question, fact), future in zip(task.held_out, waiting, strict=True):
        (sequence,) = future.result().sequences
        text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
        answers.append(Answer(question, text, task.check(text, fact)))
    return answers


def adapter_at(place: Path, service: tinkex.ServiceClient, path: str) -> Path:
    """Put the files of a checkpoint into the directory `place`, instead of those of the last time."""
    url = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result().url
    with new_directory(place, overwrite=True) as directory:
        download_archive(url, directory)
    return place
