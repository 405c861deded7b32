"""Environments for reinforcement learning: problems by number, and a program that judges the answers.

`arithmetic`, `format`, `python` (code is run in the sandbox) and `tools` (several turns with a calculator)
need no data; prompts of a file with your own reward are one too. A problem is a function of its number, so
that a run can resume. An environment knows text and messages, no tokens and no models.
"""

from __future__ import annotations

import ast
import operator
import random
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinkex.data import Message
from tinkex.errors import InvalidInputError
from tinkex.recipes.sandbox import SandboxLimits, run_python


@dataclass(frozen=True)
class Judgement:
    """What follows an answer: a reward at the end of an episode, or further messages."""

    reward: float = 0.0
    messages: tuple[Message, ...] = ()  # empty: the episode is over


class Episode(Protocol):
    """One attempt at a problem."""

    messages: list[Message]  # the conversation so far, up to where the assistant speaks

    def answer(self, text: str) -> Judgement:
        """Judge the assistant's turn."""
        ...


class Environment(Protocol):
    """Problems 0, 1, 2, …; each may be attempted many times."""

    def episode(self, number: int) -> Episode: ...


@dataclass
class OneTurn:
    """An episode of a single answer."""

    messages: list[Message]
    judge: Callable[[str], float]

    def answer(self, text: str) -> Judgement:
        return Judgement(self.judge(text))


@dataclass(frozen=True)
class Questions:
    """Prompts of a file, in turn, with your own reward."""

    prompts: Sequence[tuple[list[Message], Mapping[str, Any]]]
    reward: Callable[[str, Mapping[str, Any]], float]

    def episode(self, number: int) -> Episode:
        messages, row = self.prompts[number % len(self.prompts)]
        return OneTurn(list(messages), lambda text: self.reward(text, row))


def _asks(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Arithmetic:
    """Sums of two numbers: 1 for the right one, 0.1 for another number."""

    largest: int = 20
    seed: int = 0

    def episode(self, number: int) -> Episode:
        draw = random.Random(f"{self.seed}/{number}")
        left, right = draw.randint(0, self.largest), draw.randint(0, self.largest)
        question = _asks(f"What is {left} + {right}? Answer with the number only.")
        return OneTurn(question, lambda text: self.judge(text, left + right))

    def judge(self, text: str, right: int) -> float:
        numbers = re.findall(r"-?\d+", text)
        return 0.0 if not numbers else 1.0 if int(numbers[0][:12]) == right else 0.1


@dataclass(frozen=True)
class Format:
    """Answers between <answer> and </answer>, and nothing else: a share of 1 for each part of it."""

    seed: int = 0
    subjects: tuple[str, ...] = (
        "a colour", "an animal", "a city", "a fruit", "a metal", "a river", "a tool", "a game",
    )  # fmt: skip

    def episode(self, number: int) -> Episode:
        subject = random.Random(f"{self.seed}/{number}").choice(self.subjects)
        return OneTurn(_asks(f"Name {subject}. Write it as <answer>…</answer>."), self.judge)

    def judge(self, text: str) -> float:
        once = [text.count(tag) == 1 for tag in ("<answer>", "</answer>")]
        whole = bool(re.fullmatch(r"\s*<answer>[^<>]+</answer>\s*", text))
        return 0.25 * sum(once) + 0.5 * whole


@dataclass(frozen=True)
class Python:
    """Write a function: the share of tests that it passes, run in the sandbox."""

    seed: int = 0
    seconds: float = 3.0
    tasks: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("double(x), which returns twice x", "double", ("double(2) == 4", "double(-1) == -2")),
        ("largest(items), which returns the largest item of a list", "largest", ("largest([1, 3, 2]) == 3",)),
        ("is_even(n), which says whether n is even", "is_even", ("is_even(4)", "not is_even(3)")),
        ("last(text), which returns the last character of a string", "last", ("last('abc') == 'c'",)),
        ("count(text, char), which counts char in text", "count", ("count('banana', 'a') == 3",)),
        ("square(x), which returns x times x", "square", ("square(3) == 9", "square(0) == 0")),
    )  # fmt: skip

    def episode(self, number: int) -> Episode:
        what, _, tests = self.tasks[random.Random(f"{self.seed}/{number}").randrange(len(self.tasks))]
        question = _asks(f"Write the Python function {what}. Answer with the code only.")
        return OneTurn(question, lambda text: self.judge(text, tests))

    def judge(self, text: str, tests: Sequence[str]) -> float:
        block = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
        code = block[1] if block else text
        lines = [f"try:\n    print(1 if ({test}) else 0)\nexcept Exception:\n    print(0)" for test in tests]
        mark = secrets.token_hex(8)  # what the code prints itself is no test
        ended = run_python("\n".join([code, f"print('{mark}')", *lines]), limits=SandboxLimits(self.seconds))
        passed = ended.stdout.partition(f"{mark}\n")[2].split().count("1")
        return min(1.0, passed / len(tests)) if ended.exit_code == 0 else 0.0


@dataclass
class ToolEpisode:
    """Products that are hard to know by heart, with a calculator for <calc>…</calc>."""

    messages: list[Message]
    right: int
    turns: int = 3
    used: bool = field(default=False, init=False)

    def answer(self, text: str) -> Judgement:
        self.turns -= 1
        call = re.search(r"<calc>([^<>]{1,80})</calc>", text)
        if call is not None and self.turns > 0:
            self.used = True
            result = {"role": "user", "content": f"<result>{calculate(call[1])}</result>"}
            return Judgement(messages=(result,))
        numbers = re.findall(r"-?\d+", text)
        right = bool(numbers) and int(numbers[-1][:12]) == self.right
        return Judgement(1.0 * right + 0.1 * self.used)


@dataclass(frozen=True)
class Tools:
    """Several turns: the assistant may call a calculator, and then answers."""

    largest: int = 99
    seed: int = 0

    def episode(self, number: int) -> Episode:
        draw = random.Random(f"{self.seed}/{number}")
        left, right = draw.randint(2, self.largest), draw.randint(2, self.largest)
        question = (
            f"What is {left} * {right}? Write <calc>{left} * {right}</calc> to use the calculator; "
            "its result comes as <result>…</result>. Then answer with the number."
        )
        return ToolEpisode(_asks(question), left * right)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: lambda a, b: a / b,
}  # fmt: skip


def calculate(text: str) -> str:
    """The value of an expression of numbers and + - * /, or an error message.

    >>> calculate("(2 + 3) * 4"), calculate("__import__('os')")
    ('20', 'error: only numbers and + - * /')
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.6g}"
    except (SyntaxError, ValueError, OverflowError, ZeroDivisionError, RecursionError) as error:
        return f"error: {error if isinstance(error, ValueError | ZeroDivisionError) else 'no expression'}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case _:
            raise ValueError("only numbers and + - * /")


ENVIRONMENTS: dict[str, Callable[[int], Environment]] = {
    "arithmetic": lambda seed: Arithmetic(seed=seed),
    "format": lambda seed: Format(seed=seed),
    "python": lambda seed: Python(seed=seed),
    "tools": lambda seed: Tools(seed=seed),
}


def environment(name: str, seed: int) -> Environment:
    """A built-in environment by its name."""
    if name not in ENVIRONMENTS:
        raise InvalidInputError(f"--env must be one of {', '.join(ENVIRONMENTS)}, got {name!r}")
    return ENVIRONMENTS[name](seed)
