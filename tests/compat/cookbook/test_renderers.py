"""Every renderer of the cookbook on its family: it renders, trains and samples through the official SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.conftest import serving
from tests.compat.cookbook.kitchen import OFFICIAL, Kitchen
from tests.compat.cookbook.released import MODELS, NOT_TRIED, ROWS, released
from tests.compat.environments import interpreter

PROGRAM = Path(__file__).parent / "programs" / "renderers.py"
CI = ("Qwen/Qwen3.5-4B:qwen3_5", "openai/gpt-oss-20b:gpt_oss_no_sysprompt")
Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What one run of the program says of each row that this session tests, on one server."""
    python, collected = interpreter("cookbook"), request.session.items
    tested = [
        item for item in collected if isinstance(item, pytest.Function) and item.module is request.module
    ]
    rows = [item.callspec.params["row"] for item in tested if hasattr(item, "callspec")]
    names = {row.split(":")[0] for row in rows} or {next(iter(MODELS))}
    hub, home = released(), tmp_path_factory.mktemp("released")
    with serving({name: hub / name for name in sorted(names)}, home / "home") as (url, _):
        run = Kitchen(OFFICIAL, python, hub, home, url).run(home, str(PROGRAM), *rows)
    said = [json.loads(line) for line in run.said.splitlines() if line.startswith('{"row"')]
    return {sheet.pop("row"): sheet for sheet in said}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.ci] if row in CI else []) for row in ROWS]
)
def test_learns_a_conversation_and_answers(facts: Facts, row: str) -> None:
    told = facts[row]
    assert "error" not in told, told["error"]
    assert told["losses"][-1] < 0.1 * told["losses"][0]
    assert told["gap"] < 1e-3  # the sampler's logprobs are the trainer's
    assert (told["stopped"], told["end"], told["answer"]) == ("stop", "stop_sequence", "Rome"), told


def test_every_renderer_is_tried_or_has_its_reason(facts: Facts) -> None:
    others = set(facts["every renderer"]["names"]) - {row.split(":")[1] for row in ROWS}
    assert {name for name in others if not name.startswith(tuple(NOT_TRIED))} == set()
    assert {kind for kind in NOT_TRIED if not any(name.startswith(kind) for name in others)} == set()
