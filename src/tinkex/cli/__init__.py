"""The hand: `tinkex …`. A command's module is imported when that command is used, so that help is quick.

Promises: an error is one line on stderr that says what to do next; 0 is success, 1 failure, 2 a command line
that cannot be read, 130 Ctrl-C, 141 a reader that went away. To add a command, add its row; the words in the
row are what `--help` shows.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from tinkex._version import __version__
from tinkex.cli.output import CONTEXT, format_option

# name -> module:attribute, and what it is for
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("tinkex.cli.demo:demo", "Watch a model learn, on this machine."),
    "chat": ("tinkex.cli.chat:chat", "Talk to a model or an adapter."),
    "serve": ("tinkex.cli.serve:serve", "Serve base models to Tinker clients."),
    "server": ("tinkex.cli.keys:server", "Look after a server: its API keys."),
    "run": ("tinkex.cli.run:run", "Training runs: list them, look into one, plot its history."),
    "checkpoint": ("tinkex.cli.checkpoint:checkpoint", "Checkpoints: list, download, publish, delete."),
    "model": ("tinkex.cli.model:model", "Base models: what can be trained and sampled."),
    "session": ("tinkex.cli.session:session", "Sessions: export what happened in one."),
    "auth": ("tinkex.cli.auth:auth", "Log in and out; who am I?"),
    "billing": ("tinkex.cli.billing:billing", "What was used, and what is stored."),
    "completion": ("tinkex.cli.completion:completion", "Complete commands with Tab in your shell."),
    "version": ("tinkex.cli.version:version", "Show the version."),
}

INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + the signal's number, as shells say it


class LazyGroup(click.Group):
    """A group whose commands are rows of a table, imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # before click sees it, for which it is a failure
            raise click.exceptions.Exit(_pipe_closed()) from None

    def main(self, *args: Any, **more: Any) -> NoReturn:  # type: ignore[override]
        """Run a command line and exit as the module's docstring says."""
        _steady_streams()
        try:
            code = super().main(*args, **more, standalone_mode=False)
            sys.stdout.flush()
        except BrokenPipeError:
            code = _pipe_closed()
        except click.ClickException as error:
            code = _say(error)
        except (click.Abort, KeyboardInterrupt):
            click.echo(err=True)
            code = INTERRUPTED
        except Exception as error:
            code = _failed(error)
        sys.exit(code if isinstance(code, int) else 0)


def _steady_streams() -> None:
    """A closed stdin or stdout is an empty one, and characters that a terminal does not have end nothing."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _say(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()  # a group without a command: its help
    elif isinstance(error, click.UsageError):
        command, said = error.ctx.command_path if error.ctx else "tinkex", error.format_message()
        click.echo(f"Error: {_one_line(said)} See `{command} --help`.", err=True)
    else:
        click.echo(f"Error: {_one_line(error.format_message())}", err=True)
    return error.exit_code


def _failed(error: Exception) -> int:
    from tinkex.errors import TinkerError

    if not isinstance(error, TinkerError | OSError):
        raise error  # a mistake of ours: its traceback is what is needed
    from tinkex.cli.advice import explain

    click.echo(f"Error: {_one_line(explain(error))}", err=True)
    return 1


def _pipe_closed() -> int:
    """`| head` has seen enough. Nothing more may be written, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _one_line(message: str) -> str:
    return " ".join(message.split())


@click.group("tinkex", cls=LazyGroup, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="tinkex", message="%(prog)s %(version)s")
@format_option
def main() -> None:
    """Tinkex: the Tinker training API as an open system you run yourself.

    Commands talk to the server that TINKER_BASE_URL names, with the key in TINKER_API_KEY. With neither, they
    show what scripts on this machine have left in its home directory (TINKEX_HOME, or ~/.tinkex).
    """
    from tinkex.config import Settings

    if Settings.read().no_color:
        click.get_current_context().color = False  # for every command below
