"""The hand: `tinkex …`. A command's module is imported when that command is used, so that help is quick.

To add a command, add its row; the words in the row are what `--help` shows.
"""

from __future__ import annotations

from importlib import import_module

import click

from tinkex._version import __version__

# name -> module:attribute, and what it is for
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("tinkex.cli.serve:serve", "Serve base models to Tinker clients."),
    "server": ("tinkex.cli.keys:server", "Look after a server: its API keys."),
}


class LazyGroup(click.Group):
    """A group whose commands are rows of a table, imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinkex", message="%(prog)s %(version)s")
def main() -> None:
    """Tinkex: the Tinker training API as an open system you run yourself."""
