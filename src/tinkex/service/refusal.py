"""The caller of an operation, and how a service refuses one: by an HTTP status, which clients act on."""

from __future__ import annotations

from typing import NamedTuple

LOCAL_USER = "local"  # the owner of the runs of embedded mode
_LATER = "are accepted at a time; try again in a moment"


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


class InUse:
    """How much of something is in use, by each user and by all; what goes beyond a limit is refused (429)."""

    def __init__(self, what: str, per_user: float, in_all: float) -> None:
        self._what, self._per_user, self._in_all = what, per_user, in_all
        self.users: dict[str, int] = {}
        self._total = 0

    def take(self, user: str, amount: int, times: float = 1) -> None:
        """Use so much more; `times` stretches both limits."""
        used = self.users.get(user, 0) + amount
        if used > times * self._per_user:
            raise Refusal(429, f"{used} {self._what}: at most {self._per_user} of one user {_LATER}")
        if self._total + amount > times * self._in_all:
            raise Refusal(429, f"too many {self._what}: at most {self._in_all} of all users {_LATER}")
        self.users[user] = used
        self._total += amount

    def give_back(self, user: str, amount: int) -> None:
        left = self.users.pop(user) - amount
        if left:
            self.users[user] = left
        self._total -= amount


def not_found(what: str) -> Refusal:
    return Refusal(404, f"{what} does not exist, or is not yours")
