"""The tasks of the demos: what the model learns, and the program that checks whether it did.

The 48 pirate examples teach a form; the facts are the model's own, and no test question is among the
examples. The five-word task has no examples, only a reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class SupervisedTask:
    """Examples (question, answer), and test questions (question, fact)."""

    name: str
    goal: str
    rule: str  # the check, in words
    examples: list[tuple[str, str]]
    held_out: list[tuple[str, str]]
    check: Callable[[str, str], bool]  # (answer, fact) -> is it right?


@dataclass(frozen=True)
class RewardTask:
    """An instruction, subjects to apply it to, and the reward of a sample."""

    name: str
    goal: str
    rule: str  # the reward, in words
    instruction: str
    subjects: list[str]
    held_out: list[str]
    reward: Callable[[str], float]  # from 0 to 1


def pirate_task() -> SupervisedTask:
    lines = files("tinkex.demo").joinpath("pirate.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return SupervisedTask(
        name="pirate",
        goal="talk like a pirate",
        rule='"Arr, … be …, matey!" and the fact',
        examples=[(question["content"], answer["content"]) for question, answer in chats],
        held_out=[
            ("What is the capital of China?", "Beijing"),
            ("What is the capital of Germany?", "Berlin"),
            ("What is the capital of Portugal?", "Lisbon"),
            ("What is the capital of Canada?", "Ottawa"),
            ("What is the opposite of hot?", "cold"),
            ("How many legs does a cat have?", "four"),
            ("What is the largest planet in the solar system?", "Jupiter"),
            ("What language do they speak in Mexico?", "Spanish"),
        ],
        check=talks_like_a_pirate,
    )


def talks_like_a_pirate(answer: str, fact: str) -> bool:
    """
    >>> talks_like_a_pirate("Arr, the capital of China be Beijing, matey!", "Beijing")
    True
    >>> talks_like_a_pirate("The capital of China is Beijing.", "Beijing")
    False
    """
    return re.fullmatch(r"Arr, .+ be .+, matey!", answer) is not None and fact.lower() in answer.lower()


def five_words_task() -> RewardTask:
    return RewardTask(
        name="stories",
        goal="tell a story in five words",
        rule="five words and a full stop are 1",
        instruction="Tell a story in five words.",
        subjects=[
            "the sea", "a snake", "winter", "the moon", "a sandwich", "a storm", "a sailor", "summer",
            "a spider", "a school", "a river", "a king",
        ],
        held_out=["a ship", "a dragon", "a song", "breakfast"],
        reward=five_words,
    )  # fmt: skip


def five_words(sample: str, words: int = 5) -> float:
    """How near a sample comes to five words; 0 if it does not end as a sentence does.

    >>> five_words("The dragon ate my homework."), five_words("A dragon."), five_words("The dragon ate my")
    (1.0, 0.4, 0.0)
    """
    count = len(sample.split())
    if not count or not sample.rstrip().endswith((".", "!", "?")):
        return 0.0
    return max(0.0, 1 - abs(count - words) / words)
