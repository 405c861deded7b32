"""`tinkex serve`: options and environment variables of the server; server/serve.py runs it."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import click

from tinkex.cli.options import Finite, Whole
from tinkex.config import Settings, normalize_url
from tinkex.errors import InvalidInputError, TinkerError
from tinkex.models import CATALOGUE, DEFAULT, is_fetchable, unknown_model

_LEVELS = ("debug", "info", "warning", "error")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
MISSING_EXTRA = "the server needs more packages: pip install 'tinkex[server,engine]'"


def _check_device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not _DEVICE.fullmatch(value):
        hint = (
            ": Apple's GPU is not supported, cpu is" if value == "mps" else ": an NVIDIA GPU is called cuda"
        )
        hint = hint if value in ("mps", "gpu") else ""
        raise click.BadParameter(f"{value!r} is not a device{hint}. Give auto, cpu, cuda or cuda:N.")
    return value


@click.command(context_settings={"show_default": True})
@click.option(
    "--model", "models", multiple=True, envvar="TINKEX_MODELS", metavar="[NAME=]PLACE",
    help="A base model: a Hugging Face directory, a GGUF file or a hub id, and the name that clients use; "
    f"may be repeated.  [default: {DEFAULT}]",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", envvar="TINKEX_HOST", help="Address to listen on.")
@click.option(
    "--port", default=8000, type=click.IntRange(0, 65535), envvar="TINKEX_PORT", help="0: any free one."
)
@click.option(
    "--home", type=click.Path(path_type=Path), envvar="TINKEX_HOME",
    help="Directory of the server's state.  [default: ~/.tinkex]",
)  # fmt: skip
@click.option(
    "--device", default="auto", envvar="TINKEX_DEVICE", callback=_check_device,
    help="auto, cpu, cuda or cuda:N.",
)  # fmt: skip
@click.option(
    "--dtype", default="auto", envvar="TINKEX_DTYPE", type=click.Choice(["auto", "float32", "bfloat16"]),
    help="Of the base model's weights; auto: float32 on a CPU, bfloat16 on CUDA.",
)  # fmt: skip
@click.option(
    "--deterministic", is_flag=True, envvar="TINKEX_DETERMINISTIC",
    help="Batch-invariant numerics: a request gives bitwise the same result alone and in any batch. Slower; "
    "on CUDA for dense models in bfloat16. On a CPU, all requests use the same number of threads.",
)  # fmt: skip
@click.option(
    "--public-url", default="", show_default=False, envvar="TINKEX_PUBLIC_URL", metavar="URL",
    help="How clients reach the server behind a proxy; used in links.",
)  # fmt: skip
@click.option(
    "--max-context", type=Whole(1), envvar="TINKEX_MAX_CONTEXT",
    help="Longest sequence, if less than the model's own.",
)  # fmt: skip
@click.option(
    "--disk-quota", default="", show_default=False, envvar="TINKEX_DISK_QUOTA", metavar="SIZE",
    help="Limit of the home directory's size, as 500MB or 2TiB.  [default: the disk]",
)  # fmt: skip
@click.option(
    "--preload/--no-preload", default=True, envvar="TINKEX_PRELOAD",
    help="Load every model at start, or each on first use.",
)  # fmt: skip
@click.option(
    "--drain", "drain_seconds", default=5.0, type=Finite(0, 86400), envvar="TINKEX_DRAIN",
    help="Seconds that open polls and streams get to finish at SIGTERM.",
)  # fmt: skip
@click.option(
    "--log-level", default="info", envvar="TINKEX_LOG_LEVEL", type=click.Choice(_LEVELS),
    help="debug shows every request.",
)  # fmt: skip
@click.option("--engine", default="torch", type=click.Choice(["torch", "fake"]), hidden=True)
def serve(
    models: tuple[str, ...], host: str, port: int, home: Path | None, device: str, dtype: str,
    deterministic: bool, public_url: str, max_context: int | None, disk_quota: str, preload: bool,
    drain_seconds: float, log_level: str, engine: str,
) -> None:  # fmt: skip
    """Serve base models to any Tinker client.

    \b
    tinkex serve                                            the default model
    tinkex serve --model Qwen/Qwen3-0.6B                    one from the hub
    tinkex serve --model small=./small.gguf --model big=/models/big

    The lines that a client needs are printed once models are loaded. Without an API key only this machine can
    connect; `tinkex server keys add NAME` makes one. Ctrl-C or SIGTERM stops it; nothing is lost.
    TINKEX_MODELS may hold several models, separated by spaces.
    """
    try:
        from tinkex.engine.protocol import EngineConfig
        from tinkex.server.serve import ServerConfig
        from tinkex.server.serve import serve as run
        from tinkex.service.config import ServiceConfig
    except ImportError as error:
        raise click.ClickException(f"{MISSING_EXTRA} ({error})") from None
    settings = Settings.read()
    _log_to_stderr(log_level)
    try:
        config = ServerConfig(
            ServiceConfig(
                home=(home or settings.home).expanduser().resolve(),
                models=read_models(models or (DEFAULT,), any_place=engine == "fake"),
                engine=EngineConfig("", engine, device, dtype, max_context, deterministic=deterministic),  # type: ignore[arg-type]
                preload=preload,
                offline=settings.offline,
                disk_quota=read_size(disk_quota) if disk_quota else None,
            ),
            host,
            port,
            normalize_url(public_url) if public_url else "",
            drain_seconds,
        )
        run(config, click.echo)
    except TinkerError as error:
        raise click.ClickException(str(error)) from None


def read_models(specs: tuple[str, ...], *, any_place: bool = False) -> dict[str, str]:
    """The place of every base model, by name."""
    places: dict[str, str] = {}
    for spec in specs:
        name, place = read_model(spec, any_place=any_place)
        if places.setdefault(name, place) != place:
            raise InvalidInputError(f"two models are called {name!r}: {places[name]} and {place}")
    return places


def read_model(spec: str, *, any_place: bool = False) -> tuple[str, str]:
    """The name of a base model, and its directory, file or hub id.

    >>> read_model("tiny=.")[0]
    'tiny'
    """
    name, _, place = spec.partition("=")
    place = place or name
    if not name or ":" in name:
        raise InvalidInputError(f"--model {spec!r}: a name is needed before '=', and it must have no colon")
    path = Path(place).expanduser()
    if path.exists() or any_place:
        return name, str(path.resolve()) if path.exists() else place
    if not is_fetchable(place):
        raise InvalidInputError(f"--model {spec!r}: {unknown_model(place, CATALOGUE)}")
    return name, place  # the service finds it on this machine, or fetches it


def read_size(text: str) -> int:
    """A number of bytes.

    >>> read_size("1.5GB"), read_size("2 KiB"), read_size("7")
    (1500000000, 2048, 7)
    """
    found = re.fullmatch(r"([0-9.]+) ?(?:([KMGT]?)(i?)B)?", text.strip(), re.IGNORECASE)
    try:
        number, unit, binary = found.groups() if found else ("", "", "")
        power = "KMGT".find(unit.upper()) + 1 if unit else 0
        return int(float(number) * (1024 if binary else 1000) ** power)
    except (ValueError, OverflowError):
        raise InvalidInputError(f"{text!r} is no size; write 500MB, 20GiB or a number of bytes") from None


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("tinkex").setLevel(level.upper())
