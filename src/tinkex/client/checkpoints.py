"""The calls that look up and manage checkpoints, which `RestClient` has.

Promises: an impossible path or id is refused at the call. Knows nothing of how a run saves one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tinkex.client.base_client import BaseClient, check_id, check_text, check_ttl
from tinkex.client.future import APIFuture
from tinkex.client.rest_results import Listing, check_page_size
from tinkex.client.twins import awaited
from tinkex.errors import InvalidInputError
from tinkex.types.checkpoints import (
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
    WeightsInfoResponse,
)
from tinkex.wire import ops

_parse = ParsedCheckpointTinkerPath.from_tinker_path


class CheckpointCalls(BaseClient):
    """Look up and manage the checkpoints of a server."""

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        """Return the checkpoints of one run."""
        return self._submit(ops.LIST_CHECKPOINTS, training_run_id=training_run_id)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        """Return one page of your checkpoints, newest first; `iter_checkpoints` iterates over all."""
        return self._submit(ops.LIST_USER_CHECKPOINTS, limit=limit, offset=offset)

    def iter_checkpoints(
        self, training_run_id: str | None = None, *, page_size: int = 1000, timeout: float | None = None
    ) -> Listing[CheckpointsListResponse, Checkpoint]:
        """Iterate over the checkpoints of one run, or all of yours; `timeout` limits the wait for each page.

        >>> [checkpoint.tinker_path for checkpoint in rest.iter_checkpoints(run_id)]  # doctest: +SKIP
        """
        check_page_size(page_size)
        run_id = training_run_id if training_run_id is None else check_id("training_run_id", training_run_id)

        def fetch(offset: int) -> APIFuture[CheckpointsListResponse]:
            if run_id is None:
                return self.list_user_checkpoints(page_size, offset)
            return self.list_checkpoints(run_id)

        def total(page: CheckpointsListResponse) -> int | None:
            if run_id is not None:
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
        path = _parse(tinker_path).tinker_path
        return self._submit(ops.GET_WEIGHTS_INFO, "get_weights_info_by_tinker_path", tinker_path=path)

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Return the download URLs of an exported checkpoint's files."""
        if _parse(tinker_path).checkpoint_type != "external":
            raise InvalidInputError(
                "only exported checkpoints (save_weights_external) have files to download: expected "
                f"tinker://RUN/external_weights/NAME, got {tinker_path!r}"
            )
        return self._submit(ops.GET_EXTERNAL_WEIGHTS_URLS, **_ids(tinker_path))

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Return the download URL of a checkpoint as one tar file.

        A server builds the file on the first request and answers 503 meanwhile; the client waits up to five
        minutes. Hosted Tinker no longer offers this (see save_weights_external); Tinkex servers do.
        """
        return self._submit(ops.GET_CHECKPOINT_ARCHIVE_URL, **_joined_ids(training_run_id, checkpoint_id))

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Return the download URL of a checkpoint as one tar file, by its path."""
        return self._submit(
            ops.GET_CHECKPOINT_ARCHIVE_URL, "get_checkpoint_archive_url_from_tinker_path", **_ids(tinker_path)
        )

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Delete a checkpoint permanently."""
        return self._submit(ops.DELETE_CHECKPOINT, **_joined_ids(training_run_id, checkpoint_id))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint permanently, by its path."""
        return self._submit(ops.DELETE_CHECKPOINT, "delete_checkpoint_from_tinker_path", **_ids(tinker_path))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a checkpoint readable for everyone."""
        return self._submit(
            ops.PUBLISH_CHECKPOINT, "publish_checkpoint_from_tinker_path", **_ids(tinker_path)
        )

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a published checkpoint private again."""
        return self._submit(
            ops.UNPUBLISH_CHECKPOINT, "unpublish_checkpoint_from_tinker_path", **_ids(tinker_path)
        )

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Let a checkpoint expire `ttl_seconds` from now; None: never."""
        ids, ttl = _ids(tinker_path), check_ttl(ttl_seconds)
        method = "set_checkpoint_ttl_from_tinker_path"
        return self._submit(ops.SET_CHECKPOINT_TTL, method, **ids, ttl_seconds=ttl)

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
        return self._convert(
            ops.COPY_WEIGHTS, lambda reply: reply.tinker_path, source_path=_parse(path).tinker_path,
            destination_project_id=project, ttl_seconds=check_ttl(ttl_seconds),
            weights_access_token=weights_access_token,
        )  # fmt: skip

    def import_checkpoint(
        self,
        source: str | Path,
        base_model: str | None = None,
        name: str | None = None,
        *,
        ttl_seconds: int | None = None,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> APIFuture[str]:
        """Make an adapter from elsewhere a checkpoint, which samples and trains on; returns its path.

        `source` is a PEFT directory, a tar of one, or `hf://OWNER/NAME`. `base_model` is needed where its
        files do not name one that the server has. Only Tinkex servers do this.

        `rest.import_checkpoint("outputs/checkpoint-100", "Qwen/Qwen3-0.6B").result()`
        """
        if not isinstance(source, str | Path) or not str(source):
            raise InvalidInputError(f"source must be a path or hf://OWNER/NAME, got {source!r:.80}")
        if progress is not None and not callable(progress):
            raise InvalidInputError(f"progress must be a function or None, got {progress!r:.80}")
        check_text("base_model", base_model)
        check_text("name", name)
        ttl = check_ttl(ttl_seconds)
        from tinkex.client.adapter_upload import import_adapter  # most programs never get here

        return self._start(
            lambda: import_adapter(
                self._connection, source, base_model=base_model, name=name, ttl_seconds=ttl, progress=progress
            ),
            "import_checkpoint",
        )

    # -- the same, to await ------------------------------------------------------------------------------

    list_checkpoints_async = awaited(list_checkpoints)
    list_user_checkpoints_async = awaited(list_user_checkpoints)
    get_external_weights_urls_async = awaited(get_external_weights_urls)
    get_checkpoint_archive_url_async = awaited(get_checkpoint_archive_url)
    get_checkpoint_archive_url_from_tinker_path_async = awaited(get_checkpoint_archive_url_from_tinker_path)
    delete_checkpoint_async = awaited(delete_checkpoint)
    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)
    publish_checkpoint_from_tinker_path_async = awaited(publish_checkpoint_from_tinker_path)
    unpublish_checkpoint_from_tinker_path_async = awaited(unpublish_checkpoint_from_tinker_path)
    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)
    copy_weights_async = awaited(copy_weights)
    import_checkpoint_async = awaited(import_checkpoint)


def _ids(tinker_path: str) -> dict[str, str]:
    parsed = _parse(tinker_path)
    return {"training_run_id": parsed.training_run_id, "checkpoint_id": parsed.checkpoint_id}


def _joined_ids(training_run_id: str, checkpoint_id: str) -> dict[str, str]:
    return _ids(f"tinker://{check_id('training_run_id', training_run_id)}/{checkpoint_id}")
