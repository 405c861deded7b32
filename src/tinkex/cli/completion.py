"""`tinkex completion`: the lines that make a shell complete `tinkex …` with Tab."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tinkex.cli.output import CONTEXT


@click.command(context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete tinkex's commands and options with Tab.

    \b
    bash:  eval "$(tinkex completion bash)"     in ~/.bashrc
    zsh:   eval "$(tinkex completion zsh)"      in ~/.zshrc
    fish:  tinkex completion fish | source      in ~/.config/fish/config.fish
    """
    from tinkex.cli import main

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "tinkex", "_TINKEX_COMPLETE").source())
