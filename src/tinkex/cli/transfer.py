"""Download a checkpoint to a directory, and upload it to the Hugging Face Hub.

A directory appears complete or not at all. A temporary export on the server is deleted afterwards. Only what
PEFT reads and a model card are uploaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import bar, note
from tinkex.cli.target import connected
from tinkex.client.download import Progress, download_archive, download_files, new_directory
from tinkex.client.rest import RestClient
from tinkex.errors import (
    BadRequestError,
    InvalidInputError,
    NotFoundError,
    TinkerError,
    UnprocessableEntityError,
)
from tinkex.models import hub_name
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinkex.client.server_connection import ServerConnection

_EXPORT_LIFE = 3600  # seconds after which the server deletes an export that was not deleted here
_NOT_FOR_THE_HUB = ["optimizer.safetensors", "tinkex.json"]


def fetch_checkpoint(parsed: ParsedCheckpointTinkerPath, target: Path, *, overwrite: bool) -> int:
    """Download a checkpoint into the directory `target`; its size in bytes."""
    with connected() as connection, new_directory(target, overwrite=overwrite) as directory:
        with bar("Downloading", of_bytes=True) as progress:
            _fetch(connection, parsed, directory, progress)
        return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _fetch(
    connection: ServerConnection, parsed: ParsedCheckpointTinkerPath, directory: Path, progress: Progress
) -> None:
    rest = RestClient(connection)
    if parsed.checkpoint_type == "external":
        urls = rest.get_external_weights_urls(parsed.tinker_path).result().urls
        download_files(urls, directory, progress)
        return
    rest.get_weights_info_by_tinker_path(parsed.tinker_path).result()  # fails if it does not exist
    try:
        archive = rest.get_checkpoint_archive_url_from_tinker_path(parsed.tinker_path).result()
    except (NotFoundError, BadRequestError, UnprocessableEntityError):
        if parsed.checkpoint_type == "sampler":
            raise TinkerError(
                f"this server offers no download of sampler checkpoints ({parsed.tinker_path}): save the run "
                "with save_state or save_weights_external, and download that"
            ) from None
        _export(rest, parsed, directory, progress)
        return
    download_archive(archive.url, directory, progress)


def _export(
    rest: RestClient, parsed: ParsedCheckpointTinkerPath, directory: Path, progress: Progress
) -> None:
    """Load the checkpoint into a run, export that, download the export and delete it."""
    import tinkex

    note(f"exporting {parsed.tinker_path} on the server, in a session of its own")
    name = parsed.checkpoint_id.partition("/")[2]
    with tinkex.ServiceClient() as service:
        run = service.create_training_client_from_state(parsed.tinker_path)
        exported = run.save_weights_external(f"{name}-download", ttl_seconds=_EXPORT_LIFE).result().path
        try:
            download_files(rest.get_external_weights_urls(exported).result().urls, directory, progress)
        finally:
            rest.delete_checkpoint_from_tinker_path(exported).result()


# -- to the hub ------------------------------------------------------------------------------------------


def hub() -> Any:
    """huggingface_hub's API client, logged in."""
    try:
        from huggingface_hub import HfApi  # type: ignore[import-not-found]
    except ImportError:
        raise click.ClickException("the hub's library is missing: pip install huggingface_hub") from None
    api = HfApi()
    try:
        api.whoami()  # pyright: ignore[reportUnknownMemberType]  # a decorator of the hub's is untyped
    except Exception as error:  # its errors have no common base class
        reason = str(error).partition(".")[0].strip()
        raise click.ClickException(
            f"no access to the hub ({reason}); `hf auth login`, or set HF_TOKEN"
        ) from None
    return api


def push(
    parsed: ParsedCheckpointTinkerPath,
    api: Any,
    repo: str | None = None,
    *,
    public: bool = False,
    model_card: bool = True,
    revision: str | None = None,
    ignore: Sequence[str] = (),
    **upload: Any,
) -> dict[str, Any]:
    """Download a checkpoint, and upload what PEFT needs of it. `upload` goes to `HfApi.upload_folder`."""
    with tempfile.TemporaryDirectory(prefix="tinkex-") as scratch:
        directory = Path(scratch) / "adapter"
        fetch_checkpoint(parsed, directory, overwrite=False)
        config = _with_base_model(_adapter_config(directory, parsed), parsed)
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        repo = repo or _repository_name(parsed)
        if model_card and not (directory / "README.md").exists():
            (directory / "README.md").write_text(_model_card(repo, config, parsed), encoding="utf-8")
        made = api.create_repo(repo_id=repo, private=not public, exist_ok=True)
        repo = getattr(made, "repo_id", repo)  # with its owner
        api.upload_folder(
            repo_id=repo, folder_path=str(directory), revision=revision,
            ignore_patterns=[*_NOT_FOR_THE_HUB, *ignore], **upload,
        )  # fmt: skip
    return {"repo_id": repo, "revision": revision, "url": f"{api.endpoint}/{repo}"}


def _adapter_config(directory: Path, parsed: ParsedCheckpointTinkerPath) -> dict[str, Any]:
    if any(directory.glob("*.age")):
        raise InvalidInputError(f"{parsed.tinker_path} is encrypted: only its recipients can use it")
    try:
        return json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TinkerError(f"{parsed.tinker_path} is no PEFT adapter: {error}") from None


def _with_base_model(config: dict[str, Any], parsed: ParsedCheckpointTinkerPath) -> dict[str, Any]:
    """Name the base model by its hub id, if it has one: the files may name a path on the server."""
    with connected() as connection:
        name = RestClient(connection).get_weights_info_by_tinker_path(parsed.tinker_path).result().base_model
    if Path(name).is_absolute():
        return config
    return {**config, "base_model_name_or_path": hub_name(name) or name}


def _repository_name(parsed: ParsedCheckpointTinkerPath) -> str:
    allowed = "".join(c if c.isalnum() or c in "-_." else "-" for c in parsed.training_run_id)
    return f"tinkex-{allowed}-{parsed.checkpoint_id.partition('/')[2]}"[:96].strip("-.")


def _model_card(repo: str, config: dict[str, Any], parsed: ParsedCheckpointTinkerPath) -> str:
    base = config.get("base_model_name_or_path") or "the base model"
    return f"""---
library_name: peft
base_model: {base}
tags: [lora, tinkex]
---

# {repo.rpartition("/")[2]}

A LoRA adapter of rank {config.get("r")} for `{base}`, trained with Tinkex.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{repo}")
```

Saved as `{parsed.checkpoint_id}` of run `{parsed.training_run_id}`.
"""
