"""Downloads of files by URL, with progress.

Promises: no credential is sent, since a signed URL is one; `file://` URLs (of an embedded service; a
server's replies cannot have any) are read directly; an interrupted download leaves nothing behind; a tar
cannot write outside its directory; a download never fills the disk; a file that does not match its checksum
is refused (DamagedError). Blocking.
"""

from __future__ import annotations

import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tinkex._version import __version__
from tinkex.errors import (
    APIConnectionError,
    FailedRequest,
    FailedResponse,
    InvalidInputError,
    TinkerError,
    status_error,
)
from tinkex.files import ByteProgress, replacing
from tinkex.store import verify

_CHUNK = 1024 * 1024
_TIMEOUT = 60.0
_LEAVE_FREE = 256 * 1024 * 1024  # bytes of the disk that no download takes


def download(url: str, target: Path, progress: ByteProgress = lambda done, total: None) -> int:
    """Download `url` to the file `target`; returns its size in bytes."""
    if (local := _local(url)) is not None:
        shutil.copyfile(local, target)
        return target.stat().st_size
    with replacing(target) as out:

        def write(chunk: bytes) -> None:
            _check_free(target.parent, len(chunk))
            out.write(chunk)

        return _receive(url, write, progress)


def _receive(url: str, write: Callable[[bytes], object], progress: ByteProgress) -> int:
    headers = {"User-Agent": f"tinkex/{__version__}"}
    request = FailedRequest("GET", url.partition("?")[0])  # without the signature
    done = 0
    try:
        opener = urllib.request.build_opener(_HttpOnly)
        with opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
            length = answer.headers.get("content-length")
            total = int(length) if length else None
            while chunk := answer.read(_CHUNK):
                write(chunk)
                done += len(chunk)
                progress(done, total)
    except urllib.error.HTTPError as error:
        response = FailedResponse(error.code, dict(error.headers), "", request)
        raise status_error(f"GET {request.url}: HTTP {error.code} {error.reason}", response) from None
    except (OSError, http.client.HTTPException) as error:
        raise APIConnectionError(request, f"the download of {request.url} failed: {error}") from None
    if total is not None and done < total:
        message = f"the download of {request.url} ended after {done} of {total} bytes"
        raise APIConnectionError(request, message)
    return done


class _HttpOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise TinkerError("the server redirected a download to something else than http or https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _local(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _check_free(directory: Path, size: int) -> None:
    if (free := shutil.disk_usage(directory).free) < size + _LEAVE_FREE:
        raise TinkerError(
            f"the download needs {size} bytes more, and the disk of {directory} has {free} left, "
            f"of which {_LEAVE_FREE} stay free"
        )


@contextmanager
def new_directory(target: Path, *, overwrite: bool) -> Generator[Path]:
    """A temporary directory to fill, renamed to `target` if the block succeeds."""
    if target.exists() and not overwrite:
        raise InvalidInputError(f"{target} exists; --force overwrites it, --output DIR puts it elsewhere")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:40]}."))
    try:
        yield part
        part.chmod(0o755)
        if target.is_symlink():
            target.unlink()
        elif target.is_dir():
            shutil.rmtree(target)
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def download_files(urls: Mapping[str, str], directory: Path, progress: ByteProgress) -> None:
    """Download every file to its name below `directory`."""
    before = 0
    for name, url in urls.items():
        place = (directory / name).resolve()
        if not place.is_relative_to(directory.resolve()):
            raise TinkerError(
                f"the server named a file {name!r}, which is outside of the checkpoint; refused"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        # The total is not known before the last file has begun, so it is not shown.
        before += download(url, place, lambda done, total, before=before: progress(before + done, None))
    verify(directory)


def download_archive(url: str, directory: Path, progress: ByteProgress = lambda done, total: None) -> None:
    """Download a tar and unpack it into `directory`; a local one is unpacked where it is."""
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".archive.") as scratch:
        if (file := _local(url)) is None:
            file = Path(scratch) / "tar"
            download(url, file, progress)
        elif not file.exists():
            message = f"the download of {url} failed: No such file or directory"
            raise APIConnectionError(FailedRequest("GET", url), message)
        try:
            with tarfile.open(file) as archive:
                size = 0
                for member in archive:  # before the first is written; a packed tar can be of any size
                    _check_free(directory, size := size + member.size)
                archive.extractall(directory, filter="data")
        except tarfile.TarError as error:
            raise TinkerError(f"what the server sent cannot be unpacked: {error}") from None
    verify(directory)
