"""Login sessions of browsers: a signed cookie that names an API key by its hash, and tokens against forgery.

The cookie grants what the key does, until it expires, the key is revoked or its owner logs out. The ledger's
audit log keeps who has logged out, for all servers that share it. The API does not accept the cookie. Every
form and every request that changes something carries a token of its session, which another site cannot know.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.signing import derive
from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import LedgerFullError
from tinkex.service.rows import AuditRow

LIFE = 7 * 24 * 3600.0  # seconds
LOOK = 5.0  # seconds between two looks at what other servers have ended
LOGOUT = "console.logout"


@dataclass(frozen=True)
class LoginSession:
    """One login of one browser."""

    id: str
    key_hash: str
    expires: float


class EndedSessions:
    """The sessions whose users have logged out, by id."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger, self._seen, self._looked = ledger, 0, -LOOK
        self._ids: set[str] = set()

    def add(self, session: LoginSession, user: str) -> None:
        self._ids.add(session.id)
        if self._ledger is not None:
            with suppress(LedgerFullError):  # then only until the next start
                self._ledger.add_audit(AuditRow(time.time(), user, LOGOUT, details={"session": session.id}))

    def __contains__(self, session_id: str) -> bool:
        if self._ledger is not None and time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            for number, details in self._ledger.audit_after(self._seen, LOGOUT, start=time.time() - LIFE):
                self._seen = number
                self._ids.add(str(json.loads(details).get("session")))
        return session_id in self._ids


class LoginSessions:
    """Issues cookies, and reads them.

    A browser sends a cookie to every port of a machine: its name tells consoles apart (`named_by`).
    """

    def __init__(
        self,
        secret: bytes,
        ended: EndedSessions,
        *,
        named_by: bytes = b"",
        path: str = "/",
        secure: bool = False,
    ) -> None:
        self._cookie_key, self._form_key = derive(secret, "console"), derive(secret, "console forms")
        self._name = f"tinkex_console_{derive(named_by or secret, 'console cookie').hex()[:8]}"
        self._path, self._secure, self._ended = path, secure, ended

    def begin(self, response: Response, key_hash: str) -> None:
        """Let the browser that gets this response stay logged in."""
        expires = time.time() + LIFE
        body = json.dumps([secrets.token_urlsafe(16), key_hash, int(expires)]).encode()
        value = f"{_text(body)}.{_text(self._sign(body))}"
        self._set(response, value, int(LIFE))

    def end(self, response: Response, request: Request, user: str) -> None:
        if (session := self.read(request)) is not None:
            self._ended.add(session, user)
        self._set(response, "", 0)

    def _set(self, response: Response, value: str, seconds: int) -> None:
        response.set_cookie(
            self._name, value, max_age=seconds, path=self._path, secure=self._secure, httponly=True,
            samesite="strict",
        )  # fmt: skip

    def read(self, request: Request) -> LoginSession | None:
        """The session of a browser's cookie; None if we did not issue it, or it is over."""
        body, _, signature = request.cookies.get(self._name, "").partition(".")
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
