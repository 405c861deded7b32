"""Base classes of the small values on the wire: RequestModel and ReplyModel.

Both are frozen. A request refuses unknown names with InvalidInputError and a suggestion; a reply ignores
them, so that an older client understands a newer server. None means "not given": the field takes its default
and is not sent, except for fields listed in `sent_as_null`. Knows pydantic; knows neither HTTP nor endpoints.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import core_schema

from tinkex.errors import InvalidInputError
from tinkex.strict import Dumpable, assemble, unknown_field

log = logging.getLogger(__name__)
T = TypeVar("T")

# Validation context for values from the wire: unknown names are logged and dropped.
WIRE = "wire"

# Bytes of text in one field of a request, nested ones included; of lists that programs make.
MAX_FIELD, MAX_LARGE = 64 * 1024, 4 * 1024 * 1024
Count = Annotated[int, Field(ge=0, lt=2**63)]  # sequence numbers, sizes, offsets
# What a person calls a run, and finds it by: our extension.
RunName = Annotated[str, Field(max_length=120)]
RunTags = Annotated[list[Annotated[str, Field(min_length=1, max_length=60)]], Field(max_length=32)]
AnyJson = dict[str, Any] | list[Any] | str | int | float | bool | None  # parsed JSON, not yet checked


MANY_ERRORS = 1000


def explain(error: ValidationError, owner: str) -> str:
    """A validation error in one line: every field with what was given.

    >>> class Point(ReplyModel):
    ...     x: int
    >>> try:
    ...     Point.model_validate({"x": "one"})
    ... except ValidationError as error:
    ...     print(explain(error, "Point"))
    Point.x: Input should be a valid integer, unable to parse string as an integer, got 'one'
    """
    if error.error_count() > MANY_ERRORS:  # listing them takes longer than finding them
        return f"{owner}: {error.error_count()} values are not what is expected there"
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        place = ".".join([owner, *map(str, problem["loc"])])
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, InvalidInputError):  # its message already says what was given
            lines.append(f"{place}: {cause}" if problem["loc"] else str(cause))
        elif problem["type"] == "missing":
            lines.append(f"{place} is missing")
        else:
            given = repr(problem["input"])
            lines.append(f"{place}: {problem['msg']}, got {given if len(given) < 80 else given[:79] + '…'}")
    return "; ".join(lines[:5])


def tidy(
    owner: str, known: Collection[str], data: Mapping[Any, Any], lenient: bool, nulls: Collection[str] = ()
) -> dict[str, Any]:
    """Drop Nones from `data`, and names that `owner` does not have, which are an error unless `lenient`."""
    kept = {k: v for k, v in data.items() if k in known and (v is not None or k in nulls)}
    for name in data if len(kept) < len(data) else ():
        if name not in known:
            if not lenient:
                raise InvalidInputError(unknown_field(owner, str(name), known))
            log.debug("%s: ignored the unknown field %r", owner, name)
    return kept


class WireModel(BaseModel):
    """A frozen value; None means "not given"."""

    model_config = ConfigDict(frozen=True, defer_build=True, protected_namespaces=())
    # Fields sent as null when they are None, because leaving them out means something else.
    sent_as_null: ClassVar[frozenset[str]] = frozenset()
    large: ClassVar[frozenset[str] | None] = None  # fields of a request bounded by MAX_LARGE, not MAX_FIELD

    @model_validator(mode="before")
    @classmethod
    def _tidy(cls, data: AnyJson | Mapping[Any, Any] | WireModel, info: ValidationInfo) -> Any:
        extra = cls.model_config.get("extra")
        if not isinstance(data, Mapping):
            return data
        if cls.large is not None:
            for name, value in data.items():
                _check_size(cls.__name__, str(name), value, MAX_LARGE if name in cls.large else MAX_FIELD)
        if extra == "allow":
            return data
        lenient = extra == "ignore" or info.context == WIRE
        return tidy(cls.__name__, cls.model_fields, data, lenient, cls.sent_as_null)

    def to_wire(self) -> dict[str, Any]:
        """The value as a JSON object, with defaults and without Nones."""
        fields = self.model_dump(mode="json", exclude_none=True)
        for name in self.sent_as_null:
            fields.setdefault(name, None)
        return fields


_CONTAINERS: tuple[type[Any], ...] = (Mapping, list, tuple)


def _check_size(owner: str, name: str, value: Any, most: int) -> None:
    """Refuse a field with more than `most` bytes of text, items included; the rest is not looked at then."""
    size, rest = len(name), [value]
    while rest:
        item: Any = rest.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, _CONTAINERS):
            size += len(item)
            if size <= most:
                rest += [*item, *item.values()] if isinstance(item, Mapping) else item
        if size > most:
            raise InvalidInputError(
                f"{owner}.{name:.80} has more than {most} bytes, which is the most allowed"
            )


def _check_encodable(place: str, value: AnyJson | Mapping[Any, Any]) -> None:
    """Refuse what JSON in UTF-8 cannot represent, when the value is built and not when it is sent."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_encodable(place, key)
            _check_encodable(f"{place}.{key!s}", item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_encodable(f"{place}[{i}]", item)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidInputError(f"{place} must fit into 64 bits, got {value!r:.80}")
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            must = "must be text that UTF-8 can encode"
            raise InvalidInputError(f"{place} {must}, got {value!r:.80}") from None


if TYPE_CHECKING:
    _Strict = type(BaseModel)
else:

    class _Strict(type(BaseModel)):
        """Turns pydantic's ValidationError of a constructor call into InvalidInputError."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if args:
                names = ", ".join(cls.model_fields)
                raise InvalidInputError(f"{cls.__name__} takes its fields by name: {names}")
            try:
                value = super().__call__(**kwargs)
            except ValidationError as error:
                raise InvalidInputError(explain(error, cls.__name__)) from None
            _check_encodable(cls.__name__, value.__dict__)
            return value


class RequestModel(WireModel, metaclass=_Strict):
    """A value that a user or a client builds and sends.

    >>> class Greeting(RequestModel):
    ...     text: str
    >>> Greeting(txet="hello")
    Traceback (most recent call last):
    tinkex.errors.InvalidInputError: Greeting has no 'txet'; did you mean 'text'? It takes: text
    """

    model_config = ConfigDict(extra="forbid")
    large = frozenset()


class ReplyModel(WireModel):
    """A value that a server replies with."""

    model_config = ConfigDict(extra="ignore")


def read_plain(cls: type[T], value: AnyJson | Mapping[Any, Any] | Dumpable, *, lenient: bool) -> T:
    """`value` as the strict dataclass `cls`: unchanged, or built from a mapping by its constructor."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, (dict, Mapping)):
        raise InvalidInputError(f"must be a {cls.__name__}, got {type(value).__name__}")
    return assemble(cls, tidy(cls.__name__, _names(cls), value, lenient))


@cache
def _names(cls: type) -> dict[str, None]:
    return dict.fromkeys(f.name for f in dataclasses.fields(cls))  # ordered, with fast lookup


class Plain:
    """Marks a field whose type is a strict dataclass: `Annotated[AdamParams, Plain]`.

    Without it pydantic would build the dataclass itself and skip the constructor's checks.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        def read(value: Any, info: core_schema.ValidationInfo) -> Any:
            return read_plain(source, value, lenient=info.context == WIRE)

        write = core_schema.plain_serializer_function_ser_schema(lambda v: v.model_dump(exclude_none=True))
        return core_schema.with_info_plain_validator_function(read, serialization=write)
