"""Is there a key, and does the server take it? Three questions for scripts to ask before they start.

Promises: `get_tinker_token` and `tinker_has_credentials` look at this machine only and run no command.
"""

from __future__ import annotations

from tinkex.client.credentials import CommandCredential, resolve
from tinkex.config import HOSTED_URL, Settings
from tinkex.errors import TinkerError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The key that a new client would use, or None if there is none at hand (a command is not run for it)."""
    settings = Settings.read()
    try:
        credential = resolve(settings, base_url=settings.base_url or HOSTED_URL)
    except TinkerError:
        return None
    return credential.current()


def tinker_has_credentials() -> bool:
    """Would a new client find a credential? TINKER_CREDENTIAL_CMD counts as one, without being run."""
    settings = Settings.read()
    try:
        credential = resolve(settings, base_url=settings.base_url or HOSTED_URL)
    except TinkerError:
        return False
    return credential.current() is not None or isinstance(credential, CommandCredential)


def raise_if_tinker_not_accessible(*, timeout: float | None = 60.0) -> None:
    """Ask the server one question, once, and raise what goes wrong.

    CredentialError if there is no key, AuthenticationError if it is refused, BillingError if the account
    cannot pay, APIConnectionError if nobody answers.
    """
    from tinkex.client.future import start
    from tinkex.client.server_connection import connect
    from tinkex.client.transport import CallContext
    from tinkex.types.config import EmptyRequest
    from tinkex.wire import ops

    connection = connect(retries=False)
    context = CallContext("raise_if_tinker_not_accessible")
    asked = connection.submit(ops.GET_SERVER_CAPABILITIES, EmptyRequest(), context)
    try:
        asked.result(timeout)
    finally:
        start(connection.close, "close").result(connection.timeouts.close)
