"""Exports that only their recipients can read: every file of a directory encrypted with age (pyrage)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tinkex.engine.protocol import EngineError
from tinkex.store import atomic_directory, directory_bytes


def read_recipients(texts: list[str]) -> list[Any]:
    """age1… and ssh-… public keys."""
    if not texts:
        return []
    try:
        pyrage: Any = importlib.import_module("pyrage")  # its stubs name nothing
    except ImportError:
        raise EngineError("this server cannot encrypt: pyrage is not installed") from None

    def read(text: str) -> Any:
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            return kind.Recipient.from_str(text)
        except Exception as error:
            raise EngineError(f"{text!r} is not an age recipient: {error}", "user") from None

    return [read(text) for text in texts]


def seal(plain: Path, sealed: Path, recipients: list[Any]) -> int:
    """Write `plain`'s files, encrypted, as `sealed`/NAME.age; the bytes there are."""
    encrypt_file = importlib.import_module("pyrage").encrypt_file
    with atomic_directory(sealed, overwrite=True) as part:
        for file in sorted(plain.iterdir()):
            encrypt_file(str(file), str(part / f"{file.name}.age"), recipients)
    return directory_bytes(sealed)
