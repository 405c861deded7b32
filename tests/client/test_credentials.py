"""Credentials: where they come from, how they are kept, and that they never show."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import stat
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex.auth
from tests.stub import Stub, status
from tinkex.client.credentials import (
    CommandCredential,
    Credential,
    CredentialStore,
    JwtCredential,
    StoredKey,
    check_key,
    decode_claims,
    resolve,
    resolve_from_source,
    run_credential_command,
)
from tinkex.client.rest import RestClient
from tinkex.config import Settings
from tinkex.errors import (
    APIConnectionError,
    AuthenticationError,
    BillingError,
    CredentialError,
    InternalServerError,
    InvalidInputError,
    TinkerError,
)
from tinkex.types.config import AuthTokenResponse
from tinkex.types.sessions import CreateSessionRequest
from tinkex.wire import ops

KEY = "tml-secret-0123456789"
HOSTED = "https://tinker.example.com"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(credentials_file=tmp_path / "tinker" / "credentials.json")


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def with_(settings: Settings, **changes: Any) -> Settings:
    return Settings(**{**vars(settings), **changes})


def store(settings: Settings, key: str) -> None:
    CredentialStore(settings.credentials_file).add("7", StoredKey(key=key, name="laptop"))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def jwt(**claims: Any) -> str:
    encode = lambda value: base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()  # noqa: E731
    return f"{encode({'alg': 'none'})}.{encode(claims)}."


# -- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY, f"  {KEY}\n", jwt(sub="me")])
def test_a_key_is_taken_without_the_space_around_it(key: str):
    assert check_key(key, "api_key") == key.strip()


@pytest.mark.parametrize("key", ["sk-secret", "", "secret tml-", "tml-sec ret", "tml-sec\nret", "tml-sécret"])
def test_what_is_no_key_is_refused_without_being_shown(key: str):
    with pytest.raises(InvalidInputError, match="api_key is not an API key") as caught:
        check_key(key, "api_key")
    assert "secret" not in str(caught.value)


def test_the_order_in_which_credentials_are_looked_for(settings: Settings):
    store(settings, "tml-stored")
    settings = with_(settings, credential_cmd="echo tml-command")
    everything = with_(settings, api_key="tml-environment")

    def found(settings: Settings, api_key: str | None = None, url: str = HOSTED) -> tuple[str, str]:
        credential = resolve(settings, api_key, url)
        return credential.source, run(credential.token())

    assert found(everything, "tml-argument") == ("argument", "tml-argument")
    assert found(everything) == ("environment", "tml-environment")
    assert found(settings) == ("command", "tml-command")
    assert found(with_(settings, credential_cmd=None)) == ("store", "tml-stored")
    assert found(with_(settings, credential_cmd=None), url="http://127.0.0.1:8000") == ("store", "tml-stored")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost", "http://[::1]:8000"])
def test_a_server_on_this_machine_needs_no_key(settings: Settings, url: str):
    credential = resolve(settings, None, url)
    assert credential.source == "loopback"
    assert check_key(credential.current() or "", "the stand-in") == "tml-local"


def test_without_any_key_the_error_names_every_way_to_give_one(settings: Settings):
    with pytest.raises(CredentialError) as caught:
        resolve(settings, None, HOSTED)
    message = str(caught.value)
    ways = (
        "api_key=",
        "TINKER_API_KEY",
        "TINKER_CREDENTIAL_CMD",
        str(settings.credentials_file),
        "127.0.0.1",
    )
    assert [way for way in ways if way not in message] == []


def test_a_malformed_key_is_refused_and_its_origin_named(settings: Settings):
    with pytest.raises(InvalidInputError, match=r"^api_key"):
        resolve(settings, "sk-secret", HOSTED)
    with pytest.raises(InvalidInputError, match=r"^TINKER_API_KEY"):
        resolve(with_(settings, api_key="sk-secret"), None, HOSTED)
    store(settings, "sk-secret")
    with pytest.raises(InvalidInputError, match=r"credentials\.json"):
        resolve(settings, None, HOSTED)


def test_a_command_stands_in_for_a_malformed_key_in_the_environment(settings: Settings):
    settings = with_(settings, api_key="placeholder", credential_cmd="echo tml-command")
    assert resolve(settings, None, HOSTED).source == "command"


def test_identities_tell_keys_apart_and_give_nothing_away(settings: Settings):
    one, same, other = (resolve(settings, key, HOSTED) for key in (KEY, KEY, "tml-other"))
    assert one.identity == same.identity != other.identity
    assert KEY not in one.identity


def test_no_credential_shows_or_pickles_its_secret():
    key = Credential(KEY, "argument")
    command = CommandCredential(f"echo {KEY}")
    for credential in (key, command, JwtCredential(key, never_called)):
        assert KEY not in repr(credential)
        assert KEY not in f"{credential}"
        with pytest.raises(CredentialError, match="never pickled"):
            pickle.dumps(credential)
    assert KEY not in repr(StoredKey(key=KEY))


async def never_called(*_: Any) -> Any:
    raise AssertionError


# -- found again in another process ----------------------------------------------------------------------


def test_a_key_given_twice_counts_as_the_environments_and_can_be_found_again(settings: Settings):
    settings = with_(settings, api_key=KEY)
    assert resolve(settings, KEY, HOSTED).source == "environment"


def test_every_source_but_the_argument_can_be_found_again(settings: Settings):
    store(settings, "tml-stored")
    settings = with_(settings, api_key=KEY, credential_cmd="echo tml-command")
    tokens = {
        source: run(resolve_from_source(source, settings).token())
        for source in ("environment", "command", "store", "loopback")
    }
    assert tokens == {
        "environment": KEY,
        "command": "tml-command",
        "store": "tml-stored",
        "loopback": "tml-local",
    }


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("argument", "TINKER_API_KEY"),
        ("environment", "TINKER_API_KEY"),
        ("command", "TINKER_CREDENTIAL_CMD"),
        ("store", "log in"),
    ],
)
def test_a_receiver_without_the_credential_is_told_what_to_do(settings: Settings, source: str, names: str):
    with pytest.raises(CredentialError, match=r"from_sampler_handle\(handle, api_key=…\)") as caught:
        resolve_from_source(source, settings)
    assert names in str(caught.value)


# -- commands --------------------------------------------------------------------------------------------


def test_a_command_runs_once_for_many_callers_and_its_token_is_kept_for_a_minute(tmp_path: Path):
    runs, clock = tmp_path / "runs", Clock()
    credential = CommandCredential(f"echo run >> {runs}; sleep 0.1; echo {KEY}", clock)

    async def use() -> None:
        assert credential.current() is None
        assert await asyncio.gather(*(credential.token() for _ in range(5))) == [KEY] * 5
        clock.time += 59
        assert credential.current() == await credential.token() == KEY
        assert runs.read_text().split() == ["run"]
        clock.time += 2
        assert credential.current() is None
        assert await credential.token() == KEY
        assert runs.read_text().split() == ["run", "run"]

    run(use())


def test_a_jwt_from_a_command_is_kept_until_a_minute_before_its_end(tmp_path: Path):
    clock = Clock()
    credential = CommandCredential(f"echo {jwt(exp=clock.time + 1000)}", clock)

    async def use() -> None:
        await credential.token()
        clock.time += 939
        assert credential.current()
        clock.time += 2
        assert credential.current() is None

    run(use())


def test_the_event_loop_goes_on_while_a_command_runs(tmp_path: Path):
    go = tmp_path / "go"

    async def use() -> str:
        token = asyncio.create_task(
            CommandCredential(f"while [ ! -e {go} ]; do sleep 0.01; done; echo {KEY}").token()
        )
        await asyncio.sleep(0.05)
        go.touch()  # only reached if the loop was free meanwhile
        return await token

    assert run(use()) == KEY


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (f"echo {KEY}; echo 'vault is sealed' >&2; exit 3", "exit status 3: vault is sealed"),
        ("true", "printed no token"),
        ("echo secret-word", "what TINKER_CREDENTIAL_CMD printed is not an API key"),
        (f"echo {KEY}; echo {KEY}", "characters that no key contains"),
    ],
)
def test_a_failing_command_says_why_and_shows_no_secret(command: str, says: str):
    with pytest.raises(TinkerError, match=says) as caught:
        run_credential_command(command)
    assert KEY not in str(caught.value)
    assert "secret-word" not in str(caught.value)


def test_a_command_that_hangs_is_killed_with_its_children():
    # The child holds the pipe open: were it left alive, this would take ten minutes.
    with pytest.raises(CredentialError, match=r"no token within 0\.2 s"):
        run_credential_command("sleep 600 & sleep 600", timeout=0.2)


def test_after_a_failure_the_command_is_tried_again(tmp_path: Path):
    ready = tmp_path / "ready"
    credential = CommandCredential(f"test -e {ready} && echo {KEY}")

    async def use() -> str:
        with pytest.raises(CredentialError):
            await credential.token()
        ready.touch()
        return await credential.token()

    assert run(use()) == KEY


# -- JWTs ------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time


class Exchange:
    """The transport's part: hands out numbered JWTs that live for `life` seconds, or fails."""

    def __init__(self, clock: Clock, life: float | None = 3600) -> None:
        self.clock, self.life, self.count = clock, life, 0
        self.fails = False
        self.held: asyncio.Event | None = None

    async def __call__(self, op: Any, request: Any) -> AuthTokenResponse:
        assert op is ops.GET_AUTH_TOKEN
        self.count += 1
        if self.held is not None:
            await self.held.wait()
        if self.fails:
            raise APIConnectionError(message="no connection")
        expiry = {} if self.life is None else {"exp": self.clock.time + self.life}
        return AuthTokenResponse(jwt=jwt(n=self.count, **expiry))

    def credential(self) -> JwtCredential:
        return JwtCredential(Credential(KEY, "environment"), self, self.clock)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def number(token: str | None) -> int | None:
    return None if token is None else decode_claims(token)["n"]


def test_one_exchange_serves_everyone_until_five_minutes_before_the_end():
    exchange = Exchange(Clock())
    credential = exchange.credential()
    assert (credential.source, credential.identity) == (
        "environment",
        Credential(KEY, "argument").identity,
    )

    async def use() -> None:
        assert credential.current() is None
        tokens = await asyncio.gather(*(credential.token() for _ in range(10)))
        assert [number(token) for token in tokens] == [1] * 10
        exchange.clock.time += 3600 - 301
        assert number(credential.current()) == 1
        await settle()
        assert exchange.count == 1
        exchange.clock.time += 2
        assert number(credential.current()) == 1  # nobody waits for the new one
        await settle()
        assert number(credential.current()) == 2
        assert exchange.count == 2

    run(use())


def test_callers_wait_for_a_new_one_in_the_last_minute():
    exchange = Exchange(Clock())
    credential = exchange.credential()

    async def use() -> None:
        await credential.token()
        exchange.clock.time += 3600 - 60
        assert credential.current() is None
        assert number(await credential.token()) == 2

    run(use())


def test_a_failed_renewal_leaves_the_old_one_in_use_and_is_tried_again_a_minute_later():
    exchange = Exchange(Clock())
    credential = exchange.credential()

    async def use() -> None:
        await credential.token()
        exchange.fails = True
        exchange.clock.time += 3600 - 30
        assert number(await credential.token()) == 1
        exchange.clock.time += 59
        assert number(await credential.token()) == 1
        assert exchange.count == 2
        exchange.fails = False
        exchange.clock.time += 2
        assert number(await credential.token()) == 3

    run(use())


def test_the_first_exchange_has_nothing_to_fall_back_on():
    exchange = Exchange(Clock())
    exchange.fails = True
    credential = exchange.credential()

    async def use() -> None:
        with pytest.raises(APIConnectionError):
            await credential.token()
        exchange.fails = False
        assert number(await credential.token()) == 2

    run(use())


def test_a_caller_who_gives_up_does_not_take_the_exchange_from_the_others():
    exchange = Exchange(Clock())
    credential = exchange.credential()

    async def use() -> None:
        exchange.held = asyncio.Event()
        gives_up, waits = (asyncio.create_task(credential.token()) for _ in range(2))
        await settle()
        gives_up.cancel()
        await settle()
        exchange.held.set()
        assert number(await waits) == 1
        assert gives_up.cancelled()

    run(use())


@pytest.mark.parametrize("life", [None, -7200, 30])
def test_an_unreadable_or_past_expiry_does_not_make_every_request_an_exchange(life: float | None):
    exchange = Exchange(Clock(), life)
    credential = exchange.credential()

    async def use() -> None:
        for _ in range(20):
            await credential.token()
        assert exchange.count == 1

    run(use())


@pytest.mark.parametrize("token", ["tml-key", "eyJx", "eyJ.notbase64!.x", "a.bnVsbA.c", "a.W10.c", "é.é.é"])
def test_what_is_no_jwt_claims_nothing(token: str):
    assert decode_claims(token) == {}


# -- the stored file -------------------------------------------------------------------------------------


def test_the_store_keeps_keys_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "tinker" / "credentials.json"
    keys = CredentialStore(path)
    assert keys.default_key() is None
    assert not path.exists()
    keys.add("1", StoredKey(key="tml-one", name="laptop", note="mine"))
    keys.add("2", StoredKey(key="tml-two", name="other", type="generated"), default=False)
    assert keys.default_id() == "1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["credentials.json"]
    assert json.loads(path.read_text()) == {
        "version": 1,
        "default": "1",
        "keys": {
            "1": {"type": "manual", "key": "tml-one", "name": "laptop", "note": "mine"},
            "2": {"type": "generated", "key": "tml-two", "name": "other"},
        },
    }
    keys.add("2", StoredKey(key="tml-two", name="other", type="generated"))
    assert keys.default_key() == StoredKey(key="tml-two", name="other", type="generated")
    keys.remove("2")
    assert keys.default_key() is None
    assert list(json.loads(path.read_text())["keys"]) == ["1"]
    with pytest.raises(InvalidInputError, match="no key '2'; it has: 1"):
        keys.remove("2")


def test_what_a_newer_client_wrote_into_the_store_survives_a_change(tmp_path: Path):
    path = tmp_path / "credentials.json"
    record = {
        "type": "manual",
        "key": "tml-one",
        "name": "n",
        "details": {"org_details": {"name": "o"}},
        "new": 1,
    }
    path.write_text(json.dumps({"version": 1, "default": "1", "keys": {"1": record}, "later": True}))
    CredentialStore(path).add("2", StoredKey(key="tml-two"))
    written = json.loads(path.read_text())
    assert written["keys"]["1"] == record
    assert written["later"] is True


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"version": 2, "keys": {}}', "version is 2"),
        ('{"default": "1", "keys": {"1": {"name": "n"}}}', "'1' has no key"),
    ],
)
def test_a_broken_store_says_what_is_wrong_with_it(settings: Settings, content: str, says: str):
    settings.credentials_file.parent.mkdir()
    settings.credentials_file.write_text(content)
    with pytest.raises(CredentialError, match=says) as caught:
        resolve(settings, None, HOSTED)
    assert str(settings.credentials_file) in str(caught.value)


# -- over the wire ---------------------------------------------------------------------------------------


def test_the_key_is_sent_as_it_is_where_the_server_wants_no_jwt(stub: Stub):
    with RestClient(base_url=stub.url, api_key=KEY) as rest:
        rest.list_sessions().result(10)
    assert {request.headers["x-api-key"] for request in stub.requests} == {KEY}
    assert stub.count("auth/token") == 0


def test_the_key_is_exchanged_once_for_many_calls_at_a_time_and_not_sent_after(stub: Stub):
    stub.config = {"pjwt_auth_enabled": True}
    with RestClient(base_url=stub.url, api_key=KEY) as rest:
        for future in [rest.list_sessions() for _ in range(40)]:
            future.result(10)
        assert rest.whoami().result(10).email == "a@b.c"
    (exchange,) = stub.sent("auth/token")
    assert exchange.headers["x-api-key"] == KEY
    sent = {request.headers["x-api-key"] for request in stub.sent("sessions")}
    assert len(sent) == 1
    assert decode_claims(sent.pop())["sub"] == "tml:user:1"


@pytest.mark.parametrize(
    ("preferred", "argument", "shown"),
    [
        ("credential_cmd", None, "tml-printed"),
        ("api_key", None, KEY),
        ("credential_cmd", "tml-arg", "tml-arg"),
    ],
)
def test_a_server_may_prefer_what_a_command_prints_to_a_key_that_is_only_there(
    clean_environment: pytest.MonkeyPatch, stub: Stub, preferred: str, argument: str | None, shown: str
):
    """`credential_default_source`: a key given in so many words is still the one that is meant."""
    stub.config = {"pjwt_auth_enabled": True, "credential_default_source": preferred}
    clean_environment.setenv("TINKER_API_KEY", KEY)
    clean_environment.setenv("TINKER_CREDENTIAL_CMD", "echo tml-printed")
    with RestClient(base_url=stub.url, api_key=argument) as rest:
        rest.list_sessions().result(10)
    (exchange,) = stub.sent("auth/token")
    assert exchange.headers["x-api-key"] == shown


def test_calls_that_wait_for_a_token_do_not_hold_the_place_that_its_exchange_needs(stub: Stub):
    stub.config = {"pjwt_auth_enabled": True}
    op, request = ops.CREATE_SESSION, CreateSessionRequest()
    assert op.pool is ops.GET_AUTH_TOKEN.pool
    with RestClient(base_url=stub.url, api_key=KEY) as rest:
        for future in [rest._connection.submit(op, request) for _ in range(10)]:
            future.result(10)


def test_an_exchange_that_is_refused_fails_the_call_and_shows_no_key(stub: Stub):
    stub.config = {"pjwt_auth_enabled": True}
    stub.script("auth/token", status(401), always=True)
    with RestClient(base_url=stub.url, api_key=KEY) as rest:
        with pytest.raises(AuthenticationError, match="auth/token") as caught:
            rest.list_sessions().result(10)
    assert KEY not in str(caught.value)
    assert KEY not in repr(vars(caught.value))


def test_a_token_that_the_server_takes_no_longer_is_exchanged_for_another(stub: Stub):
    """It ended while this machine slept, the server's clock is ahead of ours, or its secret has changed."""
    stub.config = {"pjwt_auth_enabled": True}
    with RestClient(base_url=stub.url, api_key=KEY) as rest:
        rest.list_sessions().result(10)
        old = stub.sent("sessions")[0].headers["x-api-key"]
        stub.script("sessions", status(401), where=lambda r: r.headers["x-api-key"] == old, always=True)
        for future in [rest.list_sessions() for _ in range(40)]:
            future.result(10)
    assert stub.count("auth/token") == 2


def test_a_refusal_that_a_new_token_does_not_change_is_raised(stub: Stub):
    stub.config = {"pjwt_auth_enabled": True}
    stub.script("sessions", status(401), always=True)
    with RestClient(base_url=stub.url, api_key=KEY) as rest:
        with pytest.raises(AuthenticationError, match="sessions"):
            rest.list_sessions().result(10)
    assert (stub.count("sessions"), stub.count("auth/token")) == (2, 2)


# -- tinkex.auth -----------------------------------------------------------------------------------------


def test_looking_for_a_token_runs_nothing(clean_environment: pytest.MonkeyPatch, tmp_path: Path):
    assert tinkex.auth.get_tinker_token() is None
    assert not tinkex.auth.tinker_has_credentials()
    clean_environment.setenv("TINKER_CREDENTIAL_CMD", f"touch {tmp_path / 'ran'}; echo {KEY}")
    assert tinkex.auth.get_tinker_token() is None
    assert tinkex.auth.tinker_has_credentials()
    assert not (tmp_path / "ran").exists()
    clean_environment.setenv("TINKER_API_KEY", KEY)
    assert tinkex.auth.get_tinker_token() == KEY
    clean_environment.setenv("TINKER_API_KEY", "sk-wrong")
    clean_environment.delenv("TINKER_CREDENTIAL_CMD")
    assert not tinkex.auth.tinker_has_credentials()


def test_the_stored_key_is_found_in_the_home_directory(clean_environment: pytest.MonkeyPatch, tmp_path: Path):
    CredentialStore(tmp_path / ".tinker" / "credentials.json").add("1", StoredKey(key=KEY))
    assert tinkex.auth.get_tinker_token() == KEY


@pytest.mark.parametrize(
    ("code", "error"), [(401, AuthenticationError), (402, BillingError), (503, InternalServerError)]
)
def test_an_inaccessible_server_is_asked_once(
    clean_environment: pytest.MonkeyPatch, stub: Stub, code: int, error: type[TinkerError]
):
    clean_environment.setenv("TINKER_BASE_URL", stub.url)
    tinkex.auth.raise_if_tinker_not_accessible(timeout=10)
    stub.script("get_server_capabilities", status(code), always=True)
    with pytest.raises(error):
        tinkex.auth.raise_if_tinker_not_accessible(timeout=10)
    assert stub.count("get_server_capabilities") == 2


def test_a_server_that_is_not_there_is_said_at_once(clean_environment: pytest.MonkeyPatch, stub: Stub):
    clean_environment.setenv("TINKER_BASE_URL", stub.url)
    stub.stop()
    with pytest.raises(APIConnectionError, match=stub.url):
        tinkex.auth.raise_if_tinker_not_accessible(timeout=10)


def test_without_a_credential_nothing_is_asked(clean_environment: pytest.MonkeyPatch):
    with pytest.raises(CredentialError):
        tinkex.auth.raise_if_tinker_not_accessible()
