"""Projects: nobody puts anything into a project of another user's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.service.harness import User, serving
from tinkex.service.service import Service
from tinkex.types import checkpoints, sessions
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


def add_key(service: Service, owner: str, project: str | None) -> None:
    name = f"{owner}-{project}"
    service.ledger.add_key(
        name=name, note="", hash=name, owner=owner, project_id=project, created_at=time.time()
    )


async def test_nothing_is_planted_in_the_project_of_another(home: Path):
    async with serving(home) as service:
        add_key(service, "ann", "lab")
        add_key(service, "mallory", None)
        ann, mallory, both = User(service, "ann", "lab"), User(service, "mallory"), User(service, "ann")
        planted = sessions.CreateSessionRequest(project_id="lab")
        assert await mallory.status_of(ops.CREATE_SESSION, planted) == 404
        run = await mallory.run()
        session, path = run.split(":")[0], await mallory.save(run, 1, "a")
        move = sessions.AssignSessionProjectRequest(session_id=session, project_id="lab")
        assert await mallory.status_of(ops.ASSIGN_SESSION_PROJECT, move) == 404
        copy = checkpoints.CopyWeightsRequest(source_path=path, destination_project_id="lab")
        assert await mallory.status_of(ops.COPY_WEIGHTS, copy) == 404
        everything = sessions.ListSessionsRequest(access_scope="accessible")
        assert (await ann.call(ops.LIST_SESSIONS, everything)).sessions == []
        own = sessions.CreateSessionRequest(project_id="a project of nobody's")
        assert await mallory.status_of(ops.CREATE_SESSION, own) == 200
        assert await ann.status_of(ops.CREATE_SESSION, planted) == 200
        assert await both.status_of(ops.CREATE_SESSION, planted) == 200  # another key of the same user's
