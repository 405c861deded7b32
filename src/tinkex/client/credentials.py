"""Credentials: where an API key comes from, and the `x-api-key` header that it becomes.

    api_key=…  >  TINKER_API_KEY  >  TINKER_CREDENTIAL_CMD  >  ~/.tinker/credentials.json  >  loopback: none

Promises: a key never appears in a repr, a message or a pickle; a malformed key is refused before anything is
sent; commands run in a worker thread, one at a time; only its owner can read the file of stored keys, which
has the format of the official command line. Knows nothing of HTTP.
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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tinkex.client.loop import off_loop
from tinkex.config import Settings, is_loopback
from tinkex.errors import CredentialError, InvalidInputError, TinkerError
from tinkex.files import replacing

if TYPE_CHECKING:
    from tinkex.types.base import AnyJson

log = logging.getLogger("tinkex")

Source = Literal["argument", "environment", "command", "store", "loopback"]

STORE_VERSION = 1  # of the file of stored keys
LOOPBACK_KEY = "tml-local"  # well-formed, and belongs to no account
COMMAND_TIMEOUT = 60.0
COMMAND_TOKEN_LIFE = 60.0  # seconds for which a printed token is used, if it does not say itself
REFRESH_EARLY = 300.0  # seconds before a JWT's end at which a new one is fetched in the background
REFRESH_NOW = 60.0  # … and at which callers wait for it
REFRESH_PAUSE = 60.0  # after a failed refresh
FRESH_FOR = 10.0  # a new JWT is used at least this long, even if its `exp` is earlier by our clock

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


class Credential:
    """What becomes the `x-api-key` header of a request: a constant key, unless a subclass fetches it."""

    def __init__(self, key: str, source: Source) -> None:
        self.source: Source = source
        self.identity = _identity("key", key)  # a hash that identifies the credential
        self._token = key

    def current(self) -> str | None:
        """The value, if it is known without waiting."""
        return self._token

    async def token(self) -> str:
        """The value, fetched if need be. Call on the background loop."""
        return self._token

    def refused(self, token: str) -> bool:
        """The server refused `token`: can `token()` produce another?"""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(source={self.source!r})"

    def __reduce__(self) -> NoReturn:
        raise CredentialError(
            "credentials are never pickled: send their source, and find them anew with resolve_from_source"
        )


class _FetchedCredential(Credential):
    """A token that is fetched by one task at a time, and used until shortly before it expires."""

    def __init__(self, source: Source, identity: str, now: Callable[[], float]) -> None:
        super().__init__("", source)
        self.identity, self._now = identity, now
        self._use_until = 0.0
        self._fetching: asyncio.Task[str] | None = None

    def current(self) -> str | None:
        return self._token if self._now() < self._use_until else None

    def _fetch(self) -> asyncio.Task[str]:
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._renew())
            self._fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._fetching

    async def _renew(self) -> str:
        raise NotImplementedError

    def _use(self, token: str, life: float) -> float:
        """Use a new token; returns its expiry, in `life` seconds unless it says when."""
        expires, now = decode_claims(token).get("exp"), self._now()
        if not isinstance(expires, int | float) or isinstance(expires, bool):
            expires = now + life
        # At least FRESH_FOR: with a clock that is wrong by hours, every request would be an exchange.
        self._token, self._use_until = token, max(expires - REFRESH_NOW, now + FRESH_FOR)
        return expires


class CommandCredential(_FetchedCredential):
    """A token that a shell command prints; used for a minute, or until it expires if it says when."""

    def __init__(self, command: str, now: Callable[[], float] = time.time) -> None:
        super().__init__("command", _identity("command", command), now)
        self._command = command

    async def token(self) -> str:
        return self.current() or await asyncio.shield(self._fetch())

    async def _renew(self) -> str:
        self._use(await off_loop(run_credential_command, self._command), COMMAND_TOKEN_LIFE + REFRESH_NOW)
        return self._token


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
        if sys.platform == "win32":
            process.kill()
        else:  # with its children, which hold the pipes open
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise CredentialError(f"TINKER_CREDENTIAL_CMD printed no token within {timeout:g} s") from None
    if process.returncode != 0:
        said = complaint.strip()[-500:] or "nothing on stderr"
        raise CredentialError(f"TINKER_CREDENTIAL_CMD failed with exit status {process.returncode}: {said}")
    if not output.strip():
        raise CredentialError("TINKER_CREDENTIAL_CMD succeeded, but printed no token")
    return check_key(output, "what TINKER_CREDENTIAL_CMD printed")


class JwtCredential(_FetchedCredential):
    """A JWT that another credential is exchanged for, on servers that require it.

    It is renewed in the background five minutes before it expires, so that no call waits for that; if the
    exchange fails, the old one is used as long as the server accepts it.
    """

    def __init__(
        self, inner: Credential, call: Callable[..., Awaitable[Any]], now: Callable[[], float] = time.time
    ) -> None:
        super().__init__(inner.source, inner.identity, now)
        self._call = call
        self._refresh_at = 0.0

    def current(self) -> str | None:
        jwt = super().current()
        if jwt and self._now() >= self._refresh_at:
            self._fetch()
        return jwt

    async def token(self) -> str:
        if jwt := self.current():
            return jwt
        exchange = self._fetch()
        if not self._token:
            return await asyncio.shield(exchange)
        # A server in trouble may delay the exchange for minutes: try the old one then.
        await asyncio.wait([exchange], timeout=FRESH_FOR)
        if not exchange.done():
            self._use_until = self._now() + REFRESH_PAUSE
        return self._token

    def refused(self, token: str) -> bool:
        if token == self._token:  # else it was renewed meanwhile
            self._token, self._use_until = "", 0.0
        return True

    async def _renew(self) -> str:
        from tinkex.types.config import EmptyRequest  # it imports numpy, which API keys do not need
        from tinkex.wire import ops

        try:
            answer = await self._call(ops.GET_AUTH_TOKEN, EmptyRequest())
        except TinkerError as error:
            if not self._token:
                raise
            log.warning("could not renew the JWT, going on with the old one: %s", error)
            self._refresh_at = self._now() + REFRESH_PAUSE
            self._use_until = max(self._use_until, self._refresh_at)
            return self._token
        expires = self._use(answer.jwt, 2 * REFRESH_EARLY)
        self._refresh_at = max(expires - REFRESH_EARLY, self._now() + FRESH_FOR)
        return self._token


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


# -- which one -------------------------------------------------------------------------------------------


def resolve(settings: Settings, api_key: str | None = None, base_url: str = "") -> Credential:
    """The credential to use: the argument, the environment, the command, the store, or none on loopback."""
    if api_key and api_key != settings.api_key:  # if equal, another process can find it in the environment
        return Credential(check_key(api_key, "api_key"), "argument")
    sources = ["environment", "command", "store"]
    if base_url and is_loopback(base_url):
        sources.append("loopback")
    for source in sources:
        try:
            if (found := _find(source, settings)) is not None:
                return found
        except InvalidInputError:  # a command stands in for a malformed key in the environment
            if source != "environment" or not settings.credential_cmd:
                raise
    raise CredentialError(NO_CREDENTIAL.format(path=settings.credentials_file))


def resolve_from_source(source: str, settings: Settings) -> Credential:
    """Find the credential of a pickled client again, in this process."""
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
    if source == "environment" and settings.api_key:
        return Credential(check_key(settings.api_key, "TINKER_API_KEY"), source)
    if source == "command" and settings.credential_cmd:
        return CommandCredential(settings.credential_cmd)
    if source == "store" and (stored := CredentialStore(settings.credentials_file).default_key()):
        origin = f"the default key in {settings.credentials_file}"
        return Credential(check_key(stored.key, origin), source)
    if source == "loopback":
        return Credential(LOOPBACK_KEY, source)
    return None


# -- the file of stored keys -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredKey:
    """One key in the store. A `generated` one was made by login; logout deletes it."""

    key: str = field(repr=False)
    name: str = ""
    type: Literal["manual", "generated"] = "manual"
    note: str | None = None
    details: Mapping[str, Any] | None = None


class CredentialStore:
    """The stored keys by their ids, one of which may be the default."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def default_id(self) -> str | None:
        content = self._load()
        return content["default"] if content["default"] in content["keys"] else None

    def default_key(self) -> StoredKey | None:
        if (key_id := self.default_id()) is None:
            return None
        entry: AnyJson = self._load()["keys"][key_id]
        if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
            raise self._broken(f"the entry {key_id!r} has no key")
        return StoredKey(**{f.name: entry[f.name] for f in fields(StoredKey) if f.name in entry})

    def add(self, key_id: str, record: StoredKey, *, default: bool = True) -> None:
        content = self._load()
        content["keys"][key_id] = {name: value for name, value in vars(record).items() if value is not None}
        if default:
            content["default"] = key_id
        self._save(content)

    def remove(self, key_id: str) -> None:
        content = self._load()
        if key_id not in content["keys"]:
            known = ", ".join(content["keys"]) or "none"
            raise InvalidInputError(f"{self.path} has no key {key_id!r}; it has: {known}")
        del content["keys"][key_id]
        if content["default"] == key_id:
            content["default"] = None
        self._save(content)

    def _load(self) -> dict[str, Any]:
        try:
            content: AnyJson = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            content = {}
        except OSError as error:
            raise CredentialError(f"cannot read the stored keys in {self.path}: {error.strerror}") from None
        except ValueError:
            raise self._broken("it is not JSON") from None
        if not isinstance(content, dict) or not isinstance(content.get("keys", {}), dict):
            raise self._broken("it is not an object with 'keys'")
        content = {"version": STORE_VERSION, "default": None, "keys": {}, **content}
        if content["version"] != STORE_VERSION:
            understood = f"and only {STORE_VERSION} is understood"
            raise self._broken(f"its version is {content['version']!r}, {understood}")
        return content

    def _broken(self, reason: str) -> CredentialError:
        return CredentialError(
            f"the stored keys in {self.path} cannot be used: {reason}; delete it and log in again"
        )

    def _save(self, content: dict[str, Any]) -> None:
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        with replacing(self.path, mode=0o600, sync=True) as file:
            file.write(json.dumps(content, indent=2).encode())
