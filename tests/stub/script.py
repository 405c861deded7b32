"""Scripted misbehaviour: what the stub does to one request instead of answering it properly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.stub.http import Reply, Request

TRY_AGAIN = (402, 408, 409, 429)


@dataclass(frozen=True)
class Action:
    """What happens to one request instead of the default; with `effect` it is carried out all the same."""

    wait: float = 0.0
    end: str = "default"  # default | reply | drop | hang
    reply: Reply = field(default_factory=Reply)
    effect: bool = False
    failure: tuple[str, str] | None = None

    @property
    def refuses(self) -> bool:
        """True for an answer after which a client goes on with its next seq id instead of trying again."""
        proxys = self.reply.status == 400 and not self.reply.body  # a proxy's: tried again
        final = 400 <= self.reply.status < 500 and self.reply.status not in TRY_AGAIN
        return self.end == "reply" and final and not proxys


def status(
    code: int, headers: Mapping[str, str | None] | None = None, body: Any = None, *, effect: bool = False
) -> Action:
    """Answer with this status; a body other than bytes is sent as JSON, a header given as None left out."""
    body = {"detail": f"scripted {code}"} if body is None else body
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return Action(end="reply", reply=Reply(code, data, dict(headers or {})), effect=effect)


def delay(seconds: float, then: Action | None = None) -> Action:
    """Wait, then do the default or another action."""
    then = then or Action()
    return Action(seconds, then.end, then.reply, then.effect, then.failure)


def drop(*, effect: bool = False) -> Action:
    """Close the connection without an answer."""
    return Action(end="drop", effect=effect)


def hang(*, effect: bool = False) -> Action:
    """Keep the connection open and never answer."""
    return Action(end="hang", effect=effect)


def garbage(content_type: str = "application/json") -> Action:
    """A 200 whose body is neither JSON nor protobuf."""
    return Action(end="reply", reply=Reply(200, b"\xff\xfe{not json", {"content-type": content_type}))


def fail(message: str, category: str = "user") -> Action:
    """Accept the request; its future then fails with this message."""
    return Action(failure=(message, category))


@dataclass
class Rule:
    pattern: str
    actions: deque[Action]
    where: Callable[[Request], bool] | None
    always: bool

    def take(self, request: Request) -> Action | None:
        if not self.actions or not request.matches(self.pattern) or (self.where and not self.where(request)):
            return None
        return self.actions[0] if self.always and len(self.actions) == 1 else self.actions.popleft()
