"""The models directory of a home: names, locking and removal.

A model is a Hugging Face directory or a GGUF file. A name never leads out of the directory. A partial
download has a name that no model has, and the next writer deletes it if its process died.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tinkex.errors import ModelError
from tinkex.files import try_lock

ABOUT = "tinkex.json"  # in the directory of a model that `install_from_wheel` made
_PART = ".part-"


def model_at(place: Path) -> Path | None:
    """The model at a path: a Hugging Face directory, a GGUF file, or one without its ending."""
    if (place / "config.json").is_file() or (place.suffix == ".gguf" and place.is_file()):
        return place
    file = place.with_name(place.name + ".gguf") if place.name else place
    return file if file.is_file() else None


def named(directory: Path, name: str) -> Path | None:
    """The model called `name`, as ORG/NAME or ORG--NAME."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute():
        return None
    return model_at(directory / name) or model_at(directory / name.replace("/", "--"))


def names(directory: Path) -> Iterator[tuple[str, Path]]:
    """Every model in the directory: its name and its place."""
    for place in sorted(directory.glob("[!.]*")):
        for found in [place] if model_at(place) else sorted(place.glob("*")):
            if (model := model_at(found)) is not None:
                yield found.relative_to(directory).as_posix().replace("--", "/", 1), model


def remove(place: Path, directory: Path) -> int:
    """Delete a model under the lock; the number of bytes freed."""
    freed = size(place)
    if place.is_file():
        place.unlink()
    else:  # renamed first: no half-removed model is ever found
        shutil.rmtree(place.rename(directory / f"{_PART}{os.getpid()}"))
    return freed


@contextmanager
def locked(directory: Path) -> Generator[None]:
    """Let one process at a time write; what a dead process left half-written is deleted first."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ModelError(f"models cannot be kept in {directory}: {error.strerror}; set TINKEX_HOME") from None
    try:
        if not try_lock(lock):
            report(f"another process is at work in {directory}; waiting for it")
            while not try_lock(lock):
                time.sleep(0.1)
        for left in directory.glob(f"{_PART}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(lock)


@contextmanager
def part(directory: Path) -> Generator[Path]:
    """A temporary directory, under the lock."""
    place = directory / f"{_PART}{os.getpid()}"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def size(place: Path) -> int:
    return sum(file.stat().st_size for file in (place, *place.rglob("*")) if file.is_file())


def weights_of(place: Path) -> str:
    try:
        return str(json.loads((place / ABOUT).read_text())["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def report(what: str) -> None:
    """Report progress to the person who waits for a model."""
    sys.stderr.write(f"tinkex: {what}\n")
    sys.stderr.flush()
