"""Reads fields of parsed JSON as the types that they should have; refuses unsupported ones by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tinkex.errors import InvalidInputError


def as_object(value: Any) -> dict[str, Any]:
    """`value` if it is an object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """`value` if it is a list, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def need_object(value: Any, where: str, *names: str) -> dict[str, Any]:
    """`value`, an object that has these names at most; an empty one for None."""
    if value is not None and not isinstance(value, dict):
        raise InvalidInputError(f"{where} must be an object, got {str(value)[:80]}")
    found = as_object(value)
    refuse_rest({f"{where}.{name}": found[name] for name in found if name not in names}, {})
    return found


def need_list(value: Any, where: str) -> list[Any]:
    """`value`, a list; an empty one for None."""
    if value is not None and not isinstance(value, list):
        raise InvalidInputError(f"{where} must be a list, got {str(value)[:80]}")
    return as_list(value)


def refuse_rest(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse, by name, what asks for something: any value but None and those that mean nothing."""
    for name, value in given.items():
        if value is not None and value not in neutral.get(name, ()):
            raise InvalidInputError(f"{name} is not offered by this server, got {str(value)[:80]}")
