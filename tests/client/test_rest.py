"""RestClient over a real socket: what it sends, what it gives back, and what it refuses to send."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

import pytest

import tinkex.client.rest
from tests.stub import Stub, drop, hang, status
from tinkex.client.admin import AdminClient
from tinkex.client.rest import RestClient
from tinkex.errors import (
    APIResponseValidationError,
    ClientClosedError,
    CredentialError,
    ExperimentalWarning,
    InvalidInputError,
    NotFoundError,
    RequestFailedError,
    ResultTimeoutError,
)
from tinkex.types.sessions import SessionSearchRequest

RUN = "s-1:train:0"
PATH = f"tinker://{RUN}/weights/step-1"
EXPORTED = f"tinker://{RUN}/external_weights/step-1"


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


@pytest.fixture
def rest(stub: Stub) -> Iterator[RestClient]:
    with RestClient(base_url=stub.url, api_key="tml-test") as rest:
        yield rest


def checkpoint(path: str) -> dict[str, Any]:
    checkpoint_id = path.removeprefix("tinker://").partition("/")[2]
    known = {"checkpoint_type": "training", "time": "2026-01-02T03:04:05Z", "public": False}
    return {"tinker_path": path, "checkpoint_id": checkpoint_id, **known}


def run_info(run_id: str) -> dict[str, Any]:
    known = {"model_owner": "me", "is_lora": True, "last_request_time": "2026-01-02T03:04:05Z"}
    return {"training_run_id": run_id, "base_model": "stub/base", **known}


def answer(body: Any) -> Any:
    return status(200, body=body)


# -- every method, in both forms -------------------------------------------------------------------------

CALLS: list[tuple[str, tuple[Any, ...], str, str, dict[str, str]]] = [
    # method, arguments, what is sent, its query
    ("get_training_run", (RUN,), "GET", f"training_runs/{RUN}", {"access_scope": "owned"}),
    ("get_training_run", (RUN, "accessible"), "GET", f"training_runs/{RUN}", {"access_scope": "accessible"}),
    ("get_training_run_by_tinker_path", (PATH,), "GET", f"training_runs/{RUN}", {"access_scope": "owned"}),
    (
        "list_training_runs",
        (),
        "GET",
        "training_runs",
        {"limit": "20", "offset": "0", "access_scope": "owned"},
    ),
    (
        "list_training_runs",
        (5, 10, "accessible", "p"),
        "GET",
        "training_runs",
        {"limit": "5", "offset": "10", "access_scope": "accessible", "project_id": "p"},
    ),
    ("list_checkpoints", (RUN,), "GET", f"training_runs/{RUN}/checkpoints", {}),
    ("list_user_checkpoints", (), "GET", "checkpoints", {"limit": "100", "offset": "0"}),
    (
        "get_external_weights_urls",
        (EXPORTED,),
        "GET",
        f"training_runs/{RUN}/checkpoints/external_weights/step-1/external_weights_urls",
        {},
    ),
    (
        "get_checkpoint_archive_url",
        (RUN, "weights/step-1"),
        "GET",
        f"training_runs/{RUN}/checkpoints/weights/step-1/archive",
        {},
    ),
    (
        "get_checkpoint_archive_url_from_tinker_path",
        (PATH,),
        "GET",
        f"training_runs/{RUN}/checkpoints/weights/step-1/archive",
        {},
    ),
    (
        "delete_checkpoint",
        (RUN, "weights/step-1"),
        "DELETE",
        f"training_runs/{RUN}/checkpoints/weights/step-1",
        {},
    ),
    (
        "delete_checkpoint_from_tinker_path",
        (PATH,),
        "DELETE",
        f"training_runs/{RUN}/checkpoints/weights/step-1",
        {},
    ),
    (
        "publish_checkpoint_from_tinker_path",
        (PATH,),
        "POST",
        f"training_runs/{RUN}/checkpoints/weights/step-1/publish",
        {},
    ),
    (
        "unpublish_checkpoint_from_tinker_path",
        (PATH,),
        "DELETE",
        f"training_runs/{RUN}/checkpoints/weights/step-1/publish",
        {},
    ),
    (
        "set_checkpoint_ttl_from_tinker_path",
        (PATH, 3600),
        "PUT",
        f"training_runs/{RUN}/checkpoints/weights/step-1/ttl",
        {},
    ),
    ("copy_weights", (PATH, "p"), "POST", "copy_weights", {}),
    ("get_session", ("s-1",), "GET", "sessions/s-1", {"access_scope": "owned"}),
    ("list_sessions", (), "GET", "sessions", {"limit": "20", "offset": "0", "access_scope": "owned"}),
    ("assign_session_project", ("s-1", "p"), "PUT", "sessions/s-1/project", {}),
    ("delete_session", ("s-1",), "DELETE", "sessions/s-1", {}),
    ("update_training_run", (RUN,), "PUT", f"training_runs/{RUN}", {}),
    ("delete_training_run", (RUN,), "DELETE", f"training_runs/{RUN}", {"checkpoints": "False"}),
    ("export_session_trace", ("s-1",), "GET", "sessions/s-1/trace_export", {}),
    ("get_sampler", ("s-1:sample:0",), "GET", "samplers/s-1:sample:0", {}),
]
REPLIES: dict[str, Any] = {
    "get_training_run": run_info(RUN),
    "get_training_run_by_tinker_path": run_info(RUN),
    "get_session": {"training_run_ids": [RUN], "sampler_ids": []},
    "get_sampler": {"sampler_id": "s-1:sample:0", "base_model": "stub/base"},
    "export_session_trace": {"status": "ready", "url": "https://elsewhere/trace"},
}


@pytest.mark.parametrize(("name", "arguments", "verb", "path", "query"), CALLS)
def test_both_forms_send_the_same_and_give_the_same(
    stub: Stub,
    rest: RestClient,
    name: str,
    arguments: tuple[Any, ...],
    verb: str,
    path: str,
    query: dict[str, str],
):
    if name in REPLIES:
        stub.script(path, answer(REPLIES[name]), always=True)
    elif verb != "GET" and name != "copy_weights":
        stub.script(path, status(204, {"content-type": None}, b""), always=True)
    future = getattr(rest, name)(*arguments)
    assert isinstance(future, Future)
    result = future.result(10)
    again = asyncio.run(getattr(rest, f"{name}_async")(*arguments, timeout=10))
    assert type(again) is type(result)
    if name != "copy_weights":  # every copy has a path of its own
        assert again == result
    sent = [r for r in stub.requests if "client/" not in r.path]
    assert [(r.method, r.path, r.query) for r in sent] == [(verb, f"/api/v1/{path}", query)] * 2
    assert {r.headers["x-sdk-method"] for r in sent} == {name}
    assert sent[0].body == sent[1].body


# The parameters of the official SDK 0.36.0, by introspection; * marks those that are given by name only.
OFFICIAL = {
    "assign_session_project": "session_id, project_id",
    "copy_weights": "path, destination_project_id=None, *ttl_seconds=None, *weights_access_token=None",
    "delete_checkpoint": "training_run_id, checkpoint_id",
    "delete_checkpoint_from_tinker_path": "tinker_path",
    "export_session_trace": "session_id",
    "get_audit_log": "event_type='all', day=None",
    "get_billing_usage": "starting_on, ending_before",
    "get_current_checkpoint_storage_usage": "project_id=None",
    "get_external_weights_urls": "tinker_path",
    "get_sampler": "sampler_id",
    "get_session": "session_id, access_scope='owned'",
    "get_training_run": "training_run_id, access_scope='owned'",
    "get_training_run_by_tinker_path": "tinker_path, access_scope='owned'",
    "list_checkpoints": "training_run_id",
    "list_sessions": "limit=20, offset=0, access_scope='owned'",
    "list_training_runs": "limit=20, offset=0, access_scope='owned', project_id=None",
    "list_user_checkpoints": "limit=100, offset=0",
    "publish_checkpoint_from_tinker_path": "tinker_path",
    "search_sessions": "request",
    "set_checkpoint_ttl_from_tinker_path": "tinker_path, ttl_seconds",
    "unpublish_checkpoint_from_tinker_path": "tinker_path",
}
WITHOUT_TWIN = {"get_weights_info_by_tinker_path": "tinker_path", "whoami": ""}


def parameters(method: Any) -> str:
    """The parameters, but for the `timeout=` that is ours."""
    described = []
    for given in list(inspect.signature(method).parameters.values())[1:]:
        mark = "*" if given.kind is given.KEYWORD_ONLY else ""
        default = "" if given.default is given.empty else f"={given.default!r}"
        if given.name != "timeout":
            described.append(f"{mark}{given.name}{default}")
    return ", ".join(described)


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_parameters_are_the_official_ones_and_the_twin_takes_a_timeout(name: str):
    twin = getattr(RestClient, f"{name}_async")
    assert parameters(getattr(RestClient, name)) == OFFICIAL[name]
    assert parameters(twin) == OFFICIAL[name]
    assert inspect.iscoroutinefunction(twin)
    assert inspect.signature(twin).parameters["timeout"].kind is inspect.Parameter.KEYWORD_ONLY
    if hasattr(AdminClient, name):
        assert parameters(getattr(AdminClient, name)) == OFFICIAL[name]
        assert parameters(getattr(AdminClient, f"{name}_async")) == OFFICIAL[name]


def test_what_has_no_twin_has_the_official_parameters_too():
    for name, given in WITHOUT_TWIN.items():
        assert parameters(getattr(RestClient, name)) == given


def test_a_future_of_a_call_can_be_awaited_too(stub: Stub, rest: RestClient):
    async def use() -> int:
        return len((await rest.list_training_runs()).training_runs)

    assert asyncio.run(use()) == 0


# -- results ---------------------------------------------------------------------------------------------


def test_what_a_run_and_its_checkpoints_are_like(stub: Stub, rest: RestClient):
    stub.script("training_runs/*", answer({**run_info(RUN), "lora_rank": 8, "unheard_of": 1}))
    run = rest.get_training_run(RUN).result(10)
    assert (run.training_run_id, run.lora_rank, run.corrupted) == (RUN, 8, False)
    stub.checkpoints[PATH] = checkpoint(PATH)
    found = rest.list_checkpoints(RUN).result(10).checkpoints
    assert [(c.tinker_path, c.checkpoint_type, c.time) for c in found] == [
        (PATH, "training", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    ]


def test_changes_to_a_checkpoint_arrive(stub: Stub, rest: RestClient):
    stub.checkpoints[PATH] = checkpoint(PATH)
    rest.publish_checkpoint_from_tinker_path(PATH).result(10)
    assert stub.checkpoints[PATH]["public"]
    rest.unpublish_checkpoint_from_tinker_path(PATH).result(10)
    assert not stub.checkpoints[PATH]["public"]
    rest.set_checkpoint_ttl_from_tinker_path(PATH, 7200).result(10)
    rest.set_checkpoint_ttl_from_tinker_path(PATH, None).result(10)
    assert [r.json for r in stub.sent("*ttl")] == [{"ttl_seconds": 7200}, {"ttl_seconds": None}]
    assert rest.delete_checkpoint_from_tinker_path(PATH).result(10) is None
    assert stub.checkpoints == {}
    with pytest.raises(NotFoundError, match=PATH):
        rest.delete_checkpoint(RUN, "weights/step-1").result(10)


@pytest.mark.parametrize("used_before", [False, True])
def test_a_deletion_whose_answer_was_lost_has_succeeded(stub: Stub, rest: RestClient, used_before: bool):
    stub.checkpoints[PATH] = checkpoint(PATH)
    if used_before:
        rest.list_checkpoints(RUN).result(10)
    stub.script("*weights/step-1", drop(effect=True))
    assert rest.delete_checkpoint_from_tinker_path(PATH).result(10) is None
    assert stub.checkpoints == {}
    assert stub.count("*weights/step-1") == 2


def test_what_fits_a_checkpoint_is_awaitable_without_a_twin(stub: Stub, rest: RestClient):
    info = rest.get_weights_info_by_tinker_path(PATH).result(10)
    assert (info.base_model, info.is_lora) == ("stub/base", True)
    assert stub.sent("weights_info")[0].json == {"tinker_path": PATH}


def test_a_copy_goes_to_the_project_said_or_the_environments(
    stub: Stub, rest: RestClient, monkeypatch: pytest.MonkeyPatch
):
    copied = rest.copy_weights(PATH, "p", ttl_seconds=3600, weights_access_token="tok").result(10)
    assert copied.startswith("tinker://copy-")
    (sent,) = stub.sent("copy_weights")
    assert sent.json == {"source_path": PATH, "destination_project_id": "p", "ttl_seconds": 3600}
    assert sent.headers["x-tinker-weights-access-token"] == "tok"
    monkeypatch.setenv("TINKER_PROJECT_ID", "from-environment")
    with RestClient(base_url=stub.url, api_key="tml-test") as other:
        other.copy_weights(PATH).result(10)
    assert stub.sent("copy_weights")[1].json["destination_project_id"] == "from-environment"


def test_an_archives_url_and_expiry_come_from_a_redirect_or_from_json(stub: Stub, rest: RestClient):
    redirected = rest.get_checkpoint_archive_url_from_tinker_path(PATH).result(10)
    assert redirected.url == f"{stub.url}/files/archive"
    assert redirected.expires == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert stub.count("*files*") == 0  # the file is not fetched
    stub.script("*archive", answer({"url": "https://elsewhere/a.tar", "expires": "2026-01-02T03:04:05Z"}))
    said = rest.get_checkpoint_archive_url(RUN, "weights/step-1").result(10)
    assert (said.url, said.expires) == ("https://elsewhere/a.tar", redirected.expires)
    stub.script("*archive", status(302, {"location": "https://elsewhere/b.tar"}, b""))
    assert rest.get_checkpoint_archive_url(RUN, "weights/step-1").result(10).expires is None


def test_an_archive_that_is_being_built_is_waited_for(stub: Stub, rest: RestClient):
    building = status(503, {"retry-after-ms": "10"}, {"detail": "building"})
    stub.script("*archive", building, building)
    assert rest.get_checkpoint_archive_url_from_tinker_path(PATH).result(10).url
    assert stub.count("*archive") == 3


def test_a_trace_is_asked_for_until_it_is_ready(
    stub: Stub, rest: RestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tinkex.client.rest, "TRACE_POLL_INTERVAL", 0.01)
    pending = answer({"status": "pending"})
    stub.script("*trace_export", pending, pending, answer({"status": "ready", "url": "https://elsewhere/t"}))
    assert rest.export_session_trace("s-1").result(10) == "https://elsewhere/t"
    assert stub.count("*trace_export") == 3
    stub.script("*trace_export", answer({"status": "ready", "url": "https://elsewhere/u"}))
    assert asyncio.run(rest.export_session_trace_async("s-1")) == "https://elsewhere/u"


def test_a_trace_that_fails_or_does_not_come_is_a_typed_error(
    stub: Stub, rest: RestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tinkex.client.rest, "TRACE_POLL_INTERVAL", 0.01)
    stub.script("*trace_export", answer({"status": "failed", "error": "too long ago"}))
    with pytest.raises(RequestFailedError, match="session s-1 could not be made: too long ago"):
        rest.export_session_trace("s-1").result(10)
    stub.script("*trace_export", answer({"status": "ready"}))
    with pytest.raises(RequestFailedError, match="without a URL"):
        rest.export_session_trace("s-1").result(10)
    stub.script("*trace_export", answer({"status": "pending"}), always=True)
    with pytest.raises(ResultTimeoutError, match=r"not ready after 0\.05 s; the server goes on"):
        rest.export_session_trace("s-1", timeout=0.05).result(10)


def test_searching_sessions_warns_that_it_may_change(stub: Stub, rest: RestClient):
    request = SessionSearchRequest(user_metadata={"team": "a"}, limit=7)
    with pytest.warns(ExperimentalWarning, match="search_sessions") as caught:
        assert rest.search_sessions(request).result(10).sessions == []
    assert caught[0].filename == __file__

    async def scenario() -> None:
        await rest.search_sessions_async(request, timeout=10)

    with pytest.warns(ExperimentalWarning) as caught:
        asyncio.run(scenario())
    assert caught[0].filename == __file__
    sent = [r.json for r in stub.sent("sessions/search")]
    assert sent == [{"user_metadata": {"team": "a"}, "owner": {"type": "own"}, "limit": 7}] * 2


def test_what_moved_to_the_admin_client_still_works_and_says_so(stub: Stub, rest: RestClient):
    day = ("2026-01-02T03:00:00Z", "2026-01-02T04:00:00Z")
    moved = [("get_audit_log", ()), ("get_billing_usage", day), ("get_current_checkpoint_storage_usage", ())]
    for name, arguments in moved:
        with pytest.warns(DeprecationWarning, match=f"AdminClient.{name}") as caught:
            result = getattr(rest, name)(*arguments).result(10)
        assert caught[0].filename == __file__

        async def scenario(name: str = f"{name}_async", arguments: tuple[str, ...] = arguments) -> Any:
            return await getattr(rest, name)(*arguments, timeout=10)

        with pytest.warns(DeprecationWarning, match=f"AdminClient.{name}_async") as caught:
            assert asyncio.run(scenario()) == result
        assert caught[0].filename == __file__


def test_nothing_else_warns(stub: Stub, rest: RestClient):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest.list_training_runs().result(10)
        rest.get_checkpoint_archive_url(RUN, "weights/step-1").result(10)


# -- who am I --------------------------------------------------------------------------------------------


def test_whoami_reads_the_jwt(stub: Stub, rest: RestClient):
    stub.config = {"pjwt_auth_enabled": True}
    me = rest.whoami().result(10)
    assert (me.user_urn, me.org_urn, me.email) == ("tml:user:1", "tml:organization:org", "a@b.c")


def test_whoami_is_a_typed_error_where_keys_say_nothing(stub: Stub, rest: RestClient):
    with pytest.raises(CredentialError, match=f"{stub.url} takes plain API keys"):
        rest.whoami().result(10)


# -- listings --------------------------------------------------------------------------------------------


async def collect(listing: Any) -> list[Any]:
    return [item async for item in listing]


def test_all_sessions_page_by_page(stub: Stub, rest: RestClient):
    names = [f"session-{n}" for n in range(7)]
    stub.sessions = {name: {} for name in names}
    assert list(rest.iter_sessions(page_size=3)) == names
    assert asyncio.run(collect(rest.iter_sessions(page_size=3, timeout=10))) == names
    assert [r.query["offset"] for r in stub.sent("sessions")] == ["0", "3", "6", "7"] * 2


def test_all_checkpoints_of_a_user_and_of_a_run(stub: Stub, rest: RestClient):
    paths = [f"tinker://run-{n % 2}/weights/{n}" for n in range(5)]
    stub.checkpoints = {path: checkpoint(path) for path in paths}
    assert [c.tinker_path for c in rest.iter_checkpoints(page_size=2)] == paths
    assert stub.count("checkpoints") == 3
    of_run = [c.tinker_path for c in asyncio.run(collect(rest.iter_checkpoints("run-1")))]
    assert of_run == [path for path in paths if "run-1" in path]
    assert stub.count("training_runs/run-1/checkpoints") == 1


def test_all_runs_as_a_server_without_a_fixed_page_size_gives_them(stub: Stub, rest: RestClient):
    for offset in range(3):
        page = {
            "training_runs": [run_info(f"run-{offset}")],
            "cursor": {"offset": offset, "limit": 1, "total_count": 3},
        }
        stub.script("training_runs", answer(page))
    runs = list(rest.iter_training_runs("accessible", "p"))
    assert [run.training_run_id for run in runs] == ["run-0", "run-1", "run-2"]
    assert stub.sent("training_runs")[1].query == {
        "limit": "100", "offset": "1", "access_scope": "accessible", "project_id": "p",
    }  # fmt: skip


def test_a_failing_page_raises_and_the_listing_can_be_tried_again(stub: Stub, rest: RestClient):
    stub.sessions = {"a": {}, "b": {}}
    listing = rest.iter_sessions(page_size=1)
    stub.script("sessions", answer({"sessions": ["a"]}), status(404))
    with pytest.raises(NotFoundError):
        list(listing)
    assert list(listing) == ["a", "b"]


# -- what is refused at the call -------------------------------------------------------------------------

BAD_PATHS = [
    "",
    RUN,
    f"tinker://{RUN}",
    f"tinker://{RUN}/wrong/x",
    f"tinker://{RUN}/weights/a/b",
    "http://r/weights/x",
]
BY_PATH = [
    "get_training_run_by_tinker_path", "get_weights_info_by_tinker_path", "get_external_weights_urls",
    "get_checkpoint_archive_url_from_tinker_path", "delete_checkpoint_from_tinker_path", "copy_weights",
    "publish_checkpoint_from_tinker_path", "unpublish_checkpoint_from_tinker_path",
]  # fmt: skip


@pytest.mark.parametrize("name", BY_PATH)
def test_a_wrong_path_is_refused_with_what_one_looks_like(stub: Stub, rest: RestClient, name: str):
    more = ("p",) if name == "copy_weights" else ()
    for path in BAD_PATHS:
        with pytest.raises(InvalidInputError, match="tinker://RUN/weights/NAME"):
            getattr(rest, name)(path, *more)
    assert stub.requests == []


def test_bad_arguments_are_refused_and_the_client_goes_on(stub: Stub, rest: RestClient):
    with pytest.raises(InvalidInputError, match="external_weights/NAME, got"):
        rest.get_external_weights_urls(PATH)
    with pytest.raises(InvalidInputError, match="training_run_id must be an id without '/'"):
        rest.get_training_run(PATH)
    with pytest.raises(InvalidInputError, match="session_id must be"):
        rest.get_session("")
    with pytest.raises(InvalidInputError, match="tinker://RUN/weights/NAME"):
        rest.delete_checkpoint(RUN, "step-1")
    with pytest.raises(InvalidInputError, match="ttl_seconds must be a whole number from 1 on"):
        rest.set_checkpoint_ttl_from_tinker_path(PATH, 0)
    with pytest.raises(InvalidInputError, match=r"TINKER_PROJECT_ID"):
        rest.copy_weights(PATH)
    with pytest.raises(InvalidInputError, match="limit"):
        rest.list_training_runs(limit=-1)
    with pytest.raises(InvalidInputError, match="access_scope"):
        rest.list_sessions(access_scope="everyone")  # type: ignore[arg-type]
    assert stub.requests == []
    rest.list_sessions().result(10)


# -- failing, waiting, ending ----------------------------------------------------------------------------


def test_an_answer_that_cannot_be_read_names_the_call(stub: Stub, rest: RestClient):
    stub.script("training_runs/*", answer({"training_run_id": RUN}))
    with pytest.raises(APIResponseValidationError, match="training_runs"):
        rest.get_training_run(RUN).result(10)


def test_a_wait_that_runs_out_cancels_nothing(stub: Stub, rest: RestClient):
    stub.script("sessions", hang())
    future = rest.list_sessions()
    with pytest.raises(ResultTimeoutError):
        future.result(0.05)
    stub.script("sessions", hang())
    with pytest.raises(ResultTimeoutError):
        asyncio.run(rest.list_sessions_async(timeout=0.05))
    assert not future.done()
    assert rest.list_sessions().result(10).sessions == []
    assert future.cancel()


def test_a_client_of_its_own_opens_no_session(stub: Stub):
    rest = RestClient(base_url=stub.url, api_key="tml-test")
    assert stub.requests == []
    assert stub.url in repr(rest)
    rest.list_sessions().result(10)
    assert stub.count("create_session") == 0
    rest.close().result(10)
    with pytest.raises(ClientClosedError):
        rest.list_sessions()
    with pytest.raises(ClientClosedError):
        rest.whoami()


def test_a_client_on_a_shared_connection_leaves_it_open(stub: Stub, rest: RestClient):
    with RestClient(rest._connection) as guest:
        guest.list_sessions().result(10)
    rest.list_sessions().result(10)
    with pytest.raises(InvalidInputError, match="not both"):
        RestClient(rest._connection, base_url=stub.url)


def test_it_can_be_used_with_async_with(stub: Stub):
    async def use() -> RestClient:
        async with RestClient(base_url=stub.url, api_key="tml-test") as rest:
            await rest.list_sessions_async()
            return rest

    rest = asyncio.run(use())
    with pytest.raises(ClientClosedError):
        rest.list_sessions()


def test_the_environment_says_which_server(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_BASE_URL", f"{stub.url}/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-environment")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "cf-id")
    with RestClient() as rest:
        rest.list_sessions().result(10)
    (sent,) = stub.sent("sessions")
    assert sent.headers["x-api-key"] == "tml-environment"
    assert sent.headers["cf-access-client-id"] == "cf-id"
