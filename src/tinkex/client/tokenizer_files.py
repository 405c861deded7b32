"""Downloads the tokenizer files of a Tinkex server, once, into the home directory.

Promises: a directory is complete or absent, never half-written; a server without such files (hosted Tinker,
for example) falls back to the hub. Knows the names of the files, not their contents.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tinkex.client.future import start
from tinkex.client.loop import in_own_thread
from tinkex.client.server_connection import ServerConnection
from tinkex.errors import APIStatusError, NotFoundError
from tinkex.tokenizers import load_tokenizer, tokenizer_name
from tinkex.types.config import TOKENIZER_FILES, TokenizerFileRequest
from tinkex.wire import ops


async def load(connection: ServerConnection, base_model: str, tokenizer_id: str | None = None) -> Any:
    """Load a base model's tokenizer, from the server's files if it has them."""
    name = tokenizer_name(base_model, tokenizer_id)
    return await in_own_thread(partial(load_tokenizer, name, fetch=_fetcher(connection, base_model)))


def _fetcher(connection: ServerConnection, base_model: str) -> Callable[[str], Path | None]:
    """A function that downloads the tokenizer of `base_model`. It blocks, so not on the background loop."""

    def fetch(_: str) -> Path | None:
        server = hashlib.sha256(connection.base_url.encode()).hexdigest()[:16]
        place = connection.settings.home / "tokenizers" / server / base_model.replace("/", "--")
        if connection.base_url and place.is_dir():
            return place
        files = start(lambda: _download(connection, base_model), "tokenizer").result()
        return _store(place, files) if files else None

    return fetch


async def _download(connection: ServerConnection, base_model: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        request = TokenizerFileRequest(model_name=base_model, file=name)
        try:
            files[name] = await connection.call(ops.GET_TOKENIZER_FILE, request)
        except NotFoundError:
            if name == TOKENIZER_FILES[0]:
                return {}  # tokenizer.json is required
        except APIStatusError:
            if not connection.base_url:
                raise  # the error says why there is none
            return {}  # the server has no such operation
    return files


def _store(place: Path, files: dict[str, bytes]) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=".part-"))
    for name, body in files.items():
        (part / name).write_bytes(body)
    try:
        os.replace(part, place)
    except OSError:  # another process stored it first
        shutil.rmtree(part, ignore_errors=True)
    return place
