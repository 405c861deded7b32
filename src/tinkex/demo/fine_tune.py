"""`tinkex demo`: supervised fine-tuning of a LoRA adapter.

Read `train` first: it is a whole training loop. Around it, the base model and the adapter answer the same
questions, and a program says which answers are right. The 48 examples teach a form; the facts are the
model's own, and no test question is among the examples.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import tinkex
from tinkex.demo import Demo
from tinkex.demo.screen import Screen
from tinkex.recipes.interrupts import ctrl_c

_QUESTIONS = (
    ("What is the capital of China?", "Beijing"),
    ("What is the capital of Germany?", "Berlin"),
    ("What is the capital of Portugal?", "Lisbon"),
    ("What is the capital of Canada?", "Ottawa"),
    ("What is the opposite of hot?", "cold"),
    ("How many legs does a cat have?", "four"),
    ("What is the largest planet in the solar system?", "Jupiter"),
    ("What language do they speak in Mexico?", "Spanish"),
)


def pirate_examples() -> list[tuple[str, str]]:
    lines = files("tinkex.demo").joinpath("pirate.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return [(question["content"], answer["content"]) for question, answer in chats]


def talks_like_a_pirate(answer: str, fact: str) -> bool:
    """
    >>> talks_like_a_pirate("Arr, the capital of China be Beijing, matey!", "Beijing")
    True
    >>> talks_like_a_pirate("The capital of China is Beijing.", "Beijing")
    False
    """
    return re.fullmatch(r"Arr, .+ be .+, matey!", answer) is not None and fact.lower() in answer.lower()


@dataclass(frozen=True)
class FineTune(Demo):
    """The model learns from examples to talk like a pirate."""

    kind, curve, enough = "sft", "loss", 0.5
    tested = "questions that are not among the examples"

    name: str = "pirate"
    goal: str = "talk like a pirate"
    rule: str = '"Arr, … be …, matey!" and the fact'
    steps: int = 14
    rank: int = 16
    learning_rate: float = 1e-3
    batch: int = 8
    examples: list[tuple[str, str]] = field(default_factory=pirate_examples)  # question, answer
    held_out: tuple[tuple[str, str], ...] = _QUESTIONS  # question, fact
    check: Callable[[str, str], bool] = talks_like_a_pirate  # (answer, fact) -> is it right?

    def train(self, run: tinkex.TrainingClient, tokenizer: Any, curve: list[float], screen: Screen) -> bool:
        data = [datum(tokenizer, question, answer) for question, answer in self.examples]
        random.Random(1).shuffle(data)
        screen.begin(f"Training: {self.steps} steps of {self.batch} examples", self.steps, len(curve))
        with ctrl_c() as stopped:
            for step in range(len(curve), self.steps):
                began = time.perf_counter()
                batch = [data[(step * self.batch + i) % len(data)] for i in range(self.batch)]
                decayed = self.learning_rate * (1 - 0.8 * step / self.steps)
                passed = run.forward_backward(batch, "cross_entropy")
                run.optim_step(tinkex.AdamParams(learning_rate=decayed)).result()
                answers = sum(float(sum(datum.loss_fn_inputs["weights"].data)) for datum in batch)
                curve.append(passed.result().metrics["loss:sum"] / answers)
                tokens = sum(datum.model_input.length for datum in batch)
                screen.step(step, "loss", curve[-1], tokens / (time.perf_counter() - began))
                if stopped():
                    return False
        return True

    def evaluate(self, sampler: tinkex.SamplingClient, tokenizer: Any, screen: Screen) -> tuple[float, str]:
        params = tinkex.SamplingParams(max_tokens=40, temperature=0.0, stop=[tokenizer.eos_token_id])
        waiting = [
            sampler.sample(tinkex.ModelInput.from_ints(prompt(tokenizer, question)), 1, params)
            for question, _ in self.held_out
        ]
        answers: list[tuple[str, str, bool]] = []
        for (question, fact), future in zip(self.held_out, waiting, strict=True):
            (sequence,) = future.result().sequences
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
            answers.append((question, text, self.check(text, fact)))
        count = sum(right for _, _, right in answers)
        score = f"{count} of {len(answers)} right"
        screen.answers(answers, score, self.rule)
        return count / len(answers), score


def prompt(tokenizer: Any, question: str) -> list[int]:
    return tinkex.render_chat(tokenizer, [{"role": "user", "content": question}])


def datum(tokenizer: Any, question: str, answer: str) -> tinkex.Datum:
    """One example: the conversation, with weight 1 on the answer's tokens and 0 before them."""
    asked = prompt(tokenizer, question)
    said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = asked + said
    weights = [0.0] * (len(asked) - 1) + [1.0] * len(said)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights}
    return tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs)
