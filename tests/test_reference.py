"""docs/reference.md describes everything public in the code, and nothing else."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import tinkex
from tests import reference
from tests.reference import ANSWERS, BUILT, CLIENTS, GIVEN, PAGE, SETTINGS, WORDS

TEXT = PAGE.read_text()


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_is_what_the_code_says() -> None:
    """`python -m tests.reference` writes it."""
    assert reference.page() == TEXT


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)
def test_every_method_and_parameter_of_a_client_is_there(kind: type) -> None:
    """Looked up by other means than those that wrote the page."""
    rows = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", section(kind.__name__), re.MULTILINE))
    for name, member in inspect.getmembers(kind, callable):
        if name.startswith("_") or (name.endswith("_async") and name.removesuffix("_async") in rows):
            continue
        assert name in rows
        signature = inspect.signature(member)
        told = re.split(r", (?![^(]*\))", rows[name]) if rows[name] else []
        defaults = {p.name: p.default for p in signature.parameters.values() if p.name != "self"}
        wanted = [n if d is inspect.Parameter.empty else f"{n}={d!r}" for n, d in defaults.items()]
        assert [each for each in told if each != "*"] == wanted, name
        assert (
            f"`{str(signature.return_annotation).removeprefix('APIFuture[').removesuffix(']')}"
            in TEXT.replace("\\|", "|")
        )


def test_every_twin_takes_what_its_method_takes() -> None:
    """The page shows one of them: a twin may take `timeout` besides."""
    for kind in CLIENTS:
        for name, twin in inspect.getmembers(kind, callable):
            if name.endswith("_async") and not name.startswith("_"):
                own = dict(inspect.signature(getattr(kind, name.removesuffix("_async"))).parameters)
                its = dict(inspect.signature(twin).parameters)
                assert {n: p.default for n, p in its.items() if n != "timeout"} == {
                    n: p.default for n, p in own.items() if n != "timeout"
                }, f"{kind.__name__}.{name}"
                gives_future = str(inspect.signature(twin).return_annotation).startswith("APIFuture")
                assert ("timeout" in its) is not gives_future, f"{kind.__name__}.{name}"


def test_no_word_is_missing_and_none_is_left_over() -> None:
    functions: list[Any] = [kind.__init__ for kind in reference.CONSTRUCTED]
    functions += [m for kind in CLIENTS for n, m in inspect.getmembers(kind, callable) if n[0] != "_"]
    names = {name for function in functions for name in inspect.signature(function).parameters}
    assert set(WORDS["parameters"]) == names - {"self", "unknown"}
    for kind in (*BUILT, *GIVEN, *SETTINGS):
        assert list(WORDS["fields"][kind.__name__]) == list(reference.fields(kind)), kind.__name__
    assert len(WORDS["fields"]) == len((*BUILT, *GIVEN, *SETTINGS))
    for key in (*WORDS["raises"], *WORDS["what"]):
        owner, _, method = key.partition(".")
        assert hasattr(getattr(tinkex, owner), method), key


def test_every_error_and_every_client_name_is_there() -> None:
    errors = section("Errors")
    for name in tinkex._NAMES["errors"].split():
        kind = getattr(tinkex, name)
        assert not issubclass(kind, tinkex.TinkerError) or f"| `{name}` |" in errors, name
    clients = [name for name, home in tinkex._HOME.items() if home not in ("errors", "types")]
    assert [name for name in clients if not re.search(rf"(`|# ){name}\b", TEXT)] == []


def test_every_variable_that_is_read_is_there() -> None:
    source = (PAGE.parents[1] / "src" / "tinkex" / "config.py").read_text()
    assert set(re.findall(r'\b(?:get|is_on)\("([A-Z_]+)"\)', source)) == set(WORDS["environment"])


def test_every_method_is_described() -> None:
    tables = re.findall(r"^\| method \|.*\n\|-.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    heads = re.findall(r"^\| method \|.*", TEXT, re.MULTILINE)
    assert len(tables) == len(heads) > len(CLIENTS)
    for head, table in zip(heads, tables, strict=True):
        column = head.split("|").index(" what it does ")
        cells = [re.split(r"(?<!\\)\|", row)[column].strip() for row in table.splitlines()]
        assert all(cells), table


def test_every_raised_name_is_an_error() -> None:
    named = {name for text in WORDS["raises"].values() for name in re.findall(r"`(\w+Error)`", text)}
    assert named <= {*tinkex._NAMES["errors"].split(), "CancelledError"}


def test_what_has_methods_is_told_of() -> None:
    for kind in ANSWERS:
        assert section(kind.__name__).count("\n| `") == len(reference.methods(kind)) > 3
