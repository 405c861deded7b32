"""`tinkex checkpoint`: list, publish, expire, delete and download saved weights; transfer.py moves files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import Whole, bar, format_option, gather, note, show, size
from tinkex.cli.target import delete_each, rest, where

if TYPE_CHECKING:
    from tinkex.types.checkpoints import Checkpoint, ParsedCheckpointTinkerPath


@click.group()
def checkpoint() -> None:
    """Checkpoints: saved weights, named by their tinker:// paths."""


def _parse(path: str) -> ParsedCheckpointTinkerPath:
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

    return ParsedCheckpointTinkerPath.from_tinker_path(path)


@checkpoint.command("list")
@click.option("--run-id", help="Only those of this run.")
@click.option(
    "--limit", default=20, type=Whole(0), show_default=True,
    help="At most this many of all runs'; 0: all. With --run-id all are shown.",
)  # fmt: skip
@format_option
def list_checkpoints(run_id: str | None, limit: int) -> None:
    """List checkpoints, newest first: of one run, or of all."""
    place = f"of run {run_id} {where()}" if run_id else where()
    with rest() as client:
        listing = client.iter_checkpoints(run_id, page_size=min(limit or 1000, 1000))
        found, title = gather(listing, 0 if run_id else limit, "checkpoint", place)
    rows = [{"Path": one.tinker_path, **_facts(one)} for one in found]
    show({**({"run_id": run_id} if run_id else {}), "checkpoints": found}, title, rows)


def _facts(saved: Checkpoint) -> dict[str, Any]:
    return {
        "Type": saved.checkpoint_type,
        "Size": size(saved.size_bytes),
        "Public": saved.public,
        "Saved": saved.time,
        "Expires": saved.expires_at or "never",
    }


@checkpoint.command("info")
@click.argument("checkpoint_path")
@format_option
def info(checkpoint_path: str) -> None:
    """Show one checkpoint. CHECKPOINT_PATH looks like tinker://RUN/weights/NAME."""
    parsed = _parse(checkpoint_path)
    run = parsed.training_run_id
    with rest() as client:
        found = next((c for c in client.iter_checkpoints(run) if c.tinker_path == parsed.tinker_path), None)
        if found is None:
            raise click.ClickException(
                f"run {run} has no checkpoint {parsed.checkpoint_id}; "
                f"`tinkex checkpoint list --run-id {run}` shows those it has"
            )
        weights = client.get_weights_info_by_tinker_path(parsed.tinker_path).result()
    facts = {
        "Path": found.tinker_path,
        "Run": run,
        "Base model": weights.base_model,
        "LoRA rank": weights.lora_rank if weights.is_lora else "none: all weights",
        **_facts(found),
    }
    facts |= {f"Metadata: {name}": value for name, value in (found.user_metadata or {}).items()}
    fields = {**found.model_dump(), "is_lora": weights.is_lora, "lora_rank": weights.lora_rank}
    show(fields, f"Checkpoint {found.checkpoint_id}", facts)


@checkpoint.command("publish")
@click.argument("checkpoint_path")
@format_option
def publish(checkpoint_path: str) -> None:
    """Make a checkpoint of yours readable to every user of the server."""
    with rest() as client:
        client.publish_checkpoint_from_tinker_path(checkpoint_path).result()
    note(f"{checkpoint_path} is public now")


@checkpoint.command("unpublish")
@click.argument("checkpoint_path")
@format_option
def unpublish(checkpoint_path: str) -> None:
    """Make a published checkpoint of yours private again."""
    with rest() as client:
        client.unpublish_checkpoint_from_tinker_path(checkpoint_path).result()
    note(f"{checkpoint_path} is private now")


@checkpoint.command("set-ttl")
@click.argument("checkpoint_path")
@click.option("--ttl", type=Whole(1), metavar="SECONDS", help="Delete it after this many seconds.")
@click.option("--remove", is_flag=True, help="Keep it for ever.")
@format_option
def set_ttl(checkpoint_path: str, ttl: int | None, remove: bool) -> None:
    """Set when a checkpoint is deleted: --ttl SECONDS from now, or never (--remove)."""
    if (ttl is None) != remove:
        raise click.ClickException("give either --ttl SECONDS or --remove")
    with rest() as client:
        client.set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    note(f"{checkpoint_path} {'never expires' if ttl is None else f'expires in {ttl} s'} now")


@checkpoint.command("delete")
@click.argument("checkpoint_paths", nargs=-1)
@click.option("--run-id", help="Delete the checkpoints of this run: all, or those that the filters keep.")
@click.option("--type", "kind", metavar="TYPE", help="Filter: weights, sampler_weights, external_weights.")
@click.option(
    "--before", metavar="DATE", help="Filter: saved before then (2026-01-31, 2026-01-31T08:00:00Z; UTC)."
)
@click.option("--after", metavar="DATE", help="Filter: saved then or later.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@format_option
def delete(
    checkpoint_paths: tuple[str, ...], run_id: str | None, kind: str | None, before: str | None,
    after: str | None, yes: bool,
) -> None:  # fmt: skip
    """Delete checkpoints of yours for good. Name them, or give a run.

    \b
    tinkex checkpoint delete tinker://RUN/weights/0001 tinker://RUN/weights/0002
    tinkex checkpoint delete --run-id RUN --type weights --before 2026-01-31
    """
    from tinkex.types.checkpoints import FOLDERS

    if bool(checkpoint_paths) == bool(run_id):
        raise click.ClickException("name the checkpoints to delete, or give --run-id RUN, not both")
    if not run_id and (kind or before or after):
        raise click.ClickException("--type, --before and --after go with --run-id")
    if kind not in (None, *FOLDERS):
        raise click.ClickException(f"--type {kind}: there are {', '.join(FOLDERS)}")
    first, end = _date("--after", after, datetime.min), _date("--before", before, datetime.max)
    with rest() as client:
        paths = list(checkpoint_paths)
        if run_id:
            folder = f"{kind}/" if kind else ""
            paths = [
                saved.tinker_path
                for saved in client.iter_checkpoints(run_id)
                if saved.checkpoint_id.startswith(folder) and first <= saved.time < end
            ]
        lines = {path: path for path in paths}
        delete_each("checkpoint", lines, "tinker_path", client.delete_checkpoint_from_tinker_path, yes)


def _date(option: str, given: str | None, otherwise: datetime) -> datetime:
    try:
        moment = datetime.fromisoformat(given) if given else otherwise
    except ValueError:
        raise click.ClickException(
            f"{option} {given}: a date looks like 2026-01-31 or 2026-01-31T08:00:00Z"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@checkpoint.command("download")
@click.argument("checkpoint_path")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="The directory to put it in.  [default: the current one]",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@format_option
def download(checkpoint_path: str, output: Path, force: bool) -> None:
    """Download a checkpoint as a directory that PEFT loads.

    \b
    tinkex checkpoint download tinker://RUN/weights/final -o models
                                         makes models/RUN_weights_final

    An encrypted checkpoint's files end in .age: `age -d` decrypts them. Hosted Tinker has no archives of
    training checkpoints: there it is exported for the download, in a short session.
    """
    from tinkex.cli.transfer import fetch_checkpoint

    parsed = _parse(checkpoint_path)
    target = output / f"{parsed.training_run_id}_{parsed.checkpoint_id.replace('/', '_')}"
    with rest() as client:
        count = fetch_checkpoint(client, parsed, target, overwrite=force)
    fields = {"checkpoint_path": checkpoint_path, "destination": str(target), "file_size_bytes": count}
    show(fields, f"Downloaded {parsed.checkpoint_id}", {"To": target, "Size": size(count)})


@checkpoint.command("import")
@click.argument("source")
@click.option("--base", metavar="NAME", help="The base model.  [default: the one that its files name]")
@click.option("--name", help="The checkpoint's name.  [default: as the directory or the repository]")
@click.option("--ttl", type=Whole(1), metavar="SECONDS", help="Delete it after this many seconds.")
@format_option
def import_(source: str, base: str | None, name: str | None, ttl: int | None) -> None:
    """Make an adapter from elsewhere a checkpoint here: it samples, trains on and exports.

    \b
    tinkex checkpoint import outputs/checkpoint-100    a directory of PEFT's
    tinkex checkpoint import adapter.tar --base NAME   an archive of one
    tinkex checkpoint import hf://OWNER/NAME           from the Hugging Face Hub
    tinkex checkpoint import tinker://RUN/weights/NAME
                           from the server in use, to this machine

    Adapters of PEFT, TRL, Unsloth, LLaMA-Factory, axolotl and hosted Tinker are read, with any target
    modules. Nothing in the files is executed.
    """
    from tinkex.cli.transfer import import_source

    with bar("Uploading", of_bytes=True) as progress:
        path, base_model = import_source(source, base, name, ttl, progress)
    show(
        {"tinker_path": path, "base_model": base_model},
        f"Imported {source}",
        {"Path": path, "Base model": base_model, "Try it": f"tinkex chat {path}"},
    )


@checkpoint.command("push-hf")
@click.argument("checkpoint_path")
@click.option("-r", "--repo", help="The repository, OWNER/NAME.  [default: one named after the run]")
@click.option("--public", is_flag=True, help="Make the repository public.  [default: private]")
@click.option("--revision", help="The branch to push to.")
@click.option("--commit-message", help="The commit message.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of pushing to the branch.")
@click.option("--allow-pattern", "allow", multiple=True, help="Only files that match; may be repeated.")
@click.option("--ignore-pattern", "ignore", multiple=True, help="No files that match; may be repeated.")
@click.option("--no-model-card", is_flag=True, help="Do not write a README.md where there is none.")
@format_option
def push_hf(checkpoint_path: str, **options: Any) -> None:
    """Upload a checkpoint to the Hugging Face Hub as a PEFT adapter.

    Needs the huggingface_hub package, and `hf auth login` or HF_TOKEN.
    """
    from tinkex.cli.hub import hub_api
    from tinkex.cli.transfer import push

    parsed = _parse(checkpoint_path)
    place = push(parsed, hub_api(), **options)
    facts = {"Repository": place["repo_id"], "URL": place["url"]}
    show({"checkpoint_path": checkpoint_path, **place}, f"Pushed {parsed.checkpoint_id}", facts)
