"""What to do about an error: a sentence more, where the error itself does not say it."""

from __future__ import annotations

from tinkex.cli.place import base_url, is_local
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    AuthenticationError,
    CredentialError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
)


def explain(error: Exception) -> str:
    """The error's own words, and what can be done."""
    said, advice = words(error).rstrip(". "), _advice(error)
    return f"{said}; {advice}" if advice else said


def words(error: Exception) -> str:
    """What went wrong, without what only a programmer needs: of a refusal, what the server said."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, APIStatusError) and error.status_code < 500 and isinstance(error.body, dict):
        return str(error.body.get("detail") or error)
    return str(error) or type(error).__name__


def _advice(error: Exception) -> str:
    match error:
        case CredentialError() | AuthenticationError():
            return "`tinkex auth login` checks and stores a key"
        case PermissionDeniedError():
            return "another key may be allowed to: `tinkex auth status` says which is in use"
        case NotFoundError() if not is_local():
            return f"is {base_url()} the right server, and the key in use the right one?"
        case APIConnectionError():
            return "is TINKER_BASE_URL right, and is the server running?"
        case InternalServerError() if not is_local():
            return "the server's log says why"
        case APIStatusError() | _:
            return ""
