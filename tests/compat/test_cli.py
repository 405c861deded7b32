"""The official command line and ours side by side on one server; docs/cli.md says how they compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.compat.cli_table import CASES, Case, Outcome, compare, placed, table
from tests.compat.clients.report import MODEL
from tests.compat.conftest import CLIENTS, PATIENCE, Served
from tests.compat.environments import ROOT, interpreter

PAGE = ROOT / "docs" / "cli.md"
TRAIN = """
import sys, tinkex
with tinkex.ServiceClient(user_metadata={"team": "red"}) as service:
    for _ in range(3):
        run = service.create_lora_training_client(sys.argv[1], rank=2, user_metadata={"note": "n"})
        data = [tinkex.Datum(tinkex.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
        run.forward_backward(data, "cross_entropy")
        run.optim_step(tinkex.AdamParams())
        run.save_state("final").result(60)
        run.save_weights_for_sampler("final").result(60)
        run.save_weights_external("final").result(60)
        print(run.model_id)
"""


@dataclass(frozen=True)
class Person:
    """Someone at a command line: official or ours."""

    python: Path
    program: str
    env: dict[str, str]
    names: dict[str, str]

    def answers(self, cases: list[Case]) -> dict[str, dict[str, Any]]:
        """What was answered, by case; under "" all commands and their options."""
        requests: list[dict[str, Any]] = [
            {"arguments": case.arguments.format(**self.names).split(), "stdin": case.stdin, "env": case.env}
            for case in cases
        ]
        command = [str(self.python), str(CLIENTS / "command_lines.py"), self.program]
        said = _run(command, self.env, json.dumps([*requests, {"walk": True}]))
        return dict(zip([*(c.title for c in cases), ""], map(json.loads, said.splitlines()), strict=True))


@pytest.fixture(scope="module")
def sides(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """What each side answered."""
    env = served.environment(f"tml-{uuid.uuid4().hex}") | {"COLUMNS": "100"}
    programs = {
        "official": (interpreter("tinker-0.36.0"), "tinker"),
        "ours": (Path(sys.executable), "tinkex"),
    }
    trained = _run([sys.executable, "-c", TRAIN, MODEL], env | {"PYTHONPATH": str(ROOT / "src")})
    shared, *own = trained.split()
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = {"since": now - timedelta(hours=1), "until": now + timedelta(hours=2)}
    people = {}
    for (side, program), run in zip(programs.items(), own, strict=True):
        home = tmp_path_factory.mktemp(side)
        names = {"run": shared, "own": run, "session": shared.partition(":")[0], "out": str(home / "out")}
        names |= {name: at.isoformat() for name, at in hours.items()}
        people[side] = Person(*program, env | {"HOME": str(home)}, names)
    looks = {
        side: person.answers([case for case in CASES if not case.changes]) for side, person in people.items()
    }
    return {
        side: looks[side] | person.answers([case for case in CASES if case.changes])
        for side, person in people.items()
    }


def _run(command: list[str], env: dict[str, str], stdin: str = "") -> str:
    done = subprocess.run(command, env=env, input=stdin, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def outcomes(sides: dict[str, dict[str, dict[str, Any]]]) -> list[Outcome]:
    return [compare(case, sides["official"][case.title], sides["ours"][case.title]) for case in CASES]


def test_every_difference_is_explained_and_nothing_else(outcomes: list[Outcome]) -> None:
    wrong = [
        f"{case.title}: {outcome}"
        for case, outcome in zip(CASES, outcomes, strict=True)
        if outcome.same == bool(case.why)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_says_how_they_compare(outcomes: list[Outcome]) -> None:
    """UPDATE_DOCS=1 writes it anew."""
    page = PAGE.read_text()
    fresh = placed(page, table(list(zip(CASES, outcomes, strict=True))))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(fresh)
        return
    assert page == fresh, "docs/cli.md is stale: UPDATE_DOCS=1 pytest tests/compat/test_cli.py"


def test_every_official_command_and_option_is_there(sides: dict[str, dict[str, dict[str, Any]]]) -> None:
    official, ours = sides["official"][""], sides["ours"][""]
    assert len(official) > 20
    missing = {
        command: [option for option in options if option not in ours.get(command, [])]
        for command, options in official.items()
    }
    assert {command: options for command, options in missing.items() if options or command not in ours} == {}


def test_every_official_command_is_compared(sides: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Commands, not groups of them: those that no other begins with."""
    official = sides["official"][""]
    leaves = [name for name in official if name and not any(o.startswith(f"{name} ") for o in official)]
    assert len(leaves) > 15
    lines = [f" {case.arguments} " for case in CASES]
    assert [leaf for leaf in leaves if not any(f" {leaf} " in line for line in lines)] == []


def test_errors_of_ours_are_one_line(sides: dict[str, dict[str, dict[str, Any]]]) -> None:
    for case in CASES:
        ours = sides["ours"][case.title]
        assert "Traceback" not in ours["stderr"], case.title
        if ours["code"] == 1:
            assert ours["stderr"].strip().splitlines()[-1].startswith("Error: "), case.title
            assert ours["stderr"].count("Error: ") == 1, case.title
