"""What was executed for a session, as a file that a trace viewer (Perfetto, Chrome) opens."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

from tinkex.service.access import Access
from tinkex.service.activity import Activity
from tinkex.service.archive import LINK_LIFE, Link
from tinkex.service.home import Home
from tinkex.service.refusal import Caller
from tinkex.service.rows import SamplerRow
from tinkex.service.runs.execution import Execution
from tinkex.types import sessions
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.outputs import SampleResponse

TRACE_LENGTH = 20_000  # events kept of one session
Event = tuple[
    str, str, float, float, int | None, bool
]  # name, run or sampler, begun, seconds, seq id, failed?


class SessionTraces:
    """The latest events of each session, since this process began. Also counts training tokens."""

    def __init__(self, home: Home, access: Access, activity: Activity, link: Link) -> None:
        self._home = home
        self._access = access
        self._activity = activity
        self._link = link
        self._traces: dict[str, deque[Event]] = {}

    def worked(self, work: Execution, seconds: float) -> None:
        """A training request was executed."""
        row, failed = work.run.row, work.future.failed
        if work.one_pass is not None and not failed:
            self._activity.count(row, {"training": work.tokens})
        self._add(row.session_id, (work.op, row.run_id, time.time() - seconds, seconds, work.seq_id, failed))

    def sampled(
        self, row: SamplerRow, seconds: float, outcome: SampleResponse | RequestFailedResponse
    ) -> None:
        """A sample ended."""
        failed = isinstance(outcome, RequestFailedResponse)
        self._add(row.session_id, ("sample", row.sampler_id, time.time() - seconds, seconds, None, failed))

    def _add(self, session_id: str, event: Event) -> None:
        if session_id:
            if (trace := self._traces.get(session_id)) is None:
                trace = self._traces[session_id] = deque(maxlen=TRACE_LENGTH)
            trace.append(event)

    def forget(self, session_id: str) -> None:
        self._traces.pop(session_id, None)
        self._file(session_id).unlink(missing_ok=True)

    def _file(self, session_id: str) -> Path:
        return self._home.root / "traces" / f"{session_id}.json"

    async def export_session_trace(
        self, request: sessions.ExportSessionTraceRequest, caller: Caller
    ) -> sessions.SessionTraceExportResponse:
        self._access.session(request.session_id, caller)
        self._home.check_disk()
        events = list(self._traces.get(request.session_id, ()))
        path = self._file(request.session_id)
        await asyncio.to_thread(_write_trace, path, request.session_id, events)
        link = self._link(caller, path, time.time() + LINK_LIFE)
        return sessions.SessionTraceExportResponse(status="ready", url=link)


def _write_trace(path: Path, session_id: str, events: list[Event]) -> None:
    """Write Chrome's trace format: one process, a row for each run and sampler."""
    rows = {of: n for n, of in enumerate(dict.fromkeys(event[1] for event in events), 1)}
    names: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": n, "args": {"name": of}} for of, n in rows.items()
    ]
    spans = [
        {"name": name, "cat": "failed" if failed else "ok", "ph": "X", "pid": 1, "tid": rows[of],
         "ts": begun * 1e6, "dur": seconds * 1e6, "args": {} if seq_id is None else {"seq_id": seq_id}}
        for name, of, begun, seconds, seq_id, failed in events
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"traceEvents": names + spans, "displayTimeUnit": "ms", "otherData": {"session": session_id}}
    path.write_text(json.dumps(content))
