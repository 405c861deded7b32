"""Login sessions of browsers: a signed cookie that names an API key by its hash, and tokens against forgery.

The cookie grants what the key does, until it expires, the key is revoked or its owner logs out. The API does
not accept it. Every form and every request that changes something carries a token of its session, which
another site cannot know.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from tinkex.server.signing import derive

COOKIE = "tinkex_console"
LIFE = 7 * 24 * 3600.0  # seconds


@dataclass(frozen=True)
class LoginSession:
    """One login of one browser."""

    id: str
    key_hash: str
    expires: float


class LoginSessions:
    """Issues cookies, and reads them."""

    def __init__(self, secret: bytes, *, path: str = "/", secure: bool = False) -> None:
        self._cookie_key, self._form_key = derive(secret, "console"), derive(secret, "console forms")
        self._path, self._secure = path, secure
        self._ended: dict[str, float] = {}  # sessions whose users have logged out, until they expire

    def begin(self, response: Response, key_hash: str) -> None:
        """Let the browser that gets this response stay logged in."""
        expires = time.time() + LIFE
        body = json.dumps([secrets.token_urlsafe(16), key_hash, int(expires)]).encode()
        value = f"{_text(body)}.{_text(self._sign(body))}"
        self._set(response, value, int(LIFE))

    def end(self, response: Response, session: LoginSession | None) -> None:
        now = time.time()
        self._ended = {i: expires for i, expires in self._ended.items() if expires > now}
        if session is not None:
            self._ended[session.id] = session.expires
        self._set(response, "", 0)

    def _set(self, response: Response, value: str, seconds: int) -> None:
        response.set_cookie(
            COOKIE, value, max_age=seconds, path=self._path, secure=self._secure, httponly=True,
            samesite="strict",
        )  # fmt: skip

    def read(self, cookie: str) -> LoginSession | None:
        """The session of a cookie; None if we did not issue it, or it is over."""
        body, _, signature = cookie.partition(".")
        try:
            content = urlsafe_b64decode(body)
            if not hmac.compare_digest(urlsafe_b64decode(signature), self._sign(content)):
                return None
            fields: list[Any] = json.loads(content)
            session = LoginSession(str(fields[0]), str(fields[1]), float(fields[2]))
        except (ValueError, IndexError, TypeError):
            return None
        over = session.expires <= time.time() or session.id in self._ended
        return None if over else session

    def form_token(self, session: LoginSession) -> str:
        return hmac.digest(self._form_key, session.id.encode(), "sha256").hex()

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._cookie_key, body, "sha256")


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).decode()
