"""RestClient: look up and manage runs, sessions and samplers; its checkpoint methods are in checkpoints.py.

Promises: the official names, parameters and defaults; `x()` returns a future at once, `await x_async()` the
result; an impossible path or id is refused at the call. `iter_…` methods fetch listings page by page. Needs
no session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import date, datetime

from tinkex.client.admin import AdminClient
from tinkex.client.base_client import check_id, warn_caller
from tinkex.client.checkpoints import CheckpointMethods
from tinkex.client.credentials import decode_claims
from tinkex.client.future import APIFuture, Within, check_timeout, start
from tinkex.client.rest_results import Listing, StepMetrics, check_page_size
from tinkex.client.transport import CallContext
from tinkex.errors import (
    CredentialError,
    ExperimentalWarning,
    InvalidInputError,
    RequestErrorCategory,
    RequestFailedError,
    ResultTimeoutError,
)
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath
from tinkex.types.config import WhoamiResponse
from tinkex.types.reports import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)
from tinkex.types.sampling import GetSamplerRequest, GetSamplerResponse
from tinkex.types.sessions import (
    AccessScope,
    AssignSessionProjectRequest,
    ExportSessionTraceRequest,
    GetSessionRequest,
    GetSessionResponse,
    ListSessionsRequest,
    ListSessionsResponse,
    SessionSearchRequest,
    SessionSearchResponse,
)
from tinkex.types.training import (
    GetTrainingRunRequest,
    ListTrainingRunsRequest,
    TrainingRun,
    TrainingRunsResponse,
)
from tinkex.wire import ops

log = logging.getLogger("tinkex")

TRACE_POLL_INTERVAL = 5.0
TRACE_TIMEOUT = 1800.0  # seconds that the server may take to build a trace


class RestClient(CheckpointMethods):
    """Look up and manage the runs, checkpoints and sessions of a server.

    >>> rest = RestClient()  # doctest: +SKIP
    >>> for checkpoint in rest.iter_checkpoints():  # doctest: +SKIP
    ...     print(checkpoint.tinker_path)
    """

    # -- runs --------------------------------------------------------------------------------------------

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """Return the record of a run.

        >>> rest.get_training_run(run_id).result().base_model  # doctest: +SKIP
        """
        request = GetTrainingRunRequest(
            training_run_id=check_id("training_run_id", training_run_id), access_scope=access_scope
        )
        return self._submit(ops.GET_TRAINING_RUN, request, "get_training_run")

    async def get_training_run_async(
        self, training_run_id: str, access_scope: AccessScope = "owned", *, timeout: float | None = None
    ) -> TrainingRun:
        """Like `get_training_run`, awaited."""
        return await Within(timeout).result_async(self.get_training_run(training_run_id, access_scope))

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """Return the record of the run that saved a checkpoint."""
        request = GetTrainingRunRequest(
            training_run_id=ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).training_run_id,
            access_scope=access_scope,
        )
        return self._submit(ops.GET_TRAINING_RUN, request, "get_training_run_by_tinker_path")

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned", *, timeout: float | None = None
    ) -> TrainingRun:
        """Like `get_training_run_by_tinker_path`, awaited."""
        return await Within(timeout).result_async(
            self.get_training_run_by_tinker_path(tinker_path, access_scope)
        )

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """Return one page of runs, newest first; `iter_training_runs` iterates over all."""
        request = ListTrainingRunsRequest(
            limit=limit, offset=offset, access_scope=access_scope, project_id=project_id
        )
        return self._submit(ops.LIST_TRAINING_RUNS, request, "list_training_runs")

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingRunsResponse:
        """Like `list_training_runs`, awaited."""
        return await Within(timeout).result_async(
            self.list_training_runs(limit, offset, access_scope, project_id)
        )

    def iter_training_runs(
        self,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        page_size: int = 100,
        timeout: float | None = None,
    ) -> Listing[TrainingRunsResponse, TrainingRun]:
        """Iterate over all runs, newest first; `timeout` limits the wait for each page.

        >>> [run.training_run_id for run in rest.iter_training_runs()]  # doctest: +SKIP
        """
        check_page_size(page_size)
        request = ListTrainingRunsRequest(limit=page_size, access_scope=access_scope, project_id=project_id)
        return Listing(
            lambda offset: self._submit(
                ops.LIST_TRAINING_RUNS, request.model_copy(update={"offset": offset}), "list_training_runs"
            ),
            items=lambda page: page.training_runs,
            identify=lambda run: run.training_run_id,
            total=lambda page: page.cursor.total_count,
            timeout=timeout,
        )

    def get_run_metrics(self, training_run_id: str) -> APIFuture[StepMetrics]:
        """Return the metrics of each step of a run: `step`, `time`, `loss`, … Only Tinkex servers keep them.

        >>> [line["loss"] for line in rest.get_run_metrics(run_id).result()]  # doctest: +SKIP
        """
        request = GetTrainingRunRequest(training_run_id=check_id("training_run_id", training_run_id))

        async def fetch() -> StepMetrics:
            lines = await self._connection.call(ops.GET_RUN_METRICS, request, CallContext("get_run_metrics"))
            return StepMetrics.from_json_lines(lines)

        self._connection.check_open()
        return start(fetch, "get_run_metrics")

    async def get_run_metrics_async(
        self, training_run_id: str, *, timeout: float | None = None
    ) -> StepMetrics:
        """Like `get_run_metrics`, awaited."""
        return await Within(timeout).result_async(self.get_run_metrics(training_run_id))

    # -- sessions and samplers ---------------------------------------------------------------------------

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """Return the runs and samplers of a session."""
        request = GetSessionRequest(session_id=check_id("session_id", session_id), access_scope=access_scope)
        return self._submit(ops.GET_SESSION, request, "get_session")

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned", *, timeout: float | None = None
    ) -> GetSessionResponse:
        """Like `get_session`, awaited."""
        return await Within(timeout).result_async(self.get_session(session_id, access_scope))

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """Return one page of session ids, newest first; `iter_sessions` iterates over all."""
        request = ListSessionsRequest(limit=limit, offset=offset, access_scope=access_scope)
        return self._submit(ops.LIST_SESSIONS, request, "list_sessions")

    async def list_sessions_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> ListSessionsResponse:
        """Like `list_sessions`, awaited."""
        return await Within(timeout).result_async(self.list_sessions(limit, offset, access_scope))

    def iter_sessions(
        self, access_scope: AccessScope = "owned", *, page_size: int = 100, timeout: float | None = None
    ) -> Listing[ListSessionsResponse, str]:
        """Iterate over all session ids, newest first; `timeout` limits the wait for each page."""
        check_page_size(page_size)
        request = ListSessionsRequest(limit=page_size, access_scope=access_scope)
        return Listing(
            lambda offset: self._submit(
                ops.LIST_SESSIONS, request.model_copy(update={"offset": offset}), "list_sessions"
            ),
            items=lambda page: page.sessions,
            identify=str,
            timeout=timeout,
        )

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Return one page of the sessions that match; `next_cursor` starts the next page. Experimental."""
        _warn_experimental("search_sessions")
        return self._search(request)

    async def search_sessions_async(
        self, request: SessionSearchRequest, *, timeout: float | None = None
    ) -> SessionSearchResponse:
        """Like `search_sessions`, awaited."""
        _warn_experimental("search_sessions_async")
        return await Within(timeout).result_async(self._search(request))

    def _search(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        if not isinstance(request, SessionSearchRequest):
            raise InvalidInputError(f"request must be a SessionSearchRequest, got {type(request).__name__}")
        return self._submit(ops.SEARCH_SESSIONS, request, "search_sessions")

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session into a project."""
        request = AssignSessionProjectRequest(
            session_id=check_id("session_id", session_id), project_id=check_id("project_id", project_id)
        )
        return self._submit(ops.ASSIGN_SESSION_PROJECT, request, "assign_session_project")

    async def assign_session_project_async(
        self, session_id: str, project_id: str, *, timeout: float | None = None
    ) -> None:
        """Like `assign_session_project`, awaited."""
        return await Within(timeout).result_async(self.assign_session_project(session_id, project_id))

    def export_session_trace(
        self, session_id: str, *, timeout: float | None = TRACE_TIMEOUT
    ) -> APIFuture[str]:
        """Export a session's timeline as a trace; returns its download URL.

        The server may take minutes to build it: the client polls every 5 s, for `timeout` seconds in all.
        """
        check_timeout(timeout)
        request = ExportSessionTraceRequest(session_id=check_id("session_id", session_id))
        self._connection.check_open()
        return start(lambda: self._trace_url(request, timeout), "export_session_trace")

    async def export_session_trace_async(
        self, session_id: str, *, timeout: float | None = TRACE_TIMEOUT
    ) -> str:
        """Like `export_session_trace`, awaited."""
        return await Within(timeout).result_async(self.export_session_trace(session_id, timeout=timeout))

    async def _trace_url(self, request: ExportSessionTraceRequest, timeout: float | None) -> str:
        started, logged = time.monotonic(), False
        while True:
            state = await self._connection.call(
                ops.EXPORT_SESSION_TRACE, request, CallContext("export_session_trace")
            )
            if state.status == "ready" and state.url:
                return state.url
            if state.status != "pending":
                reason = state.error or f"the server said {state.status!r} without a URL or a reason"
                raise RequestFailedError(
                    f"the trace of session {request.session_id} could not be made: {reason}",
                    request_id="",
                    category=RequestErrorCategory.Server,
                )
            if timeout is not None and time.monotonic() - started + TRACE_POLL_INTERVAL > timeout:
                raise ResultTimeoutError(
                    f"the trace of session {request.session_id} is not ready after {timeout:g} s; the server "
                    "goes on making it: ask again later"
                )
            if not logged:
                log.info("waiting for the trace of session %s; this may take minutes", request.session_id)
                logged = True
            await asyncio.sleep(TRACE_POLL_INTERVAL)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """Return the base model and the adapter of a sampler."""
        request = GetSamplerRequest(sampler_id=check_id("sampler_id", sampler_id))
        return self._submit(ops.GET_SAMPLER, request, "get_sampler")

    async def get_sampler_async(self, sampler_id: str, *, timeout: float | None = None) -> GetSamplerResponse:
        """Like `get_sampler`, awaited."""
        return await Within(timeout).result_async(self.get_sampler(sampler_id))

    # -- the account -------------------------------------------------------------------------------------

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Return the owner of the API key in use, read from the JWT that the key was exchanged for."""
        self._connection.check_open()
        return start(self._whoami, "whoami")

    async def _whoami(self) -> WhoamiResponse:
        await self._connection.open()
        credential = self._connection.transport.credential
        token = await credential.token() if credential is not None else ""
        claims = decode_claims(token)
        if "sub" not in claims:
            raise CredentialError(
                f"whoami reads a JWT, and {self._connection.base_url or 'the local service'} takes plain API "
                "keys, which do not say whose they are"
            )
        return WhoamiResponse(
            user_urn=claims["sub"],
            org_urn=f"tml:organization:{claims.get('org_id')}",
            email=claims.get("email"),
        )

    # -- moved to AdminClient ----------------------------------------------------------------------------

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Deprecated: use `AdminClient.get_audit_log`."""
        return self._admin("get_audit_log").get_audit_log(event_type, day)

    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None, *, timeout: float | None = None
    ) -> AuditLogResponse:
        """Deprecated: use `AdminClient.get_audit_log_async`."""
        admin = self._admin("get_audit_log_async")
        return await admin.get_audit_log_async(event_type, day, timeout=timeout)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Deprecated: use `AdminClient.get_billing_usage`."""
        return self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str, *, timeout: float | None = None
    ) -> BillingUsageResponse:
        """Deprecated: use `AdminClient.get_billing_usage_async`."""
        admin = self._admin("get_billing_usage_async")
        return await admin.get_billing_usage_async(starting_on, ending_before, timeout=timeout)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage`."""
        admin = self._admin("get_current_checkpoint_storage_usage")
        return admin.get_current_checkpoint_storage_usage(project_id)

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None, *, timeout: float | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage_async`."""
        admin = self._admin("get_current_checkpoint_storage_usage_async")
        return await admin.get_current_checkpoint_storage_usage_async(project_id, timeout=timeout)

    def _admin(self, method: str) -> AdminClient:
        warn_caller(
            f"RestClient.{method} is deprecated: it moved to AdminClient.{method}", DeprecationWarning
        )
        return AdminClient(self._connection)


def _warn_experimental(name: str) -> None:
    warn_caller(f"RestClient.{name} is experimental and may change without notice", ExperimentalWarning)
