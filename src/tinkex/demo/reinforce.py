"""`tinkex demo rl`: reinforcement learning from a reward that a program computes, without examples.

Read `train` first. In each step the current model tells several stories about each of a few subjects. A
story's advantage is its reward compared with those about the same subject; the loss is
`importance_sampling`.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinkex
from tinkex.demo.bookmark import Bookmark, ctrl_c, open_run, save_bookmark
from tinkex.demo.fine_tune import download_adapter
from tinkex.demo.screen import Screen
from tinkex.demo.tasks import RewardTask

LEARNED_GAIN = 0.2  # rise of the mean reward, of 1, that counts as learned


@dataclass(frozen=True)
class ReinforcePlan:
    """How the demo trains, and where its files go."""

    model: str
    out: Path
    steps: int = 12
    subjects: int = 4  # in each step
    samples: int = 8  # of each subject
    max_tokens: int = 20
    rank: int = 16
    learning_rate: float = 5e-4


@dataclass(frozen=True)
class ScoredSample:
    """A prompt, what the model sampled, and its reward."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float


def demo(
    task: RewardTask, plan: ReinforcePlan, screen: Screen, bookmark: Bookmark | None = None
) -> bool | None:
    """Did the reward rise? None if Ctrl-C stopped it: then there is a bookmark in `plan.out`."""
    if bookmark is not None:
        plan = replace(plan, model=bookmark.model, steps=bookmark.steps)
    rewards: list[float] = list(bookmark.curve) if bookmark else []
    with tinkex.ServiceClient(base_url="local") as service:
        run = open_run(service, plan.model, plan.rank, bookmark)
        tokenizer = run.get_tokenizer()
        base = service.create_sampling_client(base_model=plan.model)
        before = evaluate(base, tokenizer, task, plan, screen, "Before: subjects that are not trained on")
        finished = train(run, tokenizer, task, plan, rewards, screen)
        save_bookmark(run, task.name, plan.model, plan.steps, rewards, plan.out, "rl")
        if not finished:
            return None
        try:
            path = run.save_weights_for_sampler(task.name).result().path
            sampler = service.create_sampling_client(model_path=path)
            after = evaluate(sampler, tokenizer, task, plan, screen, "After: the same subjects")
            screen.curve("reward", rewards, plan.out / "reward.png")
            screen.adapter(path, download_adapter(plan.out / task.name, service, path))
        except KeyboardInterrupt:
            return None
    Bookmark.delete(plan.out, "rl")
    learned = after - before >= LEARNED_GAIN
    screen.verdict(learned, f"a mean reward of {before:.2f} before, {after:.2f} after")
    return learned


def train(
    run: tinkex.TrainingClient,
    tokenizer: Any,
    task: RewardTask,
    plan: ReinforcePlan,
    rewards: list[float],
    screen: Screen,
) -> bool:
    """Take the remaining steps, appending to `rewards`; False if Ctrl-C stopped it."""
    title = f"Training: {plan.steps} steps of {plan.subjects} × {plan.samples} samples"
    screen.begin(title, plan.steps, len(rewards))
    with ctrl_c() as stopped:
        for step in range(len(rewards), plan.steps):
            began = time.perf_counter()
            sampler = run.save_weights_and_get_sampling_client()  # the current weights: on-policy
            subjects = random.Random(step).sample(task.subjects, plan.subjects)
            groups = sample(sampler, tokenizer, task, plan, subjects, seed=step)
            batch = [datum for group in groups for datum in group_data(group)]
            run.forward_backward(batch, "importance_sampling")
            run.optim_step(tinkex.AdamParams(learning_rate=plan.learning_rate)).result()
            samples = [each for group in groups for each in group]
            rewards.append(statistics.mean(each.reward for each in samples))
            tokens = sum(datum.model_input.length for datum in batch)
            best = max(samples, key=lambda each: each.reward).text
            screen.step(step, "reward", rewards[-1], tokens / (time.perf_counter() - began), best)
            if stopped():
                return False
    return True


def sample(
    sampler: tinkex.SamplingClient,
    tokenizer: Any,
    task: RewardTask,
    plan: ReinforcePlan,
    subjects: list[str],
    seed: int,
) -> list[list[ScoredSample]]:
    """A group of samples for each subject."""
    stop = [tokenizer.eos_token_id]
    params = tinkex.SamplingParams(max_tokens=plan.max_tokens, temperature=1.0, seed=seed, stop=stop)
    system = {"role": "system", "content": task.instruction}
    prompts = [
        tinkex.render_chat(tokenizer, [system, {"role": "user", "content": subject}]) for subject in subjects
    ]
    waiting = [sampler.sample(tinkex.ModelInput.from_ints(p), plan.samples, params) for p in prompts]
    groups: list[list[ScoredSample]] = []
    for prompt, future in zip(prompts, waiting, strict=True):
        group: list[ScoredSample] = []
        for sequence in future.result().sequences:
            assert sequence.logprobs is not None  # sampled tokens always have them
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
            tokens, logprobs = list(sequence.tokens), list(sequence.logprobs)
            group.append(ScoredSample(prompt, tokens, logprobs, text, task.reward(text)))
        groups.append(group)
    return groups


def group_data(group: list[ScoredSample]) -> list[tinkex.Datum]:
    """One subject's samples as training data, with advantages normalised within the group."""
    mean = statistics.mean(each.reward for each in group)
    spread = statistics.pstdev(each.reward for each in group) + 1e-6
    return [datum(each, (each.reward - mean) / spread) for each in group]


def datum(sampled: ScoredSample, advantage: float) -> tinkex.Datum:
    tokens, before = sampled.prompt + sampled.tokens, [0.0] * (len(sampled.prompt) - 1)
    inputs: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "logprobs": before + sampled.logprobs,  # of the policy that sampled it
        "advantages": before + [advantage] * len(sampled.tokens),
    }
    return tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs)


def evaluate(
    sampler: tinkex.SamplingClient,
    tokenizer: Any,
    task: RewardTask,
    plan: ReinforcePlan,
    screen: Screen,
    title: str,
) -> float:
    """Show a sample for each held-out subject; the mean reward of all samples."""
    screen.heading(title)
    groups = sample(sampler, tokenizer, task, plan, task.held_out, seed=0)
    mean = statistics.mean(each.reward for group in groups for each in group)
    shown = [
        (subject, group[0].text, group[0].reward)
        for subject, group in zip(task.held_out, groups, strict=True)
    ]
    screen.samples(shown, mean, task.rule)
    return mean
