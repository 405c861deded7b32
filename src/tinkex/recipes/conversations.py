"""Reads training data: files and hub datasets of many formats as conversations, pairs, prompts and texts.

Files are JSONL, JSON, Parquet, CSV, TSV or plain text. Formats are recognised by their fields: messages,
ShareGPT, Alpaca, prompt and completion, preference pairs, text. A bad row is an error that names its place,
the field, and what was expected; `skip_bad` counts it instead. Knows no tokenizer and no client.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from tinkex.data import Message
from tinkex.errors import InvalidInputError

Row = Mapping[str, Any]
Given = TypeVar("Given")
Made = TypeVar("Made")
Further = TypeVar("Further")

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt")
FORMATS = """\
{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}
{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}   (ShareGPT)
{"instruction": …, "input": …, "output": …}   (Alpaca)
{"prompt": …, "completion": …}
{"prompt": …, "chosen": …, "rejected": …}   (preference pairs)
{"text": …}"""
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
_SHOWN = 3  # bad rows that are named


@dataclass(frozen=True)
class ChatExample:
    """Messages to learn from; `prompt` of them are only read. Plain text has no messages."""

    messages: list[Message] = field(default_factory=list[Message])
    prompt: int = 0
    text: str | None = None
    tools: Any = None


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which the first is preferred."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


@dataclass(frozen=True)
class Dataset(Generic[Made]):
    """What was read: the rows that were good and their places, how many were not, and a digest of all."""

    items: list[Made]
    places: list[str]
    bad: int
    digest: str
    reasons: tuple[str, ...] = ()

    def map(self, make: Callable[[Made], Further], *, skip_bad: bool = False) -> Dataset[Further]:
        """Make something further of every item; a refusal names the item's place."""
        return _made(zip(self.places, self.items, strict=True), make, skip_bad, self)


def load(source: str | Path, make: Callable[[Row], Made], *, skip_bad: bool = False) -> Dataset[Made]:
    """Make something of every row of a file or hub dataset.

    >>> load("data.jsonl", conversation).items[0].messages  # doctest: +SKIP
    """
    read = list(rows(source))
    if not read:
        raise InvalidInputError(f"{source} has no rows")
    digest = hashlib.sha256(repr([row for _, row in read]).encode()).hexdigest()
    return _made(read, make, skip_bad, Dataset[Row]([], [], 0, digest))


def _made(
    given: Iterable[tuple[str, Given]], make: Callable[[Given], Made], skip_bad: bool, before: Dataset[Any]
) -> Dataset[Made]:
    items: list[Made] = []
    places: list[str] = []
    reasons: list[str] = []
    for place, each in given:
        try:
            if isinstance(each, _Unreadable):
                raise InvalidInputError(each.reason)
            items.append(make(each))
            places.append(place)
        except InvalidInputError as error:
            reasons.append(f"{place}: {error}")
            if not skip_bad:
                hint = "--skip-bad leaves such rows out and counts them"
                raise InvalidInputError(f"{reasons[0]}; {hint}") from None
    if not items:
        raise InvalidInputError(f"no row can be used: {reasons[0]}")
    shown = (*before.reasons, *reasons)[:_SHOWN]
    return Dataset(items, places, before.bad + len(reasons), before.digest, shown)


# -- rows ------------------------------------------------------------------------------------------------


class _Unreadable(dict[str, Any]):
    """A line that could not be parsed."""

    def __init__(self, reason: str) -> None:
        super().__init__(unreadable=reason)
        self.reason = reason


def rows(source: str | Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file (by its suffix) or of a hub dataset `org/name[:split]`, each with its place."""
    path = Path(source).expanduser()
    if not path.exists():
        if path.suffix in SUFFIXES or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
            raise InvalidInputError(f"no file {path}; a hub dataset is named org/name or org/name:split")
        yield from _hub_rows(str(source))
        return
    if path.is_dir():
        raise InvalidInputError(f"{path} is a directory: name a file of it ({', '.join(SUFFIXES)})")
    match path.suffix:
        case ".jsonl" | ".ndjson":
            yield from _json_lines(path)
        case ".json":
            yield from _json_rows(path)
        case ".parquet":
            yield from _parquet_rows(path)
        case ".csv" | ".tsv":
            yield from _csv_rows(path, "\t" if path.suffix == ".tsv" else ",")
        case ".txt":
            for number, line in enumerate(_lines(path), 1):
                if line.strip():
                    yield f"{path}:{number}", {"text": line.rstrip("\n")}
        case _:
            raise InvalidInputError(f"{path}: the suffix says the kind of file: {', '.join(SUFFIXES)}")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield f"{path}:{number}", _parsed(line)


def _parsed(line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        return _Unreadable(f"not JSON: {error}")
    wrong = f"a JSON object was expected, got {line.strip():.60}"
    return row if isinstance(row, dict) else _Unreadable(wrong)  # type: ignore[return-value]


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        content: Any = json.loads("".join(_lines(path)))
    except ValueError as error:
        raise InvalidInputError(f"{path} is not JSON: {error}; one object a line is .jsonl") from None
    if isinstance(content, dict):
        lists: list[Any] = [value for value in content.values() if isinstance(value, list)]  # type: ignore[misc]
        content = lists[0] if len(lists) == 1 else None  # {"data": […]}
    if not isinstance(content, list):
        raise InvalidInputError(f"{path}: a list of objects was expected, or an object with one list")
    for number, row in enumerate(content, 1):  # type: ignore[arg-type]
        yield f"{path}, row {number}", row if isinstance(row, dict) else _Unreadable("an object was expected")


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(_lines(path), delimiter=delimiter, restkey="")
    for row in reader:
        place = f"{path}:{reader.line_num}"
        if "" in row or None in row.values():
            yield (
                place,
                _Unreadable(f"{len(reader.fieldnames or ())} fields were expected, as in the first line"),
            )
        else:
            yield place, {key: value for key, value in row.items() if value != ""}


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise InvalidInputError(f"{path}: Parquet files need pyarrow: pip install pyarrow") from None
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", {key: value for key, value in row.items() if value is not None}


def _hub_rows(source: str) -> Iterator[tuple[str, Row]]:
    name, _, split = source.partition(":")
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise InvalidInputError(
            f"there is no file {source}, and hub datasets need the package datasets: pip install datasets"
        ) from None
    try:
        loaded = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:  # the hub's errors are of both kinds
        first = str(error).strip().partition("\n")[0]
        raise InvalidInputError(f"no file and no hub dataset {source!r}: {first}") from None
    for number, row in enumerate(loaded):
        yield f"{source}, row {number}", {key: value for key, value in row.items() if value is not None}


# -- formats ---------------------------------------------------------------------------------------------


def conversation(row: Row) -> ChatExample:
    """A row of any format that one can learn to answer from.

    >>> conversation({"instruction": "Add.", "input": "1 2", "output": "3"}).messages[0]["content"]
    'Add.\\n\\n1 2'
    """
    tools = _decoded(row.get("tools"))
    if "messages" in row:
        return ChatExample(_messages(row["messages"], "messages"), tools=tools)
    if "conversations" in row:
        return ChatExample([*_system(row), *_sharegpt(row["conversations"])], tools=tools)
    if "instruction" in row and "output" in row:
        asked = [*_system(row), {"role": "user", "content": _alpaca(row)}]
        return ChatExample([*asked, {"role": "assistant", "content": _text(row, "output")}], len(asked))
    if "prompt" in row and "completion" in row:
        asked = _turns(row, "prompt", "user")
        return ChatExample([*asked, *_turns(row, "completion", "assistant")], len(asked), tools=tools)
    if "text" in row:
        return ChatExample(text=_text(row, "text"))
    raise _unknown(row, FORMATS)


def pair(row: Row) -> Pair:
    """A row of preferences: chosen and rejected answers, or whole conversations that begin alike."""
    if "chosen" not in row or "rejected" not in row:
        raise _unknown(row, '{"prompt": …, "chosen": …, "rejected": …}')
    question = "prompt" if "prompt" in row else "question" if "question" in row else None
    chosen, rejected = _turns(row, "chosen", "assistant"), _turns(row, "rejected", "assistant")
    if question is not None:
        prompt = [*_system(row), *_turns(row, question, "user")]
        if chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:  # repeated in the answers
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        same = 0
        while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
            same += 1
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        if not prompt:
            raise InvalidInputError(
                "'prompt' is missing, and chosen and rejected do not begin with the same messages"
            )
    if chosen == rejected:
        raise InvalidInputError("'chosen' and 'rejected' are equal: there is nothing to prefer")
    return Pair(prompt, chosen, rejected)


def question(row: Row) -> tuple[list[Message], Row]:
    """A row to answer: its prompt as messages (without the assistant's last), and the row itself."""
    for key in ("prompt", "question", "problem", "query"):
        if key in row:
            return [*_system(row), *_turns(row, key, "user")], row
    if "instruction" in row:
        return [*_system(row), {"role": "user", "content": _alpaca(row)}], row
    if "text" in row:
        return [{"role": "user", "content": _text(row, "text")}], row
    known = conversation(row)
    while known.messages and known.messages[-1].get("role") == "assistant":
        known.messages.pop()
    if not known.messages:
        raise InvalidInputError("there is no message before the assistant's")
    return known.messages, row


def _unknown(row: Row, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"the fields {', '.join(row) or '(none)'} are of no known format; expected:\n{expected}"
    )


def _system(row: Row) -> list[Message]:
    return [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []


def _alpaca(row: Row) -> str:
    given = row.get("input") or ""
    return _text(row, "instruction") + (f"\n\n{given}" if given else "")


def _text(row: Row, key: str) -> str:
    value = row[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # an answer that is a number
    if not isinstance(value, str) or not value.strip():
        raise InvalidInputError(f"{key!r} must be a non-empty string, got {value!r:.60}")
    return value


def _turns(row: Row, key: str, role: str) -> list[Message]:
    """A field that is a string of one role, or a list of messages."""
    value = _decoded(row[key])
    return _messages(value, key) if isinstance(value, list) else [{"role": role, "content": _text(row, key)}]


def _decoded(value: Any) -> Any:
    """A list in a CSV cell is JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[{", "[ {")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _messages(value: Any, key: str) -> list[Message]:
    value = _decoded(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidInputError(f"{key!r} must be a non-empty list of messages, got {value!r:.60}")
    for number, message in enumerate(value):  # type: ignore[arg-type]
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):  # type: ignore[union-attr]
            raise InvalidInputError(f"{key}[{number}] needs a 'role': user, assistant, system or tool")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):  # type: ignore[union-attr]
            raise InvalidInputError(f"{key}[{number}] needs a 'content', got {message.get('content')!r:.60}")  # type: ignore[union-attr]
    return [{k: v for k, v in message.items() if v is not None} for message in value]  # type: ignore[union-attr]


def _sharegpt(value: Any) -> list[Message]:
    value = _decoded(value)
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"'conversations' must be a non-empty list of turns, got {value!r:.60}")
    turns: list[Message] = []
    for number, turn in enumerate(value):  # type: ignore[arg-type]
        who: Any = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None  # type: ignore[union-attr]
        said: Any = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None  # type: ignore[union-attr]
        if who not in _SHAREGPT_ROLES or not isinstance(said, str):
            known = ", ".join(_SHAREGPT_ROLES)
            raise InvalidInputError(
                f"conversations[{number}] needs 'from' (one of {known}) and 'value', got from={who!r:.30}"
            )
        turns.append({"role": _SHAREGPT_ROLES[who], "content": said})
    return turns
