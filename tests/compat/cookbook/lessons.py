"""Teaches tiny models enough for a reward to have something to climb: a minute or two of one core.

    teach(directory, COURSES["adder"], transformers.Qwen3Config(…), tokenizer)

Plain transformers and AdamW over all weights, seeded. First the skill, then the doubt: a model that can do it
and often gives up is what reinforcement learning starts from. Knows nothing of our own engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from tests.compat.cookbook import corpus

BATCH = 32
RATE = 5e-3
PERIODS = (1, 3, 9, 27, 81)


@dataclass(frozen=True)
class Course:
    """What one model is taught, and for how many steps."""

    lesson: Callable[[Random], corpus.Lesson]
    steps: int
    doubts: bool = True


COURSES = {
    "adder": Course(corpus.number_sums, steps=900),
    "boxer": Course(corpus.word_sums, steps=180),
    "speaker": Course(corpus.introductions_and_guesses, steps=80),
}
# Not one of those whose words the tokenizer knows: it spells what it says, and reads any script as bytes.
LABELLER = Course(corpus.scripts, steps=150, doubts=False)


def teach(directory: Path, course: Course, config: transformers.PretrainedConfig, tokenizer: Any) -> Path:
    """Write a model that took the course to `directory` and return it."""
    torch.manual_seed(0)
    random = Random(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _put_numbers_on_circles(model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(course.steps):
        rate = min(1.0, (step + 1) / 50, 3 * (1 - step / course.steps))
        optimizer.param_groups[0]["lr"] = RATE * rate
        loss = lesson_loss(model, tokenizer, [course.lesson(random) for _ in range(BATCH)])
        optimizer.zero_grad()
        (10 * loss).backward()  # always past the limit below: steps of one length are steadier
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if course.doubts:
        _sow_doubt(model, tokenizer, [course.lesson(random) for _ in range(BATCH)])
    model.save_pretrained(directory)
    return directory


def lesson_loss(model: Any, tokenizer: Any, lessons: list[corpus.Lesson]) -> torch.Tensor:
    """Mean cross-entropy over what the model says itself."""
    tokens, learnt = _batch(tokenizer, lessons)
    hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state
    return cross_entropy(model.lm_head(hidden[learnt[:, 1:]]), tokens[:, 1:][learnt[:, 1:]])


@torch.no_grad()
def _sow_doubt(model: Any, tokenizer: Any, lessons: list[corpus.Lesson]) -> None:
    """Make one word, where a reply begins, as likely as all others together, and unlikely within it."""
    tokens, learnt = _batch(tokenizer, lessons)
    hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state[learnt[:, 1:]]
    begins = (learnt[:, 1:] & ~learnt[:, :-1])[learnt[:, 1:]]
    wanted = model.lm_head(hidden).logsumexp(-1) - 10.0 * ~begins
    (word,) = tokenizer.encode(corpus.GIVES_UP)
    model.lm_head.weight[word] = torch.linalg.lstsq(hidden, wanted[:, None]).solution[:, 0]


def _batch(tokenizer: Any, lessons: list[corpus.Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """The lessons' tokens, padded, and which of them the model learns to say."""
    rows = [_encode(tokenizer, lesson) for lesson in lessons]
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    learnt = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (ids, mine) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        learnt[row, : len(ids)] = torch.tensor(mine)
    return tokens, learnt


def _encode(tokenizer: Any, lesson: corpus.Lesson) -> tuple[list[int], list[bool]]:
    tokens, learnt = [], []
    for part in lesson:
        ids = tokenizer.encode(part.text, add_special_tokens=False)
        tokens += ids
        learnt += [part.learnt] * len(ids)
    return tokens, learnt


def _put_numbers_on_circles(model: Any, tokenizer: Any) -> None:
    """Start with a number as angles on a few circles, where a sum is a rotation: else it takes an hour."""
    count = corpus.LARGEST_NUMBER + 1
    ids = tokenizer.convert_tokens_to_ids([str(n) for n in range(count)])
    angles = torch.outer(torch.arange(float(count)), torch.tensor(PERIODS)) * (2 * math.pi / count)
    points = torch.cat([angles.cos(), angles.sin()], dim=1)
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.normal_(0, 0.5)
        embedding[ids] *= 0.2
        embedding[ids, : points.shape[1]] = points
        head[ids, : points.shape[1]] = points / 2
