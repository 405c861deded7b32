"""A client that is not installed: tests that need it are skipped, but not where make has promised it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat import environments


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.delenv("TINKEX_TEST_CLIENTS", raising=False)
    return tmp_path


def test_whoever_has_none_is_told_how_to_get_it() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"`make compat-env` creates \.venv-openai"):
        environments.interpreter("openai")


@pytest.mark.parametrize("promised", ["all", "openai", "cookbook openai"])
def test_one_that_was_promised_is_missed(monkeypatch: pytest.MonkeyPatch, promised: str) -> None:
    monkeypatch.setenv("TINKEX_TEST_CLIENTS", promised)
    with pytest.raises(pytest.fail.Exception, match="no environment with openai"):
        environments.interpreter("openai")


def test_another_that_was_promised_is_not_missed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_TEST_CLIENTS", "tinker-0.36.0")
    with pytest.raises(pytest.skip.Exception):
        environments.interpreter("openai")


def test_one_half_made_does_not_count(nothing_installed: Path) -> None:
    python = nothing_installed / ".venv-openai" / "bin" / "python"
    python.parent.mkdir(parents=True)
    with pytest.raises(pytest.skip.Exception):
        environments.interpreter("openai")
    (nothing_installed / ".venv-openai" / ".ready").touch()
    assert environments.interpreter("openai") == python
