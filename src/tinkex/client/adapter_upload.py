"""Send an adapter from this machine to a service: from a directory, a tar file or a Hugging Face repository.

Only the files that hold an adapter are read, and nothing in them is executed: adapters as pickles are
refused. A tar is read where it is, and cannot name files elsewhere. Pieces are sent in order, and a piece may
be sent again.
"""

from __future__ import annotations

import contextlib
import re
import tarfile
import uuid
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tinkex.client.loop import in_own_thread
from tinkex.client.server_connection import ServerConnection
from tinkex.client.transport import CallContext
from tinkex.errors import (
    InvalidInputError,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
)
from tinkex.files import ByteProgress
from tinkex.types.checkpoints import ImportWeightsRequest, UploadWeightsRequest
from tinkex.wire import ops

PIECE = 8 * 1024 * 1024
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_OPTIONAL = ("tinkex.json", "optimizer.safetensors", "SHA256SUMS")
_CONTEXT = CallContext("import_checkpoint")
Opened = dict[str, tuple[int, Callable[[], IO[bytes]]]]  # by name: size, and how to open it


async def import_adapter(
    connection: ServerConnection,
    source: str | Path,
    *,
    base_model: str | None = None,
    name: str | None = None,
    ttl_seconds: int | None = None,
    progress: ByteProgress | None = None,
) -> str:
    """Upload an adapter and make it a checkpoint; returns its path."""
    place = await in_own_thread(lambda: _local(str(source)))
    upload_id = str(uuid.uuid4())
    with adapter_files(place) as files:
        total, done = sum(size for size, _ in files.values()), 0
        for file, (_, begin) in files.items():
            with begin() as opened:
                offset = 0
                while data := await in_own_thread(opened.read, PIECE):
                    piece = UploadWeightsRequest(upload_id=upload_id, file=file, offset=offset, data=data)
                    try:
                        await connection.call(ops.UPLOAD_WEIGHTS, piece, _CONTEXT)
                    except NotFoundError:
                        raise TinkerError(
                            f"{connection.base_url} takes no adapters from elsewhere: Tinkex servers do"
                        ) from None
                    offset += len(data)
                    if progress is not None:
                        progress(done + offset, total)
                done += offset
    request = ImportWeightsRequest(
        upload_id=upload_id,
        base_model=base_model,
        name=name or _name_of(str(source)),
        ttl_seconds=ttl_seconds,
    )
    while True:  # the server answers when it is done, or every twenty seconds
        state = await connection.call(ops.IMPORT_WEIGHTS, request, _CONTEXT)
        if state.status == "ready" and state.tinker_path:
            return state.tinker_path
        if state.status != "pending":
            raise RequestFailedError(
                f"{source} was not imported: {state.error}", request_id="", category=RequestErrorCategory.User
            )


def _name_of(source: str) -> str:
    """A checkpoint's name, after the directory, file or repository."""
    last = PurePosixPath(source.rstrip("/").partition("@")[0]).name
    last = re.sub(r"(\.tar)?(\.gz|\.tgz|\.zst)?$", "", last)
    return re.sub(r"[^\w.+=@-]+", "-", last, flags=re.ASCII).strip(".-")[:100] or "imported"


def _local(source: str) -> Path:
    """Where the adapter is on this machine; a repository of the hub is downloaded, without its pickles."""
    if not source.startswith("hf://"):
        return Path(source).expanduser()
    repo, _, revision = source.removeprefix("hf://").partition("@")
    parts = repo.strip("/").split("/")
    if len(parts) < 2:
        raise InvalidInputError(f"a repository looks like hf://OWNER/NAME, got {source!r}")
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    except ImportError:
        raise InvalidInputError(f"{source} needs the hub's library: pip install huggingface_hub") from None
    folder = "/".join(parts[2:])
    wanted = [f"{folder}/{name}".lstrip("/") for name in (WEIGHTS, CONFIG, *_OPTIONAL)]
    try:
        found = snapshot_download("/".join(parts[:2]), revision=revision or None, allow_patterns=wanted)
    except Exception as error:  # the library's errors have no common root
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TinkerError(f"{source} cannot be fetched: {why}") from error
    return Path(found) / folder


@contextlib.contextmanager
def adapter_files(place: Path) -> Generator[Opened]:
    """The files of an adapter in a directory or in a tar."""
    if place.is_dir():
        yield _in_directory(place)
        return
    if not place.is_file():
        raise InvalidInputError(f"there is no {place}; an adapter is a directory or a tar of one")
    try:
        with tarfile.open(place) as archive:
            yield _in_tar(place, archive)
    except tarfile.TarError as error:
        raise InvalidInputError(f"{place} is no tar file: {error}") from None


def _in_directory(place: Path) -> Opened:
    there = {path.name for path in place.iterdir() if path.is_file()}
    inside = sorted(path.parent.name for path in place.glob(f"*/{CONFIG}"))
    _check(str(place), there, inside)
    chosen = [name for name in (WEIGHTS, CONFIG, *_OPTIONAL) if name in there]
    files = {name: place / name for name in chosen}
    return {name: (file.stat().st_size, partial(file.open, "rb")) for name, file in files.items()}


def _in_tar(place: Path, archive: tarfile.TarFile) -> Opened:
    members = {member.name.removeprefix("./"): member for member in archive if member.isreg()}
    folders = sorted({str(PurePosixPath(name).parent) for name in members if name.endswith(CONFIG)}, key=len)
    folder = folders[0] if len(folders) == 1 or "." in folders else ""
    here = {PurePosixPath(n).name: m for n, m in members.items() if str(PurePosixPath(n).parent) == folder}
    _check(str(place), set(here) or {PurePosixPath(n).name for n in members}, [] if folder else folders)

    def begin(member: tarfile.TarInfo) -> Callable[[], Any]:
        return lambda: archive.extractfile(member)

    chosen = [name for name in (WEIGHTS, CONFIG, *_OPTIONAL) if name in here]
    return {name: (here[name].size, begin(here[name])) for name in chosen}


def _check(place: str, there: set[str], inside: list[str]) -> None:
    """Refuse what holds no adapter, and say what to give instead."""
    if WEIGHTS in there and CONFIG in there:
        return
    pickles = sorted(name for name in there if name.endswith((".bin", ".pt", ".pth")))
    if CONFIG in there and pickles:
        raise InvalidInputError(
            f"{place} has its weights in {pickles[0]}, a pickle, which could run any program: it is not "
            f"read. Save it with PEFT's save_pretrained(..., safe_serialization=True)"
        )
    if inside and CONFIG not in there:
        raise InvalidInputError(f"{place} holds several directories; give one of: {', '.join(inside[:8])}")
    if "config.json" in there and CONFIG not in there:
        raise InvalidInputError(
            f"{place} is a whole model, not an adapter: use it as the base model (base_model={place!r})"
        )
    missing = WEIGHTS if CONFIG in there else CONFIG
    raise InvalidInputError(f"{place} is no adapter: it has no {missing}. PEFT's save_pretrained writes one")
