"""RestClient: look up and manage runs, checkpoints, sessions and samplers. Needs no session.

Promises: the official names, parameters and defaults; `x()` returns a future at once, `await x_async()` the
result; an impossible path or id is refused at the call. `iter_…` methods fetch listings page by page.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import date, datetime

from tinkex.client.admin import AdminClient
from tinkex.client.base_client import check_id, warn_caller
from tinkex.client.checkpoints import CheckpointCalls
from tinkex.client.credentials import decode_claims
from tinkex.client.future import APIFuture, check_timeout
from tinkex.client.rest_results import Listing, StepMetrics, check_page_size
from tinkex.client.transport import CallContext
from tinkex.client.twins import awaited
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
from tinkex.types.sampling import GetSamplerResponse
from tinkex.types.sessions import (
    AccessScope,
    ExportSessionTraceRequest,
    GetSessionResponse,
    ListSessionsRequest,
    ListSessionsResponse,
    SessionSearchRequest,
    SessionSearchResponse,
)
from tinkex.types.training import ListTrainingRunsRequest, TrainingRun, TrainingRunsResponse
from tinkex.wire import ops

log = logging.getLogger("tinkex")

TRACE_POLL_INTERVAL = 5.0
TRACE_TIMEOUT = 1800.0  # seconds that the server may take to build a trace


class RestClient(CheckpointCalls):
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
        return self._submit(ops.GET_TRAINING_RUN, training_run_id=training_run_id, access_scope=access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """Return the record of the run that saved a checkpoint."""
        run_id = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).training_run_id
        method = "get_training_run_by_tinker_path"
        return self._submit(ops.GET_TRAINING_RUN, method, training_run_id=run_id, access_scope=access_scope)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """Return one page of runs, newest first; `iter_training_runs` iterates over all."""
        return self._submit(
            ops.LIST_TRAINING_RUNS,
            limit=limit, offset=offset, access_scope=access_scope, project_id=project_id,
        )  # fmt: skip

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
        ListTrainingRunsRequest(access_scope=access_scope, project_id=project_id)  # refuses bad ones now
        return Listing(
            lambda offset: self.list_training_runs(page_size, offset, access_scope, project_id),
            items=lambda page: page.training_runs,
            identify=lambda run: run.training_run_id,
            total=lambda page: page.cursor.total_count,
            timeout=timeout,
        )

    def get_run_metrics(self, training_run_id: str) -> APIFuture[StepMetrics]:
        """Return the metrics of each step of a run: `step`, `time`, `loss`, … Only Tinkex servers keep them.

        >>> [line["loss"] for line in rest.get_run_metrics(run_id).result()]  # doctest: +SKIP
        """
        parse = StepMetrics.from_json_lines
        return self._convert(ops.GET_RUN_METRICS, parse, training_run_id=training_run_id)

    def update_training_run(
        self, training_run_id: str, *, name: str | None = None, tags: list[str] | None = None
    ) -> APIFuture[None]:
        """Rename a run, or replace its tags; None changes nothing. Only Tinkex servers support this."""
        return self._submit(
            ops.UPDATE_RUN, "update_training_run", training_run_id=training_run_id, name=name, tags=tags
        )

    def delete_training_run(self, training_run_id: str, *, checkpoints: bool = False) -> APIFuture[None]:
        """Delete a run; with `checkpoints` its checkpoints too, without it must have none.

        >>> rest.delete_training_run(run_id, checkpoints=True).result()  # doctest: +SKIP
        """
        if not isinstance(checkpoints, bool):
            raise InvalidInputError(f"checkpoints must be True or False, got {checkpoints!r:.80}")
        return self._submit(
            ops.DELETE_RUN, "delete_training_run", training_run_id=training_run_id, checkpoints=checkpoints
        )

    # -- sessions and samplers ---------------------------------------------------------------------------

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """Return the runs and samplers of a session."""
        return self._submit(ops.GET_SESSION, session_id=session_id, access_scope=access_scope)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """Return one page of session ids, newest first; `iter_sessions` iterates over all."""
        return self._submit(ops.LIST_SESSIONS, limit=limit, offset=offset, access_scope=access_scope)

    def iter_sessions(
        self, access_scope: AccessScope = "owned", *, page_size: int = 100, timeout: float | None = None
    ) -> Listing[ListSessionsResponse, str]:
        """Iterate over all session ids, newest first; `timeout` limits the wait for each page."""
        check_page_size(page_size)
        ListSessionsRequest(access_scope=access_scope)  # refuses a bad one now
        return Listing(
            lambda offset: self.list_sessions(page_size, offset, access_scope),
            items=lambda page: page.sessions,
            identify=str,
            timeout=timeout,
        )

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Return one page of the sessions that match; `next_cursor` starts the next page. Experimental."""
        warn_caller(
            "RestClient.search_sessions is experimental and may change without notice", ExperimentalWarning
        )
        if not isinstance(request, SessionSearchRequest):
            raise InvalidInputError(f"request must be a SessionSearchRequest, got {type(request).__name__}")
        return self._connection.submit(ops.SEARCH_SESSIONS, request, CallContext("search_sessions"))

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session into a project."""
        project = check_id("project_id", project_id)
        return self._submit(ops.ASSIGN_SESSION_PROJECT, session_id=session_id, project_id=project)

    def delete_session(self, session_id: str) -> APIFuture[None]:
        """Delete a session with its runs for good; their checkpoints must be deleted before."""
        return self._submit(ops.DELETE_SESSION, session_id=session_id)

    def export_session_trace(
        self, session_id: str, *, timeout: float | None = TRACE_TIMEOUT
    ) -> APIFuture[str]:
        """Export a session's timeline as a trace; returns its download URL.

        The server may take minutes to build it: the client polls every 5 s, for `timeout` seconds in all.
        """
        check_timeout(timeout)
        request = ExportSessionTraceRequest(session_id=check_id("session_id", session_id))
        return self._start(lambda: self._trace_url(request, timeout), "export_session_trace")

    async def export_session_trace_async(
        self, session_id: str, *, timeout: float | None = TRACE_TIMEOUT
    ) -> str:
        """Like `export_session_trace`, awaited."""
        return await self.export_session_trace(session_id, timeout=timeout).result_async(timeout)

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
        return self._submit(ops.GET_SAMPLER, sampler_id=sampler_id)

    # -- the account -------------------------------------------------------------------------------------

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Return the owner of the API key in use, read from the JWT that the key was exchanged for."""
        return self._start(self._whoami, "whoami")

    async def _whoami(self) -> WhoamiResponse:
        await self._connection.open()
        credential = self._connection.transport.credential
        claims = decode_claims(await credential.token() if credential is not None else "")
        if "sub" not in claims:
            raise CredentialError(
                f"whoami reads a JWT, and {self._connection.base_url or 'the local service'} takes plain API "
                "keys, which do not say whose they are"
            )
        organization = f"tml:organization:{claims.get('org_id')}"
        return WhoamiResponse(user_urn=claims["sub"], org_urn=organization, email=claims.get("email"))

    # -- moved to AdminClient ----------------------------------------------------------------------------

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Deprecated: use `AdminClient.get_audit_log`."""
        return self._admin("get_audit_log").get_audit_log(event_type, day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Deprecated: use `AdminClient.get_billing_usage`."""
        return self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage`."""
        admin = self._admin("get_current_checkpoint_storage_usage")
        return admin.get_current_checkpoint_storage_usage(project_id)

    # -- the same, to await ------------------------------------------------------------------------------

    get_training_run_async = awaited(get_training_run)
    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)
    list_training_runs_async = awaited(list_training_runs)
    get_run_metrics_async = awaited(get_run_metrics)
    update_training_run_async = awaited(update_training_run)
    delete_training_run_async = awaited(delete_training_run)
    get_session_async = awaited(get_session)
    list_sessions_async = awaited(list_sessions)
    search_sessions_async = awaited(search_sessions)
    assign_session_project_async = awaited(assign_session_project)
    delete_session_async = awaited(delete_session)
    get_sampler_async = awaited(get_sampler)
    get_audit_log_async = awaited(get_audit_log)
    get_billing_usage_async = awaited(get_billing_usage)
    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)

    def _admin(self, name: str) -> AdminClient:
        warn_caller(
            f"RestClient.{name} is deprecated, and so is its twin: they moved to AdminClient.{name} and "
            f"AdminClient.{name}_async",
            DeprecationWarning,
        )
        return AdminClient(self._connection)
