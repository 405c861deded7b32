"""`tinkex checkpoint`: list, publish, expire, delete and download saved weights; transfer.py moves files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.options import Whole, format_option
from tinkex.cli.output import (
    Column,
    ago,
    bar,
    gather,
    note,
    plural,
    show,
    show_facts,
    show_table,
    size,
    title,
)
from tinkex.cli.target import error_message, rest, where

if TYPE_CHECKING:
    from tinkex.types.checkpoints import Checkpoint

KINDS = ("weights", "sampler_weights", "external_weights")


@click.group()
def checkpoint() -> None:
    """Checkpoints: saved weights, named by their tinker:// paths."""


@checkpoint.command("list")
@click.option("--run-id", help="Only those of this run.")
@click.option(
    "--limit", default=20, type=Whole(0), show_default=True,
    help="At most this many of all runs'; 0: all. With --run-id all are shown.",
)  # fmt: skip
@format_option
def list_checkpoints(run_id: str | None, limit: int) -> None:
    """List checkpoints, newest first: of one run, or of all."""
    with rest() as client:
        listing = client.iter_checkpoints(run_id, page_size=min(limit or 1000, 1000))
        found = gather(listing, 0 if run_id else limit, "Checkpoints")
    rows = [
        [c.tinker_path, c.checkpoint_type, size(c.size_bytes), c.public, c.time, _expiry(c)] for c in found
    ]
    columns = ["Path", "Type", Column("Size", right=True), "Public", "Saved", "Expires"]
    place = f"of run {run_id} {where()}" if run_id else where()
    show(
        {**({"run_id": run_id} if run_id else {}), "checkpoints": found},
        lambda: show_table(title(len(found), "checkpoint", place, listing.total), columns, rows),
    )


def _expiry(saved: Checkpoint) -> str:
    return ago(saved.expires_at) if saved.expires_at else "never"


@checkpoint.command("info")
@click.argument("checkpoint_path")
@format_option
def info(checkpoint_path: str) -> None:
    """Show one checkpoint. CHECKPOINT_PATH looks like tinker://RUN/weights/NAME."""
    from tinkex.errors import TinkerError
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(checkpoint_path)
    with rest() as client:
        of_run = client.iter_checkpoints(parsed.training_run_id)
        found = next((c for c in of_run if c.tinker_path == parsed.tinker_path), None)
        if found is None:
            raise TinkerError(
                f"run {parsed.training_run_id} has no checkpoint {parsed.checkpoint_id}; `tinkex checkpoint "
                f"list --run-id {parsed.training_run_id}` shows those it has"
            )
        weights = client.get_weights_info_by_tinker_path(parsed.tinker_path).result()
    facts = {
        "Path": found.tinker_path,
        "Run": parsed.training_run_id,
        "Type": found.checkpoint_type,
        "Base model": weights.base_model,
        "LoRA rank": weights.lora_rank if weights.is_lora else "none: all weights",
        "Size": size(found.size_bytes),
        "Public": found.public,
        "Saved": ago(found.time),
        "Expires": _expiry(found),
    }
    facts |= {f"Metadata: {name}": value for name, value in (found.user_metadata or {}).items()}
    fields = {**found.model_dump(), "is_lora": weights.is_lora, "lora_rank": weights.lora_rank}
    show(fields, lambda: show_facts(f"Checkpoint {found.checkpoint_id}", facts))


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


# -- deleting --------------------------------------------------------------------------------------------


@checkpoint.command("delete")
@click.argument("checkpoint_paths", nargs=-1)
@click.option("--run-id", help="Delete the checkpoints of this run: all, or those that the filters keep.")
@click.option("--type", "kind", metavar="TYPE", help=f"Filter: {', '.join(KINDS)}.")
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
    if bool(checkpoint_paths) == bool(run_id):
        raise click.ClickException("name the checkpoints to delete, or give --run-id RUN, not both")
    if not run_id and (kind or before or after):
        raise click.ClickException("--type, --before and --after go with --run-id")
    if kind not in (None, *KINDS):
        raise click.ClickException(f"--type {kind}: there are {', '.join(KINDS)}")
    span = _date("--after", after), _date("--before", before)
    with rest() as client:
        paths = list(checkpoint_paths)
        if run_id:
            paths = [c.tinker_path for c in client.iter_checkpoints(run_id) if _matches(c, kind, *span)]
        failed = _delete(client, paths) if _confirmed(paths, yes) else None
    deleted = 0 if failed is None else len(paths) - len(failed)
    done = f"deleted {plural(deleted, 'checkpoint')}"
    show({"deleted_count": deleted, "failed": failed or []}, lambda: click.echo(done))
    if failed:
        raise click.ClickException("; ".join(dict.fromkeys(one["error"] for one in failed)))


def _date(option: str, given: str | None) -> datetime | None:
    if given is None:
        return None
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise click.ClickException(
            f"{option} {given}: a date looks like 2026-01-31 or 2026-01-31T08:00:00Z"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _matches(saved: Checkpoint, kind: str | None, after: datetime | None, before: datetime | None) -> bool:
    return (
        (kind is None or saved.checkpoint_id.startswith(f"{kind}/"))
        and (after is None or saved.time >= after)
        and (before is None or saved.time < before)
    )


def _confirmed(paths: Sequence[str], yes: bool) -> bool:
    if not paths or yes:
        return True
    note("\n".join(["These checkpoints will be deleted for good:", *(f"  {path}" for path in paths)]))
    try:
        return click.confirm(f"Delete {plural(len(paths), 'checkpoint')}?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        note("")  # the prompt's line has no newline yet
        raise click.ClickException("nobody answered; --yes deletes without asking") from None


def _delete(client: Any, paths: Sequence[str]) -> list[dict[str, str]]:
    from tinkex.errors import TinkerError

    failed: list[dict[str, str]] = []
    with bar("Deleting") as report:
        for count, path in enumerate(paths, 1):
            try:
                client.delete_checkpoint_from_tinker_path(path).result()
            except TinkerError as error:
                failed.append({"tinker_path": path, "error": error_message(error)})
            report(count, len(paths))
    return failed


# -- files -----------------------------------------------------------------------------------------------


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
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(checkpoint_path)
    target = output / f"{parsed.training_run_id}_{parsed.checkpoint_id.replace('/', '_')}"
    count = fetch_checkpoint(parsed, target, overwrite=force)
    show(
        {"checkpoint_path": checkpoint_path, "destination": str(target), "file_size_bytes": count},
        lambda: show_facts(f"Downloaded {parsed.checkpoint_id}", {"To": target, "Size": size(count)}),
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
def push_hf(
    checkpoint_path: str, repo: str | None, public: bool, revision: str | None, commit_message: str | None,
    create_pr: bool, allow: tuple[str, ...], ignore: tuple[str, ...], no_model_card: bool,
) -> None:  # fmt: skip
    """Upload a checkpoint to the Hugging Face Hub as a PEFT adapter.

    Needs the huggingface_hub package, and `hf auth login` or HF_TOKEN.
    """
    from tinkex.cli.transfer import hub, push
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(checkpoint_path)
    place = push(
        parsed, hub(), repo, public=public, model_card=not no_model_card, revision=revision, ignore=ignore,
        commit_message=commit_message or f"Add {parsed.checkpoint_id}", create_pr=create_pr,
        allow_patterns=list(allow) or None,
    )  # fmt: skip
    facts = {"Repository": place["repo_id"], "URL": place["url"]}
    show(
        {"checkpoint_path": checkpoint_path, **place},
        lambda: show_facts(f"Pushed {parsed.checkpoint_id}", facts),
    )
