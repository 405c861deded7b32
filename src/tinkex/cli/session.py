"""`tinkex session`: what happened in a session, as a trace for a trace viewer."""

from __future__ import annotations

from pathlib import Path

import click

from tinkex.cli.output import CONTEXT, bar, format_option, note, show_facts, show_json, size, wants_json
from tinkex.cli.place import is_local, rest

VIEWER = "https://ui.perfetto.dev"


@click.group(context_settings=CONTEXT)
def session() -> None:
    """Sessions: each is the lease of one client process."""


@session.command("export-trace", context_settings=CONTEXT)
@click.argument("session_id")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write.  [default: SESSION_ID.pftrace]",
)  # fmt: skip
@click.option("--url-only", is_flag=True, help="Print the link to the trace instead of fetching it.")
@format_option
def export_trace(session_id: str, output: Path | None, url_only: bool) -> None:
    """Export a session's timeline as a trace. It is to be opened at ui.perfetto.dev.

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
        show_json({"session_id": session_id, "url": url}) if wants_json() else click.echo(url)
        return
    target = output or Path(f"{session_id}.pftrace")
    with bar("Downloading", of_bytes=True) as progress:
        taken = download(url, target, progress)
    if wants_json():
        show_json({"session_id": session_id, "destination": str(target), "file_size_bytes": taken})
        return
    show_facts(f"Trace of session {session_id}", {"File": target, "Size": size(taken), "Open it at": VIEWER})
