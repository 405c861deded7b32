"""DPO, GRPO, distillation and evaluation on a tiny model: they learn, and resume to the same figures."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinkex
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.recipes.conftest import jsonl
from tests.recipes.harness import metrics, values
from tinkex.data import weighted_datum
from tinkex.recipes.distill import DistillConfig, train_distill
from tinkex.recipes.dpo import DpoConfig, PreferenceLoss, train_dpo
from tinkex.recipes.evaluation import EvalConfig, evaluate_models
from tinkex.recipes.grpo import GrpoConfig, train_grpo
from tinkex.recipes.progress import Progress
from tinkex.recipes.schedule import learning_rate_at
from tinkex.recipes.sft import SftConfig, train_sft

pytestmark = pytest.mark.slow

Command = Callable[..., subprocess.CompletedProcess[str]]


class Crash(Progress):
    """Fails after a step's metrics were written, as a process that dies there."""

    def __init__(self, step: int) -> None:
        super().__init__(quiet=True)
        self._step_of_crash = step

    def row(self, row: Mapping[str, float]) -> None:
        if row["step"] == self._step_of_crash:
            raise RuntimeError("crash")


def same_after_a_crash(train: Callable[..., Any], make: Callable[[str], Any], crash_at: int) -> Path:
    """Train undisturbed, and once more with a crash; both have the same metrics."""
    with tinkex.ServiceClient(base_url="local") as service:
        train(make("whole"), service)
        with pytest.raises(RuntimeError, match="crash"):
            train(make("crashed"), service, Crash(crash_at))
        assert metrics(Path("crashed"))[-1]["step"] == crash_at
        train(make("crashed"), service)
    ours, theirs = metrics(Path("crashed")), metrics(Path("whole"))
    assert len(ours) == len(theirs)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(its, abs=1e-5)
    return Path("whole")


def test_the_gradient_of_dpo_is_torchs() -> None:
    draw = np.random.default_rng(0)
    weights = [draw.integers(0, 2, n + 1).astype(np.float32) for n in (4, 6, 5, 3)]
    data = [weighted_datum(np.arange(len(w)), w) for w in weights]
    logprobs = [-draw.random(len(w) - 1) * 3 for w in weights]
    references = -draw.random(4) * 5
    value, gradients, found = PreferenceLoss(references, 0.3).value_and_gradients(data, logprobs)
    leaves = [torch.tensor(lp, requires_grad=True) for lp in logprobs]
    sums = torch.stack([(lp * torch.tensor(w[1:])).sum() for lp, w in zip(leaves, weights, strict=True)])
    ratios = 0.3 * (sums - torch.tensor(references))
    loss = -torch.nn.functional.logsigmoid(ratios[::2] - ratios[1::2]).mean()
    loss.backward()
    assert value == pytest.approx(loss.item())
    assert found["accuracy"] == pytest.approx((ratios[::2] > ratios[1::2]).double().mean().item())
    for ours, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None
        assert ours == pytest.approx(leaf.grad.numpy(), abs=1e-6)


def test_dpo_prefers_what_was_chosen_and_resumes(home: Path, model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "chosen": f"good {n}", "rejected": f"poor {n}"} for n in range(20)]
    data = str(jsonl(tmp_path / "pairs.jsonl", rows))

    def make(out: str) -> DpoConfig:
        return DpoConfig(
            model=str(model), data=data, out=out, steps=10, batch_size=4, learning_rate=5e-3, save_every=4,
            eval_every=5, rank=8,
        )  # fmt: skip

    out = same_after_a_crash(train_dpo, make, crash_at=6)
    losses = values(out, "eval_loss")
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4), "the policy is its own reference at first"
    assert losses[-1] < 0.3 * losses[0]
    assert values(out, "eval_accuracy")[-1] == 1.0


def test_grpo_raises_the_reward_and_resumes(home: Path, model: Path, tmp_path: Path) -> None:
    """The reward is for the letter e, by a function in the working directory."""
    (tmp_path / "grading.py").write_text("def score(text, row):\n    return text.count(row['letter']) / 12\n")
    data = str(jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{n}?", "letter": "e"} for n in range(6)]))

    def make(out: str) -> GrpoConfig:
        return GrpoConfig(
            model=str(model), data=data, reward="grading:score", out=out, steps=10, batch_size=4,
            group_size=6, max_tokens=12, learning_rate=3e-2, save_every=3, kl_coefficient=0.01,
            schedule="constant", rank=8,
        )  # fmt: skip

    out = same_after_a_crash(train_grpo, make, crash_at=5)
    rewards = values(out, "reward")
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.05
    rows = [row for row in metrics(out) if "kl_v2" in row]
    assert max(row["kl_v2"] for row in rows) < 1e-8, "the sampler's logprobs are the trainer's"
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == list(range(1, 11))


@pytest.mark.parametrize("name", ["arithmetic", "format", "python", "tools"])
def test_every_environment_trains(name: str, home: Path, model: Path) -> None:
    config = GrpoConfig(
        model=str(model), env=name, out="run", steps=1, batch_size=2, group_size=3, max_tokens=6, rank=4
    )
    with tinkex.ServiceClient(base_url="local") as service:
        train_grpo(config, service)
    (row,) = metrics(Path("run"))
    assert row["attempts"] == 6
    assert row["reward"] >= 0


def test_a_grpo_run_needs_problems_and_a_reward(home: Path) -> None:
    for given in ({}, {"data": "x.jsonl"}, {"env": "format", "reward": "a:b"}):
        with pytest.raises(tinkex.InvalidInputError, match="--env"):
            train_grpo(GrpoConfig(**given))


def test_distillation_comes_closer_to_the_teacher_and_resumes(
    home: Path, model: Path, tmp_path: Path
) -> None:
    teacher = tiny_tokenizer(tiny_model(tmp_path / "teacher", "qwen3", seed=1, eos_token_id=257))
    data = str(jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"tell {n}"} for n in range(6)]))

    def make(out: str) -> DistillConfig:
        return DistillConfig(
            model=str(model), data=data, teacher=str(teacher), out=out, steps=8, batch_size=4, group_size=4,
            max_tokens=8, learning_rate=1e-2, save_every=3, rank=8,
        )  # fmt: skip

    distances = values(same_after_a_crash(train_distill, make, crash_at=4), "kl_teacher")
    assert np.mean(distances[-2:]) < np.mean(distances[:2])
    with pytest.raises(tinkex.InvalidInputError, match="give --teacher"):
        train_distill(DistillConfig(data=data))


def test_evaluation_tells_a_trained_adapter_from_its_base(
    tinkex_command: Command, model: Path, chats: Path, tmp_path: Path
) -> None:
    with tinkex.ServiceClient(base_url="local") as service:
        config = SftConfig(model=str(model), data=str(chats), out="run", steps=24, learning_rate=1e-2)
        outcome = train_sft(config, service)
        assert outcome is not None
        models = [str(model), outcome.adapter]
        base, tuned = evaluate_models(EvalConfig(models=models, data=str(chats)), service)
        assert base.loss is not None
        assert tuned.loss is not None
        assert tuned.loss < 0.5 * base.loss
        assert base.perplexity == pytest.approx(np.exp(base.loss))
        asked = jsonl(tmp_path / "asked.jsonl", [{"question": "say 7?", "answer": "yes"}])
        scores = evaluate_models(EvalConfig(models=models, data=str(asked), max_tokens=4), service)
        assert [score.score for score in scores] == [0.0, 1.0]
        rewarded = EvalConfig(models=models[1:], data=str(asked), reward="regex:^yes", max_tokens=4)
        assert evaluate_models(rewarded, service)[0].score == 1.0
        sums = evaluate_models(
            EvalConfig(models=models[:1], env="arithmetic", limit=3, max_tokens=4), service
        )
        assert sums[0].examples == 3
        with pytest.raises(tinkex.InvalidInputError, match="--data FILE or --env NAME"):
            evaluate_models(EvalConfig(models=models), service)


def test_the_commands_take_their_options(tinkex_command: Command, model: Path, chats: Path) -> None:
    options = (
        "--env format --steps 1 --batch-size 1 --group-size 2 --max-tokens 4 --out run --log tensorboard"
    )
    pytest.importorskip("tensorboard")
    done = tinkex_command("train", "grpo", "--model", model, "-n", "first try", *options.split())
    adapter = re.findall(r"adapter +(tinker://\S+)", done.stdout)[0]
    (run,) = json.loads(tinkex_command("run", "list", "-f", "json").stdout)["runs"]
    assert run["name"] == "first try"
    by_prefix = json.loads(tinkex_command("run", "info", run["training_run_id"][:10], "-f", "json").stdout)
    assert by_prefix["training_run_id"] == run["training_run_id"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("run/tensorboard").Reload()
    (reward,) = values(Path("run"), "reward")
    assert [event.value for event in events.Scalars("reward")] == pytest.approx([reward])
    said = tinkex_command("eval", adapter, "--data", chats, "--limit", 4, "-f", "json")
    (score,) = json.loads(said.stdout)
    assert (score["model"], score["examples"]) == (adapter, 4)
    refused = tinkex_command("train", "sft", chats, "--log", "paper", "--model", model, check=False)
    assert "--log must be one of wandb, trackio, tensorboard" in refused.stderr


def test_schedules_rise_and_fall() -> None:
    rates = [learning_rate_at(step, 10, 1.0, "cosine", warmup=4) for step in range(10)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[7] == pytest.approx(0.5)
    assert {learning_rate_at(step, 5, 2.0, "constant") for step in range(5)} == {2.0}
    with pytest.raises(tinkex.InvalidInputError, match="schedule must be one of"):
        learning_rate_at(1, 5, 2.0, "sudden")  # type: ignore[arg-type]


def test_recipes_are_short_enough_to_be_copied() -> None:
    folder = Path(tinkex.__file__).parent / "recipes"
    for name in ("sft", "dpo", "grpo", "distill", "evaluation"):
        assert len((folder / f"{name}.py").read_text().splitlines()) <= 200, name
    library = [folder.parent / f"{name}.py" for name in ("data", "rl")]
    assert sum(len(path.read_text().splitlines()) for path in library) <= 800
