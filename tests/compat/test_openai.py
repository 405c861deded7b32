"""OpenAI's own Python client against /v1: models, completions, chat, streams, errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.clients.report import MODEL
from tests.compat.conftest import Served

KEY = "tml-openai-and-tinker"
ERRORS = {
    "unknown model": ("NotFoundError", 404, "model_not_found", "gpt-4"),
    "unknown adapter": ("NotFoundError", 404, "model_not_found", "does not exist"),
    "too long": ("BadRequestError", 400, "context_length_exceeded", "context window"),
    "hot": ("BadRequestError", 400, None, "temperature"),
    "no messages": ("BadRequestError", 400, None, "messages"),
    "no key": ("AuthenticationError", 401, "invalid_api_key", "tml-"),
}


@pytest.fixture(scope="module")
def published(served: Served) -> dict[str, Any]:
    return served.run("tinker-0.36.0", "published.py", key=KEY)["published"]


@pytest.fixture(scope="module")
def facts(served: Served, published: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return served.run("openai", "openai_calls.py", published["path"], key=KEY)


def test_models_and_completions(facts: dict[str, dict[str, Any]], published: dict[str, Any]) -> None:
    assert facts["models"] == {"ids": [MODEL, published["path"]], "one": MODEL}
    one = facts["completion"]
    assert (one["object"], one["model"]) == ("text_completion", MODEL)
    assert one["usage"] == [9, 24, 33]
    assert one["reasons"] == ["length", "length"]
    assert (one["logprobs"], one["top"]) == ([12, 12], [3, 3])
    assert one["texts"][0] != one["texts"][1]
    assert facts["streamed completion"]["texts"] == one["texts"]
    assert facts["streamed completion"]["chunks"] > 4
    assert set(facts["many"]["texts"]) == {one["texts"][0]}
    adapter = facts["adapter"]
    assert (adapter["text"], adapter["model"]) == (published["text"], published["path"])
    assert adapter["logprobs"] == pytest.approx(published["logprobs"][: len(adapter["logprobs"])], abs=1e-4)


def test_chat(facts: dict[str, dict[str, Any]]) -> None:
    chat = facts["chat"]
    assert (chat["object"], chat["roles"]) == ("chat.completion", ["assistant"] * 2)
    assert all(set(counts) == {2} for counts in chat["logprobs"])
    prompt, drawn = chat["usage"]
    assert prompt > 20
    assert sum(map(len, chat["logprobs"])) <= drawn <= 24
    streamed = facts["streamed chat"]
    assert (streamed["texts"], streamed["usage"]) == (chat["texts"], drawn)
    assert len(streamed["ends"]) == 2
    stopped = facts["stopped"]
    assert (stopped["text"], stopped["reason"]) == (stopped["whole"].split(stopped["stop"])[0], "stop")


@pytest.mark.parametrize("step", ERRORS)
def test_errors(facts: dict[str, dict[str, Any]], step: str) -> None:
    kind, status, code, part = ERRORS[step]
    error = facts[step]["error"]
    assert (error["type"], error["status"], facts[step]["code"]) == (kind, status, code)
    assert part in error["message"]
