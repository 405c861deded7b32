"""Tables of what works with what, from test results: a short one in README.md, all rows in docs/compat.md.

    make compat-sdk ARGS=--junitxml=compat.xml && make compat-cookbook ARGS=--junitxml=cookbook.xml
    python -m tests.compat.table compat.xml cookbook.xml      # records results.json and writes both tables

Without files it writes the tables from results.json. A test fails if a page differs from it. Skipped tests
are not counted; a row without a passed test says "not run".
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from tests.compat.environments import OLDER as OLDER_SDKS

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
BEGIN = "<!-- table: from tests/compat/results.json by `python -m tests.compat.table` -->"
END = "<!-- end of table -->"
SERVED, OLDER = "unmodified, on `tinkex serve`", r"compat\.test_older::.*"
COOKBOOK = "`tinker-cookbook` 0.5.8"

Row = tuple[str, str, str]  # what it is, how it is used, and which tests show it (a pattern of test names)

SDKS: list[Row] = [
    ("official `tinker` SDK 0.36.0", SERVED,
     r"compat\.test_(clones|failures|limits|losses|loss_graphs|rest|sampling|training|traps)::"),
    *((f"official `tinker` SDK {v}", SERVED, OLDER + re.escape(v)) for v in OLDER_SDKS),
    ("official `tinker` command line 0.36.0", "side by side with ours, on one server", r"compat\.test_cli::"),
]  # fmt: skip
COOKBOOKS: list[Row] = [
    (f"{COOKBOOK}: recipes, export, evaluation", SERVED,
     r"cookbook\.test_(supervised|reinforcement|preference|export|merge|models|renderers)::|test_(decisions|inspect)::(?!.*our_sdk)"),
    (f"{COOKBOOK}: tutorials", SERVED, r"cookbook\.test_tutorials::"),
    (f"{COOKBOOK}: its integration tests", SERVED, r"cookbook\.test_theirs::test_recipes"),
    (f"{COOKBOOK} on our SDK", "`python -m tinkex.compat`, no official SDK",
     r"cookbook\.test_ours::|cookbook\..*on_our_sdk"),
    (f"{COOKBOOK}: its unit tests", "the same pass on both SDKs", r"compat\.test_alias::"),
]  # fmt: skip
TEXT_PROGRAMS: list[Row] = [
    ("`openai` Python client", "`/v1` of `tinkex serve`, streaming too", r"compat\.test_openai::"),
    *((name, how, rf"compat\.test_programs::test_{test}$") for name, how, test in [
        ("`openai` 3 and 2, `anthropic` 2", "tools, schemas, streams, `/v1/responses`, `/v1/messages`",
         r"(openai\[.*\]|fields\[.*\]|anthropic)"),
        ("`litellm`", "OpenAI's and Anthropic's formats, tools, streams", "litellm"),
        ("`langchain-openai`", "tools, structured output, streams", "langchain"),
        ("`instructor`", "tools and JSON schema", "instructor"),
        ("`inspect-ai`", "an evaluation with a tool, chat and responses API", "inspect"),
        ("`openai-agents`", "an agent with a tool, responses API, streamed too", "openai_agents"),
        ("`pydantic-ai`", "typed output, chat and responses API", "pydantic_ai"),
        ("`smolagents`", "a model that must call a tool", "smolagents"),
        ("`lm-eval`", "loglikelihoods as `--model hf` has them, chat", "lm_eval"),
        ("`verifiers` 0.4", "its training client rolls out, a run learns", "verifiers"),
    ]),
]  # fmt: skip
TINKER_PROGRAMS: list[Row] = [
    *((name, how, rf"compat\.test_tinker_programs::test_{test}$") for name, how, test in [
        ("`retrain`", "GRPO from its command line, the reward rises", "retrain"),
        ("`continualcode`", "its session learns from denied attempts", "continualcode"),
        ("`llmcomp`", "fine-tunes, then asks the trained model through `/v1`", "llmcomp"),
        ("`openpipe-art[tinker]`", "its native backend trains, and goes on after a restart", "openpipe_art"),
        ("`trinity-rft[tinker]` 0.5", "GRPO from its command line, in a Ray of its own", "trinity_rft"),
    ]),
]  # fmt: skip
OTHERS: list[Row] = [
    ("`wandb`, `trackio`", "metrics of recipes, and of all runs of a server; offline",
     r"compat\.test_(trackers|mirrors)::"),
    ("PEFT, transformers", "load our adapters, merged models", r"test_checkpoint::test_peft|test_export::"),
]  # fmt: skip
ROWS = [*SDKS, *COOKBOOKS, *TEXT_PROGRAMS, *TINKER_PROGRAMS, *OTHERS]


def _any(rows: list[Row]) -> str:
    return "|".join(f"(?:{pattern})" for _, _, pattern in rows)


SHORT: list[Row] = [
    (f"official `tinker` SDK 0.36.0 to 0.4.1 ({len(OLDER_SDKS) + 1} versions), its command line", SERVED,
     _any(SDKS)),
    (f"{COOKBOOK}: recipes, tutorials, export, evaluation", f"{SERVED}, and on our SDK", _any(COOKBOOKS)),
    ("clients of OpenAI's and Anthropic's APIs, agents, evaluations",
     "on `/v1` and `/v1/messages`: tools, schemas, streams", _any(TEXT_PROGRAMS)),
    ("`retrain`, `continualcode`, `llmcomp`, `openpipe-art`, `trinity-rft`", SERVED, _any(TINKER_PROGRAMS)),
    *OTHERS,
]  # fmt: skip
PAGES = {ROOT / "README.md": SHORT, ROOT / "docs" / "compat.md": ROWS}


def record(files: list[str]) -> dict[str, str]:
    """The outcome of every test in JUnit files, kept from one run to the next."""
    outcomes = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            kinds = {child.tag for child in case}
            if "skipped" not in kinds:
                outcomes[name] = "failed" if kinds & {"failure", "error"} else "passed"
    RESULTS.write_text(json.dumps(dict(sorted(outcomes.items())), indent=1) + "\n")
    return outcomes


def table(rows: Iterable[Row], outcomes: dict[str, str]) -> str:
    lines = ["| what | how | tests that pass |", "|---|---|---|"]
    for what, how, pattern in rows:
        found = [outcome for name, outcome in outcomes.items() if re.search(pattern, name)]
        passed = found.count("passed")
        count = f"{passed} of {len(found)}" if passed < len(found) else str(passed) if found else "not run"
        lines.append(f"| {what} | {how} | {count} |")
    return "\n".join(lines)


def placed(text: str, rows: Iterable[Row], outcomes: dict[str, str]) -> str:
    """A page with the table between its two marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table(rows, outcomes)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    outcomes = record(sys.argv[1:])
    for page, rows in PAGES.items():
        page.write_text(placed(page.read_text(), rows, outcomes))


if __name__ == "__main__":
    main()
