"""Keys, tokens and signed links: who may come in, as whom, and until when."""

from __future__ import annotations

import logging
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlencode

import jwt
import numpy as np
import pytest
from pydantic import BaseModel

from tests.server.conftest import KEY, OTHER_KEY, Running
from tinkex.server import api_keys as module
from tinkex.server.api_keys import Authenticator, hash_key, new_key
from tinkex.server.gateway import WHY
from tinkex.server.serve import Server, StartError
from tinkex.server.signing import DownloadSigner, WeightsTokens, derive, home_secret
from tinkex.service.futures import failure
from tinkex.service.home import prepare
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Refusal
from tinkex.types.futures import PendingFuture
from tinkex.types.outputs import NewTokens
from tinkex.wire import ops

SECRET = bytes(range(32))


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


def add(ledger: Ledger, name: str, *, owner: str = "alice", project: str | None = None) -> str:
    key = new_key()
    ledger.add_key(
        name=name, note="", hash=hash_key(key), owner=owner, project_id=project, created_at=time.time()
    )
    return key


def status_of(auth: Authenticator, key: str) -> int:
    try:
        auth.identify(key)
    except Refusal as refusal:
        return refusal.status
    return 200


# -- keys ------------------------------------------------------------------------------------------------


def test_without_keys_every_well_formed_key_is_a_tenant(ledger: Ledger) -> None:
    auth = Authenticator(ledger, SECRET)
    assert auth.is_open
    assert auth.identify("tml-a").user == auth.identify("tml-a").user
    assert auth.identify("tml-a").user != auth.identify("tml-b").user
    assert "tml-a" not in auth.identify("tml-a").user
    assert auth.identify("EMPTY").user != auth.identify("none").user  # what clients send where none is needed
    for bad in ("", "tml-a b", "tml-\n", "tml-" + "x" * 300, "tml-ü"):
        assert status_of(auth, bad) == 401, bad


def test_with_keys_only_those_are_taken(ledger: Ledger) -> None:
    key = add(ledger, "laptop", project="p1")
    auth = Authenticator(ledger, SECRET)
    caller = auth.caller({"x-api-key": key}, "http://here", same_machine=True)
    assert (caller.user, caller.project, caller.public_url, caller.same_machine) == (
        "alice",
        "p1",
        "http://here",
        True,
    )
    assert status_of(auth, "tml-a") == 401
    assert status_of(auth, key[:-1]) == 401


def test_a_bearer_token_is_a_key_too(ledger: Ledger) -> None:
    key = add(ledger, "laptop")
    auth = Authenticator(ledger, SECRET)
    assert auth.caller({"authorization": f"Bearer {key}"}).user == "alice"
    with pytest.raises(Refusal):
        auth.caller({"authorization": f"Basic {key}"})


def test_revoking_the_last_key_opens_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH", 0.0)
    key = add(ledger, "laptop")
    auth = Authenticator(ledger, SECRET)
    token = auth.issue_token(auth.identify(key)).jwt
    assert status_of(auth, token) == 200
    ledger.revoke_key(1, time.time())
    assert not auth.is_open
    assert [status_of(auth, k) for k in (key, token, "tml-a")] == [401, 401, 401]


def test_look_ups_are_believed_for_a_moment(ledger: Ledger) -> None:
    key = add(ledger, "laptop")
    auth = Authenticator(ledger, SECRET)
    auth.identify(key)
    ledger.revoke_key(1, time.time())
    assert status_of(auth, key) == 200


def test_only_a_hash_is_kept(ledger: Ledger, tmp_path: Path) -> None:
    key = add(ledger, "laptop")
    Authenticator(ledger, SECRET).identify(key)
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.encode() not in kept
    assert key[4:].encode() not in kept


# -- tokens ----------------------------------------------------------------------------------------------


def test_a_token_says_who_and_until_when(ledger: Ledger) -> None:
    auth = Authenticator(ledger, SECRET)
    identity = auth.identify(add(ledger, "laptop"))
    claims = jwt.decode(auth.issue_token(identity).jwt, options={"verify_signature": False})
    assert (claims["sub"], claims["org_id"], claims["email"]) == ("alice", "tinkex", "alice@localhost")
    assert 3000 < claims["exp"] - time.time() <= 3600


@pytest.mark.parametrize("change", [{"exp": 1}, {"key": "0" * 64}, {"sub": None}])
def test_tokens_that_are_not_ours(ledger: Ledger, change: dict[str, object]) -> None:
    key = add(ledger, "laptop")
    auth = Authenticator(ledger, SECRET)
    claims = (
        jwt.decode(auth.issue_token(auth.identify(key)).jwt, options={"verify_signature": False}) | change
    )
    claims = {k: v for k, v in claims.items() if v is not None}
    assert status_of(auth, jwt.encode(claims, derive(SECRET, "tokens"), "HS256")) == 401


def test_a_token_of_another_server_or_of_no_algorithm_is_refused(ledger: Ledger) -> None:
    key = add(ledger, "laptop")
    auth = Authenticator(ledger, SECRET)
    claims = jwt.decode(auth.issue_token(auth.identify(key)).jwt, options={"verify_signature": False})
    assert status_of(auth, Authenticator(ledger, bytes(32)).issue_token(auth.identify(key)).jwt) == 401
    assert status_of(auth, jwt.encode(claims, None, "none")) == 401
    assert status_of(auth, "eyJhbGciOi.broken") == 401


def test_tokens_over_the_wire(server: Running) -> None:
    token = server.ask("POST", "/api/v1/auth/token", {}).json["jwt"]
    session = server.post("create_session", tags=[], user_metadata={}, sdk_version="x")["session_id"]
    same = server.ask("GET", f"/api/v1/sessions/{session}", key={"x-api-key": token})
    assert same.status == 200
    assert server.ask("GET", f"/api/v1/sessions/{session}", key=OTHER_KEY).status == 404
    me = server.ask("GET", "/api/v1/auth/apikey/me").json
    assert me["details"]["user_details"]["email"].startswith("key-")


def test_a_key_can_give_itself_up(start: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    ledger = Ledger(tmp_path / "home" / "ledger.sqlite")
    key = {"x-api-key": add(ledger, "laptop")}
    ledger.close()
    server = start()
    me = server.ask("GET", "/api/v1/auth/apikey/me", key=key).json
    assert (me["key_id"], me["name"]) == (1, "laptop")
    assert server.ask("GET", "/metrics", key=None).status == 401
    assert server.ask("GET", "/metrics", key=key).status == 200
    assert server.ask("DELETE", "/api/v1/auth/apikey/me", key=key).status == 204
    assert server.ask("GET", "/api/v1/auth/apikey/me", key=key).status == 401
    assert server.ask("GET", "/api/v1/auth/apikey/me", key=KEY).status == 401


def test_other_hosts_need_keys(tmp_path: Path) -> None:
    from tests.server.conftest import server_config

    with pytest.raises(StartError, match="tinkex server keys add"):
        Server(server_config(tmp_path, "x", host="0.0.0.0"))


def test_keys_are_never_logged(start: Callable[..., Running], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = start()
    secret = {"x-api-key": "tml-very-secret-key"}
    server.ask("GET", "/api/v1/sessions", key=secret)
    server.ask("GET", "/api/v1/nothing", key=secret)
    server.ask("POST", "/api/v1/asample", b"{", key={"authorization": "Bearer tml-very-secret-key"})
    assert "list_sessions" in caplog.text
    assert "very-secret" not in caplog.text


# -- signed links ----------------------------------------------------------------------------------------


def test_a_link_is_good_for_its_path_until_its_end() -> None:
    signer = DownloadSigner(SECRET)
    query = dict(part.split("=") for part in signer.sign("a/b c", 1000.9).split("?")[1].split("&"))
    assert signer.verify("a/b c", query["expires"], query["signature"], now=999)
    assert not signer.verify("a/b c", query["expires"], query["signature"], now=1000)
    assert not signer.verify("a/b", query["expires"], query["signature"], now=999)
    assert not signer.verify("a/b c", "2000", query["signature"], now=999)
    assert not signer.verify("a/b c", "²000", query["signature"], now=999)
    assert not signer.verify("a/b c", "", "", now=999)
    assert not DownloadSigner(bytes(32)).verify("a/b c", query["expires"], query["signature"], now=999)


def test_the_secret_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    secret = home_secret(tmp_path)
    assert home_secret(tmp_path) == secret
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    content = bytearray((tmp_path / "secret").read_bytes())
    (tmp_path / "secret").write_bytes(content[:32])  # as older versions wrote it
    assert home_secret(tmp_path) == secret
    content[7] ^= 1
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ValueError, match="secret is damaged"):
        home_secret(tmp_path)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        home_secret(tmp_path)


def test_links_lead_nowhere_else(server: Running) -> None:
    home = server.server.config.service.home
    signer = DownloadSigner(home_secret(home))
    (home / "file").write_bytes(b"content")
    (home / "out").symlink_to("/etc")
    soon = time.time() + 60
    fetched = server.ask("GET", signer.sign("file", soon), key=None)
    assert (fetched.status, fetched.body) == (200, b"content")
    part = server.ask("GET", signer.sign("file", soon), headers={"range": "bytes=3-"}, key=None)
    assert (part.status, part.body) == (206, b"tent")
    for path, status in [("none", 404), ("../x", 403), ("/etc/passwd", 403), ("out/passwd", 403), ("", 403)]:
        assert server.ask("GET", signer.sign(path, soon), key=None).status == status, path
    assert server.ask("GET", "/api/v1/download/file", key=None).status == 403
    assert server.ask("GET", signer.sign("file", time.time() - 1), key=None).status == 403


def test_links_end_with_the_key_they_were_made_for(start: Callable[..., Running]) -> None:
    server = start()
    home = server.server.config.service.home
    ledger = Ledger(home / "ledger.sqlite")
    ann, ben = add(ledger, "ann", owner="ann"), add(ledger, "ben", owner="ben")

    def link(key: str) -> str:
        header = {"x-api-key": key}
        session = server.ask("POST", "/api/v1/create_session", b"{}", key=header).json["session_id"]
        answer = server.ask("GET", f"/api/v1/sessions/{session}/trace_export", key=header).json
        return answer["url"][answer["url"].index("/api/v1") :]

    of_ann, of_ben = link(ann), link(ben)
    assert server.ask("GET", of_ann, key=None).status == 200
    assert ann not in of_ann
    row = ledger.find_key(hash_key(ann))
    assert row is not None
    ledger.revoke_key(row.key_id, time.time())
    ledger.close()
    revoked = server.ask("GET", of_ann, key=None)
    assert (revoked.status, "revoked" in revoked.json["detail"]) == (403, True)
    for forged in (of_ann.replace(f"key={row.key_id}", "key=2"), of_ann.replace(f"key={row.key_id}&", "")):
        assert server.ask("GET", forged, key=None).status == 403
    assert server.ask("GET", of_ben, key=None).status == 200


def test_the_ledger_and_a_new_home_are_their_owners_alone(tmp_path: Path) -> None:
    prepare(home := tmp_path / "new")
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    Ledger(home / "ledger.sqlite").close()
    (home / "ledger.sqlite").chmod(0o644)  # of an older version
    home.chmod(0o755)
    ledger = Ledger(home / "ledger.sqlite")
    ledger.revoke_key(1, 0.0)
    assert {stat.S_IMODE(file.stat().st_mode) for file in home.glob("ledger.sqlite*")} == {0o600}
    ledger.close()
    prepare(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_errors_over_http_name_no_directories_of_the_server(start: Callable[..., Running]) -> None:
    server = start()
    home, run = server.server.config.service.home, server.open_run()
    shutil.rmtree(home / "runs")
    failed = server.result(server.post("save_weights", model_id=run, seq_id=1, path="w"))
    gateway = server.server.gateway
    assert str(home) not in failed.body.decode()
    assert gateway.without_paths(f"{home}/ledger.sqlite cannot be used") == "ledger.sqlite cannot be used"
    server.server.service.ledger.close()
    refused = server.ask("POST", "/api/v1/create_session", b"{}")
    assert refused.status == 503
    assert "ledger.sqlite" in refused.json["detail"]
    assert str(home) not in refused.json["detail"]


class FailingStream:
    """A sample that fails after its first token."""

    def __init__(self, why: str) -> None:
        first = NewTokens(sequence=0, tokens_np=np.array([5]), logprobs_np=np.array([-1.0], np.float32))
        self._events = iter([PendingFuture("r", "active", why), first, failure(why)])

    def __aiter__(self) -> FailingStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._events)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        pass


def test_reasons_and_streams_name_no_directories_of_the_server(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    service, run, sampler = server.server.service, server.open_run(), server.open_sampler()
    home = service.config.home
    why = f"{home}/runs/x/journal is damaged"
    service.ledger.update_run(run, corrupted=True, problem=why)
    reason = {"type": "request", "request_id": "r", "request_type": "sample"}
    failed = {"type": "failed", "category": "internal", "reason": reason, "message": why}
    service.ledger.update_session(run.split(":")[0], status=failed)
    monkeypatch.setattr(service, "stream", lambda request, caller: FailingStream(why))
    asked = {"model": "m/base", "prompt": "a", "max_tokens": 2, "stream": True}
    sample = {
        "sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "sampling_params": {"max_tokens": 2},
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
    }  # fmt: skip
    form = {"content-type": "application/x-www-form-urlencoded", "accept": "text/html"}
    pasted = urlencode({"key": KEY["x-api-key"]}).encode()
    entered = server.ask("POST", "/console/login", pasted, headers=form, key=None)
    visitor = {"cookie": entered.headers["set-cookie"].partition(";")[0], "accept": "text/html"}
    answers = {
        "run": server.ask("GET", f"/api/v1/training_runs/{run}"),
        "runs": server.ask("GET", "/api/v1/training_runs"),
        "session": server.ask("POST", "/api/v1/sessions/search", b"{}"),
        "stream": server.ask("POST", "/api/v1/stream_sample", sample),
        "openai": server.ask("POST", "/v1/completions", asked),
        "console": server.ask("GET", f"/console/runs/{run}", headers=visitor, key=None),
    }
    for name, answer in answers.items():
        text = answer.body.decode()
        assert answer.status == 200, (name, text)
        assert "runs/x/journal is damaged" in text, (name, text)
        assert str(home) not in text, (name, text)


def test_every_field_that_says_why_is_known() -> None:
    """A new one must be cleaned of the server's paths too."""
    named = {
        name
        for op in ops.OPS.values()
        for model in models_of(op.reply)
        for name, field in model.model_fields.items()
        if re.search("detail|error|message|reason|why", name) and "str" in str(field.annotation)
    }
    assert "status_reason" in named
    assert named - {"event_details"} <= WHY, "say in gateway.WHY that it says why"


def models_of(kind: Any) -> Iterator[type[BaseModel]]:
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part
            for field in part.model_fields.values():
                yield from models_of(field.annotation)
        elif part is not kind:
            yield from models_of(part)


def test_tokenizer_files(server: Running, tokenizer_dir: Path) -> None:
    got = server.ask("GET", "/api/v1/models/m/base/tokenizer/tokenizer.json")
    assert got.body == (tokenizer_dir / "tokenizer.json").read_bytes()
    for file in ("config.json", "model.safetensors", "vocab.json", "..%2fx"):
        assert server.ask("GET", f"/api/v1/models/m/base/tokenizer/{file}").status == 404, file
    assert server.ask("GET", "/api/v1/models/none/tokenizer/tokenizer.json").status == 404
    assert server.ask("GET", "/api/v1/models/m/base/tokenizer/tokenizer.json", key=None).status == 401


# -- weights of others -----------------------------------------------------------------------------------


def test_a_weights_token_opens_one_run_for_a_while() -> None:
    tokens, later = WeightsTokens(SECRET), time.time() + 60
    token = tokens.issue("a:train:0", later)
    assert tokens.run_of(token) == "a:train:0"
    assert tokens.run_of(tokens.issue("a:train:0", time.time() - 1)) is None
    expires, signature, run = token.split(".")
    for bad in (
        "", "..", f"{expires}.{signature}.b:train:0", f"{int(expires) + 1}.{signature}.{run}",
        f"{expires}..{run}", f"{expires}.\u00fc.{run}", f"{'9' * 40}.{signature}.{run}",
        WeightsTokens(b"another").issue(run, later),
    ):  # fmt: skip
        assert tokens.run_of(bad) is None, bad


def test_weights_are_read_with_a_token_in_the_header(start: Callable[..., Running], tmp_path: Path) -> None:
    server = start()
    run = server.open_run()
    path = server.result(server.post("save_weights", model_id=run, seq_id=1, path="w")).json["path"]
    other = server.open_run()
    unshared = server.result(server.post("save_weights", model_id=other, seq_id=1, path="w")).json["path"]
    tokens = WeightsTokens(home_secret(tmp_path / "home"))
    token = {"x-tinker-weights-access-token": tokens.issue(run, time.time() + 60)}

    def info(path: str, headers: dict[str, str]) -> int:
        body = {"tinker_path": path}
        return server.ask("POST", "/api/v1/weights_info", body, headers, key=OTHER_KEY).status

    assert (info(path, {}), info(path, token), info(unshared, token)) == (404, 200, 404)
    place = f"/api/v1/training_runs/{run}/checkpoints/weights/w"
    assert server.ask("DELETE", place, headers=token, key=OTHER_KEY).status == 404  # to read, not to change
    copying = {"source_path": path, "destination_project_id": "p"}
    copied = server.ask("POST", "/api/v1/copy_weights", copying, token, key=OTHER_KEY)
    assert info(copied.json["tinker_path"], {}) == 200
