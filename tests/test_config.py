"""Settings, timeouts and URLs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex import InvalidInputError, Timeouts
from tinkex.config import HOSTED_URL, Settings, console_url, is_loopback, normalize_url


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("HTTP://LocalHost:80/api/", "http://localhost/api"),
        ("https://Example.COM:443", "https://example.com"),
        ("https://example.com:8443//", "https://example.com:8443"),
        ("http://example.com:443/a/B/", "http://example.com:443/a/B"),
        ("  http://127.0.0.1:8000  ", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("https://BÜCHER.example/", "https://xn--bcher-kva.example"),
        (HOSTED_URL + "/", HOSTED_URL),
    ],
)
def test_one_spelling_for_one_server(given: str, normal: str) -> None:
    """Scheme and host in lower case, default port gone, path kept."""
    assert normalize_url(given) == normal


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "//host",
        "http://[::1",
    ],
)
def test_what_is_no_url_is_refused(bad: str) -> None:
    with pytest.raises(InvalidInputError, match="base_url"):
        normalize_url(bad)


hosts = st.from_regex(r"[a-zA-Z]([a-zA-Z0-9-]{0,10}[a-zA-Z0-9])?(\.[a-zA-Z]{1,8}){0,2}", fullmatch=True)
paths = st.from_regex(r"(/[A-Za-z0-9_-]{1,8}){0,3}", fullmatch=True)


@pytest.mark.slow
@given(st.sampled_from(["http", "https"]), hosts, st.none() | st.integers(1, 65535), paths, st.data())
def test_every_spelling_is_normalised_alike(
    scheme: str, host: str, port: int | None, path: str, data: st.DataObject
) -> None:
    default = {"http": 80, "https": 443}[scheme]
    spelled_port = f":{port}" if port else data.draw(st.sampled_from(["", f":{default}"]))
    case = data.draw(st.sampled_from([str.lower, str.upper, str.title, str]))
    url = f"{case(scheme)}://{case(host)}{spelled_port}{path}" + data.draw(st.sampled_from(["", "/", "//"]))
    normal = normalize_url(url)
    kept_port = f":{port}" if port and port != default else ""
    assert normal == f"{scheme}://{host.lower()}{kept_port}{path}"
    assert normalize_url(normal) == normal


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:1", True),
        ("http://sub.localhost", True),
        ("http://127.0.0.1", True),
        ("http://127.8.9.1:5", True),
        ("http://[::1]:5", True),
        ("http://10.0.0.1", False),
        ("https://localhost.example.com", False),
        ("https://example.com", False),
    ],
)
def test_what_counts_as_this_machine(url: str, here: bool) -> None:
    assert is_loopback(url) is here


def test_the_environment_is_read_in_one_place() -> None:
    env = {
        "TINKER_API_KEY": "tml-k",
        "TINKER_BASE_URL": "http://h",
        "TINKER_CREDENTIAL_CMD": "cmd",
        "TINKER_PROJECT_ID": "p",
        "TINKER_TAGS": "b, a,,",
        "TINKER_TELEMETRY": "On",
        "TINKER_LOG": "debug",
        "CLOUDFLARE_ACCESS_CLIENT_ID": "id",
        "CLOUDFLARE_ACCESS_CLIENT_SECRET": "secret",
        "TINKEX_HOME": "/home/of",
        "TINKEX_TOKENIZER_DIR": "/tok",
        "HF_HUB_OFFLINE": "1",
    }
    settings = Settings.read(env)
    assert (settings.api_key, settings.base_url, settings.credential_cmd) == ("tml-k", "http://h", "cmd")
    assert (settings.project_id, settings.tags, settings.log) == ("p", ("b", "a"), "debug")
    assert settings.telemetry
    assert settings.offline
    assert dict(settings.extra_headers) == {"CF-Access-Client-Id": "id", "CF-Access-Client-Secret": "secret"}
    assert (settings.home, settings.tokenizer_dir) == (Path("/home/of"), Path("/tok"))


def test_an_empty_variable_is_an_unset_one() -> None:
    names = ("API_KEY", "BASE_URL", "CREDENTIAL_CMD", "PROJECT_ID", "TAGS", "TELEMETRY", "LOG")
    assert Settings.read({f"TINKER_{name}": "" for name in names}) == Settings.read({})


@pytest.mark.parametrize("word", ["", "0", "false", "no", "off", "maybe"])
def test_telemetry_is_off_unless_asked_for(word: str) -> None:
    assert not Settings.read({"TINKER_TELEMETRY": word}).telemetry


def test_the_documented_times() -> None:
    """Two handshakes and the pause between them fit into the time for an unreachable host."""
    times = Timeouts()
    assert times.unreachable <= 10
    assert 2 * times.connect + 0.5 <= times.unreachable
    assert times.lost == 300


def test_every_time_is_in_the_documented_table_with_its_default() -> None:
    """One table, of all of them."""
    page = (Path(__file__).parents[1] / "docs" / "client.md").read_text()
    for name, seconds in dataclasses.asdict(Timeouts()).items():
        rows = [line for line in page.splitlines() if line.startswith("|") and f"`Timeouts({name}=)`" in line]
        assert rows, f"docs/client.md does not say what {name} is"
        spelled = f"{seconds:g} s" if seconds < 300 else f"{seconds / 60:g} minutes"
        assert all(spelled in row for row in rows), rows


def test_what_was_read_does_not_change() -> None:
    for value in (Settings.read({}), Timeouts()):
        with pytest.raises(AttributeError):
            setattr(value, next(iter(dataclasses.asdict(value))), 1)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "4", None, True])
def test_times_that_are_none_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidInputError, match=r"Timeouts\.lost must be seconds above 0, got"):
        Timeouts(lost=wrong)  # type: ignore[arg-type]


def test_a_misspelt_time_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="Timeouts has no 'conect'; did you mean 'connect'"):
        Timeouts(conect=1)  # type: ignore[call-arg]


def test_the_console_is_the_servers_own() -> None:
    assert console_url("http://127.0.0.1:8000", "sessions") == "http://127.0.0.1:8000/sessions"
    assert console_url(HOSTED_URL) == "https://tinker.thinkingmachines.ai"
