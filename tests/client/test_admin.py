"""AdminClient over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, date, datetime

import pytest

from tests.stub import Stub, status
from tinkex.client.admin import AdminClient
from tinkex.errors import InvalidInputError, PermissionDeniedError


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


@pytest.fixture
def admin(stub: Stub) -> Iterator[AdminClient]:
    with AdminClient(base_url=stub.url, api_key="tml-test") as admin:
        yield admin


def test_the_audit_log_of_a_day(stub: Stub, admin: AdminClient):
    log = admin.get_audit_log("checkpoints", date(2026, 1, 2)).result(10)
    assert log.entries[0].event == "checkpoint.saved"
    (sent,) = stub.sent("audit")
    assert sent.query == {"event_type": "checkpoints", "day": "2026-01-02"}
    assert sent.headers["x-sdk-method"] == "get_audit_log"
    assert asyncio.run(admin.get_audit_log_async(timeout=10)) == log
    assert stub.sent("audit")[1].query == {"event_type": "all"}


def test_an_audit_log_behind_a_redirect_is_followed_to_another_host_without_the_key(
    stub: Stub, admin: AdminClient
):
    with Stub() as elsewhere:
        stub.script("audit", status(302, {"location": f"{elsewhere.url}/signed?x=1"}))
        elsewhere.script("*", status(200, body={"entries": []}), always=True)
        assert admin.get_audit_log().result(10).entries == []
        assert "x-api-key" not in elsewhere.requests[0].headers


def test_billing_takes_datetimes_and_their_text(stub: Stub, admin: AdminClient):
    start, end = datetime(2026, 1, 2, 3, tzinfo=UTC), datetime(2026, 1, 2, 4, tzinfo=UTC)
    usage = admin.get_billing_usage(start, end).result(10)
    assert usage.data[0].event_info.type == "training"
    again = asyncio.run(
        admin.get_billing_usage_async("2026-01-02T03:00:00Z", "2026-01-02T04:00:00Z", timeout=10)
    )
    assert again == usage
    sent = [request.query for request in stub.sent("*events")]
    assert sent[0] == sent[1]
    assert {name: datetime.fromisoformat(value) for name, value in sent[0].items()} == {
        "starting_on": start,
        "ending_before": end,
    }


def test_a_time_that_is_none_is_refused_and_nothing_sent(stub: Stub, admin: AdminClient):
    with pytest.raises(InvalidInputError, match=r"ending_before must be a datetime .* got 'tomorrow'"):
        admin.get_billing_usage("2026-01-02T03:00:00Z", "tomorrow")
    with pytest.raises(InvalidInputError, match="event_type"):
        admin.get_audit_log("everything")  # type: ignore[arg-type]
    assert stub.requests == []


def test_storage_of_one_project(stub: Stub, admin: AdminClient):
    usage = admin.get_current_checkpoint_storage_usage("p1").result(10)
    assert usage.data[0].checkpoint_count == 1
    assert stub.sent("*current")[0].query == {"project_id": "p1"}
    assert asyncio.run(admin.get_current_checkpoint_storage_usage_async(timeout=10)) == usage


def test_without_the_role_it_is_a_typed_error(stub: Stub, admin: AdminClient):
    stub.script("audit", status(403, body={"detail": "admins only"}))
    with pytest.raises(PermissionDeniedError, match="admins only"):
        admin.get_audit_log().result(10)
