"""What a service says of itself and of its use: settings, capabilities, health, usage, audit, traces."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tinkex.service.core import Core
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import RunRow, SamplerRow, Scope, UsageRow
from tinkex.service.scheduler import Work
from tinkex.service.threads import in_thread
from tinkex.types import billing, config, sessions, telemetry
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.outputs import SampleResponse

TRACE_LENGTH = 20_000  # events remembered of one session
Event = tuple[str, str, float, float, int | None, bool]  # name, of what, begun, seconds, seq id, failed?


class Accounts:
    """Settings and records, one method per operation."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._traces: dict[str, deque[Event]] = {}
        self._stored_at = time.monotonic()

    # -- settings ----------------------------------------------------------------------------------------

    async def get_client_config(
        self, request: config.ClientConfigRequest, caller: Caller
    ) -> config.ClientConfigResponse:
        return config.ClientConfigResponse(
            pjwt_auth_enabled=self._core.issues_tokens,
            sample_use_retrieve_futures=self._core.config.batch_retrieval,
            custom_loss_server_side=self._core.config.custom_losses,
            sample_join_sampling_session=True,
            create_model_via_load_weights=True,
        )

    async def get_dynamic_config(
        self, request: config.ClientConfigRequest, caller: Caller
    ) -> config.ClientDynamicConfigResponse:
        return config.ClientDynamicConfigResponse(sample_cancel_enabled=True)

    async def get_health(self, request: config.EmptyRequest, caller: Caller) -> config.HealthResponse:
        if why := self._core.engines.trouble():
            raise Refusal(503, why)
        return config.HealthResponse()

    async def get_server_capabilities(
        self, request: config.EmptyRequest, caller: Caller
    ) -> config.GetServerCapabilitiesResponse:
        return config.GetServerCapabilitiesResponse(
            supported_models=[
                config.SupportedModel(
                    model_name=model.name,
                    max_context_length=model.max_context(),
                    trainable=True,
                    sampleable=True,
                )
                for model in self._core.engines
            ]
        )

    async def get_tokenizer_file(self, request: config.TokenizerFileRequest, caller: Caller) -> bytes:
        """A file of a base model's tokenizer, for clients that have no other way to it."""
        model = self._core.engines.find(request.model_name)
        directory = await in_thread(model.tokenizer_dir)  # it may be asked for before the model is fetched
        if request.file not in config.TOKENIZER_FILES:
            known = ", ".join(config.TOKENIZER_FILES)
            raise Refusal(404, f"{request.file!r} is no file of a tokenizer; those are: {known}")
        if directory is None or not (path := directory / request.file).is_file():
            raise Refusal(404, f"the tokenizer of {request.model_name} has no {request.file}")
        return await asyncio.to_thread(path.read_bytes)

    async def send_telemetry(
        self, request: telemetry.TelemetrySendRequest, caller: Caller
    ) -> telemetry.TelemetryResponse:
        """Taken, and forgotten: clients stall unless it is accepted."""
        return telemetry.TelemetryResponse()

    # -- records -----------------------------------------------------------------------------------------

    async def get_audit_log(
        self, request: billing.AuditLogRequest, caller: Caller
    ) -> billing.AuditLogResponse:
        start = end = None
        if request.day is not None:
            start = datetime(request.day.year, request.day.month, request.day.day, tzinfo=UTC).timestamp()
            end = start + 86400
        kind = "" if request.event_type == "all" else request.event_type
        rows = self._core.ledger.audit(self._core.scope(caller), kind=kind, start=start, end=end)
        return billing.AuditLogResponse(
            entries=[
                billing.AuditLogEntry(
                    timestamp=datetime.fromtimestamp(row.at, UTC),
                    event=row.event,
                    event_details=row.details,
                    model_id=row.run_id,
                    tinker_path=row.tinker_path,
                    purpose=row.purpose,
                )
                for row in rows
            ]
        )

    async def get_billing_usage(
        self, request: billing.GetBillingUsageRequest, caller: Caller
    ) -> billing.BillingUsageResponse:
        self._core.flush()
        start, end = _seconds(request.starting_on), _seconds(request.ending_before)
        rows = self._core.ledger.usage(start, end, self._core.scope(caller))
        ids = {row.session_id for row in rows if row.session_id}
        found = {i: row for i in ids if (row := self._core.ledger.session(i)) is not None}
        return billing.BillingUsageResponse(
            data=[_usage_event(row) for row in rows],
            sessions={
                i: billing.BillingUsageSession(
                    user_metadata={k: str(v) for k, v in (row.user_metadata or {}).items()}
                )
                for i, row in found.items()
            },
        )

    async def get_current_checkpoint_storage_usage(
        self, request: billing.GetCurrentCheckpointStorageUsageRequest, caller: Caller
    ) -> billing.CurrentCheckpointStorageUsageResponse:
        totals = self._core.ledger.storage(self._core.scope(caller), project_id=request.project_id)
        return billing.CurrentCheckpointStorageUsageResponse(
            data=[
                billing.CurrentCheckpointStorageUsageItem(
                    project_id=item.project_id,
                    org_user_urn=item.owner,
                    checkpoint_count=item.checkpoints,
                    size_bytes=item.size_bytes,
                    size_gigabytes=item.size_bytes / 1e9,
                )
                for item in totals
            ]
        )

    def count_storage(self) -> None:
        """Add what checkpoints have taken up since the last time."""
        now = time.monotonic()  # a clock that is set costs nobody anything
        hours, self._stored_at = (now - self._stored_at) / 3600, now
        self._core.ledger.add_usage(
            UsageRow(time.time(), item.owner, "storage", item.size_bytes / 1e9 * hours, item.project_id)
            for item in self._core.ledger.storage(Scope(None))
        )

    # -- traces ------------------------------------------------------------------------------------------

    def worked(self, row: RunRow, work: Work, op: str, seconds: float) -> None:
        """A piece of training work was done."""
        failed = work.what.future.failed
        if work.is_pass and not failed:
            self._core.count(row, {"training": work.tokens})
        self._trace(row.session_id, (op, row.run_id, time.time() - seconds, seconds, work.seq_id, failed))

    def sampled(
        self, row: SamplerRow, seconds: float, outcome: SampleResponse | RequestFailedResponse
    ) -> None:
        """A sample was done, or failed."""
        failed = isinstance(outcome, RequestFailedResponse)
        event = ("sample", row.sampler_id, time.time() - seconds, seconds, None, failed)
        self._trace(row.session_id, event)

    def _trace(self, session_id: str, event: Event) -> None:
        if session_id:
            if (trace := self._traces.get(session_id)) is None:
                trace = self._traces[session_id] = deque(maxlen=TRACE_LENGTH)
            trace.append(event)

    def forget(self, session_id: str) -> None:
        """The session is over for long."""
        self._traces.pop(session_id, None)
        self._trace_file(session_id).unlink(missing_ok=True)

    def _trace_file(self, session_id: str) -> Path:
        return self._core.home / "traces" / f"{session_id}.json"

    async def export_session_trace(
        self, request: sessions.ExportSessionTraceRequest, caller: Caller
    ) -> sessions.SessionTraceExportResponse:
        """What was done for a session since this process began, as a trace viewer (Perfetto) reads it."""
        self._core.session(request.session_id, caller)
        self._core.check_disk()
        events = list(self._traces.get(request.session_id, ()))
        path = self._trace_file(request.session_id)
        await asyncio.to_thread(_write_trace, path, request.session_id, events)
        link = self._core.link(caller, path, time.time() + 3600)
        return sessions.SessionTraceExportResponse(status="ready", url=link)

    # -- keys (the server has them; a service in one's own process needs none) ---------------------------

    async def get_auth_token(self, request: config.EmptyRequest, caller: Caller) -> config.AuthTokenResponse:
        raise Refusal(404, "this service issues no tokens")

    async def get_api_key(self, request: config.EmptyRequest, caller: Caller) -> config.ApiKeyResponse:
        raise Refusal(404, "this service has no keys")

    async def delete_api_key(self, request: config.EmptyRequest, caller: Caller) -> None:
        raise Refusal(404, "this service has no keys")


def _seconds(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _usage_event(row: UsageRow) -> billing.BillingUsageEvent:
    start, amount = datetime.fromtimestamp(row.hour, UTC), int(row.amount)
    info: Any
    match row.kind:
        case "training":
            info = billing.TrainingBillingEvent(token_count=amount)
        case "sampling_prefill" | "sampling_prefill_cached":
            cached = row.kind.endswith("cached")
            info = billing.SamplingPrefillBillingEvent(cached=cached, token_count=amount)
        case "sampling_sample":
            info = billing.SamplingSampleBillingEvent(token_count=amount)
        case "checkpoint":
            info = billing.CheckpointBillingEvent(count=amount)
        case _:
            info = billing.StorageBillingEvent(gigabyte_hours=row.amount)
    return billing.BillingUsageEvent(
        bucket_start=start,
        bucket_end=start + timedelta(hours=1),
        base_model=row.base_model,
        user_id=row.owner,
        user_name=row.owner,
        session_id=row.session_id,
        project_id=row.project_id,
        event_info=info,
    )


def _write_trace(path: Path, session_id: str, events: list[Event]) -> None:
    """Chrome's trace format: one process, a row for each run and sampler."""
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
