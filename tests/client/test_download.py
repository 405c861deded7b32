"""Files by link, from a real HTTP server of the standard library that sometimes misbehaves."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tinkex.client.download import download, download_archive, download_files, new_directory
from tinkex.errors import APIConnectionError, InvalidInputError, PermissionDeniedError, TinkerError

BODY = bytes(range(256)) * 10_000


def tar(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.replace("UP", "../"))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


PAGES = {
    "/file": BODY,
    "/tar": tar(a=b"one", b=b"two"),
    "/escape": tar(UPevil=b"x"),
    "/not-a-tar": b"<html>",
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/forbidden":
            self.send_error(403)
            return
        if path == "/cut-in-a-chunk":
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"1000\r\nshort")
            return
        body = PAGES.get(path, BODY)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        assert "x-api-key" not in {name.lower() for name in self.headers}
        self.wfile.write(body[: 1000 if path == "/cut" else None])

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_a_file_with_progress(url: str, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    assert download(f"{url}/file?signature=s", tmp_path / "f", lambda *now: told.append(now)) == len(BODY)
    assert (tmp_path / "f").read_bytes() == BODY
    assert told[-1] == (len(BODY), len(BODY))
    assert len(told) > 1


@pytest.mark.parametrize(
    ("page", "error", "says"),
    [
        ("cut", APIConnectionError, "1000 of 2560000 bytes"),
        ("cut-in-a-chunk", APIConnectionError, "the download of .* failed: IncompleteRead"),
        ("forbidden", PermissionDeniedError, "HTTP 403"),
    ],
)
def test_what_fails_leaves_nothing(url: str, tmp_path: Path, page: str, error: type, says: str) -> None:
    (tmp_path / "f").write_text("older")
    with pytest.raises(error, match=says) as failed:
        download(f"{url}/{page}?signature=secret", tmp_path / "f")
    assert "secret" not in str(failed.value)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"f": "older"}


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(APIConnectionError, match=r"the download of http://127\.0\.0\.1:9/x failed"):
        download("http://127.0.0.1:9/x", tmp_path / "f")


def test_an_archive_is_unpacked(url: str, tmp_path: Path) -> None:
    with new_directory(tmp_path / "out", overwrite=False) as directory:
        download_archive(f"{url}/tar", directory, lambda *_: None)
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == {"a": "one", "b": "two"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_archive_of_this_machine_is_unpacked_where_it_is(tmp_path: Path) -> None:
    (file := tmp_path / "ä b.tar").write_bytes(PAGES["/tar"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with new_directory(tmp_path / "out", overwrite=True) as directory:
        download_archive(file.as_uri(), directory)
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == {"a": "one", "b": "two"}
    assert list((tmp_path / "elsewhere").iterdir()) == []  # the link was replaced, not what it leads to
    assert file.exists()
    file.unlink()
    with pytest.raises(APIConnectionError, match=r"the download of file://.*No such file"):
        download_archive(file.as_uri(), tmp_path / "out")


@pytest.mark.parametrize("page", ["escape", "not-a-tar"])
def test_a_bad_archive_is_refused(url: str, tmp_path: Path, page: str) -> None:
    with pytest.raises(TinkerError, match="cannot be unpacked"):
        with new_directory(tmp_path / "in" / "out", overwrite=False) as directory:
            download_archive(f"{url}/{page}", directory, lambda *_: None)
    assert [p.name for p in tmp_path.rglob("*")] == ["in"]


def test_files_stay_in_their_directory(url: str, tmp_path: Path) -> None:
    told: list[int] = []
    (tmp_path / "d").mkdir()
    download_files(
        {"a": f"{url}/file", "sub/b": f"{url}/file"}, tmp_path / "d", lambda done, _: told.append(done)
    )
    assert (tmp_path / "d" / "sub" / "b").read_bytes() == BODY
    assert told == sorted(told)
    assert told[-1] == 2 * len(BODY)
    with pytest.raises(TinkerError, match="outside of the checkpoint"):
        download_files({"../evil": f"{url}/file"}, tmp_path / "d", lambda *_: None)


def test_what_is_there_is_kept_unless_it_succeeds(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(InvalidInputError, match="--force"):
        with new_directory(tmp_path / "out", overwrite=False):
            pass
    with suppress(KeyError), new_directory(tmp_path / "out", overwrite=True) as directory:
        (directory / "new").touch()
        raise KeyError
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "old"]
    with new_directory(tmp_path / "out", overwrite=True) as directory:
        (directory / "new").touch()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "new"]
