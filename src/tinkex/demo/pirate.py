"""The task of `tinkex demo`: answer a question of general knowledge as a pirate would, and answer it right.

The 48 examples beside this file teach the form; the facts are the model's own, and the questions it is tested
with are not among the examples. An answer counts if it has the form from end to end and the fact in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Task:
    """Something to learn: examples (question, answer), and questions to test it with (question, fact)."""

    name: str
    goal: str
    rule: str  # the check, in words
    examples: list[tuple[str, str]]
    held_out: list[tuple[str, str]]
    check: Callable[[str, str], bool]  # (answer, fact) -> does it count?


HELD_OUT = [
    ("What is the capital of China?", "Beijing"),
    ("What is the capital of Germany?", "Berlin"),
    ("What is the capital of Portugal?", "Lisbon"),
    ("What is the capital of Canada?", "Ottawa"),
    ("What is the opposite of hot?", "cold"),
    ("How many legs does a cat have?", "four"),
    ("What is the largest planet in the solar system?", "Jupiter"),
    ("What language do they speak in Mexico?", "Spanish"),
]


def talks_like_a_pirate(answer: str, fact: str) -> bool:
    """
    >>> talks_like_a_pirate("Arr, the capital of China be Beijing, matey!", "Beijing")
    True
    >>> talks_like_a_pirate("The capital of China is Beijing.", "Beijing")
    False
    """
    return re.fullmatch(r"Arr, .+ be .+, matey!", answer) is not None and fact.lower() in answer.lower()


def task() -> Task:
    lines = files("tinkex.demo").joinpath("pirate.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return Task(
        name="pirate",
        goal="talk like a pirate",
        rule='"Arr, … be …, matey!" and the fact',
        examples=[(question["content"], answer["content"]) for question, answer in chats],
        held_out=HELD_OUT,
        check=talks_like_a_pirate,
    )
