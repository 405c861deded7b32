"""`/v1` on two `tinkex serve` processes that share a Postgres and an S3 store: any of them answers the same.

A request names a model and no session, so each server samples by itself, in a session of its own.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import tinkex
from tests.cloud.members import eventually
from tests.server.served import MODEL, Serve
from tinkex.types import AdamParams, Datum, ModelInput

pytestmark = pytest.mark.slow
ASKED = {"prompt": "one two three", "max_tokens": 8, "temperature": 0.7, "seed": 4, "logprobs": 1}


@pytest.fixture
def two(postgres: str, s3: str, tmp_path: Path) -> Iterator[list[Serve]]:
    options = ("--ledger", postgres, "--store", s3, "--dtype", "float32", "--deterministic")
    made: list[Serve] = []
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            made.append(Serve(tmp_path / name, *options, text=True))
        yield made
    finally:
        for server in made:
            server.kill()


def complete(server: Serve, path: str, *, stream: bool) -> list[dict[str, Any]]:
    """The events of a completion, or the one response."""
    body = {"model": path, "stream": stream, **ASKED}
    headers = {"Authorization": "Bearer tml-ann", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    if not stream:
        return [json.loads(text)]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def drawn(events: list[dict[str, Any]]) -> list[Any]:
    """Text, tokens and logprobs of the choices, put together."""
    choices = [choice for event in events for choice in event["choices"]]
    scores = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return [
        "".join(choice["text"] for choice in choices),
        [token for one in scores for token in one["tokens"]],
        [value for one in scores for value in one["token_logprobs"]],
        choices[-1]["finish_reason"],
    ]


def used(postgres: str) -> dict[str, float]:
    """What Ann has sampled, by kind."""
    with psycopg.connect(postgres) as db:
        rows = db.execute("SELECT kind, sum(amount) FROM usage GROUP BY kind").fetchall()
    return {kind: amount for kind, amount in rows if "sampl" in kind or "prompt" in kind or "prefill" in kind}


def test_any_server_streams_the_same_tokens_and_counts_them(two: list[Serve], postgres: str) -> None:
    owner, other = two
    datum = Datum(ModelInput.from_ints([5, 6, 7, 8]), {"target_tokens": [6, 7, 8, 9]})
    with tinkex.ServiceClient(base_url=owner.url, api_key="tml-ann") as service:
        run = service.create_lora_training_client(MODEL, rank=8, seed=1)
        for step in range(3):
            run.forward_backward([datum], "cross_entropy")
            run.optim_step(AdamParams(learning_rate=0.3)).result(60)
            path = run.save_weights_for_sampler(f"v{step}").result(60).path
            first = drawn(complete(other, path, stream=True))  # at once, where nobody has seen it yet
            assert (
                first
                == drawn(complete(owner, path, stream=True))
                == drawn(complete(other, path, stream=False))
            )
            assert len(first[1]) == len(first[2]) > 0
    base = drawn(complete(other, MODEL, stream=True))
    assert base == drawn(complete(owner, MODEL, stream=True))
    assert base != first, "the adapter was used"
    rises: list[dict[str, float]] = []
    for server in two:
        before = settled(postgres)
        complete(server, path, stream=True)
        eventually(lambda before=before: used(postgres) != before, 30)
        after = settled(postgres)
        rises.append({kind: after[kind] - before.get(kind, 0.0) for kind in after})
    assert rises[0] == rises[1]
    assert any(rises[0].values())


def settled(postgres: str) -> dict[str, float]:
    """`used`, once it has not changed for a while: servers write usage down every few seconds."""
    last, since = used(postgres), time.monotonic()
    while time.monotonic() - since < 6:
        time.sleep(0.2)
        if (now := used(postgres)) != last:
            last, since = now, time.monotonic()
    return last
