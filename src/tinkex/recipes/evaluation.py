"""Evaluation of base models and adapters on one set of data: `tinkex eval MODEL… --data FILE`.

Rows with an assistant's answer give its loss. Rows with an `answer` are answered greedily and are right if
the answer contains it; with a reward or an environment the mean reward counts. All requests of a model are
sent at once, so that the engine batches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tinkex
from tinkex.data import Message, chat_data, learnt_tokens, text_datum
from tinkex.recipes.conversations import ChatExample, conversation, load, question
from tinkex.recipes.environments import OneTurn, environment
from tinkex.recipes.progress import Progress
from tinkex.recipes.rewards import Reward
from tinkex.recipes.settings import sampler_of
from tinkex.rl import whole_sequence


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is evaluated, and on what."""

    models: Sequence[str]  # base models, and adapters by their tinker:// paths
    data: str | None = None
    env: str | None = None
    reward: str | None = None
    limit: int = 200  # rows, or problems of an environment
    max_tokens: int = 128
    skip_bad: bool = False
    seed: int = 0


@dataclass(frozen=True)
class ModelScore:
    """The figures of one model; a figure is None where the data has nothing to compute it from."""

    model: str
    examples: int
    loss: float | None = None  # of a token of the answers
    perplexity: float | None = None
    score: float | None = None  # the share of right answers, or the mean reward
    answers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def evaluate_models(
    config: EvalConfig, service: tinkex.ServiceClient | None = None, progress: Progress | None = None
) -> list[ModelScore]:
    """Evaluate every model on the same examples.

    >>> evaluate_models(EvalConfig(models=["SmolLM2-135M-Instruct"], data="chats.jsonl"))  # doctest: +SKIP
    """
    progress = progress or Progress(quiet=True)
    with ExitStack() as stack:
        reward = None
        if config.reward is not None:
            reward = Reward(config.reward)
            stack.callback(reward.close)
        examples, questions = read(config, reward)
        service = service or stack.enter_context(tinkex.ServiceClient())
        scores: list[ModelScore] = []
        for model in config.models:
            sampler = sampler_of(service, model)
            tokenizer = sampler.get_tokenizer()
            loss = answers_loss(sampler, tokenizer, examples) if examples else None
            said = answer_all(sampler, tokenizer, questions, config) if questions else []
            score = float(np.mean([each["score"] for each in said])) if said else None
            count = max(len(examples), len(questions))
            perplexity = None if loss is None else math.exp(min(loss, 700))
            scores.append(ModelScore(model, count, loss, perplexity, score, said))
            progress.note(f"{model}: {figures(scores[-1])}")
        return scores


def read(
    config: EvalConfig, reward: Reward | None
) -> tuple[list[ChatExample], list[tuple[list[Message], OneTurn]]]:
    """The examples whose answers have a loss, and the questions with what judges them."""
    if (config.data is None) == (config.env is None):
        raise tinkex.InvalidInputError("give --data FILE or --env NAME, one of them")
    if config.env is not None:
        world = environment(config.env, config.seed)
        episodes = [world.episode(number) for number in range(config.limit)]
        turns = [each for each in episodes if isinstance(each, OneTurn)]
        if not turns:
            raise tinkex.InvalidInputError(
                f"--env {config.env} has several turns: train and look at its rewards"
            )
        return [], [(each.messages, each) for each in turns]
    rows = load(str(config.data), lambda row: row, skip_bad=config.skip_bad)
    rows.items[config.limit :] = []
    rows.places[config.limit :] = []
    if reward is not None or all("answer" in row for row in rows.items):
        asked = rows.map(question, skip_bad=config.skip_bad).items
        return [], [(messages, OneTurn(messages, judge(row, reward))) for messages, row in asked]
    return rows.map(conversation, skip_bad=config.skip_bad).items, []


def judge(row: Mapping[str, Any], reward: Reward | None) -> Callable[[str], float]:
    """What scores an answer to the row: the reward, or whether it contains the row's `answer`."""
    if reward is not None:
        return lambda text: reward(text, row)
    expected = str(row["answer"]).rpartition("####")[2].strip().lower()
    return lambda text: float(expected in text.lower())


def answers_loss(sampler: tinkex.SamplingClient, tokenizer: Any, examples: Sequence[ChatExample]) -> float:
    """The mean loss of a token of the assistant's answers."""
    data: list[tinkex.Datum] = []
    for each in examples:
        read_only = [{**message, "weight": 0} for message in each.messages[: each.prompt]]
        if each.text is not None:
            data.append(text_datum(tokenizer, each.text))
        else:
            data += chat_data(tokenizer, [*read_only, *each.messages[each.prompt :]])
    asked = [sampler.compute_logprobs(whole_sequence(datum)) for datum in data]
    total = 0.0
    for datum, future in zip(data, asked, strict=True):
        scores = np.array(future.result()[1:], np.float64)
        total -= float(scores @ datum.loss_fn_inputs["weights"].to_numpy())
    return total / learnt_tokens(data)


def answer_all(
    sampler: tinkex.SamplingClient,
    tokenizer: Any,
    questions: Sequence[tuple[list[Message], OneTurn]],
    config: EvalConfig,
) -> list[dict[str, Any]]:
    """Greedy answers and their scores."""
    params = tinkex.SamplingParams(max_tokens=config.max_tokens, temperature=0.0)
    asked = [
        sampler.sample(tinkex.ModelInput.from_ints(tinkex.render_chat(tokenizer, messages)), 1, params)
        for messages, _ in questions
    ]
    answers: list[dict[str, Any]] = []
    for (messages, turn), future in zip(questions, asked, strict=True):
        text = tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip()
        answers.append({"messages": messages, "text": text, "score": turn.answer(text).reward})
    return answers


def figures(score: ModelScore) -> str:
    """The figures as one line of text."""
    known = {"loss": score.loss, "perplexity": score.perplexity, "score": score.score}
    return "  ".join(f"{name} {value:.4g}" for name, value in known.items() if value is not None)
