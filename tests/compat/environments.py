"""Where the clients of other people live: an environment for each, made by `make compat-env`.

The test suite never makes them: whoever has none skips what needs one, and is told how to get it. The newest
SDK and the cookbook share one, since the cookbook needs that SDK.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIRECTORIES = {
    "tinker-0.36.0": ".venv-cookbook",
    "tinker-0.26.0": ".venv-tinker-0.26.0",
    "tinker-0.13.1": ".venv-tinker-0.13.1",
    "tinker-0.4.1": ".venv-tinker-0.4.1",
    "openai": ".venv-openai",
    "cookbook": ".venv-cookbook",
    "cookbook-tinkex": ".venv-cookbook-tinkex",
}


def interpreter(client: str) -> Path:
    """The Python that has `client` installed; the test is skipped where there is none."""
    directory = ROOT / DIRECTORIES[client]
    if not (directory / ".ready").exists():
        target = "cookbook-env" if client.startswith("cookbook") else "compat-env"
        pytest.skip(f"no environment with {client} here: `make {target}` creates {directory.name}")
    return directory / "bin" / "python"
