"""The demos end to end on a tiny random model: they train, they test, and they tell the truth about it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers

from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.processes import interruptible
from tinkex.demo import Bookmark
from tinkex.demo.fine_tune import FineTune, talks_like_a_pirate
from tinkex.demo.reinforce import Reinforce, five_words
from tinkex.demo.screen import Screen
from tinkex.errors import InvalidInputError

AYE = partial(
    FineTune,
    name="aye",
    goal="say aye",
    rule="aye",
    examples=[
        (f"Is it {word}?", "Aye!") for word in ("cold", "hot", "wet", "dry", "new", "old", "big", "far")
    ],
    held_out=(("Is it red?", "Aye"), ("Is it near?", "Aye"), ("Is it late?", "Aye"), ("Is it up?", "Aye")),
    check=lambda answer, fact: answer == f"{fact}!",
)
A_LETTER = partial(
    Reinforce,
    name="letter",
    goal="say a certain letter",
    rule="the share of e",
    instruction="e",
    subjects=("a", "b", "c", "d"),
    held_out=("x", "y"),
    reward=lambda sample: sample.count("e") / max(1, len(sample)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_model(tmp_path_factory.mktemp("models"), "llama3"))


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    return tmp_path / "out"


def test_the_accuracy_rises(model: Path, out: Path, capsys: pytest.CaptureFixture[str]):
    lesson = AYE(str(model), out, steps=30, rank=16, learning_rate=2e-2)
    assert lesson.play(Screen(model)) is True
    said = capsys.readouterr().out
    before, after = map(int, re.findall(r"^(\d) of 4 right", said, re.MULTILINE))
    assert before == 0
    assert after >= 3
    assert said.count("tokens/s") == 30  # not a terminal: a line for each step
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    # What it tells its reader to type: the adapter through PEFT answers as ours does.
    load_base, load_adapter = re.findall(r"^  model = (.*)$", said, re.MULTILINE)
    loaded = eval(load_base, {"transformers": transformers})
    loaded = eval(load_adapter, {"peft": peft, "model": loaded})
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "Is it red?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(loaded(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokenizer.decode(ids[-4:]) == "Aye!"


def test_the_reward_rises(model: Path, out: Path, capsys: pytest.CaptureFixture[str]):
    lesson = A_LETTER(str(model), out, steps=12, samples=16, max_tokens=8, learning_rate=2e-2)
    assert lesson.play(Screen(model)) is True
    said = capsys.readouterr().out
    before, after = map(float, re.findall(r"^mean reward (\S+)", said, re.MULTILINE))
    assert after - before >= Reinforce.enough
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_did_not_learn_is_not_said_to_have(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str]
):
    lesson = AYE(str(model), out, steps=1, learning_rate=1e-6)
    assert lesson.play(Screen(model)) is False
    assert "It did not learn: 0 of 4 right before, 0 of 4 right after." in capsys.readouterr().out


# -- stopping and going on -------------------------------------------------------------------------------


class StopsAfter(Screen):
    """Presses Ctrl-C once a number of steps was shown."""

    def __init__(self, base: Path, steps: int) -> None:
        super().__init__(base)
        self._last = steps

    def step(self, step: int, name: str, value: float, tokens_per_second: float, said: str = "") -> None:
        super().step(step, name, value, tokens_per_second, said)
        if step + 1 == self._last:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_leaves_a_bookmark_and_resuming_ends_where_it_would_have(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str]
):
    lesson = AYE(str(model), out, steps=6, rank=4, learning_rate=1e-2)
    lesson.play(Screen(model))
    straight = _losses(capsys.readouterr().out)

    assert lesson.play(StopsAfter(model, 3)) is None
    assert _losses(capsys.readouterr().out) == straight[:3]
    bookmark = Bookmark.read(out, "sft")
    assert len(bookmark.curve) == 3

    file = out / "sft-stopped.json"
    whole = file.read_text()
    file.write_text(whole.replace('"steps": 6', '"steps": 7'))
    with pytest.raises(InvalidInputError, match=r"sft-stopped\.json is damaged"):
        Bookmark.read(out, "sft")
    file.write_text(whole)

    assert lesson.play(Screen(model), bookmark) is not None
    assert _losses(capsys.readouterr().out) == straight[3:]
    with pytest.raises(InvalidInputError, match="there is nothing to resume"):
        Bookmark.read(out, "sft")


class InterruptedAfter(Screen):
    """Presses Ctrl-C while the demo evaluates the trained model."""

    def heading(self, text: str) -> None:
        super().heading(text)
        if text.startswith("After"):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_ctrl_c_during_the_last_test_leaves_a_bookmark_too(
    model: Path, out: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, kind: str
):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    if kind == "sft":
        demo = AYE(str(model), out, steps=2, rank=4).play
    else:
        demo = A_LETTER(str(model), out, steps=2, samples=4).play
    assert demo(InterruptedAfter(model)) is None
    bookmark = Bookmark.read(out, kind)
    assert len(bookmark.curve) == bookmark.steps == 2
    capsys.readouterr()
    assert demo(Screen(model), bookmark) is not None  # it goes straight to the test
    assert "tokens/s" not in capsys.readouterr().out
    with pytest.raises(InvalidInputError, match="there is nothing to resume"):
        Bookmark.read(out, kind)


def test_ctrl_c_at_the_last_step_stops_there(model: Path, out: Path):
    lesson = AYE(str(model), out, steps=2, rank=4)
    assert lesson.play(StopsAfter(model, 2)) is None
    assert len(Bookmark.read(out, "sft").curve) == 2


def test_rl_resumes_too(model: Path, out: Path, capsys: pytest.CaptureFixture[str]):
    lesson = A_LETTER(str(model), out, steps=4, samples=4, max_tokens=4, rank=4, learning_rate=1e-2)
    lesson.play(Screen(model))
    straight = _losses(capsys.readouterr().out, "reward")
    assert lesson.play(StopsAfter(model, 2)) is None
    assert lesson.play(Screen(model), Bookmark.read(out, "rl")) is not None
    assert _losses(capsys.readouterr().out, "reward") == straight


def _losses(said: str, name: str = "loss") -> list[str]:
    return re.findall(rf"^  step .*  {name} (\S+)", said, re.MULTILINE)


# -- the command -----------------------------------------------------------------------------------------


def tinkex(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, home=home)
    out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start(*arguments: str, home: Path) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER", "TINKEX"))}
    # A key must not lead the demo to a server.
    env = {**clean, "TINKEX_HOME": str(home), "HOME": str(home), "TINKER_API_KEY": "tml-none"}
    command = interruptible([sys.executable, "-m", "tinkex.cli", *arguments])
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_fails_if_nothing_was_learned(model: Path, tmp_path: Path):
    done = tinkex("demo", "--model", str(model), "--steps", "1", "-n", "first try", home=tmp_path)
    assert done.returncode == 1, done.stderr
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ledger:
        assert ledger.execute("SELECT name FROM runs").fetchall() == [("first try",)]
    assert "It did not learn" in done.stdout
    assert "shows its curves at http://127.0.0.1:8265" in done.stderr
    assert (tmp_path / "demo" / "loss.png").exists()
    assert json.loads((tmp_path / "demo" / "pirate" / "adapter_config.json").read_text())["r"] == 16


def test_a_server_that_is_set_is_said_not_to_be_used(model: Path, tmp_path: Path):
    """And the commands it advises find what it made: without a word they would ask that server."""
    done = tinkex("demo", "--model", str(model), "--steps", "1", home=tmp_path)
    assert "the demo runs on this machine, not on https://" in done.stderr
    chat, plot = re.findall(r"^  (TINKER_BASE_URL=local .*)$", done.stdout, re.MULTILINE)
    assert " chat tinker://" in chat
    env = {"TINKEX_HOME": str(tmp_path), "HOME": str(tmp_path), "TINKER_API_KEY": "tml-none"}
    seen = subprocess.run(plot, shell=True, env={**os.environ, **env}, capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr
    assert "loss" in seen.stdout


def test_ctrl_c_says_how_to_go_on_and_that_works(model: Path, tmp_path: Path):
    out_dir = tmp_path / "its own"
    process = start("demo", "--model", str(model), "--steps", "60", "--out", str(out_dir), home=tmp_path)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("  step  2/60"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "finishing the steps under way, then saving" in err  # at once, whatever the step takes
    again = re.search(r"continue with: (.*)$", out, re.MULTILINE)
    assert again is not None, out
    env = {"TINKEX_HOME": str(tmp_path), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(shlex.split(again[1]), env=env, capture_output=True, text=True, timeout=100)
    taken = re.search(r"continuing after step (\d+)", done.stdout)
    assert taken is not None, done.stderr
    assert done.returncode == 1  # of a random model nothing else is to be expected
    assert f"  step {int(taken[1]) + 1:>2}/60" in done.stdout


def test_the_command_says_what_cannot_be(model: Path, tmp_path: Path):
    for arguments, said in (
        (["--model", str(model), "--resume"], "Error: there is nothing to resume"),
        (["--model", "nobody"], "Error: no base model is called 'nobody'"),
    ):
        done = tinkex("demo", *arguments, home=tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(said), done.stderr
        assert "Traceback" not in done.stderr


# -- the tasks -------------------------------------------------------------------------------------------


def test_no_question_of_the_test_is_among_the_examples():
    task = FineTune("any", Path())
    asked = {question for question, _ in task.examples}
    assert len(asked) == 48
    assert not asked & {question for question, _ in task.held_out}
    facts = " ".join(answer for _, answer in task.examples)
    # Its every answer is in form, and none gives a capital of the test away.
    assert all(task.check(answer, "") for _, answer in task.examples)
    assert not any(city in facts for city in ("Beijing", "Berlin", "Lisbon", "Ottawa", "Jupiter"))


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        ("Arr, the capital of China be Beijing, matey!", True),
        ("Arr, the capital of China be Shanghai, matey!", False),
        ("Arr, that is Beijing, matey!", False),
        ("The capital of China is Beijing.", False),
        ("Arr, the capital be Beijing, matey! Arr", False),
        ("", False),
    ],
)
def test_what_counts_as_pirate_talk(answer: str, good: bool):
    assert talks_like_a_pirate(answer, "Beijing") is good


@pytest.mark.parametrize(
    ("sample", "reward"),
    [
        ("The moon has no teeth.", 1.0),
        ("The moon has no teeth", 0.0),
        ("A sea!", 0.4),
        ("Why did the old moon lose its teeth so soon?", 0.0),
        ("", 0.0),
    ],
)
def test_what_a_story_is_worth(sample: str, reward: float):
    assert five_words(sample) == pytest.approx(reward)
