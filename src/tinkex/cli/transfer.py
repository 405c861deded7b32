"""Move a checkpoint: download it to a directory, import one from elsewhere, push one to the Hugging Face Hub.

A directory appears complete or not at all. A temporary export on the server is deleted afterwards.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tinkex import errors
from tinkex.cli.hub import model_card, upload
from tinkex.cli.output import bar, note
from tinkex.cli.target import rest
from tinkex.client.download import download_archive, download_files, new_directory
from tinkex.client.rest import RestClient
from tinkex.config import LOCAL
from tinkex.files import ByteProgress
from tinkex.models import hub_name
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

_EXPORT_LIFE = 3600  # seconds after which the server deletes an export that was not deleted here


def fetch_checkpoint(
    client: RestClient, saved: ParsedCheckpointTinkerPath, target: Path, *, overwrite: bool
) -> int:
    """Download a checkpoint into the directory `target`; its size in bytes."""
    with new_directory(target, overwrite=overwrite) as directory:
        with bar("Downloading", of_bytes=True) as progress:
            _fetch(client, saved, directory, progress)
        return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _fetch(
    client: RestClient, saved: ParsedCheckpointTinkerPath, directory: Path, progress: ByteProgress
) -> None:
    path = saved.tinker_path
    if saved.checkpoint_type == "external":
        download_files(client.get_external_weights_urls(path).result().urls, directory, progress)
        return
    client.get_weights_info_by_tinker_path(path).result()  # fails if it does not exist
    try:
        archive = client.get_checkpoint_archive_url_from_tinker_path(path).result()
    except (errors.NotFoundError, errors.BadRequestError, errors.UnprocessableEntityError):
        if saved.checkpoint_type == "sampler":
            raise errors.TinkerError(
                f"this server offers no download of sampler checkpoints ({path}): save the run with "
                "save_state or save_weights_external, and download that"
            ) from None
        _export(client, saved, directory, progress)
    else:
        download_archive(archive.url, directory, progress)


def _export(
    client: RestClient, saved: ParsedCheckpointTinkerPath, directory: Path, progress: ByteProgress
) -> None:
    """Load the checkpoint into a run, export that, download the export and delete it."""
    import tinkex

    note(f"exporting {saved.tinker_path} on the server, in a session of its own")
    name = saved.checkpoint_id.partition("/")[2]
    with tinkex.ServiceClient() as service:
        run = service.create_training_client_from_state(saved.tinker_path)
        exported = run.save_weights_external(f"{name}-download", ttl_seconds=_EXPORT_LIFE).result().path
        try:
            download_files(client.get_external_weights_urls(exported).result().urls, directory, progress)
        finally:
            client.delete_checkpoint_from_tinker_path(exported).result()


def import_source(
    source: str, base: str | None, name: str | None, ttl: int | None, progress: ByteProgress
) -> tuple[str, str]:
    """Import an adapter into the service in use; its path and its base model.

    A checkpoint of a server comes to this machine, where it must find its base model.
    """
    import tinkex

    with tempfile.TemporaryDirectory(prefix="tinkex-") as scratch:
        target = None
        if source.startswith("tinker://"):
            saved = ParsedCheckpointTinkerPath.from_tinker_path(source)
            directory = Path(scratch) / "adapter"
            with rest() as client:
                fetch_checkpoint(client, saved, directory, overwrite=False)
                base = base or client.get_weights_info_by_tinker_path(source).result().base_model
            source, target = str(directory), LOCAL
            name = name or saved.checkpoint_id.partition("/")[2]
        with tinkex.ServiceClient(base_url=target) as service:
            client = service.create_rest_client()
            path = client.import_checkpoint(source, base, name, ttl_seconds=ttl, progress=progress).result()
            return path, client.get_weights_info_by_tinker_path(path).result().base_model


def push(
    saved: ParsedCheckpointTinkerPath, api: Any, *, repo: str | None = None, no_model_card: bool = False,
    commit_message: str | None = None, revision: str | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Download a checkpoint, and upload what PEFT needs of it."""
    with tempfile.TemporaryDirectory(prefix="tinkex-") as scratch, rest() as client:
        directory = Path(scratch) / "adapter"
        fetch_checkpoint(client, saved, directory, overwrite=False)
        if any(directory.glob("*.age")):
            raise errors.InvalidInputError(
                f"{saved.tinker_path} is encrypted: only its recipients can use it"
            )
        try:
            config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise errors.TinkerError(f"{saved.tinker_path} is no PEFT adapter: {error}") from None
        base = client.get_weights_info_by_tinker_path(saved.tinker_path).result().base_model
        if Path(base).is_absolute():  # a path on the server; the files may know a name
            base = config.get("base_model_name_or_path") or base
        base, repo = hub_name(base) or base, repo or _repository_name(saved)
        keep = no_model_card or (directory / "README.md").exists()
        card = None if keep else model_card(client, saved, repo, "peft", base, None)
        message = commit_message or f"Add {saved.checkpoint_id}"
        repo = upload(api, repo, directory, base, card, message=message, revision=revision, **options)
    return {"repo_id": repo, "revision": revision, "url": f"{api.endpoint}/{repo}"}


def _repository_name(saved: ParsedCheckpointTinkerPath) -> str:
    allowed = "".join(c if c.isalnum() or c in "-_." else "-" for c in saved.training_run_id)
    return f"tinkex-{allowed}-{saved.checkpoint_id.partition('/')[2]}"[:96].strip("-.")
