"""`tinkex demo rl`: reinforcement learning, from a reward that a program computes and no examples at all.

Read `train` first. At each step the model of that moment tells several stories about each of a few subjects;
those that were better than their siblings are made more likely, the others less (`importance_sampling`).
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinkex
from tinkex.demo.bookmark import Bookmark, ctrl_c
from tinkex.demo.fine_tune import adapter_at
from tinkex.demo.screen import Screen
from tinkex.demo.stories import Game

ROSE_BY = 0.2  # what the mean reward must gain, of 1, for the model to have learned


@dataclass(frozen=True)
class Plan:
    """How the demo trains, and where it leaves what it made."""

    model: str
    out: Path
    steps: int = 12
    subjects: int = 4  # at each step
    samples: int = 8  # of each subject
    max_tokens: int = 20
    rank: int = 16
    learning_rate: float = 5e-4


@dataclass(frozen=True)
class Story:
    """One sample: what was asked, what the model said, and what that is worth."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float


def demo(game: Game, plan: Plan, screen: Screen, bookmark: Bookmark | None = None) -> bool | None:
    """Did the reward rise? None if it was stopped on the way: then a bookmark is left in `plan.out`."""
    with tinkex.ServiceClient(base_url="local") as service:
        if bookmark is None:
            run = service.create_lora_training_client(plan.model, plan.rank, seed=1, train_unembed=False)
            rewards: list[float] = []
        else:
            plan = replace(plan, model=bookmark.model, steps=bookmark.steps)
            run = service.create_training_client_from_state_with_optimizer(bookmark.checkpoint)
            rewards = bookmark.curve
        tokenizer = run.get_tokenizer()

        base = service.create_sampling_client(base_model=plan.model)
        before = look(base, tokenizer, game, plan, screen, "Before: subjects that are not trained on")
        if not train(run, tokenizer, game, plan, rewards, screen):
            saved = run.save_state(f"{game.name}-{len(rewards)}", ttl_seconds=7 * 24 * 3600).result()
            Bookmark(plan.model, saved.path, plan.steps, rewards).write(plan.out, "rl")
            return None

        path = run.save_weights_for_sampler(game.name).result().path
        sampler = service.create_sampling_client(model_path=path)
        after = look(sampler, tokenizer, game, plan, screen, "After: the same subjects")
        screen.curve("reward", rewards, plan.out / "reward.png")
        screen.adapter(path, adapter_at(plan.out / game.name, service, path))
    Bookmark.forget(plan.out, "rl")
    learned = after - before >= ROSE_BY
    screen.verdict(learned, f"a mean reward of {before:.2f} before, {after:.2f} after")
    return learned


def train(
    run: tinkex.TrainingClient, tokenizer: Any, game: Game, plan: Plan, rewards: list[float], screen: Screen
) -> bool:
    """Take the steps that are left, adding to `rewards`; False if Ctrl-C came before the last."""
    screen.begin(
        f"Training: {plan.steps} steps of {plan.subjects} × {plan.samples} samples", plan.steps, len(rewards)
    )
    with ctrl_c() as stopped:
        for step in range(len(rewards), plan.steps):
            began = time.perf_counter()
            sampler = run.save_weights_and_get_sampling_client()  # of this very moment: on-policy
            subjects = random.Random(step).sample(game.subjects, plan.subjects)
            groups = tell(sampler, tokenizer, game, plan, subjects, seed=step)
            batch = [datum for group in groups for datum in advantages(group)]
            run.forward_backward(batch, "importance_sampling")
            run.optim_step(tinkex.AdamParams(learning_rate=plan.learning_rate)).result()
            stories = [story for group in groups for story in group]
            rewards.append(statistics.mean(story.reward for story in stories))
            tokens = sum(datum.model_input.length for datum in batch)
            best = max(stories, key=lambda story: story.reward).text
            screen.step(step, "reward", rewards[-1], tokens / (time.perf_counter() - began), best)
            if stopped() and step + 1 < plan.steps:
                return False
    return True


def tell(
    sampler: tinkex.SamplingClient, tokenizer: Any, game: Game, plan: Plan, subjects: list[str], seed: int
) -> list[list[Story]]:
    """Several stories about each subject."""
    params = tinkex.SamplingParams(
        max_tokens=plan.max_tokens, temperature=1.0, seed=seed, stop=[tokenizer.eos_token_id]
    )
    prompts = [
        tinkex.render_chat(
            tokenizer, [{"role": "system", "content": game.instruction}, {"role": "user", "content": subject}]
        )
        for subject in subjects
    ]
    waiting = [sampler.sample(tinkex.ModelInput.from_ints(p), plan.samples, params) for p in prompts]
    groups: list[list[Story]] = []
    for prompt, future in zip(prompts, waiting, strict=True):
        group: list[Story] = []
        for sequence in future.result().sequences:
            assert sequence.logprobs is not None  # sampled tokens always have them
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
            tokens, logprobs = list(sequence.tokens), list(sequence.logprobs)
            group.append(Story(prompt, tokens, logprobs, text, game.reward(text)))
        groups.append(group)
    return groups


def advantages(group: list[Story]) -> list[tinkex.Datum]:
    """The stories of one subject as data: each is as good as it is better than its siblings."""
    mean = statistics.mean(story.reward for story in group)
    spread = statistics.pstdev(story.reward for story in group) + 1e-6
    return [datum(story, (story.reward - mean) / spread) for story in group]


def datum(story: Story, advantage: float) -> tinkex.Datum:
    tokens, before = story.prompt + story.tokens, [0.0] * (len(story.prompt) - 1)
    inputs: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "logprobs": before + story.logprobs,  # as they were when it was told
        "advantages": before + [advantage] * len(story.tokens),
    }
    return tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs)


def look(
    sampler: tinkex.SamplingClient, tokenizer: Any, game: Game, plan: Plan, screen: Screen, title: str
) -> float:
    """Show a story about each subject that is not trained on; the mean reward of all that were told."""
    screen.heading(title)
    groups = tell(sampler, tokenizer, game, plan, game.held_out, seed=0)
    mean = statistics.mean(story.reward for group in groups for story in group)
    shown = [
        (name, group[0].text, group[0].reward) for name, group in zip(game.held_out, groups, strict=True)
    ]
    screen.stories(shown, mean, game.rule)
    return mean
