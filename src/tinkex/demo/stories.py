"""The task of `tinkex demo rl`: a story in exactly five words. No example is given, only a reward.

The reward is the whole of what the model is told: how near a sample comes to five words, and nothing for one
that does not end as a sentence does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Game:
    """Something to be rewarded for: what is asked of the model, about what, and what a sample is worth."""

    name: str
    goal: str
    rule: str  # the reward, in words
    instruction: str
    subjects: list[str]
    held_out: list[str]
    reward: Callable[[str], float]  # of a sample, from 0 to 1


SUBJECTS = [
    "the sea", "a snake", "winter", "the moon", "a sandwich", "a storm", "a sailor", "summer", "a spider",
    "a school", "a river", "a king",
]  # fmt: skip
HELD_OUT = ["a ship", "a dragon", "a song", "breakfast"]
WORDS = 5


def five_words(sample: str) -> float:
    """
    >>> five_words("The dragon ate my homework."), five_words("A dragon."), five_words("The dragon ate my")
    (1.0, 0.4, 0.0)
    """
    words = sample.split()
    if not words or not sample.rstrip().endswith((".", "!", "?")):
        return 0.0
    return max(0.0, 1 - abs(len(words) - WORDS) / WORDS)


def game() -> Game:
    return Game(
        name="stories",
        goal="tell a story in five words",
        rule="five words and a full stop are 1",
        instruction="Tell a story in five words.",
        subjects=SUBJECTS,
        held_out=HELD_OUT,
        reward=five_words,
    )
