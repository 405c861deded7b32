"""Directories that appear whole or not at all, with a checksum of every file: on disk, or in an object store.

A location is a path, or a URL (s3://BUCKET/PREFIX, gs://…, az://…): then each file is an object. A crash
leaves either the old state or the new one. `SHA256SUMS` in a directory has the SHA-256 of its files, in the
format of `sha256sum -c`; in an object store it is written last, and what has none is not there. A directory
on disk without one is of an older version, or of another program: there is nothing to compare it with.
Everything here blocks. Credentials and endpoints are the cloud's own environment variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.errors import InvalidInputError, TinkerError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import AzureStore, GCSStore, S3Store

    Bucket = S3Store | GCSStore | AzureStore

CHECKSUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")


class LocationExistsError(FileExistsError):
    """There is something at the location already."""


class DamagedError(TinkerError):
    """A file is not what was written; the message names it."""


class StoreError(OSError):
    """The object store cannot be reached, or refuses; the message says what was wanted of it."""


@contextlib.contextmanager
def atomic_directory(
    location: str | Path, *, overwrite: bool = False, sync: bool = True, sums: bool = True
) -> Generator[Path]:
    """A temporary directory to write into; it becomes `location` on success and is removed on failure.

    Raises LocationExistsError if `location` exists and `overwrite` is not given. Without `sync`, the caller
    adds checksums and syncs; in an object store both are always done. Without `sums` the caller has written
    checksums of its own (`write_checksums`), which are not compared with the files.
    """
    if is_remote(location):
        with _new_prefix(str(location), overwrite) as temporary:
            yield temporary
        return
    target = Path(location)
    if target.exists() and not overwrite:
        raise LocationExistsError(f"{target} already exists; choose another name")
    named = [parent.parent for parent in target.parents if not parent.exists()]  # what will name new ones
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if sync:
            if sums:
                add_checksums(temporary)
            sync_tree(temporary)
        replaced = temporary.with_suffix(".old")
        if target.exists():
            target.rename(replaced)
        temporary.rename(target)
        for directory in (target.parent, *named) if sync else ():
            sync_path(directory)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def add_checksums(directory: Path) -> None:
    """Write the checksums of all files below; if they came with the files (a copy), check them instead."""
    if (directory / CHECKSUMS).exists():
        verify(directory)
        return
    write_checksums(directory)


def write_checksums(directory: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the checksums of all files below; those that are `known` by name are not computed again."""
    sums = known or {}
    lines = [f"{sums.get(name) or _sum(directory / name)}  {name}\n" for name in _names(directory)]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def verify(directory: Path, names: Iterable[str] | None = None) -> None:
    """Compare files with their checksums: those of `names` that exist, or all present or listed files.

    Raises DamagedError. A directory that has no checksums passes.
    """
    try:
        text = (directory / CHECKSUMS).read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return
    sums = {name: digest for digest, name in _LINE.findall(text)}
    place = "/".join(directory.parts[-2:])
    if text != "".join(f"{digest}  {name}\n" for name, digest in sums.items()):
        raise DamagedError(f"{place}/{CHECKSUMS} is damaged: it is no list of checksums")
    for name in dict.fromkeys([*sums, *_names(directory)]) if names is None else names:
        file = directory / name
        if name == CHECKSUMS or (names is not None and not file.exists()):
            continue
        why = "" if file.is_file() else "it is missing"
        if not why and name not in sums:
            why = f"{CHECKSUMS} does not list it"
        elif not why and _sum(file) != sums[name]:
            why = f"it is not what {CHECKSUMS} says"
        if why:
            raise DamagedError(
                f"{place}/{name} is damaged: {why}. Take another copy of these files; if they were changed "
                f"on purpose, delete {CHECKSUMS}"
            )


def _names(directory: Path) -> list[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(name for file in files if (name := file.relative_to(directory).as_posix()) != CHECKSUMS)


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def directory_bytes(location: str | Path) -> int:
    """The size of all files below; those that are deleted meanwhile do not count."""
    if is_remote(location):
        return sum(files(str(location)).values())
    total = 0
    for place, _, names in os.walk(location):
        for file in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, file)).st_size
    return total


def sync_path(path: str | Path) -> None:
    """Flush one file, or the entries of one directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(location: str | Path) -> None:
    """Flush everything below `location`, files before the directories that name them.

    The files of a directory together: the disk then writes its own journal once, not once for each.
    """
    for directory, _, files in os.walk(location, topdown=False):
        with ThreadPoolExecutor(min(len(files), 8) or 1, "tinkex-sync") as pool:
            list(pool.map(sync_path, [Path(directory) / name for name in files]))
        sync_path(directory)


# -- locations, on disk or in an object store ------------------------------------------------------------

_SCHEMES = ("s3://", "gs://", "az://")
_DELETED_AT_ONCE = 500  # objects; S3 takes at most 1,000


def is_remote(location: str | Path) -> bool:
    return isinstance(location, str) and location.startswith(_SCHEMES)


def read_location(text: str) -> str:
    """A location as a user wrote it: a URL of an object store, or a directory.

    >>> read_location("s3://bucket/tinkex/")
    's3://bucket/tinkex'
    """
    if is_remote(text):
        scheme, _, rest = text.partition("://")
        if not rest.strip("/"):
            raise InvalidInputError(
                f"{text!r} names no bucket; write {scheme}://BUCKET or {scheme}://BUCKET/PREFIX"
            )
        return text.rstrip("/")
    if "://" in text:
        raise InvalidInputError(
            f"{text!r} is no store; write a directory, or s3://BUCKET/PREFIX, gs://…, az://…"
        )
    return str(Path(text).expanduser().absolute())


def join(location: str, place: str) -> str:
    """The location at `place`, a relative path with forward slashes, below another."""
    return f"{location}/{place}"


@contextlib.contextmanager
def local_copy(location: str | Path) -> Generator[Path]:
    """The directory at a location, to read: itself, or a temporary copy whose checksums were verified."""
    if not is_remote(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory(prefix="tinkex-") as place:
        download(str(location), Path(place))
        yield Path(place)


def download(location: str, directory: Path) -> None:
    """Copy a remote location into a directory, and verify its checksums."""
    names = files(location)
    if CHECKSUMS not in names:
        raise FileNotFoundError(f"there is nothing at {location}")
    for name in names:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out, _reporting(f"read {location}/{name}") as obstore:
            out.writelines(obstore.get(*_find(f"{location}/{name}")).stream())
    verify(directory)


def upload(directory: Path, location: str) -> None:
    """Copy a directory to a new location. It is complete once its list of checksums, copied last, exists."""
    add_checksums(directory)
    if not is_remote(location):
        with atomic_directory(location) as part:
            shutil.copytree(directory, part, dirs_exist_ok=True)
        return
    for name in [*_names(directory), CHECKSUMS]:
        with _reporting(f"write {location}/{name}") as obstore:
            obstore.put(*_find(f"{location}/{name}"), directory / name)  # large files in parts


@contextlib.contextmanager
def _new_prefix(location: str, overwrite: bool) -> Generator[Path]:
    there = files(location)
    if CHECKSUMS in there and not overwrite:
        raise LocationExistsError(f"{location} already exists; choose another name")
    with tempfile.TemporaryDirectory(prefix="tinkex-") as place:
        yield Path(place)
        if there:
            remove(location)  # its list of checksums goes first, so that a mixture is never taken for whole
        upload(Path(place), location)


def files(location: str) -> dict[str, int]:
    """The files below a location, by their relative names, with their sizes."""
    if not is_remote(location):
        root = Path(location)
        return {
            name.relative_to(root).as_posix(): name.stat().st_size
            for name in root.rglob("*")
            if name.is_file()
        }
    with _reporting(f"list {location}") as obstore:
        bucket, prefix = _find(f"{location}/")
        batches: Iterable[Sequence[ObjectMeta]] = obstore.list(bucket, prefix)  # type: ignore
        return {meta["path"][len(prefix) :]: meta["size"] for batch in batches for meta in batch}


def remove(location: str) -> None:
    """Delete everything below a location."""
    if not is_remote(location):
        shutil.rmtree(location, ignore_errors=True)
        return
    names = sorted(files(location), key=lambda name: not name.endswith(CHECKSUMS))
    for first in range(0, len(names), _DELETED_AT_ONCE):
        with _reporting(f"delete {location}") as obstore:
            found = [_find(f"{location}/{name}") for name in names[first : first + _DELETED_AT_ONCE]]
            obstore.delete(found[0][0], [path for _, path in found])


def copy_directory(source: str, target: str) -> None:
    """Copy a whole directory to another location of the same store, replacing its content."""
    with local_copy(source) as directory, atomic_directory(target, overwrite=True) as part:
        shutil.copytree(directory, part, dirs_exist_ok=True)


def create_file(location: str, content: bytes, *, sync: bool = True) -> None:
    """Write one file that must not exist yet, else LocationExistsError. Atomic among processes."""
    if is_remote(location):
        with _reporting(f"create {location}") as obstore:
            try:
                obstore.put(*_find(location), content, mode="create", use_multipart=False)
            except obstore.exceptions.AlreadyExistsError:
                raise LocationExistsError(f"{location} exists already") from None
        return
    path = Path(location)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        part.write_bytes(content)
        if sync:
            sync_path(part)
        try:
            os.link(part, path)  # unlike a rename, it replaces nothing
        except FileExistsError:
            raise LocationExistsError(f"{location} exists already") from None
        if sync:
            sync_path(path.parent)
    finally:
        part.unlink(missing_ok=True)


def read_file(location: str) -> bytes:
    """The content of one file; FileNotFoundError if there is none."""
    if not is_remote(location):
        return Path(location).read_bytes()
    with _reporting(f"read {location}") as obstore:
        return bytes(obstore.get(*_find(location)).bytes())


def modified(location: str) -> float:
    """When one file was written, as a POSIX time; FileNotFoundError if there is none."""
    if not is_remote(location):
        return Path(location).stat().st_mtime
    with _reporting(f"look at {location}") as obstore:
        return obstore.head(*_find(location))["last_modified"].timestamp()


def remove_file(location: str) -> None:
    """Delete one file, if it exists."""
    if not is_remote(location):
        Path(location).unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError), _reporting(f"delete {location}") as obstore:
        obstore.delete(*_find(location))


def write_file(path: Path, location: str) -> None:
    """Copy a file of this machine to a remote location, in parts if it is large."""
    with _reporting(f"write {location}") as obstore:
        obstore.put(*_find(location), path)


def link(location: str, seconds: float) -> str:
    """A URL that gives read access to one remote file for a limited time."""
    with _reporting(f"sign a link to {location}") as obstore:
        bucket, path = _find(location)
        return obstore.sign(bucket, "GET", path, timedelta(seconds=seconds))


@lru_cache(maxsize=16)
def _bucket(root: str) -> Bucket:
    import obstore.store

    # The environment's variables say where the store is and who may use it.
    patience = {"max_retries": 5, "retry_timeout": timedelta(seconds=15)}
    return obstore.store.from_url(root, retry_config=patience)  # type: ignore[return-value, arg-type]


def _find(location: str) -> tuple[Bucket, str]:
    scheme, _, rest = location.partition("://")
    name, _, path = rest.partition("/")
    return _bucket(f"{scheme}://{name}"), path


@contextlib.contextmanager
def _reporting(what: str):
    """obstore, whose errors are ours: FileNotFoundError, or StoreError with what was being done."""
    try:
        import obstore
    except ImportError:
        raise InvalidInputError(
            f"an object store needs more packages: pip install 'tinkex[store]' (to {what})"
        ) from None
    try:
        yield obstore
    except FileNotFoundError:
        raise FileNotFoundError(f"cannot {what}: there is no such object, or no such bucket") from None
    except obstore.exceptions.BaseError as error:
        why = str(error).strip().splitlines()[0]
        raise StoreError(f"cannot {what}: {why}") from error
