"""What users of the official SDK do wrong comes back as a typed error, at once, and later calls work."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.conftest import AT_ONCE, Served

CONTEXT = "Prompt length plus max_tokens exceeds the model's context window: 250 + 10 > 256"
# step of the script: the error's type, a part of its message
SAMPLES = {
    "too long": ("BadRequestError", CONTEXT),
    "no tokens": ("UnprocessableEntityError", "max_tokens must be at least 1"),
    "no such id": ("RequestFailedError", "100000"),
    "no prompt": ("RequestFailedError", "empty"),
    "no temperature": ("UnprocessableEntityError", "temperature"),
    "no eyes": ("BadRequestError", "ImageChunk"),
}
UNKNOWN = {
    "no such model": ("NotFoundError", "no/such-model"),
    "no such model to sample": ("NotFoundError", "no/such-model"),
    "no rank": ("UnprocessableEntityError", "rank must be positive"),
    "nothing to train": ("AssertionError", "At least one of"),
    "no optimizer": ("UnprocessableEntityError", "dimuon"),
    "no such state": ("NotFoundError", "does not exist"),
    "no such sampler weights": ("NotFoundError", "does not exist"),
    "no such run": ("NotFoundError", "does not exist"),
    "no such session": ("NotFoundError", "does not exist"),
    "no such checkpoint": ("NotFoundError", "does not exist"),
    "bad key": ("TinkerError", "tml-"),
}
PASSES = {
    "no such loss": "'nonsense'",
    "no targets": "target_tokens",
    "short targets": "[2]",
    "no such target": "100000",
    "not a number": "nan",
    "no advantages": "importance_sampling",
    "bad chunk of two": "[1]",
    "too long a sequence": "300",
}


@pytest.fixture(scope="module")
def facts(served: Served) -> dict[str, dict[str, Any]]:
    return served.run("tinker-0.36.0", "failures.py")


@pytest.mark.parametrize("step", [*SAMPLES, *UNKNOWN])
def test_wrong_requests(facts: dict[str, dict[str, Any]], step: str) -> None:
    kind, part = {**SAMPLES, **UNKNOWN}[step]
    error = facts[step]["error"]
    assert error["type"] == kind, error
    assert part in error["message"]
    assert error["seconds"] < AT_ONCE
    if kind == "RequestFailedError":
        assert error["category"] == "user"


def test_a_prompt_of_the_whole_context_is_scored(facts: dict[str, dict[str, Any]]) -> None:
    assert facts["whole context"]["length"] == 256


@pytest.mark.parametrize("step", PASSES)
def test_a_wrong_pass_fails_with_its_step_and_changes_nothing(
    facts: dict[str, dict[str, Any]], step: str
) -> None:
    found = facts[step]
    assert (found["error"]["type"], found["error"]["category"]) == ("RequestFailedError", "user")
    assert PASSES[step] in found["error"]["message"]
    assert (found["stepped"]["type"], found["stepped"]["category"]) == ("RequestFailedError", "user")
    assert "no step was taken" in found["stepped"]["message"]
    assert found["same"]


def test_a_run_goes_on_after_all_that(facts: dict[str, dict[str, Any]]) -> None:
    assert facts["went on"]["after"]["loss"] < facts["went on"]["before"]["loss"]


def test_wrong_saves(facts: dict[str, dict[str, Any]]) -> None:
    for name, part in (("bad/name", "bad/name"), ("../up", "../up"), ("ok", "3600")):
        error = facts[f"saved {name}"]["error"]
        assert part in error["message"]
        assert (error["status"] or 0) // 100 == 4 or error["category"] == "user"
    resumed = facts["resumed from a sampler"]["error"]
    assert "without optimizer state" in resumed["message"]
    assert (resumed["category"], resumed["seconds"] < AT_ONCE) == ("user", True)


def test_a_refused_loss_says_so(facts: dict[str, dict[str, Any]]) -> None:
    error = facts["refused"]["error"]
    assert "stable_reinforce" in error["message"]
    assert (error["type"], error["category"]) == ("RequestFailedError", "user")


def test_a_step_after_a_refused_loss_fails_at_once(facts: dict[str, dict[str, Any]]) -> None:
    error = facts["after a refusal"]["error"]
    assert (error["type"], error["category"]) == ("RequestFailedError", "user")
    assert "no step was taken" in error["message"]
