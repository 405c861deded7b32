"""Over sockets: one tenant asks for far too much, and another is served beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import KEY, MODEL, OTHER_KEY, PROTO, Running, pass_body
from tinkex import AdamParams, Datum, ModelInput, ServiceClient
from tinkex.engine.protocol import EngineConfig

pytestmark = pytest.mark.slow
ENGINE = EngineConfig("", kind="fake", max_pass_tokens=4)  # one datum a micro-batch


def sampling(server: Running, session: str, **more: Any) -> dict[str, Any]:
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    return {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_session_id": server.post("create_sampling_session", **sampler)["sampling_session_id"],
        "seq_id": 0, **more,
    }  # fmt: skip


def test_a_huge_pass_and_a_huge_sample_do_not_hold_up_another_tenant(start: Callable[..., Running]):
    server = start(engine=ENGINE, long_poll=0.05)
    run = server.open_run()
    huge = server.ask("POST", "/api/v1/forward_backward", pass_body(run, 1, datums=3000), PROTO).json
    many = {"max_tokens": 200, "seed": 1, "stop": []}
    session = run.split(":")[0]
    samples = server.post("asample", **sampling(server, session, num_samples=1024, sampling_params=many))

    class Other(Running):
        """The same server, for another tenant."""

        def __init__(self) -> None:
            self.server = server.server

        def ask(self, method: str, path: str, body: Any = None, headers: Any = None, key: Any = OTHER_KEY):
            return super().ask(method, path, body, headers, key)

    other = Other()
    mine = other.open_run()
    one = {"max_tokens": 1, "seed": 1}
    for seq_id in (1, 3, 5):
        answer = other.ask("POST", "/api/v1/forward_backward", pass_body(mine, seq_id), PROTO)
        step = other.post("optim_step", model_id=mine, seq_id=seq_id + 1, adam_params={"learning_rate": 0.1})
        assert other.result(answer.json).status == other.result(step).status == 200
    promise = other.post("asample", **sampling(other, mine.split(":")[0], sampling_params=one))
    assert len(other.result(promise).json["sequences"]) == 1
    for pending in (huge, samples):
        body = {"request_id": pending["request_id"]}
        assert server.ask("POST", "/api/v1/retrieve_future", body).status == 408


def test_passes_beyond_the_memory_of_one_user_are_sent_again_until_they_are_done(
    start: Callable[..., Running],
):
    server = start(engine=ENGINE, queue_memory_per_user=200)
    tokens = [1 + i % 500 for i in range(5)]
    datum = Datum(
        ModelInput.from_ints(tokens[:-1]), {"target_tokens": np.array(tokens[1:]), "weights": np.ones(4)}
    )
    service = ServiceClient(base_url=server.url, api_key=KEY["x-api-key"])
    runs = [service.create_lora_training_client(MODEL, rank=4, seed=1) for _ in range(2)]
    passes: list[Any] = []
    for _ in range(6):
        passes += [run.forward_backward([datum] * 2, "cross_entropy") for run in runs]
        for run in runs:
            run.optim_step(AdamParams(learning_rate=0.1))
    losses = [future.result().metrics["loss:sum"] for future in passes]
    assert losses[::2] == losses[1::2] == sorted(losses[::2], reverse=True)
    assert server.server.gateway.metrics.requests["forward_backward", 429]
