"""`tinkex auth`: a key is checked before it is stored, in the file that the official command line reads."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import TINKER, Place
from tests.server.conftest import Running
from tests.service.harness import config
from tinkex.server.api_keys import hash_key
from tinkex.server.serve import ServerConfig
from tinkex.service.ledger import Ledger

KEY = "tml-a-real-key"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A server that knows one key, and a person who has not logged in."""
    for name in TINKER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "home").mkdir()
    ledger = Ledger(tmp_path / "home" / "ledger.sqlite")
    ledger.add_key(name="laptop", note="", hash=hash_key(KEY), owner="ada", project_id=None, created_at=0.0)
    ledger.close()
    running = Running(ServerConfig(config(tmp_path / "home"), port=0, drain_seconds=0.1))
    yield Place({"TINKER_BASE_URL": running.url})
    running.stop()


def test_login_stores_a_key_that_the_server_takes(server: Place, tmp_path: Path) -> None:
    store = tmp_path / ".tinker" / "credentials.json"
    for wrong, says in (("", "no key was given"), ("sesame", "is not an API key"), ("tml-wrong", "login")):
        assert says in server.fails("auth", "login", stdin=f"{wrong}\n" if wrong else "")
        assert not store.exists()
    told = server.json("auth", "login", stdin=f"{KEY}\n")
    assert (told["key_name"], told["server"]) == ("laptop", server.env["TINKER_BASE_URL"])
    assert KEY not in json.dumps(told)
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    kept = json.loads(store.read_text())
    assert kept["keys"][kept["default"]]["key"] == KEY
    assert "`tinkex auth logout` removes it" in server.fails("auth", "login", stdin=f"{KEY}\n")
    assert server.json("auth", "status")["source"] == "store"
    assert server.json("run", "list") == {"runs": []}
    assert "the key itself still works" in server.says("auth", "logout")
    assert "no key is stored" in server.fails("auth", "logout")
    assert json.loads(store.read_text())["keys"] == {}


def test_links_lead_to_the_server_in_use(server: Place) -> None:
    url = server.env["TINKER_BASE_URL"]
    asked = server.invoke("auth", "login", stdin=f"{KEY}\n")
    assert url in asked.stderr
    assert "thinkingmachines" not in asked.output
    hosted = server.invoke("auth", "login", TINKER_BASE_URL="", stdin="sesame\n")
    assert "stored already" in hosted.stderr
    server.says("auth", "logout")
    hosted = server.invoke("auth", "login", TINKER_BASE_URL="", stdin="sesame\n")
    assert "https://tinker.thinkingmachines.ai/keys?new_key=true" in hosted.stderr


def test_status_says_what_is_wrong_and_what_to_do(server: Place) -> None:
    accepted = server.json("auth", "status", TINKER_API_KEY=KEY)
    assert (accepted["credentials_available"], accepted["tinker_accessible"]) == (True, True)
    assert accepted["source"] == "environment"
    refused = server.invoke("auth", "status", TINKER_API_KEY="tml-wrong")
    assert refused.exit_code == 1
    assert refused.stdout.startswith("Credentials available: yes")
    assert "Tinker accessible: no" in refused.stdout
    assert "`tinkex auth login`" in refused.stderr
    nothing = server.invoke("auth", "status", TINKER_BASE_URL="")
    assert (nothing.exit_code, "their own process" in nothing.stderr) == (1, True)


def test_whoami_works_with_a_plain_key(server: Place) -> None:
    who = server.json("auth", "whoami", TINKER_API_KEY=KEY)
    assert set(who) == {"user_urn", "org_urn", "email"}
    assert "ada" in who["user_urn"]
    assert who["email"] in server.says("auth", "whoami", TINKER_API_KEY=KEY)
    assert "neither a key nor a server is set" in server.fails("auth", "whoami", TINKER_BASE_URL="")
