"""The official command line and ours, command by command: what to compare, and why they differ where they do.

Every case is run by both sides on one server as one tenant: first what only looks, at {run} say, then what
changes a run of each side's own, {own}. docs/cli.md holds the outcome, which test_cli.py checks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

Match = Literal["values", "fields", "text", "columns"]
OFFICIAL_HAS_NO_JSON = "official ignores the format here; ours prints an object"
MORE = "ours adds status and status_reason"
FACTS = "ours adds what the model is and takes"
PARTIAL = "something was not deleted: ours exits with 1, official with 0"


@dataclass(frozen=True)
class Case:
    """One command line. `why` explains a difference, and only that."""

    title: str
    arguments: str
    why: str = ""
    match: Match = "fields"
    stdin: str = ""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        return "{own}" in self.arguments


NO_KEY = {"TINKER_API_KEY": ""}
LONG_AGO = "2026-01-01T00:00:00Z 2026-01-02T00:00:00Z"
CASES = [
    Case("no key", "-f json run list", "on its own machine our client needs no key", env=NO_KEY),
    Case("auth status", "-f json auth status", OFFICIAL_HAS_NO_JSON),
    Case("auth status, no key", "auth status", "on its own machine our client needs no key", env=NO_KEY),
    Case("auth whoami", "-f json auth whoami", match="values"),
    Case("auth logout, nothing stored", "auth logout", env=NO_KEY),
    Case("auth login", "auth login", stdin="tml-pasted\n", env=NO_KEY),
    Case("auth login, again", "auth login", stdin="tml-pasted\n", env=NO_KEY),
    Case("auth status, logged in", "auth status", env=NO_KEY),
    Case("auth logout", "auth logout", env=NO_KEY),
    Case("billing usage", "-f json billing usage {since} {until}"),
    Case("billing usage --csv -", "billing usage {since} {until} --csv -", match="columns"),
    Case(
        "billing usage --sessions-csv -",
        "-f json billing usage {since} {until} --sessions-csv -",
        match="columns",
    ),
    Case(
        "billing usage --csv -, no usage",
        f"billing usage {LONG_AGO} --csv -",
        "official writes an empty line, ours the header",
        match="columns",
    ),
    Case("billing usage, a bad date", "billing usage soon later"),
    Case("billing checkpoint-storage", "-f json billing checkpoint-storage", match="values"),
    Case("billing checkpoint-storage --csv -", "billing checkpoint-storage --csv -", match="text"),
    Case("checkpoint list", "-f json checkpoint list", match="values"),
    Case("checkpoint list --limit 1", "-f json checkpoint list --limit 1", match="values"),
    Case("checkpoint list --run-id", "-f json checkpoint list --run-id {run}", match="values"),
    Case("checkpoint list --run-id, no such run", "-f json checkpoint list --run-id nope"),
    Case("checkpoint info", "-f json checkpoint info tinker://{run}/weights/final", match="values"),
    Case("checkpoint info, no path", "checkpoint info nope"),
    Case("checkpoint info, no such checkpoint", "checkpoint info tinker://{run}/weights/none"),
    Case("checkpoint publish", "-f json checkpoint publish tinker://{own}/weights/final"),
    Case("… then info", "-f json checkpoint info tinker://{own}/weights/final"),
    Case("checkpoint unpublish", "-f json checkpoint unpublish tinker://{own}/weights/final"),
    Case("checkpoint set-ttl --ttl", "-f json checkpoint set-ttl tinker://{own}/weights/final --ttl 7200"),
    Case("checkpoint set-ttl --remove", "-f json checkpoint set-ttl tinker://{own}/weights/final --remove"),
    Case("checkpoint set-ttl, too short", "checkpoint set-ttl tinker://{own}/weights/final --ttl 5"),
    Case("checkpoint set-ttl, no option", "checkpoint set-ttl tinker://{own}/weights/final"),
    Case("checkpoint download", "-f json checkpoint download tinker://{own}/weights/final -o {out}"),
    Case("checkpoint download, again", "checkpoint download tinker://{own}/weights/final -o {out}"),
    Case(
        "checkpoint download --force",
        "-f json checkpoint download tinker://{own}/weights/final -o {out} --force",
    ),
    Case(
        "checkpoint download, exported",
        "-f json checkpoint download tinker://{own}/external_weights/final -o {out}",
    ),
    Case(
        "checkpoint download, of a sampler",
        "-f json checkpoint download tinker://{own}/sampler_weights/final -o {out}",
        "official refuses; ours fetches the archive that our servers offer",
    ),
    Case("checkpoint delete, refused", "checkpoint delete tinker://{own}/sampler_weights/final", stdin="n\n"),
    Case("checkpoint delete -y", "-f json checkpoint delete tinker://{own}/sampler_weights/final -y"),
    Case("… again, gone", "-f json checkpoint delete tinker://{own}/sampler_weights/final -y", PARTIAL),
    Case(
        "checkpoint delete, nothing matches",
        "-f json checkpoint delete --run-id {own} --before 2020-01-01 -y",
        "official prints a sentence, ours an object",
    ),
    Case("checkpoint delete --run-id --type", "-f json checkpoint delete --run-id {own} --type weights -y"),
    Case("checkpoint delete, a bad type", "checkpoint delete --run-id {own} --type foo -y"),
    Case("checkpoint delete, a bad date", "checkpoint delete --run-id {own} --before soon -y"),
    Case("checkpoint delete, of nothing", "checkpoint delete"),
    Case("checkpoint delete, both ways", "checkpoint delete tinker://{own}/weights/final --run-id {own} -y"),
    Case("checkpoint push-hf, no token", "checkpoint push-hf tinker://{run}/weights/final -r a/b"),
    Case("model list", "-f json model list", FACTS, match="values"),
    Case("model list SUBSTRING", "-f json model list BASE", FACTS, match="values"),
    Case("model list, none matches", "-f json model list zzz"),
    Case("run list", "-f json run list", MORE, match="values"),
    Case("run list --limit 1", "-f json run list --limit 1", MORE, match="values"),
    Case("run list -c", "-f json run list -c id,owner", MORE, match="values"),
    Case("run list -c, no such column", "run list -c id,bogus"),
    Case("run info", "-f json run info {run}", MORE, match="values"),
    Case("run info, no such run", "run info nope"),
    Case("session export-trace", "-f json session export-trace {session} -o {out}.trace"),
    Case("session export-trace --url-only", "-f json session export-trace {session} --url-only"),
    Case("session export-trace, no such session", "session export-trace nope"),
    Case("version", "-f json version", OFFICIAL_HAS_NO_JSON),
    Case("no command", ""),
    Case("a group without a command", "run"),
    Case("no such command", "rum list"),
    Case("no such option", "run list --limt 3"),
]

Side = dict[str, Any]  # code, stdout, stderr


@dataclass(frozen=True)
class Outcome:
    """How the two compare."""

    codes: str
    printed: str
    same: bool

    def row(self, case: Case) -> str:
        return f"| `{case.title}` | {self.codes} | {self.printed} | {case.why} |"


def compare(case: Case, official: Side, ours: Side) -> Outcome:
    """Exit codes, and what is on stdout: as text, or as JSON by its values or by its fields."""
    same_code = official["code"] == ours["code"]
    codes = str(ours["code"]) if same_code else f"{official['code']}, ours {ours['code']}"
    theirs, mine = (_json(side["stdout"]) for side in (official, ours))
    if mine is None or theirs is None:
        if (mine is None) != (theirs is None) and "json" in case.arguments:
            return Outcome(
                codes, "only ours is JSON" if theirs is None else "only the official is JSON", False
            )
        if case.match == "text":
            equal = official["stdout"] == ours["stdout"]
            return Outcome(codes, "the same text" if equal else "another text", same_code and equal)
        if case.match == "columns":
            theirs, mine = (side["stdout"].split("\n")[0].split(",") for side in (official, ours))
            equal = [name for name in mine if name in theirs] == theirs != ["\r"]
            return Outcome(codes, "all its columns" if equal else "other columns", same_code and equal)
        return Outcome(codes, "", same_code)
    if case.match == "values":
        if theirs == mine:
            return Outcome(codes, "the same values", same_code)
        return Outcome(codes, "its values and more" if covers(mine, theirs) else "other values", False)
    equal = shape(theirs) == shape(mine)
    return Outcome(codes, "the same fields" if equal else "other fields", same_code and equal)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def covers(mine: Any, theirs: Any) -> bool:
    """Whether a JSON value has every field of another, with the same values."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return all(name in mine and covers(mine[name], value) for name, value in theirs.items())
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(covers, mine, theirs))
    return mine == theirs


def shape(value: Any) -> Any:
    """A JSON value with its fields, and kinds in place of what they hold."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    return [shape(one) for one in value[:1]] if isinstance(value, list) else type(value).__name__


BEGIN, END = "<!-- compared by tests/compat/test_cli.py -->", "<!-- end -->"


def table(outcomes: list[tuple[Case, Outcome]]) -> str:
    head = "| command | exit code | stdout | where they differ |\n|---|---|---|---|"
    return "\n".join([head, *(outcome.row(case) for case, outcome in outcomes)])


def placed(page: str, text: str) -> str:
    """`page` with `text` between the two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"
