"""`tinkex console`: the console of this machine's home, in a browser, also while a script trains in it."""

from __future__ import annotations

from pathlib import Path

import click

from tinkex.cli.output import needing, note
from tinkex.config import Settings


@click.command("console")
@click.option(
    "--port", default=8265, show_default=True, type=click.IntRange(0, 65535), help="0: any free one."
)
@click.option(
    "--home",
    type=click.Path(path_type=Path),
    help="The directory to look at.  [default: TINKEX_HOME, or ~/.tinkex]",
)
def console(port: int, home: Path | None) -> None:
    """Look at the runs in a home directory with a browser: curves, rollouts, checkpoints.

    It only reads, and takes no lock: a script may be training in the same home. Open the link that it prints.
    `tinkex serve` has a console of its own, with a playground.
    """
    with needing("server", "the console"):
        import uvicorn

        from tinkex.server.console.console_routes import home_console
        from tinkex.server.console.visitors import HomeVisitors
        from tinkex.server.serve import listen
    home = (home or Settings.read().home).expanduser().absolute()
    visitors = HomeVisitors(home)
    app = home_console(home, visitors)
    socket = listen("127.0.0.1", port)
    socket.listen()  # an early request waits a moment
    url = f"http://127.0.0.1:{socket.getsockname()[1]}/console/login?key={visitors.key}"
    click.echo(url)
    note("Open this link in a browser; Ctrl-C ends the console.")
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="off",
                            timeout_graceful_shutdown=1)  # fmt: skip
    uvicorn.Server(config).run([socket])
