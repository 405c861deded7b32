"""`tinkex serve`: the options of a server, which server/serve.py runs."""

from __future__ import annotations

import importlib.util
import logging
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.model_options import read_model_options, split_options
from tinkex.cli.output import Finite, Whole, needing
from tinkex.config import Settings, normalize_url
from tinkex.errors import InvalidInputError
from tinkex.models import CATALOGUE, DEFAULT, is_fetchable, unknown_model
from tinkex.store import read_location
from tinkex.trackers import EXPERIMENT_TRACKERS

if TYPE_CHECKING:
    from tinkex.engine.protocol import Placement
    from tinkex.service.config import Durability

_LEVELS = ("debug", "info", "warning", "error")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_DEVICE_HINTS = {"mps": ": Apple's GPU is not supported, cpu is", "gpu": ": an NVIDIA GPU is called cuda"}


def _check_device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not _DEVICE.fullmatch(value):
        hint = _DEVICE_HINTS.get(value, "")
        raise click.BadParameter(f"{value!r} is not a device{hint}. Give auto, cpu, cuda or cuda:N.")
    return value


def _as_url(ctx: click.Context, param: click.Parameter, text: str) -> str:
    return normalize_url(text) if text else ""


def _as_size(ctx: click.Context, param: click.Parameter, text: str) -> int | None:
    return read_size(text) if text else None


# Every option is also read from the environment: --max-context from TINKEX_MAX_CONTEXT.
@click.command(context_settings={"show_default": True, "auto_envvar_prefix": "TINKEX"})
@click.option(
    "--model", "models", multiple=True, metavar="[NAME=]PLACE[,OPTION=N…]",
    help="A base model: a Hugging Face directory, a GGUF file or a hub id, and the name that clients use; "
    "may be repeated. tensor=K: over K GPUs. On a cluster: trainers=M, data=D processes of each, "
    "samplers=N or N-M, gpus=K.  "
    f"[default: {DEFAULT}]",
)  # fmt: skip
@click.option(
    "--cluster", default="", show_default=False, metavar="auto|HOST:PORT",
    help="Run engines on Ray: on this machine (auto), or on the cluster with this head.  [default: no]",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option(
    "--home", type=click.Path(path_type=Path), help="Directory of the server's state.  [default: ~/.tinkex]"
)
@click.option(
    "--store", default="", show_default=False, metavar="LOCATION",
    help="Where saved adapters are kept: s3://BUCKET/PREFIX, gs://…, az://…, or a directory.  "
    "[default: the home]",
)  # fmt: skip
@click.option(
    "--ledger", default="", show_default=False, metavar="URL",
    help="A Postgres database (postgresql://USER@HOST/DATABASE) that several servers share, with --store.  "
    "[default: SQLite in the home]",
)  # fmt: skip
@click.option(
    "--lease", default=10.0, type=Finite(0.5, 3600),
    help="With --ledger: seconds of silence after which other servers take over this one's sessions.",
)  # fmt: skip
@click.option(
    "--peer-url", default="", show_default=False, metavar="URL", callback=_as_url,
    help="With --ledger: how the other servers reach this one.  [default: http://HOST:PORT]",
)  # fmt: skip
@click.option("--device", default="auto", callback=_check_device, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype", default="auto", type=click.Choice(["auto", "float32", "bfloat16"]),
    help="Of the base model's weights; auto: float32 on a CPU, bfloat16 on CUDA.",
)  # fmt: skip
@click.option(
    "--quantize", default="none", type=click.Choice(["none", "nf4", "fp8", "int8", "file"]),
    help="How the frozen matrices of the layers are kept in memory: in --dtype, in 4 bits, in 8 bits, or as "
    "the model's files hold them. Adapters train on top as always; less memory, and slower.",
)  # fmt: skip
@click.option(
    "--deterministic", is_flag=True,
    help="Batch-invariant numerics: a request gives bitwise the same result alone and in any batch. Slower; "
    "on CUDA for dense models in bfloat16. On a CPU, all requests use the same number of threads.",
)  # fmt: skip
@click.option(
    "--public-url", default="", show_default=False, metavar="URL", callback=_as_url,
    help="How clients reach the server behind a proxy; used in links.",
)  # fmt: skip
@click.option("--max-context", type=Whole(1), help="Longest sequence, if less than the model's own.")
@click.option(
    "--disk-quota", default="", show_default=False, metavar="SIZE", callback=_as_size,
    help="Limit of the home directory's size, as 500MB or 2TiB.  [default: the disk]",
)  # fmt: skip
@click.option(
    "--durability", default="power", type=click.Choice(["power", "process"]),
    help="What was acknowledged survives a power cut, or only a killed process (a little faster).",
)  # fmt: skip
@click.option(
    "--disk-per-user", default="", show_default=False, metavar="SIZE", callback=_as_size,
    help="Limit of what one user's runs and checkpoints take.  [default: half of the quota, or of the disk]",
)  # fmt: skip
@click.option(
    "--runs-per-user", default=256, type=Whole(1), help="Live runs of one user; one more waits (429)."
)
@click.option(
    "--max-connections", default=16_384, type=Whole(1),
    help="Open connections of all clients; one more gets 503. Never more than the process may open files.",
)  # fmt: skip
@click.option(
    "--requests-per-user", default=8_192, type=Whole(1),
    help="Open requests of one user, long polls included; one more is told to wait (429).",
)  # fmt: skip
@click.option(
    "--body-memory", default="2GiB", metavar="SIZE", callback=_as_size,
    help="Request bodies that are being received or decoded; one more is told to wait (429).",
)  # fmt: skip
@click.option(
    "--body-memory-per-user", default="512MiB", metavar="SIZE", callback=_as_size,
    help="The same for one user; a single larger body is refused (413).",
)  # fmt: skip
@click.option(
    "--queue-memory", default="4GiB", metavar="SIZE", callback=_as_size,
    help="Passes that wait to be executed; one more is told to wait (429).",
)  # fmt: skip
@click.option(
    "--queue-memory-per-user",
    default="1GiB",
    metavar="SIZE",
    callback=_as_size,
    help="The same for one user.",
)
@click.option(
    "--cors-origin", "cors_origins", multiple=True, metavar="URL",
    help="A web page's origin that may call the APIs from a browser; several times.  [default: none]",
)  # fmt: skip
@click.option(
    "--keep-rollouts", default=0.0, type=Finite(0, 1), metavar="SHARE",
    help="The share of prompts whose samples the console shows, token by token: from 0 to 1.",
)  # fmt: skip
@click.option(
    "--rollout-bytes", default="64MiB", metavar="SIZE", callback=_as_size,
    help="Of one run's; then the oldest go.",
)  # fmt: skip
@click.option(
    "--mirror", "mirrors", multiple=True, type=click.Choice(EXPERIMENT_TRACKERS),
    help="Send the metrics of every run to this tracker too, which is set up by its own environment "
    "variables; may be repeated.  [default: none]",
)  # fmt: skip
@click.option("--preload/--no-preload", default=True, help="Load every model at start, or each on first use.")
@click.option(
    "--warm-up/--no-warm-up", default=True,
    help="While a model loads, compile kernels and capture steps (CUDA) and sample once, or on first use.",
)  # fmt: skip
@click.option(
    "--drain", default=5.0, type=Finite(0, 86400),
    help="Seconds that open polls and streams get to finish at SIGTERM.",
)  # fmt: skip
@click.option("--log-level", default="info", type=click.Choice(_LEVELS), help="debug shows every request.")
@click.option("--engine", default="torch", type=click.Choice(["torch", "fake"]), hidden=True)
def serve(
    models: tuple[str, ...], cluster: str, host: str, port: int, home: Path | None, store: str, ledger: str,
    lease: float, peer_url: str, device: str, dtype: str, quantize: str, deterministic: bool,
    public_url: str, max_context: int | None, disk_quota: int | None,
    durability: Durability, disk_per_user: int | None, runs_per_user: int, max_connections: int,
    requests_per_user: int, body_memory: int, body_memory_per_user: int, queue_memory: int,
    queue_memory_per_user: int, cors_origins: tuple[str, ...], keep_rollouts: float, rollout_bytes: int,
    mirrors: tuple[str, ...], preload: bool, warm_up: bool, drain: float, log_level: str, engine: str,
) -> None:  # fmt: skip
    """Serve base models to any Tinker client.

    \b
    tinkex serve                                            the default model
    tinkex serve --model Qwen/Qwen3-0.6B                    one from the hub
    tinkex serve --model small=./small.gguf --model big=/models/big
    tinkex serve --model big=/models/big,tensor=4           over four GPUs
    tinkex serve --cluster auto --model big=/models/big,trainers=2,samplers=1-6

    The lines that a client needs are printed once models are loaded. Without an API key only this machine can
    connect; `tinkex server keys add NAME` makes one. Ctrl-C or SIGTERM stops it; nothing is lost.
    TINKEX_MODELS may hold several models, separated by spaces.
    """
    with needing("server,engine", "the server"):
        from tinkex.engine.protocol import EngineConfig
        from tinkex.server.serve import ServerConfig
        from tinkex.server.serve import serve as run
        from tinkex.service.config import ServiceConfig
    settings = Settings.read()
    _log_to_stderr(log_level)
    place = (home or settings.home).expanduser().resolve()
    options = dict(split_options(spec) for spec in models or (DEFAULT,))
    tensor, placements = read_placements(options, cluster)
    if cluster:
        _join_cluster(cluster)
    given = (engine, device, dtype, max_context, quantize)
    service = ServiceConfig(
        home=place,
        store=read_location(store) if store else None,
        ledger=ledger or None,
        lease=lease,
        models=read_models(tuple(options), any_place=engine == "fake"),
        engine=EngineConfig("", *given, deterministic=deterministic, warm_up=warm_up),  # type: ignore[arg-type]
        tensor=tensor,
        placements=placements,
        durability=durability,
        preload=preload,
        offline=settings.offline,
        disk_quota=disk_quota,
        disk_per_user=disk_per_user or (disk_quota or _disk(place)) // 2,
        runs_per_user=runs_per_user,
        queue_memory=queue_memory,
        queue_memory_per_user=queue_memory_per_user,
        keep_rollouts=keep_rollouts,
        rollout_bytes=rollout_bytes,
        mirrors=_installed(mirrors),
    )
    config = ServerConfig(
        service, host, port, public_url, drain,
        max_connections=max_connections, requests_per_user=requests_per_user, body_memory=body_memory,
        body_memory_per_user=body_memory_per_user, cors_origins=cors_origins, peer_url=peer_url,
    )  # fmt: skip
    run(config, click.echo)


def _log_to_stderr(level: str) -> None:
    shown = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level="WARNING", format=shown)
    logging.getLogger("tinkex").setLevel(level.upper())


def read_placements(
    options: dict[str, dict[str, str]], cluster: str
) -> tuple[dict[str, int], dict[str, Placement]]:
    """By the names of models: those over several GPUs, and where they run; nowhere else without a cluster."""
    found = {
        spec.partition("=")[0]: read_model_options(spec, given, cluster) for spec, given in options.items()
    }
    tensor = {name: ranks for name, (ranks, _) in found.items() if ranks > 1}
    return tensor, {name: placement for name, (_, placement) in found.items() if placement is not None}


def _join_cluster(address: str) -> None:
    """Check the cluster first, so that a wrong address fails before anything is started."""
    from tinkex.engine.cluster.connection import connect
    from tinkex.engine.protocol import EngineError

    try:
        connect(address)
    except EngineError as error:
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
    if (path := Path(place).expanduser()).exists():
        return name, str(path.resolve())
    if not any_place and not is_fetchable(place):
        raise InvalidInputError(f"--model {spec!r}: {unknown_model(place, CATALOGUE)}")
    return name, place  # the service finds it on this machine, or fetches it


def _installed(trackers: tuple[str, ...]) -> tuple[str, ...]:
    """Trackers to which metrics go; each needs its package, which is not one of the server's."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise click.ClickException(f"--mirror {name} needs its package: pip install {name}")
    return tuple(dict.fromkeys(trackers))


def _disk(place: Path) -> int:
    """The size of the disk that a directory is on, or will be."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).total


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
