"""Every format and kind of file that training data comes in, and what is said of bad rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import InvalidInputError
from tinkex.recipes.conversations import ChatExample, conversation, load, pair, question

USER, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("row", "messages", "read_only"),
    [
        ({"messages": [USER, SAID]}, [USER, SAID], 0),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
            [USER, SAID],
            0,
        ),
        ({"system": "Be kind.", "conversations": [{"role": "user", "content": "Hi"}]}, [SYSTEM, USER], 0),
        ({"instruction": "Hi", "output": "Hello"}, [USER, SAID], 1),
        (
            {"instruction": "Hi", "input": "you", "output": "Hello"},
            [{"role": "user", "content": "Hi\n\nyou"}, SAID],
            1,
        ),
        ({"prompt": "Hi", "completion": "Hello"}, [USER, SAID], 1),
        ({"prompt": [SYSTEM, USER], "completion": [SAID]}, [SYSTEM, USER, SAID], 2),
        ({"messages": json.dumps([USER, SAID])}, [USER, SAID], 0),
    ],
)
def test_conversations_of_every_format(row: dict[str, Any], messages: Any, read_only: int) -> None:
    assert conversation(row) == ChatExample(messages, read_only)


def test_text_and_tools() -> None:
    assert conversation({"text": "Once"}) == ChatExample(text="Once")
    assert conversation({"messages": [USER, SAID], "tools": [{"name": "f"}]}).tools == [{"name": "f"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"question": "Hi", "chosen": "Hello", "rejected": "No"},
        {"chosen": [USER, SAID], "rejected": [USER, {"role": "assistant", "content": "No"}]},
        {
            "prompt": [USER],
            "chosen": [USER, SAID],
            "rejected": [USER, {"role": "assistant", "content": "No"}],
        },
    ],
)
def test_pairs_of_every_format(row: dict[str, Any]) -> None:
    found = pair(row)
    assert found.prompt == [USER]
    assert found.chosen == [SAID]
    assert found.rejected == [{"role": "assistant", "content": "No"}]


def test_questions_leave_the_answer_out() -> None:
    row = {"question": "Hi", "answer": "42"}
    assert question(row) == ([USER], row)
    assert question({"messages": [USER, SAID]})[0] == [USER]


BAD = [
    ({"prompts": "x"}, "the fields prompts are of no known format; expected"),
    ({"messages": []}, "'messages' must be a non-empty list"),
    ({"messages": [{"content": "x"}]}, "messages[0] needs a 'role'"),
    ({"messages": [{"role": "user"}]}, "messages[0] needs a 'content', got None"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "conversations[0] needs 'from' (one of human"),
    ({"prompt": "x", "completion": ""}, "'completion' must be a non-empty string"),
    ({"text": 7.5j}, "'text' must be"),
]


@pytest.mark.parametrize(("row", "told"), BAD)
def test_a_bad_row_says_its_field_and_what_was_expected(row: Any, told: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        conversation(row)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"chosen": "a", "rejected": "b"}, "'prompt' is missing"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "are equal"),
        ({"prompt": "p", "chosen": "a"}, "expected"),
    ],
)
def test_a_bad_pair_says_what_is_wrong(row: Any, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        pair(row)


ROWS = [{"prompt": f"p{n}", "completion": f"c{n}"} for n in range(3)]


def write(path: Path) -> Path:
    if path.suffix in (".jsonl", ".ndjson"):
        path.write_text("\ufeff" + "\n".join(map(json.dumps, ROWS)) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps({"version": 1, "data": ROWS}))
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json", "parquet", "csv", "tsv"])
def test_every_kind_of_file_is_read(suffix: str, tmp_path: Path) -> None:
    read = load(write(tmp_path / f"data.{suffix}"), conversation)
    assert [item.messages[0]["content"] for item in read.items] == ["p0", "p1", "p2"]
    assert [item.messages[1]["content"] for item in read.items] == ["c0", "c1", "c2"]


def test_a_text_file_has_an_example_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert [item.text for item in load(tmp_path / "a.txt", conversation).items] == ["one", "two"]


def test_bad_rows_are_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "good"}\n{"text": ""}\n{"broken\n[1]\n')
    with pytest.raises(InvalidInputError, match=r"data\.jsonl:2: 'text' must be a non-empty .*--skip-bad"):
        load(path, conversation)
    read = load(path, conversation, skip_bad=True)
    assert (len(read.items), read.bad) == (1, 3)
    assert [reason.partition(": ")[0] for reason in read.reasons] == [f"{path}:{n}" for n in (2, 3, 4)]
    assert "not JSON" in read.reasons[1]
    assert "a JSON object was expected, got [1]" in read.reasons[2]
    longer = read.map(lambda item: item.text, skip_bad=True)
    assert (longer.items, longer.bad, longer.digest) == (["good"], 3, read.digest)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.jsonl", None, "no file"),
        ("data.xml", "x", "the suffix says the kind of file: .jsonl"),
        ("data.jsonl", "", "has no rows"),
        ("data.json", "{", "is not JSON"),
        ("data.json", '{"a": 1}', "a list of objects was expected"),
        ("data.csv", "a,b\n1,2,3\n", "2 fields were expected"),
        ("data.jsonl", b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    name: str, content: str | bytes | None, told: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InvalidInputError, match=told):
        load(tmp_path / name, conversation)


@pytest.mark.slow
def test_a_hub_dataset_is_read_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets reads a directory of that name as it would read the hub's."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "org" / "name").mkdir(parents=True)
    write(tmp_path / "org" / "name" / "train.jsonl")
    monkeypatch.setattr(Path, "exists", lambda self: False)  # the directory stands for the hub
    read = load("org/name", conversation)
    assert [item.messages[1]["content"] for item in read.items] == ["c0", "c1", "c2"]
