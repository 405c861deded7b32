"""The file of stored API keys, ~/.tinker/credentials.json, in the format of the official command line.

Promises: it is written to a temporary file and renamed; only its owner can read it; a repr shows no key.
Knows nothing of how keys are used.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinkex.errors import CredentialError, InvalidInputError

if TYPE_CHECKING:
    from tinkex.types.base import AnyJson


@dataclass(frozen=True)
class StoredKey:
    """One key in the store. A `generated` one was made for this machine alone; logout deletes it."""

    key: str = field(repr=False)
    name: str = ""
    type: Literal["manual", "generated"] = "manual"
    note: str | None = None
    details: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class CredentialStore:
    """The stored keys by their ids, one of which may be the default."""

    VERSION = 1

    def __init__(self, path: Path) -> None:
        self.path = path

    def keys(self) -> dict[str, StoredKey]:
        """Every key, by its id."""
        return {key_id: self._record(key_id, entry) for key_id, entry in self._load()["keys"].items()}

    def default_id(self) -> str | None:
        content = self._load()
        return content["default"] if content["default"] in content["keys"] else None

    def default_key(self) -> StoredKey | None:
        key_id = self.default_id()
        return None if key_id is None else self.keys()[key_id]

    def add(self, key_id: str, record: StoredKey, *, default: bool = True) -> None:
        content = self._load()
        content["keys"][key_id] = record.to_json()
        if default:
            content["default"] = key_id
        self._save(content)

    def remove(self, key_id: str) -> None:
        content = self._load()
        if key_id not in content["keys"]:
            known = ", ".join(content["keys"]) or "none"
            raise InvalidInputError(f"{self.path} has no key {key_id!r}; it has: {known}")
        del content["keys"][key_id]
        if content["default"] == key_id:
            content["default"] = None
        self._save(content)

    def _record(self, key_id: str, entry: AnyJson) -> StoredKey:
        if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
            raise self._broken(f"the entry {key_id!r} has no key")
        return StoredKey(**{f.name: entry[f.name] for f in fields(StoredKey) if f.name in entry})

    def _load(self) -> dict[str, Any]:
        try:
            content: AnyJson = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {"version": self.VERSION, "default": None, "keys": {}}
        except OSError as error:
            raise CredentialError(f"cannot read the stored keys in {self.path}: {error.strerror}") from None
        except ValueError:
            raise self._broken("it is not JSON") from None
        if not isinstance(content, dict) or not isinstance(content.get("keys", {}), dict):
            raise self._broken("it is not an object with 'keys'")
        if content.get("version", self.VERSION) != self.VERSION:
            raise self._broken(
                f"its version is {content['version']!r}, and only {self.VERSION} is understood"
            )
        return {"version": self.VERSION, "default": None, "keys": {}, **content}

    def _broken(self, reason: str) -> CredentialError:
        return CredentialError(
            f"the stored keys in {self.path} cannot be used: {reason}; delete it and log in again"
        )

    def _save(self, content: dict[str, Any]) -> None:
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        handle, part = tempfile.mkstemp(dir=folder, prefix=self.path.name)  # mkstemp makes it 0600
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
