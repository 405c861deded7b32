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
from click.shell_completion import get_completion_class

from tinkex._version import __version__
from tinkex.cli.output import format_option, show

# name -> module:attribute, and its line in `tinkex --help`
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("tinkex.cli.demo:demo", "Fine-tune a small model on this machine, in a minute."),
    "init": ("tinkex.cli.init:init", "Make a project folder: a script, data, a test."),
    "train": ("tinkex.cli.train:train", "Train an adapter on your data."),
    "eval": ("tinkex.cli.evaluate:evaluate", "Compare models and adapters on your data."),
    "chat": ("tinkex.cli.chat:chat", "Talk to a model or an adapter."),
    "serve": ("tinkex.cli.serve:serve", "Serve base models to Tinker clients."),
    "console": ("tinkex.cli.home_console:console", "Look at this machine's runs in a browser."),
    "plan": ("tinkex.cli.plan:plan", "Estimate what fits on some GPUs, and what they reach."),
    "server": ("tinkex.cli.server_admin:server", "API keys of a server, sharing of runs, and repair."),
    "run": ("tinkex.cli.run:run", "Training runs: list, show, plot, rename, tag, delete."),
    "checkpoint": ("tinkex.cli.checkpoint:checkpoint", "Checkpoints: list, download, publish, delete."),
    "export": ("tinkex.cli.export:export", "Write a checkpoint for PEFT, transformers, llama.cpp, MLX."),
    "model": ("tinkex.cli.model:model", "Base models: list, fetch, remove."),
    "session": ("tinkex.cli.run:session", "Sessions: delete one, export its timeline."),
    "auth": ("tinkex.cli.login:auth", "Log in and out, and show who you are."),
    "billing": ("tinkex.cli.billing:billing", "Usage by the hour, and storage."),
    "completion": ("tinkex.cli:completion", "Print the script for Tab completion in your shell."),
    "version": ("tinkex.cli:version", "Show the version."),
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader (`| head`) has left; click would report it as a failure
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at exit
            raise click.exceptions.Exit(PIPE_CLOSED) from None

    def main(self, *args: Any, **more: Any) -> NoReturn:  # type: ignore[override]
        """Run a command line and exit."""
        _prepare_streams()
        try:
            code = super().main(*args, **more, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()  # a group without a command: its help
            code = error.exit_code
        except click.ClickException as error:
            see = ""
            if isinstance(error, click.UsageError):
                see = f" See `{error.ctx.command_path if error.ctx else 'tinkex'} --help`."
            code = _print_error(error.format_message() + see, error.exit_code)
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


def _print_error(message: str, code: int = 1) -> int:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    return code


@click.group(
    "tinkex", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]},
    commands=COMMANDS,  # for click's "Did you mean"
)  # fmt: skip
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


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes tinkex's commands and options.

    \b
    bash:  eval "$(tinkex completion bash)"     in ~/.bashrc
    zsh:   eval "$(tinkex completion zsh)"      in ~/.zshrc
    fish:  tinkex completion fish | source      in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "tinkex", "_TINKEX_COMPLETE").source())


@click.command()
@format_option
def version() -> None:
    """Show the version."""
    show({"version": __version__}, f"tinkex {__version__}")
