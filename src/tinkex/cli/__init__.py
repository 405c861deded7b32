"""`tinkex …`: the command line. A command's module is imported when it is used, so that `--help` is quick.

An error is one line on stderr that says what to do. Exit codes: 0 success, 1 failure, 2 usage, 130 Ctrl-C,
141 closed pipe. To add a command, add a row to COMMANDS; its text is what `--help` shows.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from tinkex._version import __version__
from tinkex.cli.options import format_option

# name -> module:attribute, and its line in `tinkex --help`
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("tinkex.cli.demo:demo", "Fine-tune a small model on this machine, in a minute."),
    "chat": ("tinkex.cli.chat:chat", "Talk to a model or an adapter."),
    "serve": ("tinkex.cli.serve:serve", "Serve base models to Tinker clients."),
    "server": ("tinkex.cli.keys:server", "API keys of a server, and sharing of runs."),
    "run": ("tinkex.cli.run:run", "Training runs: list, show, plot."),
    "checkpoint": ("tinkex.cli.checkpoint:checkpoint", "Checkpoints: list, download, publish, delete."),
    "model": ("tinkex.cli.model:model", "Base models: list, fetch, remove."),
    "session": ("tinkex.cli.session:session", "Sessions: export the timeline of one."),
    "auth": ("tinkex.cli.login:auth", "Log in and out, and show who you are."),
    "billing": ("tinkex.cli.billing:billing", "Usage by the hour, and storage."),
    "completion": ("tinkex.cli.shell:completion", "Print the script for Tab completion in your shell."),
    "version": ("tinkex.cli.shell:version", "Show the version."),
}

INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + the signal's number, as shells report it


class LazyGroup(click.Group):
    """A group whose commands are the rows of COMMANDS."""

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
        except BrokenPipeError:  # click would report it as a failure
            raise click.exceptions.Exit(_pipe_closed()) from None

    def main(self, *args: Any, **more: Any) -> NoReturn:  # type: ignore[override]
        """Run a command line and exit."""
        _prepare_streams()
        try:
            code = super().main(*args, **more, standalone_mode=False)
            sys.stdout.flush()
        except BrokenPipeError:
            code = _pipe_closed()
        except click.ClickException as error:
            code = _usage_or_failure(error)
        except (click.Abort, KeyboardInterrupt):
            click.echo(err=True)
            code = INTERRUPTED
        except Exception as error:
            from tinkex.errors import TinkerError

            if not isinstance(error, TinkerError | OSError):
                raise  # a bug: show its traceback
            from tinkex.cli.target import explain

            code = _print_error(explain(error))
        sys.exit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    """Treat a closed stdin or stdout as empty, and replace characters that the terminal's encoding lacks."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _usage_or_failure(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()  # a group without a command: its help
    elif isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "tinkex"
        _print_error(f"{error.format_message()} See `{command} --help`.")
    else:
        _print_error(error.format_message())
    return error.exit_code


def _print_error(message: str) -> int:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    return 1


def _pipe_closed() -> int:
    """The reader (`| head`) has left: nothing more may be written, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


@click.group("tinkex", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinkex", message="%(prog)s %(version)s")
@format_option
def main() -> None:
    """Tinkex: the Tinker training API as an open system you run yourself.

    \b
    tinkex demo     fine-tune a model here and now: no key, no server
    tinkex serve    the same for other machines and scripts, over HTTP

    Commands talk to the server in TINKER_BASE_URL, with the key in TINKER_API_KEY. If neither is set, they
    show what scripts on this machine have trained (in TINKEX_HOME, or ~/.tinkex).
    """
    from tinkex.config import Settings

    if Settings.read().no_color:
        click.get_current_context().color = False  # for every command below
