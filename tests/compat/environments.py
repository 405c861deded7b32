"""Where the clients of other people live: an environment for each, made by `make compat-env`.

The test suite never makes them: whoever has none skips what needs one, and is told how to get it. Where make
has just made them, it names them in TINKEX_TEST_CLIENTS (or `all`), and one that is missing is a failure. The
newest SDK and the cookbook share one, since the cookbook needs that SDK.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDER = ("0.28.1", "0.26.0", "0.24.1", "0.22.7", "0.18.2", "0.16.1", "0.13.1", "0.4.1")
DIRECTORIES = {
    "tinker-0.36.0": ".venv-cookbook",
    **{f"tinker-{version}": f".venv-tinker-{version}" for version in OLDER},
    "openai": ".venv-openai",
    # Programs for OpenAI's and Anthropic's APIs, by what their dependencies agree on.
    "agents": ".venv-agents",
    "inspect": ".venv-inspect",
    "lm-eval": ".venv-lm-eval",
    "trackers": ".venv-trackers",
    "verifiers": ".venv-verifiers",
    # Programs for the Tinker API.
    "retrain": ".venv-retrain",
    "art": ".venv-art",
    "trinity": ".venv-trinity",
    "cookbook": ".venv-cookbook",
    "cookbook-tinkex": ".venv-cookbook-tinkex",
}


def interpreter(client: str) -> Path:
    """The Python that has `client` installed; the test is skipped, or fails, where there is none."""
    directory = ROOT / DIRECTORIES[client]
    if not (directory / ".ready").exists():
        target = "cookbook-env" if client.startswith("cookbook") else "compat-env"
        missing = f"no environment with {client} here: `make {target}` creates {directory.name}"
        if {client, "all"} & set(os.environ.get("TINKEX_TEST_CLIENTS", "").split()):
            pytest.fail(missing)
        pytest.skip(missing)
    return directory / "bin" / "python"
