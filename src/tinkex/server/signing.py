"""What is its own credential: links to files below the home, and tokens that open a run's weights.

Promises: what was not signed here is refused, and so is what has expired; each says what it is for and until
when, and nothing else. Also keeps the home's one secret, of which each use has a key of its own. Knows no
HTTP, and not whether what it signs for exists.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path
from urllib.parse import quote, urlencode

DOWNLOADS = "/api/v1/download"
SECRET_FILE = "secret"
_SECRET_BYTES = 32


def home_secret(home: Path) -> bytes:
    """The home's secret, made when first asked for; whoever can read it can sign."""
    place = home / SECRET_FILE
    try:
        file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        secret = place.read_bytes()
        if len(secret) < _SECRET_BYTES:
            raise ValueError(f"{place} is damaged: delete it, and links and tokens are made anew") from None
        return secret
    with os.fdopen(file, "wb") as out:
        secret = secrets.token_bytes(_SECRET_BYTES)
        out.write(secret)
    return secret


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose: what it signs means nothing for another."""
    return hmac.digest(secret, purpose.encode(), "sha256")


class Signer:
    """Signs download links and checks them.

    >>> signer = Signer(b"secret")
    >>> signer.sign("runs/a/weights/w", 1700000000.0).split("&")[0]
    '/api/v1/download/runs/a/weights/w?expires=1700000000'
    """

    def __init__(self, secret: bytes) -> None:
        self._key = derive(secret, "downloads")

    def sign(self, path: str, expires: float) -> str:
        """The link to `path` (relative to the home), good until `expires` (unix seconds), without a host."""
        query = urlencode({"expires": int(expires), "signature": self._signature(path, int(expires))})
        return f"{DOWNLOADS}/{quote(path)}?{query}"

    def allows(self, path: str, expires: str, signature: str, now: float) -> bool:
        if not (expires.isascii() and expires.isdigit() and len(expires) < 16) or int(expires) <= now:
            return False
        expected = self._signature(path, int(expires))
        return hmac.compare_digest(expected.encode(), signature.encode())

    def _signature(self, path: str, expires: int) -> str:
        return hmac.new(self._key, f"{expires}\n{path}".encode(), hashlib.sha256).hexdigest()


class WeightsTokens:
    """Tokens with which anybody who has a key of this server may read one run's checkpoints.

    >>> tokens = WeightsTokens(b"secret")
    >>> tokens.opened(tokens.issue("a:train:0", time.time() + 60))
    'a:train:0'
    """

    def __init__(self, secret: bytes) -> None:
        self._key = derive(secret, "weights")

    def issue(self, run_id: str, expires: float) -> str:
        """A token for the run, good until `expires` (unix seconds)."""
        return f"{int(expires)}.{self._signature(run_id, int(expires))}.{run_id}"

    def opened(self, token: str) -> str | None:
        """The run that `token` opens; None if it was not issued here, or is too old."""
        expires, _, rest = token.partition(".")
        signature, _, run_id = rest.partition(".")
        if not (expires.isascii() and expires.isdigit() and len(expires) < 16) or int(expires) <= time.time():
            return None
        expected = self._signature(run_id, int(expires))
        return run_id if hmac.compare_digest(expected.encode(), signature.encode()) else None

    def _signature(self, run_id: str, expires: int) -> str:
        return hmac.new(self._key, f"{expires}\n{run_id}".encode(), hashlib.sha256).hexdigest()
