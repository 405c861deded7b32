"""Who looks at the console: a browser's session as the caller of a service, on a server or at a home."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from tinkex.config import is_loopback_host
from tinkex.server.api_keys import LOCAL_KEY, Authenticator, hash_key
from tinkex.server.console.login_session import EndedSessions, LoginSessions
from tinkex.service.access import scope_of
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import LOCAL_USER, Caller, Refusal
from tinkex.service.rows import Scope


@dataclass(frozen=True)
class Visitor:
    """A browser whose user is known."""

    caller: Caller
    scope: Scope  # whose rows its pages show
    form_token: str
    admin: bool = False

    @property
    def name(self) -> str:
        return self.caller.user


class Visitors(Protocol):
    """Finds out who a browser's user is."""

    @property
    def hint(self) -> str:
        """What the login page offers to type."""
        ...

    @property
    def read_only(self) -> bool:
        """Nothing can be changed, nor sampled."""
        ...

    def find(self, request: Request) -> Visitor | None: ...

    def log_in(self, response: Response, key: str) -> None:
        """Remember a user by their key; Refusal if it is not accepted."""
        ...

    def log_out(self, response: Response, request: Request, visitor: Visitor) -> None: ...


class KeyVisitors:
    """The users of a server, by their API keys."""

    read_only = False

    def __init__(self, authenticator: Authenticator, ledger: Ledger, secret: bytes, public_url: str) -> None:
        self._authenticator, self._public_url = authenticator, public_url
        parts, ended = urlsplit(public_url), EndedSessions(ledger)
        secure = parts.scheme == "https"
        self._sessions = LoginSessions(secret, ended, path=f"{parts.path}/", secure=secure)

    @property
    def hint(self) -> str:
        return LOCAL_KEY if self._authenticator.is_open else ""

    def find(self, request: Request) -> Visitor | None:
        session = self._sessions.read(request)
        if session is None:
            return None
        try:
            identity = self._authenticator.from_hash(session.key_hash)
        except Refusal:  # the key was revoked, or real keys were made meanwhile
            return None
        key = identity.key
        # Without keys, whoever reaches this port is at this machine, and so must be the name that it uses:
        # else the page of another site whose name leads here would be served too.
        if key is None and not is_loopback_host(request.url.hostname or ""):
            raise Refusal(403, "this server has no keys: open its console as http://127.0.0.1 or localhost")
        url = self._public_url or f"{request.url.scheme}://{request.headers.get('host', '')}"
        caller = Caller(
            identity.user, identity.project, url, key_id=0 if key is None else key.key_id,
            sees_local=key is None,
        )  # fmt: skip
        token = self._sessions.form_token(session)
        return Visitor(caller, scope_of(caller, "accessible"), token, key is not None and key.admin)

    def log_in(self, response: Response, key: str) -> None:
        self._sessions.begin(response, self._authenticator.identify(key).key_hash)

    def log_out(self, response: Response, request: Request, visitor: Visitor) -> None:
        self._sessions.end(response, request, visitor.name)


class HomeVisitors:
    """The owner of a home directory, who was given a key when the console began."""

    hint, read_only = "", True

    def __init__(self, home: Path) -> None:
        self.key = f"tml-{secrets.token_urlsafe(24)}"
        named_by = str(home.absolute()).encode()
        self._sessions = LoginSessions(secrets.token_bytes(32), EndedSessions(), named_by=named_by)

    def find(self, request: Request) -> Visitor | None:
        session = self._sessions.read(request)
        if session is None:
            return None
        return Visitor(Caller(LOCAL_USER), Scope(None), self._sessions.form_token(session), admin=True)

    def log_in(self, response: Response, key: str) -> None:
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            raise Refusal(401, "this is not the key that was printed when the console began")
        self._sessions.begin(response, hash_key(key))

    def log_out(self, response: Response, request: Request, visitor: Visitor) -> None:
        self._sessions.end(response, request, visitor.name)
