"""Official SDKs of earlier days: everything they know works on the same server, with the same numbers."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from tests.compat import reference
from tests.compat.clients.report import MODEL, PROMPT, SEQUENCES
from tests.compat.conftest import AT_ONCE, Served
from tests.compat.environments import OLDER
from tests.compat.formulas import ADVANTAGES, FORMULAS, OLD

close = pytest.approx
KNOWN = 259  # ids that the tokenizer knows


@pytest.fixture(scope="module", params=OLDER)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def downloads(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def facts(served: Served, version: str, downloads: Path) -> dict[str, dict[str, Any]]:
    return served.run(f"tinker-{version}", "older.py", str(downloads))


def test_training(served: Served, version: str, facts: dict[str, dict[str, Any]]) -> None:
    assert facts["capabilities"] == {"version": version, "models": [MODEL]}
    assert (facts["info"]["name"], facts["info"]["text"]) == (MODEL, "a tokenizer")
    tables = reference.base_logprobs(served.model, SEQUENCES)
    expected = [np.array(reference.scores(p, ids)) for p, ids in zip(tables, SEQUENCES, strict=True)]
    for given, right in zip(facts["first"]["logprobs"], expected, strict=True):
        assert given == close(right, abs=1e-4)
    assert facts["first"]["loss"] == close(-sum(lp.sum() for lp in expected), rel=1e-4)
    kinds = ["importance_sampling", "ppo", *(["cispo", "dro"] if version != "0.4.1" else [])]
    for kind in kinds:
        lags = [(lp, lp - OLD[: len(lp)], ADVANTAGES[: len(lp)]) for lp in expected]
        right = sum(FORMULAS[f"{kind} 0"](lp, np.exp(lag), gain, lag) for lp, lag, gain in lags)
        assert facts[kind]["loss"] == close(right, rel=1e-4), kind

    losses = facts["steps"]["losses"]
    assert losses[3] < 0.5 * losses[0]
    for step in ("resumed", "loaded"):  # the oldest ones always restored the optimizer too
        assert facts[step]["losses"] == close(losses[2:], rel=1e-6)
    if version != "0.4.1":
        assert facts["weights only"]["losses"][0] == close(losses[2], rel=1e-6)
        assert facts["weights only"]["losses"][1] != close(losses[3], rel=1e-3)
    few, many = facts["chunks"]["few"], facts["chunks"]["many"]
    assert many["loss"] == close(60 * few["loss"], rel=1e-5)
    assert all(many["logprobs"][i] == close(few["logprobs"][i % 3], abs=1e-5) for i in range(180))
    assert facts["custom"]["metrics"]["loss:sum"] == close(losses[0], rel=1e-5)
    assert facts["custom"]["after"]["loss"] == close(losses[1], rel=1e-5)
    for error in facts["wrong"].values():
        assert (error["type"], error["category"]) == ("RequestFailedError", "user")
        assert error["seconds"] < AT_ONCE
    assert facts["asynchronous"]["after"] < facts["asynchronous"]["before"] == close(few["loss"], rel=1e-5)


def test_sampling(served: Served, version: str, facts: dict[str, dict[str, Any]]) -> None:
    for sampler in facts["scores"]["scores"]:
        for scored, trained in zip(sampler, facts["scores"]["trained"], strict=True):
            assert scored[0] is None
            assert scored[1:] == close(trained, abs=1e-4)
    drawn = facts["drawn"]
    assert [s["tokens"] for s in drawn["first"]] == [s["tokens"] for s in drawn["again"]]
    for sequence in drawn["first"]:
        ids = PROMPT + sequence["tokens"]
        (table,) = reference.base_logprobs(served.model, [ids])
        assert sequence["logprobs"] == close(reference.scores(table, ids)[len(PROMPT) - 1 :], abs=1e-4)
        assert (len(sequence["tokens"]), sequence["stop"]) == (16, "length")
    (greedy,) = drawn["greedy"]
    (table,) = reference.base_logprobs(served.model, [PROMPT + greedy["tokens"]])
    assert greedy["tokens"] == table[len(PROMPT) - 1 : -1, :KNOWN].argmax(-1).tolist()
    assert drawn["top"][0]["tokens"] == greedy["tokens"]
    whole = drawn["first"][0]["tokens"]
    (stopped,) = facts["stopped"]["sequences"]
    assert stopped["tokens"] == whole[: whole.index(facts["stopped"]["stop"]) + 1]
    assert stopped["stop"] == "stop"

    (table,) = reference.base_logprobs(served.model, [PROMPT])
    assert facts["prompt"]["logprobs"][0] is facts["prompt"]["top"][0] is None
    assert facts["prompt"]["logprobs"][1:] == close(reference.scores(table, PROMPT), abs=1e-4)
    best = torch.topk(table[:-1, :KNOWN], 2).indices.tolist()
    assert [[token for token, _ in row] for row in facts["prompt"]["top"][1:]] == best
    error = facts["too long"]["error"]
    assert (error["type"], error["seconds"] < AT_ONCE) == ("BadRequestError", True)
    assert "exceeds the model's context window: 250 + 10 > 256" in error["message"]
    if version != "0.4.1":
        assert facts["pickled"]["tokens"] == [s["tokens"] for s in drawn["first"]]


def test_rest(version: str, facts: dict[str, dict[str, Any]], downloads: Path) -> None:
    run = facts["info"]["run"]
    assert run in facts["runs"]["ids"]
    assert facts["runs"]["total"] == len(facts["runs"]["ids"]) == (3 if version == "0.4.1" else 4)
    assert facts["run"] == {"id": run, "model": MODEL, "rank": 4}
    before = {"sampler_weights/sampler": False, "weights/mid": False}
    checkpoints = facts["checkpoints"]
    assert checkpoints["before"] == checkpoints["unpublished"] == before
    assert checkpoints["published"] == before | {"sampler_weights/sampler": True}
    assert facts["of user"] == {"ids": sorted(before), "total": 2}
    assert facts["deleted"]["ids"] == ["weights/mid"]
    assert facts["deleted"]["error"]["status"] == 404
    if version != "0.4.1":
        assert facts["weights"]["rank"] == 4
        assert facts["sessions"]["ids"] == [run.split(":")[0]]

    assert facts["archive"]["left"] > 60
    with tarfile.open(fileobj=io.BytesIO((downloads / "archive.tar").read_bytes())) as archive:
        assert all(member.isreg() and "/" not in member.name for member in archive.getmembers())
        weights = archive.extractfile("adapter_model.safetensors")
        assert weights is not None
        assert all(".lora_" in name for name in load(weights.read()))
        assert "adapter_config.json" in archive.getnames()
