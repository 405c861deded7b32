"""`tinkex chat`: several turns over a pipe on a tiny model, and what Ctrl-C leaves of an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.tiny import tiny_model, tiny_tokenizer
from tinkex.cli.chat import Conversation
from tinkex.errors import FailedResponse, StreamingUnsupportedError
from tinkex.types.data import ModelInput
from tinkex.types.params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_model(tmp_path_factory.mktemp("models"), "llama3"))


def chat(model: Path, home: Path, typed: str, *options: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER", "TINKEX"))}
    env = {**clean, "TINKEX_HOME": str(home), "HOME": str(home), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "tinkex.cli", "chat", str(model), "--max-tokens", "6", *options]
    return subprocess.run(command, env=env, input=typed, capture_output=True, text=True, timeout=100)


def test_answers_go_to_stdout_and_a_reset_forgets(model: Path, tmp_path: Path):
    done = chat(
        model, tmp_path, "hello\nhello\n/reset\nhello\n/nonsense\n/quit\nhello\n", "--temperature", "0"
    )
    assert done.returncode == 0, done.stderr
    assert "There is no /nonsense" in done.stderr
    first, second, again = _answers(done.stdout)
    assert first == again  # greedy, and the same conversation
    assert first != second  # which had the first before it


def test_an_answer_that_failed_fails_the_command_where_nobody_looks(model: Path, tmp_path: Path):
    done = chat(model, tmp_path, "hello " * 5000 + "\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip().splitlines()[-1].startswith("Error: ")


def _answers(said: str) -> list[str]:
    """Each answer ends its line; a random model may say newlines of its own, so none is looked for."""
    lines = said.split("\n")[:-1]
    assert len(lines) == 3, said
    return lines


class Says:
    """A sampler that streams these pieces, or raises what is among them."""

    def __init__(self, *pieces: list[int] | BaseException) -> None:
        self._pieces = pieces
        self.prompts: list[list[int]] = []

    def sample_stream(self, prompt: ModelInput, params: SamplingParams) -> Any:
        self.prompts.append(prompt.to_ints())
        return _Stream(self._pieces)

    def sample(self, prompt: ModelInput, count: int, params: SamplingParams) -> Any:
        answer = SimpleNamespace(sequences=[SimpleNamespace(tokens=[72, 105])])
        return SimpleNamespace(result=lambda: answer)


class _Stream:
    def __init__(self, pieces: tuple[list[int] | BaseException, ...]) -> None:
        self._pieces = pieces

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        """Nothing to close."""

    def __iter__(self) -> Iterator[Any]:
        for piece in self._pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield SimpleNamespace(tokens=piece)


def talk(tokenizer: Any, sampler: Says, *lines: str) -> tuple[list[str], list[dict[str, str]]]:
    conversation = Conversation(sampler, tokenizer, SamplingParams(max_tokens=4), "Be brief.")  # type: ignore[arg-type]
    told: list[str] = []
    for line in lines:
        conversation.say(line, told.append)
    return told, conversation.messages


def test_what_was_said_before_ctrl_c_is_remembered(model: Path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    begun, rest = tokenizer.encode("Hel"), tokenizer.encode("lo")
    sampler = Says(begun, KeyboardInterrupt(), rest)
    told, messages = talk(tokenizer, sampler, "Hi", "Again")
    assert "".join(told) == "HelHel"
    roles = [(message["role"], message["content"]) for message in messages]
    assert roles == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hel"),
        ("user", "Again"),
        ("assistant", "Hel"),
    ]
    expected = tokenizer.apply_chat_template(messages[:4], add_generation_prompt=True, return_dict=False)
    assert sampler.prompts[1] == expected


def test_a_server_without_streams_is_asked_for_the_whole(model: Path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    sampler = Says(StreamingUnsupportedError("no streams", response=FailedResponse(404)))
    told, _ = talk(tokenizer, sampler, "Hi")
    assert "".join(told) == tokenizer.decode([72, 105])
