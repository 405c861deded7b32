"""`tinkex demo rl`: reinforcement learning from a reward that a program computes, without examples.

Read `train` first. In each step the current model tells several stories about each of a few subjects. A
story's advantage is its reward compared with those about the same subject; the loss is
`importance_sampling`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tinkex
from tinkex.demo import Demo
from tinkex.demo.screen import Screen
from tinkex.recipes.interrupts import ctrl_c
from tinkex.rl import group_advantages, rl_datum


def five_words(sample: str) -> float:
    """How near a sample comes to five words; 0 if it does not end as a sentence does.

    >>> five_words("The dragon ate my homework."), five_words("A dragon."), five_words("The dragon ate my")
    (1.0, 0.4, 0.0)
    """
    count = len(sample.split())
    if not count or not sample.rstrip().endswith((".", "!", "?")):
        return 0.0
    return max(0.0, 1 - abs(count - 5) / 5)


@dataclass(frozen=True)
class ScoredSample:
    """A prompt, what the model sampled, and its reward."""

    prompt: list[int]
    sequence: tinkex.SampledSequence
    text: str
    reward: float


@dataclass(frozen=True)
class Reinforce(Demo):
    """The model learns from a reward to tell stories of five words."""

    kind, curve, enough = "rl", "reward", 0.2
    tested = "subjects that are not trained on"

    name: str = "stories"
    goal: str = "tell a story in five words"
    rule: str = "five words and a full stop are 1"
    steps: int = 12
    rank: int = 16
    learning_rate: float = 5e-4
    subjects_per_step: int = 4
    samples: int = 8  # of each subject
    max_tokens: int = 20
    instruction: str = "Tell a story in five words."
    subjects: tuple[str, ...] = (
        "the sea", "a snake", "winter", "the moon", "a sandwich", "a storm", "a sailor", "summer",
        "a spider", "a school", "a river", "a king",
    )  # fmt: skip
    held_out: tuple[str, ...] = ("a ship", "a dragon", "a song", "breakfast")
    reward: Callable[[str], float] = five_words  # from 0 to 1

    def train(self, run: tinkex.TrainingClient, tokenizer: Any, curve: list[float], screen: Screen) -> bool:
        title = f"Training: {self.steps} steps of {self.subjects_per_step} × {self.samples} samples"
        screen.begin(title, self.steps, len(curve))
        with ctrl_c() as stopped:
            for step in range(len(curve), self.steps):
                began = time.perf_counter()
                sampler = run.save_weights_and_get_sampling_client()  # the current weights: on-policy
                subjects = random.Random(step).sample(self.subjects, self.subjects_per_step)
                groups = self.sample(sampler, tokenizer, subjects, seed=step)
                batch = [datum for group in groups for datum in group_data(group)]
                run.forward_backward(batch, "importance_sampling")
                run.optim_step(tinkex.AdamParams(learning_rate=self.learning_rate)).result()
                samples = [each for group in groups for each in group]
                curve.append(statistics.mean(each.reward for each in samples))
                tokens = sum(datum.model_input.length for datum in batch)
                best = max(samples, key=lambda each: each.reward).text
                screen.step(step, "reward", curve[-1], tokens / (time.perf_counter() - began), best)
                if stopped():
                    return False
        return True

    def sample(
        self, sampler: tinkex.SamplingClient, tokenizer: Any, subjects: Sequence[str], seed: int
    ) -> list[list[ScoredSample]]:
        """A group of samples for each subject."""
        stop = [tokenizer.eos_token_id]
        params = tinkex.SamplingParams(max_tokens=self.max_tokens, temperature=1.0, seed=seed, stop=stop)
        system = {"role": "system", "content": self.instruction}
        prompts = [
            tinkex.render_chat(tokenizer, [system, {"role": "user", "content": subject}])
            for subject in subjects
        ]
        waiting = [sampler.sample(tinkex.ModelInput.from_ints(p), self.samples, params) for p in prompts]
        groups: list[list[ScoredSample]] = []
        for prompt, future in zip(prompts, waiting, strict=True):
            groups.append([])
            for sequence in future.result().sequences:
                text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
                groups[-1].append(ScoredSample(prompt, sequence, text, self.reward(text)))
        return groups

    def evaluate(self, sampler: tinkex.SamplingClient, tokenizer: Any, screen: Screen) -> tuple[float, str]:
        groups = self.sample(sampler, tokenizer, self.held_out, seed=0)
        mean = statistics.mean(each.reward for group in groups for each in group)
        firsts = zip(self.held_out, (group[0] for group in groups), strict=True)
        score = f"mean reward {mean:.2f}"
        screen.samples([(subject, first.text, first.reward) for subject, first in firsts], score, self.rule)
        return mean, score


def group_data(group: list[ScoredSample]) -> list[tinkex.Datum]:
    """One subject's samples as training data, with advantages normalised within the group."""
    advantages = group_advantages([each.reward for each in group], divide_by_std=True)
    pairs = zip(group, advantages.tolist(), strict=True)
    return [rl_datum(each.prompt, each.sequence, advantage) for each, advantage in pairs]
