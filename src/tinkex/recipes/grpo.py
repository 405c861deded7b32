"""Reinforcement learning with groups of answers (GRPO): `tinkex train grpo PROMPTS --reward …`, or `--env …`.

Read `train_grpo`. In each step the current model attempts some problems, several times each; an attempt's
advantage is its reward compared with the others at the same problem. Every draw has its own seed, so a
killed run resumes with the same rewards and losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import tinkex
from tinkex.data import Batches
from tinkex.recipes.conversations import load, question
from tinkex.recipes.environments import Environment, Episode, Questions, environment
from tinkex.recipes.progress import Progress
from tinkex.recipes.recipe_run import RecipeRun
from tinkex.recipes.rewards import Reward
from tinkex.recipes.run_directory import Outcome
from tinkex.recipes.settings import TrainConfig, option
from tinkex.rl import (
    group_advantages,
    has_signal,
    kl_metrics,
    mean_advantages,
    reward_metrics,
    trajectory_data,
    whole_sequence,
    with_kl_penalty,
)

_STRIDE = 1_000_003  # between the seeds of two steps


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(TrainConfig):
    """Settings of reinforcement learning."""

    data: str | None = option(None, "Prompts: a file, or a hub dataset org/name[:split].", argument=True)
    reward: str | None = option(None, "module:function, regex:PATTERN or program:COMMAND.")
    env: str | None = option(None, "Instead of prompts: arithmetic, format, python or tools.")
    batch_size: int = option(8, "Problems of a step.")
    group_size: int = option(8, "Attempts at each problem.")
    max_tokens: int = option(128, "Tokens of an answer.")
    temperature: float = option(1.0, "Of sampling.")
    loss: Literal["importance_sampling", "ppo", "cispo"] = option("importance_sampling", "The loss.")
    scale_rewards: bool = option(True, "Divide advantages by the spread of their group's rewards.")
    kl_coefficient: float = option(0.0, "Penalty of the KL divergence to the model at the start.")
    reward_seconds: float = option(10.0, "Time limit of a reward.")
    skip_bad: bool = option(False, "Leave out rows that cannot be used, and count them.")


@dataclass
class Rollout:
    """One episode in progress: its turns, and its reward at the end."""

    episode: Episode
    turns: list[tuple[list[int], tinkex.SampledSequence]] = field(default_factory=list[Any])
    reward: float | None = None
    said: str = ""


def train_grpo(
    config: GrpoConfig, service: tinkex.ServiceClient | None = None, progress: Progress | None = None
) -> Outcome:
    """Train an adapter by rewards.

    >>> train_grpo(GrpoConfig(env="arithmetic", steps=20, out="runs/sums"))  # doctest: +SKIP
    """
    world, problems, reward, digest = world_of(config)
    what = config.env or str(config.data)
    with (
        closing(reward) if reward else nullcontext(),
        RecipeRun("grpo", what, config, service, progress, data_digest=digest) as run,
    ):
        if run.outcome is not None:
            return run.outcome
        client, tokenizer = run.client, run.client.get_tokenizer()
        steps = config.steps or 50
        # A function of the step: problems of a file in shuffled epochs, others as they come.
        batches = Batches([1] * problems, size=config.batch_size, seed=config.seed) if problems else None
        reference = config.reference(run.service) if config.kl_coefficient else None
        run.begin(f"{what}: {steps} steps of {config.batch_size} × {config.group_size} attempts", steps)
        for step in run:
            first = (step - 1) * config.batch_size
            numbers = batches[step - 1] if batches else list(range(first, first + config.batch_size))
            sampler = client.save_weights_and_get_sampling_client()  # the current weights: on-policy
            slow = reward.timeouts if reward else 0
            groups = attempt(sampler, tokenizer, world, numbers, config, step)
            rewards = [[each.reward or 0.0 for each in group] for group in groups]
            data = [
                datum
                for group, own in zip(groups, rewards, strict=True)
                if has_signal(own)  # a group of equal rewards teaches nothing
                for each, advantage in zip(
                    group, group_advantages(own, divide_by_std=config.scale_rewards).tolist(), strict=True
                )
                for datum in trajectory_data(each.turns, advantage)
            ]
            row = {**reward_metrics(rewards), "attempts": float(sum(map(len, groups)))}
            if reward is not None:
                row["reward_timeouts"] = float(reward.timeouts - slow)
            if data:
                if reference is not None:
                    scored = [reference.compute_logprobs(whole_sequence(datum)) for datum in data]
                    known = [future.result() for future in scored]
                    data, row["kl_reference"] = with_kl_penalty(data, known, config.kl_coefficient)
                adam = run.adam(step)
                passed = client.forward_backward(mean_advantages(data), config.loss)
                client.optim_step(adam).result()
                output = passed.result()
                row |= {"loss": output.metrics["loss:sum"], **kl_metrics(data, output)}
                row["learning_rate"] = adam.learning_rate
            played = [each for group in groups for each in group]
            turns = [turn for each in played for turn in each.turns]
            run.directory.log(step, row, sum(len(prompt) + len(said.tokens) for prompt, said in turns))
            best = max(played, key=lambda each: each.reward or 0.0)
            run.directory.sample(step, reward=best.reward, messages=best.episode.messages, text=best.said)
        return run.finish()


def world_of(config: GrpoConfig) -> tuple[Environment, int, Reward | None, str]:
    """The environment, how many problems it has (0: no end), its reward if it is the user's, a digest."""
    if config.env is not None:
        if config.data is not None or config.reward is not None:
            raise tinkex.InvalidInputError("--env has prompts and a reward of its own: give either, not both")
        return environment(config.env, config.seed), 0, None, config.env
    if config.data is None or config.reward is None:
        raise tinkex.InvalidInputError("give prompts and --reward, or --env arithmetic|format|python|tools")
    read = load(config.data, question, skip_bad=config.skip_bad)
    reward = Reward(config.reward, config.reward_seconds)
    return Questions(read.items, reward), len(read.items), reward, read.digest


def attempt(
    sampler: tinkex.SamplingClient,
    tokenizer: Any,
    world: Environment,
    numbers: Sequence[int],
    config: GrpoConfig,
    step: int,
) -> list[list[Rollout]]:
    """Play a group of episodes of each problem to its end, all of them at the same time."""
    groups = [[Rollout(world.episode(number)) for _ in range(config.group_size)] for number in numbers]
    seed = (config.seed * 7919 + step) * _STRIDE

    def ask(episode: Episode, count: int, draw: int) -> tuple[list[int], Any]:
        prompt = tinkex.render_chat(tokenizer, episode.messages)
        params = tinkex.SamplingParams(
            max_tokens=config.max_tokens, temperature=config.temperature, seed=(seed + draw) % 2**31
        )
        return prompt, sampler.sample(tinkex.ModelInput.from_ints(prompt), count, params)

    # The first turn of a group is one request: its attempts share the prompt.
    asked = [(group, *ask(group[0].episode, len(group), place)) for place, group in enumerate(groups)]
    turn = 0
    while asked:
        for going_on, prompt, future in asked:
            for each, sequence in zip(going_on, future.result().sequences, strict=True):
                each.turns.append((prompt, sequence))
                each.said = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
                judged = each.episode.answer(each.said)
                each.episode.messages.append({"role": "assistant", "content": each.said})
                each.episode.messages.extend(judged.messages)
                each.reward = None if judged.messages else judged.reward
        turn += 1
        left = [each for group in groups for each in group if each.reward is None]
        asked = [([each], *ask(each.episode, 1, turn * 10_007 + place)) for place, each in enumerate(left)]
    return groups
