"""RestClient: runs, checkpoints, sessions and samplers, looked up and looked after.

Promises: the official names, parameters and defaults; `x()` gives a future at once, `await x_async()` its
result; a path or an id that cannot be one is refused at the call. Listings also come as iterators, which
fetch page after page. Needs no session. Knows nothing of how a call travels.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from datetime import date, datetime

from tinkex.client.admin import AdminClient
from tinkex.client.auth import JwtCredential, decode_claims
from tinkex.client.calls import Calls
from tinkex.client.future import APIFuture, start
from tinkex.client.pages import Listing
from tinkex.errors import (
    CredentialError,
    ExperimentalWarning,
    InvalidInputError,
    RequestErrorCategory,
    RequestFailedError,
    ResultTimeoutError,
)
from tinkex.types.billing import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)
from tinkex.types.checkpoints import (
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointRequest,
    CheckpointsListResponse,
    CopyWeightsRequest,
    ExternalWeightsUrlsResponse,
    ListCheckpointsRequest,
    ListUserCheckpointsRequest,
    ParsedCheckpointTinkerPath,
    SetCheckpointTTLRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.config import WhoamiResponse
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
TRACE_TIMEOUT = 1800.0  # seconds that a trace may take to build, unless the caller says otherwise


class RestClient(Calls):
    """Runs, checkpoints and sessions of a server.

    >>> rest = RestClient()  # doctest: +SKIP
    >>> for checkpoint in rest.iter_checkpoints():  # doctest: +SKIP
    ...     print(checkpoint.tinker_path)
    """

    # -- runs --------------------------------------------------------------------------------------------

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """One run."""
        request = GetTrainingRunRequest(
            training_run_id=_check_id("training_run_id", training_run_id), access_scope=access_scope
        )
        return self._submit(ops.GET_TRAINING_RUN, request, "get_training_run")

    async def get_training_run_async(
        self, training_run_id: str, access_scope: AccessScope = "owned", *, timeout: float | None = None
    ) -> TrainingRun:
        return await self.get_training_run(training_run_id, access_scope).result_async(timeout)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The run that a checkpoint was saved from."""
        request = GetTrainingRunRequest(
            training_run_id=_parse(tinker_path).training_run_id, access_scope=access_scope
        )
        return self._submit(ops.GET_TRAINING_RUN, request, "get_training_run_by_tinker_path")

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned", *, timeout: float | None = None
    ) -> TrainingRun:
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope).result_async(timeout)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """One page of runs, newest first; `iter_training_runs` goes through all."""
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
        return await self.list_training_runs(limit, offset, access_scope, project_id).result_async(timeout)

    def iter_training_runs(
        self,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        page_size: int = 100,
        timeout: float | None = None,
    ) -> Listing[TrainingRunsResponse, TrainingRun]:
        """All runs, newest first; each page may take `timeout` seconds."""
        return Listing(
            lambda offset: self.list_training_runs(page_size, offset, access_scope, project_id),
            items=lambda page: page.training_runs,
            identify=lambda run: run.training_run_id,
            total=lambda page: page.cursor.total_count,
            timeout=timeout,
        )

    # -- checkpoints: looking ----------------------------------------------------------------------------

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of one run."""
        request = ListCheckpointsRequest(training_run_id=_check_id("training_run_id", training_run_id))
        return self._submit(ops.LIST_CHECKPOINTS, request, "list_checkpoints")

    async def list_checkpoints_async(
        self, training_run_id: str, *, timeout: float | None = None
    ) -> CheckpointsListResponse:
        return await self.list_checkpoints(training_run_id).result_async(timeout)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        """One page of your checkpoints, newest first; `iter_checkpoints` goes through all."""
        request = ListUserCheckpointsRequest(limit=limit, offset=offset)
        return self._submit(ops.LIST_USER_CHECKPOINTS, request, "list_user_checkpoints")

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0, *, timeout: float | None = None
    ) -> CheckpointsListResponse:
        return await self.list_user_checkpoints(limit, offset).result_async(timeout)

    def iter_checkpoints(
        self, training_run_id: str | None = None, *, page_size: int = 1000, timeout: float | None = None
    ) -> Listing[CheckpointsListResponse, Checkpoint]:
        """All checkpoints: of one run, or yours; each page may take `timeout` seconds."""

        def fetch(offset: int) -> APIFuture[CheckpointsListResponse]:
            if training_run_id is not None:
                return self.list_checkpoints(training_run_id)
            return self.list_user_checkpoints(page_size, offset)

        def total(page: CheckpointsListResponse) -> int | None:
            if training_run_id is not None:
                return len(page.checkpoints)  # a run's checkpoints come in one page
            return page.cursor.total_count if page.cursor else None

        return Listing(
            fetch,
            items=lambda page: page.checkpoints,
            identify=lambda checkpoint: checkpoint.tinker_path,
            total=total,
            timeout=timeout,
        )

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """What a run must be like for a checkpoint to fit. Await it, or call `.result()`."""
        request = WeightsInfoRequest(tinker_path=_parse(tinker_path).tinker_path)
        return self._submit(ops.GET_WEIGHTS_INFO, request, "get_weights_info_by_tinker_path")

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Where the files of an exported checkpoint can be downloaded."""
        parsed = _parse(tinker_path)
        if parsed.checkpoint_type != "external":
            raise InvalidInputError(
                f"only exported checkpoints have files to download: expected tinker://RUN/external_weights/NAME "
                f"(from save_weights_external), got {tinker_path!r}"
            )
        return self._submit(ops.GET_EXTERNAL_WEIGHTS_URLS, _request(parsed), "get_external_weights_urls")

    async def get_external_weights_urls_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> ExternalWeightsUrlsResponse:
        return await self.get_external_weights_urls(tinker_path).result_async(timeout)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Where a checkpoint can be downloaded as one file.

        Servers build the file when first asked and answer 503 meanwhile, which is waited for, for up to five
        minutes. Hosted Tinker no longer offers it (see save_weights_external); servers of ours do.
        """
        return self._archive_url(_join(training_run_id, checkpoint_id), "get_checkpoint_archive_url")

    async def get_checkpoint_archive_url_async(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> CheckpointArchiveUrlResponse:
        return await self.get_checkpoint_archive_url(training_run_id, checkpoint_id).result_async(timeout)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """The same for a path."""
        return self._archive_url(_parse(tinker_path), "get_checkpoint_archive_url_from_tinker_path")

    async def get_checkpoint_archive_url_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> CheckpointArchiveUrlResponse:
        return await self.get_checkpoint_archive_url_from_tinker_path(tinker_path).result_async(timeout)

    def _archive_url(
        self, parsed: ParsedCheckpointTinkerPath, method: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        return self._submit(ops.GET_CHECKPOINT_ARCHIVE_URL, _request(parsed), method)

    # -- checkpoints: changing ---------------------------------------------------------------------------

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Delete a checkpoint, for good."""
        request = _request(_join(training_run_id, checkpoint_id))
        return self._submit(ops.DELETE_CHECKPOINT, request, "delete_checkpoint")

    async def delete_checkpoint_async(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> None:
        return await self.delete_checkpoint(training_run_id, checkpoint_id).result_async(timeout)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint, for good."""
        request = _request(_parse(tinker_path))
        return self._submit(ops.DELETE_CHECKPOINT, request, "delete_checkpoint_from_tinker_path")

    async def delete_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        return await self.delete_checkpoint_from_tinker_path(tinker_path).result_async(timeout)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let everyone read a checkpoint."""
        request = _request(_parse(tinker_path))
        return self._submit(ops.PUBLISH_CHECKPOINT, request, "publish_checkpoint_from_tinker_path")

    async def publish_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        return await self.publish_checkpoint_from_tinker_path(tinker_path).result_async(timeout)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Keep a checkpoint to its owner again."""
        request = _request(_parse(tinker_path))
        return self._submit(ops.UNPUBLISH_CHECKPOINT, request, "unpublish_checkpoint_from_tinker_path")

    async def unpublish_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        return await self.unpublish_checkpoint_from_tinker_path(tinker_path).result_async(timeout)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Let a checkpoint expire in `ttl_seconds` from now; None: never."""
        _check_ttl(ttl_seconds)
        parsed = _parse(tinker_path)
        request = SetCheckpointTTLRequest(
            training_run_id=parsed.training_run_id,
            checkpoint_id=parsed.checkpoint_id,
            ttl_seconds=ttl_seconds,
        )
        return self._submit(ops.SET_CHECKPOINT_TTL, request, "set_checkpoint_ttl_from_tinker_path")

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None, *, timeout: float | None = None
    ) -> None:
        return await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds).result_async(timeout)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project (by default TINKER_PROJECT_ID's); gives the copy's path."""
        project = destination_project_id or self._connection.settings.project_id
        if not project:
            raise InvalidInputError(
                "copy_weights needs a project: pass destination_project_id or set TINKER_PROJECT_ID"
            )
        _check_ttl(ttl_seconds)
        request = CopyWeightsRequest(
            source_path=_parse(path).tinker_path,
            destination_project_id=project,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

        async def copy() -> str:
            reply = await self._connection.call(ops.COPY_WEIGHTS, request, method="copy_weights")
            return reply.tinker_path

        self._connection.check_open()
        return start(copy, "copy_weights")

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        timeout: float | None = None,
    ) -> str:
        return await self.copy_weights(
            path, destination_project_id, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        ).result_async(timeout)

    # -- sessions and samplers ---------------------------------------------------------------------------

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """A session's runs and samplers."""
        request = GetSessionRequest(session_id=_check_id("session_id", session_id), access_scope=access_scope)
        return self._submit(ops.GET_SESSION, request, "get_session")

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned", *, timeout: float | None = None
    ) -> GetSessionResponse:
        return await self.get_session(session_id, access_scope).result_async(timeout)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """One page of session ids, newest first; `iter_sessions` goes through all."""
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
        return await self.list_sessions(limit, offset, access_scope).result_async(timeout)

    def iter_sessions(
        self, access_scope: AccessScope = "owned", *, page_size: int = 100, timeout: float | None = None
    ) -> Listing[ListSessionsResponse, str]:
        """All session ids, newest first; each page may take `timeout` seconds."""
        return Listing(
            lambda offset: self.list_sessions(page_size, offset, access_scope),
            items=lambda page: page.sessions,
            identify=str,
            timeout=timeout,
        )

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """One page of the sessions that match; go on with `next_cursor`. Experimental."""
        _warn_experimental("search_sessions")
        return self._submit(ops.SEARCH_SESSIONS, request, "search_sessions")

    async def search_sessions_async(
        self, request: SessionSearchRequest, *, timeout: float | None = None
    ) -> SessionSearchResponse:
        _warn_experimental("search_sessions_async")
        return await self._submit(ops.SEARCH_SESSIONS, request, "search_sessions").result_async(timeout)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Put a session into a project."""
        request = AssignSessionProjectRequest(
            session_id=_check_id("session_id", session_id), project_id=_check_id("project_id", project_id)
        )
        return self._submit(ops.ASSIGN_SESSION_PROJECT, request, "assign_session_project")

    async def assign_session_project_async(
        self, session_id: str, project_id: str, *, timeout: float | None = None
    ) -> None:
        return await self.assign_session_project(session_id, project_id).result_async(timeout)

    def export_session_trace(
        self, session_id: str, *, timeout: float | None = TRACE_TIMEOUT
    ) -> APIFuture[str]:
        """Have a session's timeline made into a trace; gives the URL to download it from.

        Making it can take minutes: the server is asked every 5 s, for `timeout` seconds in all.
        """
        request = ExportSessionTraceRequest(session_id=_check_id("session_id", session_id))
        self._connection.check_open()
        return start(lambda: self._trace_url(request, timeout), "export_session_trace")

    async def export_session_trace_async(
        self, session_id: str, *, timeout: float | None = TRACE_TIMEOUT
    ) -> str:
        return await self.export_session_trace(session_id, timeout=timeout)

    async def _trace_url(self, request: ExportSessionTraceRequest, timeout: float | None) -> str:
        started, told = time.monotonic(), False
        while True:
            state = await self._connection.call(
                ops.EXPORT_SESSION_TRACE, request, method="export_session_trace"
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
            if not told:
                log.info("waiting for the trace of session %s; this may take minutes", request.session_id)
                told = True
            await asyncio.sleep(TRACE_POLL_INTERVAL)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """What a sampler samples from."""
        request = GetSamplerRequest(sampler_id=_check_id("sampler_id", sampler_id))
        return self._submit(ops.GET_SAMPLER, request, "get_sampler")

    async def get_sampler_async(self, sampler_id: str, *, timeout: float | None = None) -> GetSamplerResponse:
        return await self.get_sampler(sampler_id).result_async(timeout)

    # -- who am I ----------------------------------------------------------------------------------------

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Who the key in use belongs to, by the JWT it was exchanged for. Await it, or call `.result()`."""
        self._connection.check_open()
        return start(self._whoami, "whoami")

    async def _whoami(self) -> WhoamiResponse:
        await self._connection.open()
        credential = getattr(self._connection.transport, "credential", None)  # a local service has none
        token = await credential.token() if credential is not None else ""
        claims = credential.claims if isinstance(credential, JwtCredential) else decode_claims(token)
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
        _warn_moved("get_audit_log")
        return AdminClient(self._connection).get_audit_log(event_type, day)

    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None, *, timeout: float | None = None
    ) -> AuditLogResponse:
        """Deprecated: use `AdminClient.get_audit_log_async`."""
        _warn_moved("get_audit_log_async")
        return await AdminClient(self._connection).get_audit_log_async(event_type, day, timeout=timeout)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Deprecated: use `AdminClient.get_billing_usage`."""
        _warn_moved("get_billing_usage")
        return AdminClient(self._connection).get_billing_usage(starting_on, ending_before)

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str, *, timeout: float | None = None
    ) -> BillingUsageResponse:
        """Deprecated: use `AdminClient.get_billing_usage_async`."""
        _warn_moved("get_billing_usage_async")
        admin = AdminClient(self._connection)
        return await admin.get_billing_usage_async(starting_on, ending_before, timeout=timeout)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage`."""
        _warn_moved("get_current_checkpoint_storage_usage")
        return AdminClient(self._connection).get_current_checkpoint_storage_usage(project_id)

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None, *, timeout: float | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage_async`."""
        _warn_moved("get_current_checkpoint_storage_usage_async")
        admin = AdminClient(self._connection)
        return await admin.get_current_checkpoint_storage_usage_async(project_id, timeout=timeout)


_parse = ParsedCheckpointTinkerPath.from_tinker_path


def _join(training_run_id: str, checkpoint_id: str) -> ParsedCheckpointTinkerPath:
    return _parse(f"tinker://{training_run_id}/{checkpoint_id}")


def _request(parsed: ParsedCheckpointTinkerPath) -> CheckpointRequest:
    return CheckpointRequest(training_run_id=parsed.training_run_id, checkpoint_id=parsed.checkpoint_id)


def _check_id(name: str, value: str) -> str:
    if not isinstance(value, str) or not value or "/" in value:
        raise InvalidInputError(f"{name} must be an id without '/', as the server gave it, got {value!r}")
    return value


def _check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and ttl_seconds < 1:
        raise InvalidInputError(f"ttl_seconds must be at least 1, or None for no expiry, got {ttl_seconds}")


def _warn_moved(name: str) -> None:
    warnings.warn(
        f"RestClient.{name} is deprecated: it moved to AdminClient.{name}", DeprecationWarning, stacklevel=3
    )


def _warn_experimental(name: str) -> None:
    warnings.warn(
        f"RestClient.{name} is experimental and may change without notice", ExperimentalWarning, stacklevel=3
    )
