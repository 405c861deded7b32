"""Credentials: where an API key comes from, and the `x-api-key` header that it becomes.

    api_key=…  >  TINKER_API_KEY  >  TINKER_CREDENTIAL_CMD  >  ~/.tinker/credentials.json  >  loopback: none

Promises: a key never appears in a repr, a message or a pickle; a malformed key is refused before anything is
sent; commands run in a worker thread, one at a time. Knows nothing of HTTP: a key is exchanged for a JWT
through the `call` that it is given.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tinkex.client.credential_store import CredentialStore
from tinkex.client.loop import off_loop
from tinkex.config import Settings, is_loopback
from tinkex.errors import CredentialError, InvalidInputError, TinkerError

if TYPE_CHECKING:
    from tinkex.types.base import AnyJson

log = logging.getLogger("tinkex")

Source = Literal["argument", "environment", "command", "store", "loopback"]

LOOPBACK_KEY = "tml-local"  # well-formed, and nobody's
COMMAND_TIMEOUT = 60.0
COMMAND_TOKEN_LIFE = 60.0  # seconds for which a printed token is used, if it does not say itself
REFRESH_EARLY = 300.0  # seconds before a JWT's end at which a new one is fetched in the background
REFRESH_NOW = 60.0  # … and at which callers wait for it
REFRESH_PAUSE = 60.0  # after a failed refresh
FRESH_FOR = 10.0  # a new JWT is used at least this long, whatever its `exp` and our clock say

NO_CREDENTIAL = (
    "no API key: pass api_key=…, set TINKER_API_KEY, set TINKER_CREDENTIAL_CMD to a command that prints a "
    "token, or log in, which stores one in {path}; a server on this machine (http://127.0.0.1:…) needs none"
)


def looks_like_key(text: str) -> bool:
    return text.strip().startswith(("tml-", "eyJ"))


def check_key(key: str, origin: str) -> str:
    """`key` without surrounding space, if it can be one; the error never shows it."""
    key = key.strip()
    if not looks_like_key(key):
        raise InvalidInputError(f"{origin} is not an API key: keys start with 'tml-' (or 'eyJ', for a JWT)")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise InvalidInputError(f"{origin} is not an API key: it has characters that no key contains")
    return key


def _identity(kind: str, secret: str) -> str:
    return hashlib.sha256(f"{kind}\0{secret}".encode()).hexdigest()[:16]


# -- kinds of credentials --------------------------------------------------------------------------------


class Credential(ABC):
    """Something that produces the `x-api-key` header of a request."""

    source: Source
    identity: str  # a hash that tells credentials apart

    @abstractmethod
    def current(self) -> str | None:
        """The value, if it is known without waiting."""

    @abstractmethod
    async def token(self) -> str:
        """The value, fetched if need be. Call on the background loop."""

    def refused(self, token: str) -> bool:
        """The server refused `token`: can `token()` produce another?"""
        return False

    def __reduce__(self) -> NoReturn:
        raise CredentialError(
            "credentials are never pickled: send their source, and find them anew with resolve_from_source"
        )


class KeyCredential(Credential):
    """A constant key."""

    def __init__(self, key: str, source: Source) -> None:
        self.source: Source = source
        self.identity = _identity("key", key)
        self._key = key

    def current(self) -> str | None:
        return self._key

    async def token(self) -> str:
        return self._key

    def __repr__(self) -> str:
        return f"KeyCredential(source={self.source!r})"


class CommandCredential(Credential):
    """A token that a shell command prints; used for a minute, or until it expires if it says when."""

    source: Source = "command"

    def __init__(self, command: str, now: Callable[[], float] = time.time) -> None:
        self.identity = _identity("command", command)
        self._command = command
        self._now = now
        self._token = ""
        self._until = 0.0
        self._running: asyncio.Task[str] | None = None

    def current(self) -> str | None:
        return self._token if self._now() < self._until else None

    async def token(self) -> str:
        if token := self.current():
            return token
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)

    async def _run(self) -> str:
        self._token = await off_loop(run_credential_command, self._command)
        expires, now = _expiry(self._token), self._now()
        self._until = now + COMMAND_TOKEN_LIFE
        if expires is not None:
            self._until = max(expires - REFRESH_NOW, now + FRESH_FOR)
        return self._token

    def __repr__(self) -> str:
        return "CommandCredential(TINKER_CREDENTIAL_CMD)"


def run_credential_command(command: str, timeout: float = COMMAND_TIMEOUT) -> str:
    """The token that `command` prints. An error shows stderr, but neither the command nor its output."""
    try:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CredentialError(f"TINKER_CREDENTIAL_CMD could not be run: {error.strerror}") from None
    try:
        output, complaint = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        process.communicate()
        raise CredentialError(f"TINKER_CREDENTIAL_CMD printed no token within {timeout:g} s") from None
    if process.returncode != 0:
        said = complaint.strip()[-500:] or "nothing on stderr"
        raise CredentialError(f"TINKER_CREDENTIAL_CMD failed with exit status {process.returncode}: {said}")
    if not output.strip():
        raise CredentialError("TINKER_CREDENTIAL_CMD succeeded, but printed no token")
    return check_key(output, "what TINKER_CREDENTIAL_CMD printed")


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a shell and its children: they hold the pipes open."""
    if sys.platform == "win32":
        return process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class JwtCredential(Credential):
    """A JWT that another credential is exchanged for, on servers that require it.

    It is renewed in the background five minutes before it expires, so that no call waits for that; if the
    exchange fails, the old one is used as long as the server accepts it. One exchange runs at a time.
    """

    def __init__(
        self, inner: Credential, call: Callable[..., Awaitable[Any]], now: Callable[[], float] = time.time
    ) -> None:
        self.source: Source = inner.source
        self.identity = inner.identity
        self.inner = inner
        self._call = call
        self._now = now
        self._jwt = ""
        self._use_until = 0.0
        self._refresh_at = 0.0
        self._exchange: asyncio.Task[str] | None = None

    def current(self) -> str | None:
        now = self._now()
        if now >= self._use_until:
            return None
        if now >= self._refresh_at:
            self._start_exchange()
        return self._jwt

    async def token(self) -> str:
        if jwt := self.current():
            return jwt
        exchange = self._start_exchange()
        if not self._jwt:
            return await asyncio.shield(exchange)
        # A server in trouble may delay the exchange for minutes: try the old one then.
        await asyncio.wait([exchange], timeout=FRESH_FOR)
        if not exchange.done():
            self._use_until = self._now() + REFRESH_PAUSE
        return self._jwt

    def refused(self, token: str) -> bool:
        if token == self._jwt:  # else it was renewed meanwhile
            self._jwt, self._use_until = "", 0.0
        return True

    def _start_exchange(self) -> asyncio.Task[str]:
        if self._exchange is None or self._exchange.done():
            self._exchange = asyncio.create_task(self._renew())
            self._exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._exchange

    async def _renew(self) -> str:
        from tinkex.types.config import EmptyRequest  # it imports numpy, which keys alone do not need
        from tinkex.wire import ops

        try:
            answer = await self._call(ops.GET_AUTH_TOKEN, EmptyRequest())
        except TinkerError as error:
            if not self._jwt:
                raise
            log.warning("could not renew the JWT, going on with the old one: %s", error)
            self._refresh_at = self._now() + REFRESH_PAUSE
            self._use_until = max(self._use_until, self._refresh_at)
            return self._jwt
        self._jwt, now = answer.jwt, self._now()
        expires = _expiry(self._jwt)
        if expires is None:
            expires = now + 2 * REFRESH_EARLY
        # At least FRESH_FOR: with a clock that is wrong by hours, every request would be an exchange.
        self._use_until = max(expires - REFRESH_NOW, now + FRESH_FOR)
        self._refresh_at = max(expires - REFRESH_EARLY, now + FRESH_FOR)
        return self._jwt

    def __repr__(self) -> str:
        return f"JwtCredential({self.inner!r})"


def decode_claims(token: str) -> dict[str, Any]:
    """What a JWT says, unverified; empty if it is no JWT.

    >>> decode_claims("eyJhbGciOiJub25lIn0.eyJzdWIiOiJ1c2VyIn0.")
    {'sub': 'user'}
    """
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        claims: AnyJson = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        return {}
    return claims if isinstance(claims, dict) else {}


def _expiry(token: str) -> float | None:
    expires = decode_claims(token).get("exp")
    return float(expires) if isinstance(expires, int | float) and not isinstance(expires, bool) else None


# -- which one -------------------------------------------------------------------------------------------


def resolve(settings: Settings, api_key: str | None = None, base_url: str = "") -> Credential:
    """The credential to use: the argument, the environment, the command, the store, or none on loopback."""
    if api_key and api_key != settings.api_key:  # if equal, another process can find it in the environment
        return KeyCredential(check_key(api_key, "api_key"), "argument")
    try:
        found = _find("environment", settings)
    except InvalidInputError:
        if not settings.credential_cmd:
            raise
        found = None
    found = found or _find("command", settings) or _find("store", settings)
    if found is None and base_url and is_loopback(base_url):
        found = _find("loopback", settings)
    if found is None:
        raise CredentialError(NO_CREDENTIAL.format(path=settings.credentials_file))
    return found


def resolve_from_source(source: str, settings: Settings) -> Credential:
    """The credential that a pickled client says it used, found anew in this process."""
    if (found := _find(source, settings)) is not None:
        return found
    missing = _NOT_FOUND.get(source, _NOT_FOUND["argument"]).format(path=settings.credentials_file)
    raise CredentialError(
        f"this client was made with {missing}, or take the sampler's handle instead: "
        "SamplingClient.from_sampler_handle(handle, api_key=…)"
    )


_NOT_FOUND = {
    "environment": "the key in TINKER_API_KEY, which is not set in the process it was sent to "
    "(keys are never pickled): set it here",
    "command": "TINKER_CREDENTIAL_CMD, which is not set in the process it was sent to: set it here",
    "store": "the stored key, and {path} has no default key in the process it was sent to: log in here",
    "argument": "api_key=…, and keys are never pickled: make it with TINKER_API_KEY set in both processes",
}


def _find(source: str, settings: Settings) -> Credential | None:
    """The credential from one source, if it has one."""
    if source == "environment" and settings.api_key:
        return KeyCredential(check_key(settings.api_key, "TINKER_API_KEY"), source)
    if source == "command" and settings.credential_cmd:
        return CommandCredential(settings.credential_cmd)
    if source == "store" and (stored := CredentialStore(settings.credentials_file).default_key()):
        origin = f"the default key in {settings.credentials_file}"
        return KeyCredential(check_key(stored.key, origin), source)
    if source == "loopback":
        return KeyCredential(LOOPBACK_KEY, source)
    return None
