"""Credentials: where a key comes from, how it becomes the `x-api-key` of a request, and where it is kept.

    api_key=…  >  TINKER_API_KEY  >  TINKER_CREDENTIAL_CMD  >  ~/.tinker/credentials.json  >  loopback: none

Promises: a key never appears in a repr, a message or a pickle; a malformed one is refused before anything
is sent; commands run off the event loop, and one at a time. Knows nothing of HTTP: the exchange of a key
for a JWT goes through the `call` it is given.
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
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

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


class Credential(Protocol):
    """Something that can produce the `x-api-key` of a request."""

    source: Source
    identity: str  # tells credentials apart without giving them away

    def current(self) -> str | None:
        """The value, if it is at hand without waiting."""
        ...

    async def token(self) -> str:
        """The value, fetched if need be. Call on the background loop."""
        ...


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


class _Secret:
    """Something that must not leave the process by accident."""

    def __reduce__(self) -> NoReturn:
        raise CredentialError(
            "credentials are never pickled: send their source, and find them anew with resolve_from_source"
        )


class KeyCredential(_Secret):
    """A key that is known and stays the same."""

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


class CommandCredential(_Secret):
    """A token that a shell command prints; kept for a minute, or for as long as it says it is valid."""

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
        expires = _expiry(decode_claims(self._token))
        now = self._now()
        self._until = (
            now + COMMAND_TOKEN_LIFE if expires is None else max(expires - REFRESH_NOW, now + FRESH_FOR)
        )
        return self._token

    def __repr__(self) -> str:
        return "CommandCredential(TINKER_CREDENTIAL_CMD)"


def run_credential_command(command: str, timeout: float = COMMAND_TIMEOUT) -> str:
    """What `command` prints, checked. Neither the command nor its output appears in an error: both may
    hold secrets; what it wrote to stderr does, since that is for people to read."""
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the shell's children too: they hold the pipes open
        process.communicate()
        raise CredentialError(f"TINKER_CREDENTIAL_CMD printed no token within {timeout:g} s") from None
    if process.returncode != 0:
        said = complaint.strip()[-500:] or "nothing on stderr"
        raise CredentialError(f"TINKER_CREDENTIAL_CMD failed with exit status {process.returncode}: {said}")
    if not output.strip():
        raise CredentialError("TINKER_CREDENTIAL_CMD succeeded, but printed no token")
    return check_key(output, "what TINKER_CREDENTIAL_CMD printed")


class JwtCredential(_Secret):
    """A JWT that another credential is exchanged for, where a server wants that.

    A new one is fetched in the background five minutes before the old one ends, so that no call waits for
    it; if that fails, the old one serves as long as the server takes it. One exchange runs at a time.
    """

    def __init__(
        self, inner: Credential, call: Callable[..., Awaitable[Any]], now: Callable[[], float] = time.time
    ) -> None:
        self.source: Source = inner.source
        self.identity = inner.identity
        self.inner = inner  # what the exchange itself is authorised with
        self.claims: Mapping[str, Any] = {}
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
        # A server in trouble may keep the exchange waiting for minutes: the old one is worth a try then.
        await asyncio.wait([exchange], timeout=FRESH_FOR)
        if not exchange.done():
            self._use_until = self._now() + REFRESH_PAUSE
        return self._jwt

    def refused(self, jwt: str) -> None:
        """The server does not take `jwt` any more, whatever it says of itself: the next caller waits."""
        if jwt == self._jwt:  # else there is another already
            self._jwt, self._use_until = "", 0.0

    def _start_exchange(self) -> asyncio.Task[str]:
        if self._exchange is None or self._exchange.done():
            self._exchange = asyncio.create_task(self._renew())
            self._exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._exchange

    async def _renew(self) -> str:
        from tinkex.types.config import EmptyRequest  # with numpy behind it, which keys alone do not need
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
        self._jwt, self.claims = answer.jwt, decode_claims(answer.jwt)
        now, expires = self._now(), _expiry(self.claims)
        if expires is None:
            expires = now + 2 * REFRESH_EARLY
        # A clock that is wrong by hours must not make every request an exchange.
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


def _expiry(claims: Mapping[str, Any]) -> float | None:
    expires = claims.get("exp")
    return float(expires) if isinstance(expires, int | float) and not isinstance(expires, bool) else None


# -- which one -------------------------------------------------------------------------------------------


def resolve(settings: Settings, api_key: str | None = None, base_url: str = "") -> Credential:
    """The credential to use: the argument, the environment, the command, the store, or none on loopback."""
    if api_key and api_key == settings.api_key:
        api_key = None  # said twice: the environment's is one that another process can find again
    if api_key:
        return KeyCredential(check_key(api_key, "api_key"), "argument")
    if settings.api_key:
        try:
            return KeyCredential(check_key(settings.api_key, "TINKER_API_KEY"), "environment")
        except InvalidInputError:
            if not settings.credential_cmd:
                raise
    if settings.credential_cmd:
        return CommandCredential(settings.credential_cmd)
    if stored := CredentialStore(settings.credentials_file).default_key():
        return KeyCredential(
            check_key(stored.key, f"the default key in {settings.credentials_file}"), "store"
        )
    if base_url and is_loopback(base_url):
        return KeyCredential(LOOPBACK_KEY, "loopback")
    raise CredentialError(NO_CREDENTIAL.format(path=settings.credentials_file))


def resolve_from_source(source: str, settings: Settings) -> Credential:
    """The credential that a pickled client says it used, found anew in this process."""
    advice = "or take the sampler's handle instead: SamplingClient.from_sampler_handle(handle, api_key=…)"
    match source:
        case "environment" if settings.api_key:
            return KeyCredential(check_key(settings.api_key, "TINKER_API_KEY"), "environment")
        case "environment":
            raise CredentialError(
                "this client was made with the key in TINKER_API_KEY, which is not set in the process it was "
                f"sent to (keys are never pickled): set it here, {advice}"
            )
        case "command" if settings.credential_cmd:
            return CommandCredential(settings.credential_cmd)
        case "command":
            raise CredentialError(
                "this client was made with TINKER_CREDENTIAL_CMD, which is not set in the process it was "
                f"sent to: set it here, {advice}"
            )
        case "store":
            stored = CredentialStore(settings.credentials_file).default_key()
            if stored is None:
                raise CredentialError(
                    f"this client was made with the stored key, and {settings.credentials_file} has no "
                    f"default key in the process it was sent to: log in here, {advice}"
                )
            return KeyCredential(check_key(stored.key, "the stored default key"), "store")
        case "loopback":
            return KeyCredential(LOOPBACK_KEY, "loopback")
        case _:
            raise CredentialError(
                "this client was made with api_key=…, and keys are never pickled: make it with TINKER_API_KEY"
                f" set in both processes, {advice}"
            )


# -- the stored file -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredKey:
    """One key in the store; a `generated` one belongs to this machine alone and is deleted at logout."""

    key: str = field(repr=False)
    name: str = ""
    type: Literal["manual", "generated"] = "manual"
    note: str | None = None
    details: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        fields = {"type": self.type, "key": self.key, "name": self.name}
        optional = {"note": self.note, "details": self.details}
        return {**fields, **{name: value for name, value in optional.items() if value is not None}}


class CredentialStore:
    """The file of stored keys, in the format that the official command line writes too.

    It is replaced as a whole, so that a reader never sees half of it, and only its owner can read it.
    """

    VERSION = 1

    def __init__(self, path: Path) -> None:
        self.path = path

    def keys(self) -> dict[str, StoredKey]:
        """Every key, by its id."""
        return {key_id: self._record(key_id, fields) for key_id, fields in self._load()["keys"].items()}

    def default_id(self) -> str | None:
        content = self._load()
        return content["default"] if content["default"] in content["keys"] else None

    def default_key(self) -> StoredKey | None:
        key_id = self.default_id()
        return None if key_id is None else self.keys()[key_id]

    def add(self, key_id: str, record: StoredKey, *, default: bool = True) -> None:
        content = self._load()
        content["keys"][key_id] = record.to_json()
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

    def _record(self, key_id: str, fields: AnyJson) -> StoredKey:
        if not isinstance(fields, dict) or not isinstance(fields.get("key"), str):
            raise self._broken(f"the entry {key_id!r} has no key")
        known = {name: fields[name] for name in ("key", "name", "type", "note", "details") if name in fields}
        return StoredKey(**known)

    def _load(self) -> dict[str, Any]:
        try:
            content: AnyJson = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {"version": self.VERSION, "default": None, "keys": {}}
        except OSError as error:
            raise CredentialError(f"cannot read the stored keys in {self.path}: {error.strerror}") from None
        except ValueError:
            raise self._broken("it is not JSON") from None
        if not isinstance(content, dict) or not isinstance(content.get("keys", {}), dict):
            raise self._broken("it is not an object with 'keys'")
        if content.get("version", self.VERSION) != self.VERSION:
            raise self._broken(
                f"its version is {content['version']!r}, and only {self.VERSION} is understood"
            )
        return {"version": self.VERSION, "default": None, "keys": {}, **content}

    def _broken(self, reason: str) -> CredentialError:
        return CredentialError(
            f"the stored keys in {self.path} cannot be used: {reason}; delete it and log in again"
        )

    def _save(self, content: dict[str, Any]) -> None:
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        handle, part = tempfile.mkstemp(dir=folder, prefix=self.path.name)  # mkstemp makes it 0600
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
