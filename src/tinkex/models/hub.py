"""Models from a Hugging Face hub, through huggingface_hub, which keeps them in its own cache.

With `offline` no request is made. A hub that does not answer is detected within seconds. Without the library
there is no hub. This module does not know the models directory.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from tinkex.errors import ModelError

log = logging.getLogger("tinkex")

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]  # the files that the engine reads
_TIMEOUT = 3.0  # seconds for a hub to answer at all


def is_id(name: str) -> bool:
    """Does a name have the form of a hub id, ORG/NAME?"""
    return _ID.fullmatch(name) is not None and not name.endswith(".gguf")


def cached(hub_id: str) -> Path | None:
    """The model in the hub's cache, if all of its weights are there."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    # Another program may have fetched fewer files than the engine needs.
    file = try_to_load_from_cache(hub_id, "config.json")
    return Path(file).parent if isinstance(file, str) and _is_whole(Path(file).parent) else None


def is_reachable(hub_id: str) -> bool:
    """Does a hub have this model, and does it answer within seconds?"""
    try:
        from huggingface_hub import HfApi

        HfApi().model_info(hub_id, timeout=_TIMEOUT)
    except Exception as error:  # the library's errors have no common root
        log.debug("no hub for %s: %s", hub_id, error)
        return False
    return True


def download(hub_id: str, *, offline: bool) -> Path:
    """The model from the hub, with the library's own progress bars."""
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # a bare type
    except ImportError:
        raise ModelError(
            f"{hub_id!r} is no directory here, and fetching it from a hub needs the package huggingface_hub: "
            "pip install 'tinkex[engine]'"
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_FILES, local_files_only=offline))
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        how = (
            "is not in the hub's cache, and HF_HUB_OFFLINE is set"
            if offline
            else f"cannot be fetched ({why})"
        )
        raise ModelError(
            f"the model {hub_id!r} {how}, and there is no such directory here; see `tinkex model list-local`"
        ) from error


def _is_whole(place: Path) -> bool:
    index = place / "model.safetensors.index.json"
    if not index.is_file():
        return (place / "model.safetensors").is_file()
    files = set(json.loads(index.read_text())["weight_map"].values())
    return all((place / file).is_file() for file in files)
