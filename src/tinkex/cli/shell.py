"""`tinkex completion` and `tinkex version`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tinkex._version import __version__
from tinkex.cli.options import format_option
from tinkex.cli.output import show


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes tinkex's commands and options.

    \b
    bash:  eval "$(tinkex completion bash)"     in ~/.bashrc
    zsh:   eval "$(tinkex completion zsh)"      in ~/.zshrc
    fish:  tinkex completion fish | source      in ~/.config/fish/config.fish
    """
    from tinkex.cli import main

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "tinkex", "_TINKEX_COMPLETE").source())


@click.command()
@format_option
def version() -> None:
    """Show the version."""
    show({"version": __version__}, lambda: click.echo(f"tinkex {__version__}"))
