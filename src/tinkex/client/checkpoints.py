"""The checkpoint methods of RestClient: list, download, publish, copy and delete.

Promises: an impossible path is refused at the call, with an example of a valid one. Otherwise as rest.py.
"""

from __future__ import annotations

from tinkex.client.base_client import BaseClient, check_id, check_ttl
from tinkex.client.future import APIFuture, Within, start
from tinkex.client.rest_results import Listing, check_page_size
from tinkex.client.transport import CallContext
from tinkex.errors import InvalidInputError
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
from tinkex.wire import ops


class CheckpointMethods(BaseClient):
    """The checkpoint methods; RestClient inherits them."""

    # -- lookup -----------------------------------------------------------------------------

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        """Return the checkpoints of one run."""
        request = ListCheckpointsRequest(training_run_id=check_id("training_run_id", training_run_id))
        return self._submit(ops.LIST_CHECKPOINTS, request, "list_checkpoints")

    async def list_checkpoints_async(
        self, training_run_id: str, *, timeout: float | None = None
    ) -> CheckpointsListResponse:
        """Like `list_checkpoints`, awaited."""
        return await Within(timeout).result_async(self.list_checkpoints(training_run_id))

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        """Return one page of your checkpoints, newest first; `iter_checkpoints` iterates over all."""
        request = ListUserCheckpointsRequest(limit=limit, offset=offset)
        return self._submit(ops.LIST_USER_CHECKPOINTS, request, "list_user_checkpoints")

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0, *, timeout: float | None = None
    ) -> CheckpointsListResponse:
        """Like `list_user_checkpoints`, awaited."""
        return await Within(timeout).result_async(self.list_user_checkpoints(limit, offset))

    def iter_checkpoints(
        self, training_run_id: str | None = None, *, page_size: int = 1000, timeout: float | None = None
    ) -> Listing[CheckpointsListResponse, Checkpoint]:
        """Iterate over the checkpoints of one run, or all of yours; `timeout` limits the wait for each page.

        >>> [checkpoint.tinker_path for checkpoint in rest.iter_checkpoints(run_id)]  # doctest: +SKIP
        """
        check_page_size(page_size)
        if training_run_id is not None:
            check_id("training_run_id", training_run_id)

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
        """Return what a run needs to load a checkpoint: base model, rank and trained layers."""
        request = WeightsInfoRequest(tinker_path=_parse(tinker_path).tinker_path)
        return self._submit(ops.GET_WEIGHTS_INFO, request, "get_weights_info_by_tinker_path")

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Return the download URLs of an exported checkpoint's files."""
        parsed = _parse(tinker_path)
        if parsed.checkpoint_type != "external":
            raise InvalidInputError(
                "only exported checkpoints (save_weights_external) have files to download: expected "
                f"tinker://RUN/external_weights/NAME, got {tinker_path!r}"
            )
        return self._submit(ops.GET_EXTERNAL_WEIGHTS_URLS, _request(parsed), "get_external_weights_urls")

    async def get_external_weights_urls_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> ExternalWeightsUrlsResponse:
        """Like `get_external_weights_urls`, awaited."""
        return await Within(timeout).result_async(self.get_external_weights_urls(tinker_path))

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Return the download URL of a checkpoint as one tar file.

        A server builds the file on the first request and answers 503 meanwhile; the client waits up to five
        minutes. Hosted Tinker no longer offers this (see save_weights_external); Tinkex servers do.
        """
        return self._archive_url(_join(training_run_id, checkpoint_id), "get_checkpoint_archive_url")

    async def get_checkpoint_archive_url_async(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> CheckpointArchiveUrlResponse:
        """Like `get_checkpoint_archive_url`, awaited."""
        return await Within(timeout).result_async(
            self.get_checkpoint_archive_url(training_run_id, checkpoint_id)
        )

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Return the download URL of a checkpoint as one tar file, by its path."""
        return self._archive_url(_parse(tinker_path), "get_checkpoint_archive_url_from_tinker_path")

    async def get_checkpoint_archive_url_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> CheckpointArchiveUrlResponse:
        """Like `get_checkpoint_archive_url_from_tinker_path`, awaited."""
        return await Within(timeout).result_async(
            self.get_checkpoint_archive_url_from_tinker_path(tinker_path)
        )

    def _archive_url(
        self, parsed: ParsedCheckpointTinkerPath, method: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        return self._submit(ops.GET_CHECKPOINT_ARCHIVE_URL, _request(parsed), method)

    # -- changes ----------------------------------------------------------------------------

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Delete a checkpoint permanently."""
        request = _request(_join(training_run_id, checkpoint_id))
        return self._submit(ops.DELETE_CHECKPOINT, request, "delete_checkpoint")

    async def delete_checkpoint_async(
        self, training_run_id: str, checkpoint_id: str, *, timeout: float | None = None
    ) -> None:
        """Like `delete_checkpoint`, awaited."""
        return await Within(timeout).result_async(self.delete_checkpoint(training_run_id, checkpoint_id))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint permanently, by its path."""
        request = _request(_parse(tinker_path))
        return self._submit(ops.DELETE_CHECKPOINT, request, "delete_checkpoint_from_tinker_path")

    async def delete_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        """Like `delete_checkpoint_from_tinker_path`, awaited."""
        return await Within(timeout).result_async(self.delete_checkpoint_from_tinker_path(tinker_path))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a checkpoint readable for everyone."""
        request = _request(_parse(tinker_path))
        return self._submit(ops.PUBLISH_CHECKPOINT, request, "publish_checkpoint_from_tinker_path")

    async def publish_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        """Like `publish_checkpoint_from_tinker_path`, awaited."""
        return await Within(timeout).result_async(self.publish_checkpoint_from_tinker_path(tinker_path))

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a published checkpoint private again."""
        request = _request(_parse(tinker_path))
        return self._submit(ops.UNPUBLISH_CHECKPOINT, request, "unpublish_checkpoint_from_tinker_path")

    async def unpublish_checkpoint_from_tinker_path_async(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> None:
        """Like `unpublish_checkpoint_from_tinker_path`, awaited."""
        return await Within(timeout).result_async(self.unpublish_checkpoint_from_tinker_path(tinker_path))

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Let a checkpoint expire `ttl_seconds` from now; None: never."""
        parsed = _parse(tinker_path)
        request = SetCheckpointTTLRequest(
            training_run_id=parsed.training_run_id,
            checkpoint_id=parsed.checkpoint_id,
            ttl_seconds=check_ttl(ttl_seconds),
        )
        return self._submit(ops.SET_CHECKPOINT_TTL, request, "set_checkpoint_ttl_from_tinker_path")

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None, *, timeout: float | None = None
    ) -> None:
        """Like `set_checkpoint_ttl_from_tinker_path`, awaited."""
        return await Within(timeout).result_async(
            self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)
        )

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project (by default TINKER_PROJECT_ID); returns the copy's path."""
        project = destination_project_id or self._connection.settings.project_id
        if not project:
            raise InvalidInputError(
                "copy_weights needs a project: pass destination_project_id or set TINKER_PROJECT_ID"
            )
        request = CopyWeightsRequest(
            source_path=_parse(path).tinker_path,
            destination_project_id=project,
            ttl_seconds=check_ttl(ttl_seconds),
            weights_access_token=weights_access_token,
        )

        async def copy() -> str:
            reply = await self._connection.call(ops.COPY_WEIGHTS, request, CallContext("copy_weights"))
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
        """Like `copy_weights`, awaited."""
        return await Within(timeout).result_async(
            self.copy_weights(
                path,
                destination_project_id,
                ttl_seconds=ttl_seconds,
                weights_access_token=weights_access_token,
            )
        )


_parse = ParsedCheckpointTinkerPath.from_tinker_path


def _join(training_run_id: str, checkpoint_id: str) -> ParsedCheckpointTinkerPath:
    return _parse(f"tinker://{check_id('training_run_id', training_run_id)}/{checkpoint_id}")


def _request(parsed: ParsedCheckpointTinkerPath) -> CheckpointRequest:
    return CheckpointRequest(training_run_id=parsed.training_run_id, checkpoint_id=parsed.checkpoint_id)
