"""SQL that the ledger's statements are put together from: conditions of lists, searches and scopes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tinkex.service import rows
from tinkex.service.rows import Scope
from tinkex.types.sessions import ClientFinishedSessionStatusQuery, SessionSearchRequest, UserSearchOwner

CHECKPOINT = "run_id = ? AND kind = ? AND name = ?"


UNEXPIRED = "(expires_at IS NULL OR expires_at > ?)"


LISTED = "(SELECT value FROM json_each(?))"  # a list of any length as one parameter


ADD_TO_USAGE = """
    ON CONFLICT (hour, owner, kind, ifnull(project_id, ''), ifnull(session_id, ''), ifnull(run_id, ''),
                 ifnull(base_model, '')) DO UPDATE SET amount = usage.amount + excluded.amount"""


def listed(values: Iterable[str]) -> str:
    return json.dumps(list(values))


def within(scope: Scope, project_id: str | None = None) -> tuple[str, list[Any]]:
    given = [("owner = ?", scope.owner), ("owner = ?", scope.also), ("project_id = ?", scope.project)]
    where, values = "1", list[Any]()
    if scope.owner is not None:
        clauses, values = zip(*((clause, value) for clause, value in given if value is not None), strict=True)
        where, values = f"({' OR '.join(clauses)})", [*values]
    return (where, values) if project_id is None else (f"{where} AND project_id = ?", [*values, project_id])


def run_clauses(query: rows.RunQuery) -> Iterator[tuple[Any, ...]]:
    if query.text:
        columns, joined = ("name", "run_id", "base_model", "tags", "owner"), " || ' ' || "
        # SQLite's own `lower` is quick, and knows only ASCII.
        text = f"lower({joined.join(columns)})" if query.text.isascii() else f"folded({', '.join(columns)})"
        yield f"{text} LIKE ? ESCAPE '!'", containing(query.text.casefold())
    if query.model:
        yield "base_model = ?", query.model
    if query.tag:
        yield "tags LIKE ? ESCAPE '!'", containing(json.dumps(query.tag))
    busy = f"(last_request_at >= ? OR run_id IN {LISTED})"
    heard = "(SELECT last_seen_at FROM sessions WHERE sessions.session_id = runs.session_id) >= ?"
    at_work = query.active_since, listed(query.busy)
    match query.state:
        case "running":
            yield f"corrupted = 0 AND ended = '' AND {busy}", *at_work
        case "idle":
            yield f"corrupted = 0 AND ended = '' AND NOT {busy} AND {heard}", *at_work, query.heard_since
        case "interrupted":
            silent = f"ended = '' AND NOT {busy} AND NOT {heard}"
            clause = f"corrupted = 0 AND (ended = 'interrupted' OR ({silent}))"
            yield clause, *at_work, query.heard_since
        case "finished":
            yield ("corrupted = 0 AND ended = 'finished'",)
        case "failed":
            yield ("(corrupted = 1 OR ended = 'failed')",)
        case _:
            pass


def containing(text: str) -> str:
    """The LIKE pattern that finds `text` literally; its escape character is "!"."""
    return f"%{text.replace('!', '!!').replace('%', '!%').replace('_', '!_')}%"


def search_clauses(query: SessionSearchRequest) -> Iterator[tuple[Any, ...]]:
    if query.session_id is not None:
        yield "session_id = ?", query.session_id
    if query.display_name is not None:
        yield "display_name = ?", query.display_name
    if query.project_ids is not None:
        yield f"project_id IN {LISTED}", listed(query.project_ids)
    if isinstance(query.owner, UserSearchOwner):
        yield f"owner IN {LISTED}", listed(query.owner.owner_urns)
    if query.user_metadata:
        yield (
            "NOT EXISTS (SELECT 1 FROM json_each(?) AS wanted WHERE NOT EXISTS (SELECT 1 "
            "FROM json_each(sessions.user_metadata) AS had WHERE had.key = wanted.key "
            "AND CAST(had.value AS TEXT) = wanted.value))",
            json.dumps(query.user_metadata),
        )
    if query.statuses is not None:
        types, reasons = set[str](), set[str]()
        for status in query.statuses:
            if isinstance(status, ClientFinishedSessionStatusQuery) and status.reasons is not None:
                reasons.update(status.reasons)
            else:
                types.add(status.type)
        yield (
            f"(json_extract(status, '$.type') IN {LISTED} OR json_extract(status, '$.reason.type') "
            f"IN {LISTED} AND json_extract(status, '$.type') = 'client_finished')",
            listed(types),
            listed(reasons),
        )
    if query.cursor is not None:
        at = round(query.cursor.last_created_at.timestamp(), 6)
        yield "(created_at, session_id) < (?, ?)", at, query.cursor.last_session_id
