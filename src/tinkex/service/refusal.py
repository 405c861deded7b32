"""The caller of an operation, and how a service refuses one: by an HTTP status, which clients act on."""

from __future__ import annotations

from typing import NamedTuple

LOCAL_USER = "local"  # whose the runs of embedded mode are


class Refusal(Exception):
    """The request is not accepted. Never 409: official clients would repeat it for five minutes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Caller(NamedTuple):
    """On whose behalf a request is made."""

    user: str
    project: str | None = None
    public_url: str = ""  # where this caller reaches the server, for links; "" in the same process
    same_machine: bool = False  # paths of this machine mean something to the caller
    weights_token: str | None = None  # opens the checkpoints of a run of another's, to be read
    attempt: str = ""  # the same for every repetition of one request; "" if the caller does not say
    key_id: int = 0  # of the API key; 0 where there are no keys
    sees_local: bool = False  # no key is needed: what scripts of this machine trained is the caller's too

    def owns(self, owner: str) -> bool:
        return owner == self.user or (self.sees_local and owner == LOCAL_USER)

    def must_own(self, owner: str, what: str) -> None:
        if not self.owns(owner):
            raise not_found(what)


def not_found(what: str) -> Refusal:
    return Refusal(404, f"{what} does not exist, or is not yours")
