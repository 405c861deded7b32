"""Official SDK: RestClient and AdminClient, whole. Arguments: a directory for downloads, an age recipient."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tinker
from report import MODEL, PROMPT, done, error_of, say
from tinker import types
from tinker.lib._jwt_auth import jwt_claims

warnings.simplefilter("ignore", tinker.ExperimentalWarning)


def train(run: Any) -> None:
    ids = tinker.ModelInput.from_ints(PROMPT[:4])
    datum = tinker.Datum(model_input=ids, loss_fn_inputs={"target_tokens": [5, 6, 7, 8]})
    run.forward_backward([datum], "cross_entropy").result()
    run.optim_step(tinker.AdamParams(learning_rate=0.01)).result()


def listed(response: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": c.checkpoint_id, "type": c.checkpoint_type, "path": c.tinker_path, "public": c.public,
            "size": c.size_bytes, "metadata": c.user_metadata,
            "expires": None if c.expires_at is None else (c.expires_at - datetime.now(UTC)).total_seconds(),
        }
        for c in response.checkpoints
    ]  # fmt: skip


def checkpoints(rest: Any, run_id: str, path: str) -> None:
    def now() -> list[dict[str, Any]]:
        return listed(rest.list_checkpoints(run_id).result())

    say("checkpoints", of_run=now(), of_user=listed(rest.list_user_checkpoints().result()))
    page = rest.list_user_checkpoints(limit=1, offset=1).result()
    say("page", ids=[c.checkpoint_id for c in page.checkpoints], total=page.cursor.total_count)
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()  # twice is no error
    say("published", checkpoints=now())
    others = tinker.RestClient(api_key="tml-somebody-else")
    say("read by others", base_model=others.get_weights_info_by_tinker_path(path).result().base_model)
    say("changed by others", error=error_of(others.delete_checkpoint_from_tinker_path(path).result))
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    say("unpublished", checkpoints=now())
    say("unread by others", error=error_of(others.get_weights_info_by_tinker_path(path).result))
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    say("short-lived", checkpoints=now())
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    say("long-lived", checkpoints=now())
    info = rest.get_weights_info_by_tinker_path(path).result()
    say("weights", base_model=info.base_model, rank=info.lora_rank, mlp=info.train_mlp, attn=info.train_attn)


def exports(rest: Any, run: Any, out: Path, recipient: str) -> None:
    paths = {
        "plain": run.save_weights_external("plain", ttl_seconds=3600).result().path,
        "sealed": run.save_weights_external("sealed", age_encryption_recipients=[recipient]).result().path,
    }
    for name, path in paths.items():
        answer = rest.get_external_weights_urls(path).result()
        (out / name).mkdir()
        for file, url in answer.urls.items():
            (out / name / file).write_bytes(urllib.request.urlopen(url).read())
        left = (answer.expires - datetime.now(UTC)).total_seconds()
        say(name, path=path, files=sorted(answer.urls), left=left)
        rest.delete_checkpoint_from_tinker_path(path).result()
    say("deleted", error=error_of(rest.get_external_weights_urls(paths["plain"]).result))


def records(rest: Any, session: str, path: str) -> None:
    admin, now = tinker.AdminClient(), datetime.now(UTC)
    log = admin.get_audit_log("checkpoints", day=now.date()).result()
    say("audit", events=[(e.event, e.tinker_path) for e in log.entries])
    usage = admin.get_billing_usage(now - timedelta(hours=2), now + timedelta(hours=2)).result()
    events = [
        {**e.event_info.model_dump(), "session": e.session_id, "model": e.base_model} for e in usage.data
    ]
    say("usage", events=events, sessions={k: v.user_metadata for k, v in usage.sessions.items()})
    stored = admin.get_current_checkpoint_storage_usage().result().data
    say("storage", counts=[s.checkpoint_count for s in stored], sizes=[s.size_bytes for s in stored])
    trace = json.load(urllib.request.urlopen(rest.export_session_trace(session).result()))
    say("trace", names=sorted({e.get("name", "") for e in trace["traceEvents"]}))
    mine = (
        rest.search_sessions(types.SessionSearchRequest(session_id=session)).result().sessions[0].project_id
    )
    rest.assign_session_project(session, mine).result()
    copied = rest.copy_weights(path, mine, ttl_seconds=3600).result()
    say("copied", path=copied, rank=rest.get_weights_info_by_tinker_path(copied).result().lora_rank)
    say("whoami", who=rest.whoami().result().model_dump(mode="json"), claims=jwt_claims(exchanged()))


def exchanged() -> str:
    """A short-lived token for this key."""
    request = urllib.request.Request(
        f"{os.environ['TINKER_BASE_URL']}/api/v1/auth/token", b"{}",
        {"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"},
    )  # fmt: skip
    return json.load(urllib.request.urlopen(request))["jwt"]


def main(out: Path, recipient: str) -> None:
    rest = tinker.RestClient()
    service = tinker.ServiceClient(user_metadata={"team": "red"}, display_name="the first")
    run = service.create_lora_training_client(MODEL, rank=2, train_mlp=False, user_metadata={"renderer": "r"})
    train(run)
    run_id = run.get_info().model_id
    session = run_id.split(":")[0]
    state = run.save_state("state", user_metadata={"step": "1"}).result().path
    sampler_path = run.save_weights_for_sampler("sampler", ttl_seconds=3600).result().path
    sampler = run.create_sampling_client(sampler_path)
    sampler.sample(
        tinker.ModelInput.from_ints(PROMPT), 2, tinker.SamplingParams(max_tokens=5, stop=[])
    ).result()

    runs = rest.list_training_runs().result()
    found = rest.get_training_run_by_tinker_path(state).result()
    say(
        "runs", ids=[r.training_run_id for r in runs.training_runs], total=runs.cursor.total_count, run=run_id
    )
    say(
        "run", model=found.base_model, lora=[found.is_lora, found.lora_rank], metadata=found.user_metadata,
        last=found.last_checkpoint.tinker_path, last_sampler=found.last_sampler_checkpoint.tinker_path,
        same=found == rest.get_training_run(run_id).result(), state=state, sampler=sampler_path,
    )  # fmt: skip
    about = rest.get_sampler(sampler._sampling_session_id).result()
    say("sampler", model=about.base_model, path=about.model_path)
    seen = rest.get_session(session).result()
    say(
        "session", runs=seen.training_run_ids, samplers=seen.sampler_ids, metadata=seen.user_metadata,
        name=seen.display_name, listed=rest.list_sessions().result().sessions, id=session,
    )  # fmt: skip
    checkpoints(rest, run_id, state)
    exports(rest, run, out, recipient)
    records(rest, session, state)

    query = types.SessionSearchRequest(user_metadata={"team": "red"})
    active = rest.search_sessions(query).result().sessions
    service.close("success", "all done").result()
    with tinker.ServiceClient(display_name="the second") as other:
        other.create_sampling_client(base_model=MODEL)
    broken = error_of(lambda: fail_inside())
    ended = rest.search_sessions(types.SessionSearchRequest(limit=10)).result().sessions
    say(
        "search", active=[s.status.type for s in active], counts=[s.checkpoints_count for s in active],
        ended={s.display_name: s.status.model_dump() for s in ended if s.display_name}, error=broken,
    )  # fmt: skip


def fail_inside() -> None:
    with tinker.ServiceClient(display_name="the third") as service:
        service.create_sampling_client(base_model=MODEL)
        raise RuntimeError("out of ideas")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    done()
