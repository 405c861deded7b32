"""What is done with every field of OpenAI's and Anthropic's requests: none is dropped silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.api_fields import CHAT, COMPLETIONS, COUNT, MESSAGES, RESPONSES, ApiField
from tests.server.conftest import Running
from tinkex.server.anthropic import messages_api
from tinkex.server.openai import responses_api
from tinkex.server.openai.requests import ChatRequest, CompletionRequest, read_request

pytestmark = pytest.mark.slow

BEARER = {"authorization": "Bearer EMPTY"}
Read = Callable[[dict[str, Any]], Any]


def effect(request: Any) -> dict[str, Any]:
    """What of a request matters: formats by what they ask for; best_of equals n, or is refused."""
    return {**request.model_dump(exclude={"response_format", "best_of"}), "constraint": request.constraint()}


APIS: dict[str, tuple[dict[str, ApiField], Read]] = {
    "/v1/chat/completions": (CHAT, lambda fields: read_request(ChatRequest, fields)),
    "/v1/completions": (COMPLETIONS, lambda fields: read_request(CompletionRequest, fields)),
    "/v1/responses": (RESPONSES, lambda fields: read_request(ChatRequest, responses_api.chat_fields(fields))),
    "/v1/messages": (MESSAGES, lambda fields: read_request(ChatRequest, messages_api.chat_fields(fields))),
    "/v1/messages/count_tokens": (
        COUNT,
        lambda fields: read_request(ChatRequest, messages_api.chat_fields(fields)),
    ),
}
LENGTHS = {"/v1/responses": "max_output_tokens", "/v1/messages/count_tokens": None}


def least(path: str) -> dict[str, Any]:
    """The least that a request must have, and a short answer."""
    fields, _ = APIS[path]
    asked = {name: field.honoured[0] for name, field in fields.items() if not field.neutral}
    short = LENGTHS.get(path, "max_tokens")
    return asked if short is None else {short: 4, **asked}


def cases(*kinds: str) -> list[Any]:
    found: list[Any] = []
    for path, (fields, _) in APIS.items():
        for name, field in fields.items():
            for kind in kinds:
                for i, value in enumerate(getattr(field, kind)):
                    found.append(pytest.param(path, name, value, id=f"{path}-{name}-{kind}{i}"))
    return found


@pytest.mark.parametrize(("path", "name", "value"), cases("neutral", "ignored", "honoured"))
def test_what_is_offered_is_accepted(server: Running, path: str, name: str, value: Any) -> None:
    answer = server.ask("POST", path, {**least(path), name: value}, BEARER, key=None)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(("path", "name", "value"), cases("refused"))
def test_what_is_not_offered_is_refused_by_name(server: Running, path: str, name: str, value: Any) -> None:
    answer = server.ask("POST", path, {**least(path), name: value}, BEARER, key=None)
    assert answer.status == 400, answer.body
    assert name in answer.json["error"]["message"]


@pytest.mark.parametrize(("path", "name", "value"), cases("honoured"))
def test_what_is_honoured_reaches_the_sampler_or_the_reply(path: str, name: str, value: Any) -> None:
    fields, read = APIS[path]
    if fields[name].neutral:
        rest = {k: v for k, v in least(path).items() if k != name}
        assert effect(read({**rest, name: value})) != effect(read(rest))


@pytest.mark.parametrize(("path", "name", "value"), cases("neutral", "ignored"))
def test_what_is_neutral_changes_nothing(path: str, name: str, value: Any) -> None:
    _, read = APIS[path]
    rest = {k: v for k, v in least(path).items() if k != name}
    assert effect(read({**rest, name: value})) == effect(read(rest))
