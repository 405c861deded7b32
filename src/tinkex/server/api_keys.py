"""Authentication: API keys, and the short-lived tokens that clients exchange them for.

    tml-…     an API key; the ledger holds its hash, `tinkex server keys` makes and revokes it
    eyJ…      a JWT issued here for a key; it is refused once the key is revoked
    no keys   no key was ever made: every key is its own tenant, "EMPTY" too (loopback only)
    nothing   there, for text: a program of this machine is the tenant LOCAL_KEY, a page in a browser nobody

A key is never stored or logged. A revoked key is refused within REFRESH seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jwt

from tinkex.config import is_loopback
from tinkex.server.signing import derive
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import KeyRow
from tinkex.types import config

REFRESH = 2.0  # seconds for which a look-up is cached; another process may revoke a key
TOKEN_LIFE = 3600.0
ORGANIZATION = "tinkex"
WEIGHTS_TOKEN = "x-tinker-weights-access-token"
_WELL_FORMED = re.compile(r"tml-[\x21-\x7e]{1,252}")
_VISIBLE = re.compile(r"[\x21-\x7e]{1,256}")
_CACHE_SIZE = 4096
LOCAL_KEY = "tml-local"  # what a server without keys tells its clients to use

NO_KEY = "no API key: send one that begins with 'tml-' in X-API-Key (for /v1: Authorization: Bearer …)"
BAD_KEY = "this API key is unknown, revoked or expired"
MALFORMED = "an API key must begin with 'tml-' and have no spaces"


@dataclass(frozen=True)
class Identity:
    """The user that a credential belongs to. `key` is None where no keys are configured."""

    user: str
    project: str | None
    key_hash: str
    key: KeyRow | None = None

    @property
    def email(self) -> str:
        return self.user if "@" in self.user else f"{self.user}@localhost"


def new_key() -> str:
    return f"tml-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """A hash without salt: keys are long and random, so a search for one is hopeless."""
    return hashlib.sha256(key.encode()).hexdigest()


def credential(headers: Mapping[str, str]) -> str:
    """The key or token of a request; "" if it has none."""
    key = headers.get("x-api-key", "")
    if not key:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else ""
    return key.strip()


def _from_a_page(headers: Mapping[str, str]) -> bool:
    """Did a browser send it for some page? A page of any site may post to this machine, but without a key."""
    named = is_loopback(f"//{headers.get('host', '')}")  # else some site's name leads here
    return "origin" in headers or "sec-fetch-site" in headers or not named


class Authenticator:
    """Identifies callers by the ledger's keys."""

    def __init__(self, ledger: Ledger, secret: bytes) -> None:
        self._ledger = ledger
        self._jwt_key = derive(secret, "tokens")
        self._cache: dict[bytes, tuple[Identity, float]] = {}  # by the credential's hash; with its expiry

    @property
    def is_open(self) -> bool:
        """True if no key was ever made. Revoking the last key does not make the server open."""
        return not self._ledger.had_keys

    def caller(
        self,
        headers: Mapping[str, str],
        public_url: str = "",
        same_machine: bool = False,
        *,
        keyless: bool = False,
    ) -> Caller:
        """The caller of a request with these headers; Refusal 401 if its credential is not accepted.

        `keyless`: a program of this machine needs no key on a server without keys.
        """
        key = credential(headers)
        if not key and keyless and same_machine and self.is_open and not _from_a_page(headers):
            key = LOCAL_KEY
        identity = self.identify(key)
        return Caller(
            identity.user, identity.project, public_url, same_machine,
            headers.get(WEIGHTS_TOKEN), headers.get("x-idempotency-key", ""),
            0 if identity.key is None else identity.key.key_id, sees_local=identity.key is None,
        )  # fmt: skip

    def is_valid(self, key_id: str) -> bool:
        """Is there an unrevoked key with this id?"""
        known = self._ledger.keys()
        return any(str(row.key_id) == key_id and row.revoked_at is None for row in known)

    def identify(self, key: str) -> Identity:
        if not key:
            raise Refusal(401, NO_KEY)
        # blake2b: OpenSSL's sha256 makes a system call each time, to detect a fork.
        digest, now = hashlib.blake2b(key.encode()).digest(), time.monotonic()
        known = self._cache.get(digest)
        if known is not None and now < known[1]:
            return known[0]
        identity = self._from_token(key) if key.startswith("eyJ") else self._from_key(key)
        if len(self._cache) >= _CACHE_SIZE:
            self._cache.clear()
        self._cache[digest] = (identity, now + REFRESH)
        return identity

    def _from_key(self, key: str) -> Identity:
        if not (_VISIBLE if self.is_open else _WELL_FORMED).fullmatch(key):
            raise Refusal(401, MALFORMED)
        return self.from_hash(hash_key(key))

    def from_hash(self, key_hash: str) -> Identity:
        row = self._ledger.find_key(key_hash)
        if row is not None and hmac.compare_digest(row.hash, key_hash):
            return Identity(row.owner, row.project_id, key_hash, row)
        if self.is_open:
            return Identity(f"key-{key_hash[:16]}", None, key_hash)
        raise Refusal(401, BAD_KEY)

    # -- tokens ------------------------------------------------------------------------------------------

    def issue_token(self, identity: Identity) -> config.AuthTokenResponse:
        now = int(time.time())
        claims = {
            "sub": identity.user, "org_id": ORGANIZATION, "email": identity.email, "iat": now,
            "exp": now + int(TOKEN_LIFE), "key": identity.key_hash,
        }  # fmt: skip
        return config.AuthTokenResponse(jwt=jwt.encode(claims, self._jwt_key, algorithm="HS256"))

    def _from_token(self, token: str) -> Identity:
        try:
            claims = jwt.decode(
                token, self._jwt_key, algorithms=["HS256"], options={"require": ["exp", "sub", "key"]}
            )
        except (jwt.InvalidTokenError, ValueError):
            raise Refusal(401, BAD_KEY) from None
        return self.from_hash(claims["key"])

    def describe(self, identity: Identity) -> config.ApiKeyResponse:
        details = config.ApiKeyDetails(
            org_details=config.NamedDetails(name=identity.project or ORGANIZATION),
            user_details=config.UserDetails(email=identity.email),
        )
        if (key := identity.key) is not None:
            return config.ApiKeyResponse(key_id=key.key_id, name=key.name, note=key.note, details=details)
        note = "no keys are configured on this server"
        return config.ApiKeyResponse(key_id=0, name=identity.user, note=note, details=details)

    def revoke(self, identity: Identity) -> None:
        """Revoke the key that the caller itself used."""
        if identity.key is not None:
            self._ledger.revoke_key(identity.key.key_id, time.time())
        self._cache.clear()
