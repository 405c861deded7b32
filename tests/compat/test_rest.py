"""The official SDK's RestClient and AdminClient: every call, on a server whose state is known."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.compat.clients.report import MODEL
from tests.compat.conftest import Served

pyrage: Any = importlib.import_module("pyrage")  # without types of its own


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def identity() -> Any:
    return pyrage.x25519.Identity.generate()


@pytest.fixture(scope="module")
def facts(served: Served, downloads: Path, identity: Any) -> dict[str, dict[str, Any]]:
    return served.run("tinker-0.36.0", "rest_calls.py", str(downloads), str(identity.to_public()))


def _one(facts: dict[str, Any], step: str, name: str = "weights/state") -> dict[str, Any]:
    (found,) = [c for c in facts[step]["checkpoints"] if c["id"] == name]
    return found


def test_runs_sessions_and_samplers(facts: dict[str, dict[str, Any]]) -> None:
    run = facts["runs"]["run"]
    assert facts["runs"] == {"ids": [run], "total": 1, "run": run}
    assert facts["run"] == {
        "model": MODEL, "lora": [True, 2], "metadata": {"renderer": "r"}, "same": True,
        "last": facts["run"]["state"], "last_sampler": facts["run"]["sampler"],
        "state": f"tinker://{run}/weights/state", "sampler": f"tinker://{run}/sampler_weights/sampler",
    }  # fmt: skip
    assert facts["sampler"] == {"model": MODEL, "path": facts["run"]["sampler"]}
    session = facts["session"]
    assert (session["runs"], session["metadata"], session["name"]) == ([run], {"team": "red"}, "the first")
    assert len(session["samplers"]) == 1
    assert session["listed"] == [session["id"]] == [run.split(":")[0]]


def test_checkpoints(facts: dict[str, dict[str, Any]]) -> None:
    of_run, of_user = facts["checkpoints"]["of_run"], facts["checkpoints"]["of_user"]
    assert [c["id"] for c in of_run] == [c["id"] for c in of_user]
    sampler, state = sorted(of_run, key=lambda c: c["id"])
    assert (sampler["id"], sampler["type"]) == ("sampler_weights/sampler", "sampler")
    assert (state["id"], state["type"]) == ("weights/state", "training")
    assert sampler["expires"] == pytest.approx(3600, abs=60)
    assert (state["expires"], state["metadata"], state["public"]) == (None, {"step": "1"}, False)
    assert 0 < sampler["size"] < state["size"]
    assert (facts["page"]["total"], len(facts["page"]["ids"])) == (2, 1)

    assert [_one(facts, step)["public"] for step in ("published", "unpublished")] == [True, False]
    assert facts["read by others"]["base_model"] == MODEL
    for step in ("changed by others", "unread by others", "deleted"):
        assert (facts[step]["error"]["type"], facts[step]["error"]["status"]) == ("NotFoundError", 404)
    assert _one(facts, "short-lived")["expires"] == pytest.approx(7200, abs=60)
    assert _one(facts, "long-lived")["expires"] is None
    assert facts["weights"] == {"base_model": MODEL, "rank": 2, "mlp": False, "attn": True}
    assert facts["copied"]["rank"] == 2
    assert facts["copied"]["path"] != facts["run"]["state"]


def test_exports_plain_and_sealed(facts: dict[str, dict[str, Any]], downloads: Path, identity: Any) -> None:
    for name in ("plain", "sealed"):
        assert facts[name]["path"].endswith(f"/external_weights/{name}")
        assert facts[name]["left"] > 300  # clients ask anew below five minutes
    plain = load_file(downloads / "plain" / "adapter_model.safetensors")
    config = json.loads((downloads / "plain" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 32)
    assert plain
    assert not any("mlp" in key for key in plain)
    assert facts["sealed"]["files"] == [f"{file}.age" for file in facts["plain"]["files"]]
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        sealed = (downloads / "sealed" / f"{file}.age").read_bytes()
        assert pyrage.decrypt(sealed, [identity]) == (downloads / "plain" / file).read_bytes()


def test_records(facts: dict[str, dict[str, Any]]) -> None:
    state, session = facts["run"]["state"], facts["session"]["id"]
    events = [tuple(event) for event in facts["audit"]["events"]]
    for event in ("checkpoints.save", "checkpoints.publish", "checkpoints.unpublish"):
        assert (event, state) in events
    assert ("checkpoints.delete", facts["plain"]["path"]) in events
    used = {event["type"]: event for event in facts["usage"]["events"] if event["session"] == session}
    assert (used["training"]["token_count"], used["sampling_sample"]["token_count"]) == (4, 10)
    assert (used["sampling_prefill"]["token_count"], used["checkpoint"]["count"]) == (8, 4)
    assert facts["usage"]["sessions"][session] == {"team": "red"}
    sizes = {c["id"]: c["size"] for c in facts["checkpoints"]["of_run"]}
    assert (facts["storage"]["counts"], facts["storage"]["sizes"]) == ([2], [sum(sizes.values())])
    assert {"forward_backward", "optim_step", "sample", "save_weights"} <= set(facts["trace"]["names"])
    claims = facts["whoami"]["claims"]
    who = facts["whoami"]["who"]  # which the client reads from a token
    assert (who["user_urn"], who["email"]) == (claims["sub"], claims["email"])
    assert who["org_urn"] == f"tml:organization:{claims['org_id']}"
    assert claims["exp"] > claims["iat"]
    assert claims["sub"]
    assert claims["org_id"]


def test_sessions_end_as_their_clients_say(facts: dict[str, dict[str, Any]]) -> None:
    search = facts["search"]
    assert (search["active"], search["counts"]) == (["active"], [2])
    assert search["error"]["message"] == "out of ideas"
    ended = {name: status for name, status in search["ended"].items() if name.startswith("the ")}
    assert {name: (status["reason"]["type"], status["detail"]) for name, status in ended.items()} == {
        "the first": ("success", "all done"),
        "the second": ("success", None),
        "the third": ("errored", None),
    }
