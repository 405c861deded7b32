"""Looks up sessions, runs, samplers and checkpoints for a caller; those of other users are "not found"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tinkex.errors import InvalidInputError
from tinkex.service.activity import Activity
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import LOCAL_USER, Caller, Refusal, not_found
from tinkex.service.rows import CheckpointRow, RunRow, SamplerRow, Scope, SessionRow
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

LEAST_PREFIX = 3  # characters of an id that stand for it, if no other begins so
# The run whose checkpoints a weights access token opens; None if it is no valid token.
OpenedBy = Callable[[str], str | None]


def scope_of(caller: Caller, access_scope: str = "owned") -> Scope:
    project = caller.project if access_scope == "accessible" else None
    return Scope(caller.user, project, LOCAL_USER if caller.sees_local else None)


@dataclass(eq=False)
class Access:
    """Reads the ledger's rows on behalf of callers."""

    _ledger: Ledger
    _activity: Activity
    _opened_by: OpenedBy
    _samplers: dict[str, SamplerRow] = field(default_factory=dict[str, SamplerRow], init=False)

    def session(self, session_id: str, caller: Caller, *, to_use: bool = False) -> SessionRow:
        return _seen(self._ledger.session(session_id), f"session {session_id}", caller, to_use)

    def active_session(self, session_id: str, caller: Caller) -> SessionRow:
        """A session of the caller's own that has not ended."""
        row = self.session(session_id, caller, to_use=True)
        if row.status["type"] != "active":
            raise Refusal(410, f"session {session_id} has ended")
        self._activity.heard_of(session_id)
        return row

    def project_for(self, asked: str | None, caller: Caller) -> str | None:
        """The project of something new: a caller's own, or one that no key of another user is for."""
        if asked in (None, caller.project):
            return caller.project
        members = {row.owner for row in self._ledger.keys() if row.project_id == asked}  # noqa: SIM118
        if caller.project is not None or members - {caller.user}:
            raise not_found(f"project {asked}")
        return asked

    def run(self, run_id: str, caller: Caller, *, to_use: bool = False) -> RunRow:
        return _seen(self._ledger.run(run_id), f"run {run_id}", caller, to_use)

    def called(self, text: str, caller: Caller) -> RunRow:
        """The run with this id or name, or the only one whose id starts with it."""
        if self._ledger.run(text) is not None or len(text) < LEAST_PREFIX:
            return self.run(text, caller)
        match self._ledger.runs_called(text, scope_of(caller, "accessible")):
            case [row]:
                return row
            case []:
                raise not_found(f"run {text}")
            case found:
                both = " and ".join(row.run_id for row in found)
                raise Refusal(404, f"{text!r} may be several runs, as {both}: give more of the id")

    def sampler(self, sampler_id: str, caller: Caller) -> SamplerRow:
        row = self._samplers.get(sampler_id) or self._ledger.sampler(sampler_id)
        if row is None or not caller.owns(row.owner):
            raise not_found(f"sampler {sampler_id}")
        self._samplers[sampler_id] = row  # it never changes, and every sample asks for it
        return row

    def delete_sampler(self, sampler_id: str) -> None:
        self._samplers.pop(sampler_id, None)
        self._ledger.delete_sampler(sampler_id)

    def checkpoint(
        self, path: str, caller: Caller, *, to_change: bool = False, token: str | None = None
    ) -> CheckpointRow:
        """The checkpoint at a tinker:// path: the caller's own; to read, a public or opened one too."""
        row = self.any_checkpoint(path)
        token = token or caller.weights_token
        opened = None if token is None or to_change else self._opened_by(token)
        if row is not None and not to_change and (row.public or opened == row.run_id):
            return row
        return _seen(row, f"checkpoint {path}", caller, to_change)

    def any_checkpoint(self, path: str) -> CheckpointRow | None:
        """The checkpoint at a path, for any caller; None if there is none or it has expired."""
        try:
            parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        except InvalidInputError as error:
            raise Refusal(400, str(error)) from None
        row = self._ledger.checkpoint(parsed.training_run_id, *parsed.checkpoint_id.split("/"))
        return None if row is None or row.expired else row


Row = TypeVar("Row", SessionRow, RunRow, CheckpointRow)


def _seen(row: Row | None, what: str, caller: Caller, to_use: bool) -> Row:
    """The row, if the caller owns it; to be read, if it is of the caller's project."""
    if row is not None:
        of_project = caller.project is not None and row.project_id == caller.project
        if caller.owns(row.owner) or (of_project and not to_use):
            return row
    raise not_found(what)
