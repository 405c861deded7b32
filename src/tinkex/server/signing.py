"""Signed download links, and tokens that grant read access to a run's weights.

A signature covers what is granted and until when. The home directory holds one secret, from which each
purpose derives its own key. A link names the API key it was made for. Does not check whether
the path, the key or the run exists.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, urlencode

DOWNLOADS = "/api/v1/download"
_SECRET_BYTES, _CHECK_BYTES = 32, 8  # the file of an older version has no checksum


def home_secret(home: Path) -> bytes:
    """The home's secret, created on first use. Who can read it can sign."""
    place = home / "secret"
    try:
        file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        content = place.read_bytes()
        secret, check = content[:_SECRET_BYTES], content[_SECRET_BYTES:]
        if len(secret) < _SECRET_BYTES or (check and check != _check(secret)):
            raise ValueError(f"{place} is damaged: delete it, and links and tokens are made anew") from None
        return secret
    with os.fdopen(file, "wb") as out:
        secret = secrets.token_bytes(_SECRET_BYTES)
        out.write(secret + _check(secret))
    return secret


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()[:_CHECK_BYTES]


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose; its signatures are not valid for another."""
    return hmac.digest(secret, purpose.encode(), "sha256")


class _Signer:
    purpose: ClassVar[str]

    def __init__(self, secret: bytes) -> None:
        self._key = derive(secret, self.purpose)

    def _signature(self, what: str, expires: int) -> str:
        return hmac.digest(self._key, f"{expires}\n{what}".encode(), "sha256").hex()

    def verify(self, what: str, expires: str, signature: str, now: float) -> bool:
        if not (expires.isascii() and expires.isdigit() and len(expires) < 16) or int(expires) <= now:
            return False
        return hmac.compare_digest(self._signature(what, int(expires)).encode(), signature.encode())


class DownloadSigner(_Signer):
    """Signs download links and verifies them.

    >>> signer = DownloadSigner(b"secret")
    >>> signer.sign("runs/a/weights/w", 1700000000.0).split("&")[0]
    '/api/v1/download/runs/a/weights/w?expires=1700000000'
    """

    purpose = "downloads"

    def sign(self, path: str, expires: float, key_id: int = 0) -> str:
        """The link to `path` (relative to the home), valid until `expires` (unix seconds), without a host.

        `key_id` is the number of the API key that it was made for; 0 where there are no keys.
        """
        key = str(key_id) if key_id else ""
        signature = self._signature(link_text(path, key), int(expires))
        query = {"expires": str(int(expires)), **({"key": key} if key else {}), "signature": signature}
        return f"{DOWNLOADS}/{quote(path)}?{urlencode(query)}"


def link_text(path: str, key_id: str) -> str:
    """The fields that a link's signature covers, in addition to its expiry."""
    return f"{key_id}\n{path}" if key_id else path


class WeightsTokens(_Signer):
    """Tokens with which any user of this server may read one run's checkpoints.

    >>> tokens = WeightsTokens(b"secret")
    >>> tokens.run_of(tokens.issue("a:train:0", time.time() + 60))
    'a:train:0'
    """

    purpose = "weights"

    def issue(self, run_id: str, expires: float) -> str:
        """A token for the run, valid until `expires` (unix seconds)."""
        return f"{int(expires)}.{self._signature(run_id, int(expires))}.{run_id}"

    def run_of(self, token: str) -> str | None:
        """The run that `token` grants access to; None if it was not issued here, or has expired."""
        expires, _, rest = token.partition(".")
        signature, _, run_id = rest.partition(".")
        return run_id if self.verify(run_id, expires, signature, time.time()) else None
