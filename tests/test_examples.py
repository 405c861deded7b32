"""Run every example as a user would, on a tiny model; losses that should fall must fall."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from tests.engine.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    path = tiny_tokenizer(tiny_model(models, "qwen3", eos_token_id=257, max_position_embeddings=512))
    return path.rename(models / "tiny")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def run(name: str, *arguments: object, home: Path, cwd: Path, said: str = "") -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER", "TINKEX"))}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)],
        cwd=cwd, input=said, capture_output=True, text=True, timeout=100,
        env=kept | {"TINKEX_HOME": str(home), "HOME": str(home), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(text: str, label: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{label} ([-+\d.]+)", text)]


def test_sft_then_evaluate_then_chat(model: Path, home: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    said = run(
        "sft", "data.jsonl", "--model", model, "--steps", 30, "--learning-rate", 1e-2, home=home, cwd=tmp_path
    )
    losses = numbers(said, "nll")
    assert len(losses) == 30
    assert losses[-1] < 0.1 * losses[0]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(30))

    adapter = re.findall(r"adapter: (tinker://\S+)", said)[0]
    (tmp_path / "questions.jsonl").write_text('{"question": "hello?", "answer": "yes"}\n')
    assert "1 of 1 right" in run(
        "evaluate", "questions.jsonl", adapter, "--max-tokens", 4, home=home, cwd=tmp_path
    )
    assert "0 of 1 right" in run(
        "evaluate", "questions.jsonl", model, "--max-tokens", 4, home=home, cwd=tmp_path
    )
    exported = run("export", adapter, "out", "--base", model, home=home, cwd=tmp_path)
    assert "merged: out/merged" in exported
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert said_by(load(tmp_path / "out/merged"), model) == "yes"
    assert said_by(peft.PeftModel.from_pretrained(load(model), tmp_path / "out/adapter"), model) == "yes"
    talked = run("chat", adapter, "--temperature", 0, home=home, cwd=tmp_path, said="hello?\n")
    assert "model: yes" in talked


TRACKER = """
import json
from pathlib import Path

def _note(*said):
    with Path("tracked.jsonl").open("a") as log:
        print(json.dumps(said), file=log)

def init(*, project, config): _note("init", project, config["model"])
def log(metrics, *, step): _note("log", metrics, step)
def finish(): _note("finish")
"""


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_metrics_go_to_a_tracker_too(
    model: Path, home: Path, tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of that name with the functions that both have; what it is told is read back."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{tracker}.py").write_text(TRACKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    talk = [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    options = ["--model", model, "--steps", 2, "--track", tracker]
    losses = numbers(run("sft", "data.jsonl", *options, home=home, cwd=tmp_path), "nll")
    rewards = numbers(run("rl", *options, "--max-tokens", 4, home=home, cwd=tmp_path), "reward")
    told = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert [line[0] for line in told] == ["init", "log", "log", "finish"] * 2
    assert told[0][1:] == ["sft", str(model)]
    assert [told[i][1]["nll"] for i in (1, 2)] == pytest.approx(losses, abs=1e-4)
    assert [told[i][1]["reward"] for i in (5, 6)] == pytest.approx(rewards, abs=1e-3)
    assert [line[2] for line in told if line[0] == "log"] == [0, 1, 0, 1]


def said_by(model: Any, place: Path) -> str:
    """What transformers has it say to the question that was trained on."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    messages = [{"role": "user", "content": "hello?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    return tokenizer.decode(model.generate(prompt, max_new_tokens=3, do_sample=False)[0, prompt.shape[1] :])


def test_rl_raises_the_reward(model: Path, home: Path, tmp_path: Path) -> None:
    said = run(
        "rl",
        "--model",
        model,
        "--steps",
        8,
        "--max-tokens",
        12,
        "--learning-rate",
        3e-2,
        home=home,
        cwd=tmp_path,
    )
    rewards = numbers(said, "reward")
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > sum(rewards[:2])
    assert "adapter: tinker://" in said


def test_dpo_prefers_what_was_chosen(model: Path, home: Path, tmp_path: Path) -> None:
    pair = {"prompt": "say it", "chosen": "good", "rejected": "poor"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    said = run(
        "dpo", "pairs.jsonl", "--model", model, "--steps", 5, "--learning-rate", 1e-2, home=home, cwd=tmp_path
    )
    margins = numbers(said, "margin")
    assert margins[0] == pytest.approx(0, abs=1e-3), "the policy is its own reference at first"
    assert margins[-1] > 0.1


def test_distillation_comes_closer_to_the_teacher(
    model: Path, home: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    teacher = tiny_tokenizer(
        tiny_model(tmp_path_factory.mktemp("teacher"), "qwen3", seed=1, eos_token_id=257)
    )
    said = run(
        "distill", "--model", model, "--teacher", teacher, "--steps", 8, "--max-tokens", 8,
        "--learning-rate", 1e-2, home=home, cwd=tmp_path,
    )  # fmt: skip
    distances = numbers(said, "per token")
    assert distances[-1] < distances[0]


def test_a_stopped_loop_goes_on_where_it_was(model: Path, home: Path, tmp_path: Path) -> None:
    whole = run("resume", "--model", model, "--steps", 8, "--state", "whole.json", home=home, cwd=tmp_path)
    half = run("resume", "--model", model, "--steps", 5, "--state", "half.json", home=home, cwd=tmp_path)
    rest = run("resume", "--model", model, "--steps", 8, "--state", "half.json", home=home, cwd=tmp_path)
    assert "going on after step 5" in rest
    assert numbers(half, "loss") + numbers(rest, "loss") == pytest.approx(numbers(whole, "loss"), abs=1e-4)


def test_the_same_script_against_a_server(model: Path, home: Path, tmp_path: Path) -> None:
    said = run(
        "served", "--model", f"tiny={model}", "--", EXAMPLES / "resume.py", "--model", "tiny", "--steps", 3,
        home=home, cwd=tmp_path,
    )  # fmt: skip
    here = run("resume", "--model", model, "--steps", 3, "--state", "here.json", home=home, cwd=tmp_path)
    assert numbers(said, "loss") == pytest.approx(numbers(here, "loss"), abs=1e-4)


def test_examples_are_short_and_say_how_they_are_run() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 120, f"{path.name} is too long to be copied"
        assert f"python examples/{path.name}" in text, f"{path.name} does not say how it is run"
