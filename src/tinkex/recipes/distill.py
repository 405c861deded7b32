"""On-policy distillation: `tinkex train distill PROMPTS --teacher MODEL`.

Read `train_distill`. The student answers; a token's advantage is the teacher's logprob of it minus the
student's, so that the reverse KL divergence falls. Student and teacher must share a vocabulary.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tinkex
from tinkex.data import Batches
from tinkex.recipes.conversations import load, question
from tinkex.recipes.interrupts import ctrl_c
from tinkex.recipes.progress import Progress
from tinkex.recipes.run_directory import Interrupted, Outcome
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
    progress = progress or Progress(quiet=True)
    read = load(config.data, question, skip_bad=config.skip_bad)
    with ExitStack() as stack:
        directory = stack.enter_context(
            config.open("distill", config.data, progress, data_digest=read.digest)
        )
        if directory.outcome is not None:
            progress.note(f"{directory.path} is finished; --fresh trains anew")
            return directory.outcome
        service = service or stack.enter_context(tinkex.ServiceClient())
        run = directory.resume(service) or config.create_run(service, directory.name)
        tokenizer = run.get_tokenizer()
        teacher = sampler_of(service, config.teacher)
        check_vocabularies(tokenizer, teacher.get_tokenizer(), config)
        prompts = read.map(lambda each: tinkex.render_chat(tokenizer, each[0]), skip_bad=config.skip_bad)
        batches = Batches([1] * len(prompts.items), size=config.batch_size, seed=config.seed)
        steps = config.steps or 50
        peak = config.peak_learning_rate(service, "distill")
        answers = f"{config.batch_size} × {config.group_size} answers"
        title = f"{len(prompts.items)} prompts ({prompts.bad} bad rows left out): {steps} steps of {answers}"
        progress.begin(f"{title}, learning rate {peak:g}", steps, directory.done)
        stopped = stack.enter_context(ctrl_c())
        for step in range(directory.done + 1, steps + 1):
            batch = [prompts.items[i] for i in batches[step - 1]]
            student = run.save_weights_and_get_sampling_client()  # the current weights: on-policy
            seed = (config.seed * 7919 + step) * _STRIDE
            params = tinkex.SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature)
            asked = [
                student.sample(
                    tinkex.ModelInput.from_ints(prompt),
                    config.group_size,
                    replace(params, seed=(seed + place) % 2**31),
                )
                for place, prompt in enumerate(batch)
            ]
            said = [
                (prompt, sequence)
                for prompt, future in zip(batch, asked, strict=True)
                for sequence in future.result().sequences
            ]
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
            adam = config.step_params(step - 1, steps, peak)
            passed = run.forward_backward(mean_advantages(data), "importance_sampling")
            run.optim_step(adam).result()
            row = {"kl_teacher": float(np.concatenate(distances).mean()), **kl_metrics(data, passed.result())}
            tokens = sum(datum.model_input.length for datum in data)
            row = {"loss": passed.result().metrics["loss:sum"], **row, "learning_rate": adam.learning_rate}
            directory.log(step, row, tokens)
            text = tokenizer.decode(said[0][1].tokens, skip_special_tokens=True)
            directory.sample(step, prompt=tokenizer.decode(said[0][0]), text=text)
            stop = stopped()
            if stop or step % config.save_every == 0 or step == steps:
                directory.save(service, run, step)
            if stop and step < steps:
                raise Interrupted(f"stopped after step {step} of {steps}; the same command continues")
        return directory.finish(run)


def check_vocabularies(student: Any, teacher: Any, config: DistillConfig) -> None:
    """Token ids must mean the same to both."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        differ = len(ours.items() ^ theirs.items())
        raise tinkex.InvalidInputError(
            f"the teacher {config.teacher} has another vocabulary than {config.model}: {differ} entries "
            "differ. A teacher of the same family has the same"
        )
