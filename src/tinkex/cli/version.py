"""`tinkex version`."""

from __future__ import annotations

import click

from tinkex._version import __version__
from tinkex.cli.output import CONTEXT, format_option, show_json, wants_json


@click.command(context_settings=CONTEXT)
@format_option
def version() -> None:
    """Show the version."""
    if wants_json():
        show_json({"version": __version__})
    else:
        click.echo(f"tinkex {__version__}")
