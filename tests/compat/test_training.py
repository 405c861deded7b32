"""The official SDK trains, saves, loads and resumes on `tinkex serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat import reference
from tests.compat.clients.report import MODEL, SEQUENCES
from tests.compat.conftest import AT_ONCE, Served

close = pytest.approx


def test_the_official_client_trains_as_peft_does(served: Served, tmp_path: Path) -> None:
    facts = served.run("tinker-0.36.0", "training.py", str(tmp_path))
    assert facts["capabilities"] == {"models": [MODEL], "contexts": [256]}
    info = facts["info"]
    assert (info["name"], info["rank"], info["text"]) == (MODEL, 4, "a tokenizer")
    assert facts["start"]["path"] == f"tinker://{info['run']}/external_weights/start"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(facts["start"]["files"])

    # four pipelined steps of two passes each, against peft and torch.optim from the same exported adapter
    model = reference.adapted(served.model, tmp_path / "start")
    losses, norms = reference.trained(model, 4, weight_decay=0.1, clip=0.5)
    uninterrupted = facts["steps"]["losses"]
    assert uninterrupted == close(losses, rel=1e-4)
    assert [metrics["grad_norm"] for metrics in facts["steps"]["norms"]] == close(norms, rel=1e-3)
    assert reference.same_adapter(model, tmp_path / "end", 1e-4)

    # the optimizer comes back with its moments and its step, or not at all
    assert facts["steps"]["mid"] == f"tinker://{info['run']}/weights/mid"
    for step in ("resumed", "loaded with optimizer"):
        assert facts[step]["losses"] == close(uninterrupted[2:], rel=1e-6)
    assert facts["resumed"]["rank"] == 4
    for step in ("weights only", "loaded"):
        assert facts[step]["losses"][0] == close(uninterrupted[2], rel=1e-6)
        assert facts[step]["losses"][1] != close(uninterrupted[3], rel=1e-3)
    assert facts["weights only"]["losses"] == close(facts["loaded"]["losses"], rel=1e-6)
    assert facts["again"]["error"]["category"] == "user"
    assert "exists" in facts["again"]["error"]["message"]
    assert facts["again"]["error"]["seconds"] < AT_ONCE
    assert facts["overwritten"]["path"] == facts["steps"]["mid"]

    # a batch of several requests comes back whole and in order
    few, many = facts["chunks"]["few"], facts["chunks"]["many"]
    assert many["loss"] == close(400 * few["loss"], rel=1e-5)
    assert len(many["logprobs"]) == 1200
    assert all(many["logprobs"][i] == close(few["logprobs"][i % 3], abs=1e-5) for i in range(1200))

    # on-policy: a sampler scores as its run did when it was published, whatever was trained since
    for sampler in facts["scores"]["scores"]:
        for scored, trained in zip(sampler, few["logprobs"], strict=True):
            assert scored[0] is None
            assert scored[1:] == close(trained, abs=1e-4)
    assert facts["moved on"]["loss"] < 0.5 * few["loss"]

    # the same through asyncio
    coroutine = facts["coroutine"]
    assert coroutine["first"]["loss"] == close(few["loss"], rel=1e-5)
    assert coroutine["second"]["loss"] == close(facts["moved on"]["loss"], rel=1e-5)
    for scored, trained in zip(coroutine["scores"], coroutine["second"]["logprobs"], strict=True):
        assert scored[1:] == close(trained, abs=1e-4)
    assert len(SEQUENCES) == len(coroutine["scores"])
