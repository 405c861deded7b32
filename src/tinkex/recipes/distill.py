"""On-policy distillation: `tinkex train distill PROMPTS --teacher MODEL`.

Read `train_distill`. The student answers; a token's advantage is the teacher's logprob of it minus the
student's, so that the reverse KL divergence falls. Student and teacher must share a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tinkex
from tinkex.data import Batches
from tinkex.recipes.conversations import load, question
from tinkex.recipes.progress import Progress
from tinkex.recipes.recipe_run import RecipeRun
from tinkex.recipes.run_directory import Outcome
from tinkex.recipes.settings import TrainConfig, option, sampler_of
from tinkex.rl import kl_metrics, mean_advantages, rl_datum

_STRIDE = 1_000_003  # between the seeds of two steps


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """Settings of distillation."""

    data: str = option("", "Prompts: a file, or a hub dataset org/name[:split].", argument=True)
    teacher: str = option("", "A base model, or an adapter by its tinker:// path.")
    batch_size: int = option(8, "Prompts of a step.")
    group_size: int = option(4, "Answers to each prompt.")
    max_tokens: int = option(128, "Tokens of an answer.")
    temperature: float = option(1.0, "Of sampling.")
    skip_bad: bool = option(False, "Leave out rows that cannot be used, and count them.")


def train_distill(
    config: DistillConfig, service: tinkex.ServiceClient | None = None, progress: Progress | None = None
) -> Outcome:
    """Train an adapter to answer as the teacher would.

    >>> train_distill(DistillConfig(data="prompts.jsonl", teacher="Qwen/Qwen3-8B"))  # doctest: +SKIP
    """
    if not config.teacher:
        raise tinkex.InvalidInputError("give --teacher: a base model, or an adapter's tinker:// path")
    read = load(config.data, question, skip_bad=config.skip_bad)
    with RecipeRun("distill", config.data, config, service, progress, data_digest=read.digest) as run:
        if run.outcome is not None:
            return run.outcome
        client, tokenizer = run.client, run.client.get_tokenizer()
        teacher = sampler_of(run.service, config.teacher)
        check_vocabularies(tokenizer, teacher.get_tokenizer(), config)
        prompts = read.map(lambda each: tinkex.render_chat(tokenizer, each[0]), skip_bad=config.skip_bad)
        batches = Batches([1] * len(prompts.items), size=config.batch_size, seed=config.seed)
        steps = config.steps or 50
        answers = f"{config.batch_size} × {config.group_size} answers"
        bad = f"{prompts.bad} bad rows left out"
        run.begin(f"{len(prompts.items)} prompts ({bad}): {steps} steps of {answers}", steps)
        for step in run:
            batch = [prompts.items[i] for i in batches[step - 1]]
            student = client.save_weights_and_get_sampling_client()  # the current weights: on-policy
            said = answer(student, batch, config, step)
            scored = [
                teacher.compute_logprobs(tinkex.ModelInput.from_ints([*prompt, *sequence.tokens]))
                for prompt, sequence in said
            ]
            data: list[tinkex.Datum] = []
            distances: list[np.ndarray] = []
            for (prompt, sequence), future in zip(said, scored, strict=True):
                theirs = np.array(future.result()[len(prompt) :], np.float64)
                apart = np.array(sequence.logprobs) - theirs
                distances.append(apart)
                data.append(rl_datum(prompt, sequence, -apart))
            adam = run.adam(step)
            passed = client.forward_backward(mean_advantages(data), "importance_sampling")
            client.optim_step(adam).result()
            row = {"kl_teacher": float(np.concatenate(distances).mean()), **kl_metrics(data, passed.result())}
            tokens = sum(datum.model_input.length for datum in data)
            row = {"loss": passed.result().metrics["loss:sum"], **row, "learning_rate": adam.learning_rate}
            run.directory.log(step, row, tokens)
            text = tokenizer.decode(said[0][1].tokens, skip_special_tokens=True)
            run.directory.sample(step, prompt=tokenizer.decode(said[0][0]), text=text)
        return run.finish()


def answer(
    student: tinkex.SamplingClient, batch: Sequence[list[int]], config: DistillConfig, step: int
) -> list[tuple[list[int], tinkex.SampledSequence]]:
    """The student's answers to a step's prompts, each with its prompt."""
    seed = (config.seed * 7919 + step) * _STRIDE
    params = tinkex.SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature)
    asked = [
        student.sample(tinkex.ModelInput.from_ints(prompt), config.group_size, replace(params, seed=own))
        for prompt, own in zip(batch, ((seed + place) % 2**31 for place in range(len(batch))), strict=True)
    ]
    answers = zip(batch, asked, strict=True)
    return [(prompt, sequence) for prompt, future in answers for sequence in future.result().sequences]


def check_vocabularies(student: Any, teacher: Any, config: DistillConfig) -> None:
    """Token ids must mean the same to both."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        differ = len(ours.items() ^ theirs.items())
        raise tinkex.InvalidInputError(
            f"the teacher {config.teacher} has another vocabulary than {config.model}: {differ} entries "
            "differ. A teacher of the same family has the same"
        )
