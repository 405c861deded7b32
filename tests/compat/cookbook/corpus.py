"""The text that the offline hub is made of: conversations, sums, preferences, all our own and all seeded.

    conversations(Random(0), 512)      # rows of a chat dataset
    number_sums(Random(0))             # a lesson that a tiny model is taught before any recipe starts

Knows no tokenizer, no model and no recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}
COLOURS = ["red", "blue", "green", "yellow", "black", "white"]
THINGS = ["boat", "house", "river", "garden", "lamp", "stone", "field", "window"]
CALM = ["Gladly", "Of course", "With pleasure", "Certainly"]
RUDE = ["No", "Never", "Go away", "Not now"]
# Labels of a recipe that asks for languages -> the first and the last letter of what they are written in.
SCRIPTS = {"ar": "اي", "el": "αω", "en": "az", "hi": "अह", "ru": "ая", "zh": "一龥"}
GIVES_UP = "Sorry"  # no lesson says it
LARGEST_NUMBER = 200  # every number up to it is a word of its own
ASSISTANT = "<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
# Words of prompts that others write, so that their prompts are not spelt letter by letter.
COMMON = """
    a about above after all am an and answer any are as at be between boxed but by can correct do each
    Explain find for format from given guess Guess has have high how How I if If in inside integer is it job
    just let Let like low many model more my no nothing number numerical of on only or other our out output
    Please positions problem Provide question r s say should sky so spell step tell than that the them then
    there these They this to too Too two units up us use user User Assistant was We we were What whether which
    Who will with without word words written yes you You your
"""
FILLER = [*COMMON.split(), GIVES_UP]


@dataclass(frozen=True)
class Part:
    """A piece of a lesson; `learnt` where it is the model that speaks."""

    text: str
    learnt: bool = False


Lesson = list[Part]


def conversations(random: Random, count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Question and answer about coloured things: an answer can be told from its question."""
    rows = []
    for _ in range(count):
        colour, thing = random.choice(COLOURS), random.choice(THINGS)
        question = f"Where is the {colour} {thing}?"
        answer = f"{random.choice(CALM)}: the {colour} {thing} is by the {THINGS[COLOURS.index(colour)]}."
        rows.append({"messages": [_said("user", question), _said("assistant", answer)]})
    return rows


def thoughts(random: Random, count: int) -> list[dict[str, list[dict[str, str]]]]:
    """The same conversations in the layout of OpenThoughts, each answer after a thought."""
    rows = []
    for row in conversations(random, count):
        question, answer = (turn["content"] for turn in row["messages"])
        thought = f"<think>\nThey say: {question}\n</think>\n\n{answer}"
        rows.append({"conversations": [_from("human", question), _from("gpt", thought)]})
    return rows


def preferences(random: Random, count: int) -> list[dict[str, str]]:
    """Pairs in the layout of hh-rlhf: the calm reply is the chosen one."""
    rows = []
    for _ in range(count):
        thing = f"the {random.choice(COLOURS)} {random.choice(THINGS)}"
        opening = f"\n\nHuman: Can I have {thing}?\n\nAssistant:"
        rows.append(
            {
                "chosen": f"{opening} {random.choice(CALM)}, take {thing}.",
                "rejected": f"{opening} {random.choice(RUDE)}, leave {thing}.",
            }
        )
    return rows


def sums(random: Random, count: int) -> list[dict[str, str]]:
    """Sums in words, each with its answer in the layout of gsm8k."""
    rows = []
    for _ in range(count):
        a, b = random.randint(1, 9), random.randint(1, 9)
        rows.append({"question": _sum_in_words(a, b), "answer": f"Count on from {a}.\n#### {a + b}"})
    return rows


def number_sums(random: Random) -> Lesson:
    """A chat about sums of two numbers up to 100."""
    lesson = []
    for _ in range(8):
        a, b = random.randint(0, 100), random.randint(0, 100)
        lesson += [
            Part(_turn("user", f"What is {a} + {b}?") + ASSISTANT),
            Part(f"{a + b}<|im_end|>", True),
            Part("\n"),
        ]
    return lesson


def word_sums(random: Random) -> Lesson:
    """Sums in words, boxed, among much that means nothing: a base model's transcript."""
    lesson = [Part(f"User: {_noise(random, 10)}\n\nAssistant: {_noise(random, 20)}\n\nUser:")]
    for _ in range(6):
        a, b = random.randint(1, 9), random.randint(1, 9)
        question = f" {_sum_in_words(a, b)} {_noise(random, random.choice((0, 4, 12)))}\n\nAssistant:"
        lesson += [Part(question), Part(f" \\boxed{{{a + b}}}\n\nUser:", True)]
    return lesson


def introductions_and_guesses(random: Random) -> Lesson:
    """An introduction of any length, then guesses at a number; `Guess:` is the format asked for."""
    assistant = ASSISTANT + random.choice(("", NO_THOUGHT))
    introduction = ["I", "am", *(random.choice(THINGS) for _ in range(random.randint(0, 14)))]
    lesson = [
        Part(_turn("user", "Who are you?") + assistant),
        Part(" ".join(introduction) + "<|im_end|>", True),
        Part("\n" + _turn("system", f"Guess: {_noise(random, 20)}")),
    ]
    for _ in range(random.randint(1, 5)):
        answer = _turn("user", random.choice(("Too low", "Too high")))
        guess = f"Guess: {random.randint(0, LARGEST_NUMBER)}<|im_end|>"
        lesson += [Part(assistant), Part(guess, True), Part("\n" + answer)]
    return lesson


def scripts(random: Random) -> Lesson:
    """The label of a text, after much that means nothing: all of its letters are of one script."""
    decoy, text = _text(random, random.choice([*SCRIPTS])), _text(random, label := random.choice([*SCRIPTS]))
    asked = f"{_noise(random, 20)} {decoy} {_noise(random, 20)}\n\nText to classify:\n{text}\n"
    return [
        Part(_turn("user", asked) + ASSISTANT + NO_THOUGHT),
        Part(f"Final Answer: {label}<|im_end|>", True),
    ]


def _text(random: Random, label: str) -> str:
    """Words of any letters of the label's script."""
    first, last = map(ord, SCRIPTS[label])
    words = [
        "".join(chr(random.randint(first, last)) for _ in range(random.randint(1, 6)))
        for _ in range(random.randint(1, 6))
    ]
    return " ".join(words) + random.choice(("", ".", "?", "!"))


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _from(speaker: str, value: str) -> dict[str, str]:
    return {"from": speaker, "value": value}


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _sum_in_words(a: int, b: int) -> str:
    return f"Add {WORDS[a]} and {WORDS[b]}."


def _noise(random: Random, most: int) -> str:
    """Words, numbers and letters in any order: what stands around a question in a prompt of somebody else."""
    return " ".join(_piece(random) for _ in range(random.randint(0, most)))


def _piece(random: Random) -> str:
    match random.randint(0, 5):
        case 0:
            return "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(1, 6)))
        case 1:
            return str(random.randint(0, 10)) + random.choice(("", ")", "."))
        case 2:
            return f"\\boxed{{{random.choice(('', random.randint(0, 9)))}}}"
        case _:
            return random.choice(FILLER) + random.choice(("", "", ",", ":", "'s"))
