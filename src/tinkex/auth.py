"""Is there an API key, and does the server accept it? Three questions for scripts to ask before they start.

`get_tinker_token` and `tinker_has_credentials` make no request and run no command.
"""

from __future__ import annotations

from tinkex.client.credentials import CommandCredential, Credential, resolve
from tinkex.config import HOSTED_URL, Settings
from tinkex.errors import TinkerError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The key that a new client would use; None if there is none, or only a command that prints one."""
    credential = _credential()
    return None if credential is None else credential.current()


def tinker_has_credentials() -> bool:
    """Would a new client find a credential? TINKER_CREDENTIAL_CMD counts as one, without being run."""
    credential = _credential()
    return isinstance(credential, CommandCredential) or get_tinker_token() is not None


def _credential() -> Credential | None:
    settings = Settings.read()
    try:
        return resolve(settings, base_url=settings.base_url or HOSTED_URL)
    except TinkerError:
        return None


def raise_if_tinker_not_accessible(*, timeout: float | None = 60.0) -> None:
    """Make one request, without retries, and raise what goes wrong.

    CredentialError if there is no key, AuthenticationError if it is refused, BillingError if the account
    cannot pay, APIConnectionError if there is no answer.
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
