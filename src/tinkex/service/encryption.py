"""Exports that only their recipients can read: every file of a directory encrypted with age (pyrage)."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

from tinkex.engine.protocol import EngineError
from tinkex.store import sync_path, sync_tree


def read_recipients(texts: list[str]) -> list[Any]:
    """age1… and ssh-… public keys."""
    if not texts:
        return []
    try:
        pyrage: Any = importlib.import_module("pyrage")  # its stubs name nothing
    except ImportError:
        raise EngineError("this server cannot encrypt: pyrage is not installed") from None
    recipients: list[Any] = []
    for text in texts:
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            recipients.append(kind.Recipient.from_str(text))
        except Exception as error:
            raise EngineError(f"{text!r} is not an age recipient: {error}", "user") from None
    return recipients


def seal(plain: Path, sealed: Path, recipients: list[Any]) -> int:
    """Write `plain`'s files, encrypted, as `sealed`/NAME.age; the bytes there are."""
    encrypt_file = importlib.import_module("pyrage").encrypt_file
    part = sealed.with_name(f".{sealed.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in sorted(plain.iterdir()):
        encrypt_file(str(file), str(part / f"{file.name}.age"), recipients)
    sync_tree(part)
    shutil.rmtree(sealed, ignore_errors=True)
    part.rename(sealed)
    sync_path(sealed.parent)
    return sum(file.stat().st_size for file in sealed.iterdir())
