"""`tinkex session`: the timeline of a session, as a file for a trace viewer."""

from __future__ import annotations

from pathlib import Path

import click

from tinkex.cli.options import format_option
from tinkex.cli.output import bar, note, show, show_facts, size
from tinkex.cli.target import is_local, rest

VIEWER = "https://ui.perfetto.dev"


@click.group()
def session() -> None:
    """Sessions. A session is what one client process did on the server."""


@session.command("export-trace")
@click.argument("session_id")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write.  [default: SESSION_ID.pftrace]",
)  # fmt: skip
@click.option("--url-only", is_flag=True, help="Print the link to the trace instead of downloading it.")
@format_option
def export_trace(session_id: str, output: Path | None, url_only: bool) -> None:
    """Export a session's timeline. Open the file at ui.perfetto.dev.

    The link of --url-only works without a key, for about an hour.
    """
    from tinkex.client.download import download

    if is_local():
        raise click.ClickException(
            "the process that trains keeps the timeline in its memory: export it there, with "
            "RestClient.export_session_trace, or set TINKER_BASE_URL to ask a server"
        )
    note(f"the server is making the trace of {session_id}; this may take a while")
    with rest() as client:
        url = client.export_session_trace(session_id).result()
    if url_only:
        show({"session_id": session_id, "url": url}, lambda: click.echo(url))
        return
    target = output or Path(f"{session_id}.pftrace")
    with bar("Downloading", of_bytes=True) as progress:
        count = download(url, target, progress)
    facts = {"File": target, "Size": size(count), "Open it at": VIEWER}
    show(
        {"session_id": session_id, "destination": str(target), "file_size_bytes": count},
        lambda: show_facts(f"Trace of session {session_id}", facts),
    )
