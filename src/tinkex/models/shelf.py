"""The shelf: the directory of models in a home, and who may write to it.

Promises: a name never leads out of the shelf; what is being written has a name that no model has, and is
swept away by the next who writes if its writer died. A model is a Hugging Face directory or a GGUF file.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tinkex.errors import ModelError
from tinkex.models.progress import Report

ABOUT = "tinkex.json"  # what we know of a model that we made ready, beside its files
_PART = ".part-"


@dataclass(frozen=True)
class Kept:
    """A model on this machine."""

    name: str
    place: Path
    bytes: int
    weights: str  # what they are, where that is known


def model_at(place: Path) -> Path | None:
    """The model at a path: a Hugging Face directory, a GGUF file, or one without its ending."""
    if (place / "config.json").is_file() or (place.suffix == ".gguf" and place.is_file()):
        return place
    file = place.with_name(place.name + ".gguf") if place.name else place
    return file if file.is_file() else None


def on_shelf(shelf: Path, name: str) -> Path | None:
    """The model called `name`, as ORG/NAME or ORG--NAME."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute():
        return None
    places = (shelf / name, shelf / name.replace("/", "--"))
    return next((found for place in places if (found := model_at(place)) is not None), None)


def names(shelf: Path) -> Iterator[tuple[str, Path]]:
    """Every model on the shelf: its name and where it is."""
    for place in sorted(shelf.glob("[!.]*")) if shelf.is_dir() else ():
        inside = [place] if model_at(place) else sorted(place.glob("*")) if place.is_dir() else []
        for found in inside:
            if (model := model_at(found)) is not None:
                yield found.relative_to(shelf).as_posix().replace("--", "/", 1), model


def remove(shelf: Path, name: str, report: Report) -> int:
    """Take a model off the shelf; how many bytes that freed."""
    with locked(shelf, report):
        place = on_shelf(shelf, name)
        if place is None:
            there = ", ".join(name for name, _ in names(shelf)) or "none"
            raise ModelError(f"no model called {name!r} in {shelf}; there are: {there}")
        freed = size(place)
        if place.is_file():
            place.unlink()
        else:
            gone = place.rename(shelf / f"{_PART}{os.getpid()}")  # at once: a half-removed model is none
            shutil.rmtree(gone)
    return freed


@contextmanager
def locked(shelf: Path, report: Report) -> Generator[None]:
    """One process at a time writes to a shelf; what others left half-written is swept away first."""
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        lock = os.open(shelf / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ModelError(f"models cannot be kept in {shelf}: {error.strerror}; set TINKEX_HOME") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            report(f"another process is at work in {shelf}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in shelf.glob(f"{_PART}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(lock)


@contextmanager
def part(shelf: Path) -> Generator[Path]:
    """A directory to write in, gone afterwards; only under the lock."""
    place = shelf / f"{_PART}{os.getpid()}"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def size(place: Path) -> int:
    files = [place] if place.is_file() else [p for p in place.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)


def weights_of(place: Path) -> str:
    try:
        return str(json.loads((place / ABOUT).read_text())["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
