"""Hundreds of runs and thousands of samples in one process: nobody starves."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, datum, eventually
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.stub import Stub, delay
from tinkex import ServiceClient
from tinkex.wire.ops import Pool

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "many_runs.py"

# -- samplers ----------------------------------------------------------------------------------------------


def test_one_sample_does_not_wait_for_another_samplers_thousands(stub: Stub, service: ServiceClient) -> None:
    """A counter of what was sent between its call and its own turn."""
    greedy = service.create_sampling_client(base_model="stub/base", timeout=20)
    modest = service.create_sampling_client(base_model="stub/base", timeout=20)
    transport: Any = service._connection.transport
    limiter = transport._permits[Pool.SAMPLE]
    stub.script("asample", *[delay(0.02)] * 3000)
    many = [greedy.sample(PROMPT, 1, PARAMS) for _ in range(3000)]
    stub.wait_for("asample", 50)
    eventually(lambda: len(limiter) > 1000)
    sent_before = stub.count("asample")
    modest.sample(PROMPT, 1, PARAMS).result(10)
    sent = [request.json["sampling_session_id"] for request in stub.sent("asample")]
    waited_for = sent.index(modest._sampling_session_id) - sent_before
    assert waited_for <= 4 * limiter.capacity, f"{waited_for} of the other's samples went first"
    assert len(sent) < 1000, "it was done long before the other's thousands"
    for future in many:
        future.cancel()


def test_polls_are_shared_too(stub: Stub, service: ServiceClient) -> None:
    """One sampler's held results fill every poll, and another's result comes all the same."""
    greedy = service.create_sampling_client(base_model="stub/base", timeout=20)
    modest = service.create_sampling_client(base_model="stub/base", timeout=20)
    transport: Any = service._connection.transport
    polls = transport._permits[Pool.RETRIEVE]
    stub.hold("asample")
    many = [greedy.sample(PROMPT, 1, PARAMS) for _ in range(polls.capacity * 3)]
    eventually(lambda: polls.used == polls.capacity and len(polls) > polls.capacity, timeout=20)
    one = modest.sample(PROMPT, 1, PARAMS)
    eventually(lambda: any(owner == modest._sampling_session_id for owner in polls._waiting))
    done_before = sum(future.done() for future in many)
    stub.release()
    one.result(20)
    waited_for = sum(future.done() for future in many) - done_before
    assert waited_for < polls.capacity * 2, "it did not wait for all of them"
    for future in many:
        future.result(20)


# -- runs --------------------------------------------------------------------------------------------------


def test_hundreds_of_runs_and_thousands_of_samples_advance_together(stub: Stub) -> None:
    """200 runs of 5 steps and 2,000 samples at once: when the first is done, none is far behind."""
    steps, runs, samples = 5, 200, 10
    service = ServiceClient(base_url=stub.url)
    done: Counter[int] = Counter(dict.fromkeys(range(runs), 0))
    sampled: Counter[int] = Counter(dict.fromkeys(range(runs), 0))
    behind: list[int] = []
    jitter = random.Random(1)

    async def train(number: int) -> None:
        run = await service.create_lora_training_client_async("stub/base")
        sampler = await service.create_sampling_client_async(base_model="stub/base")
        await all_there.wait()  # or those who came first would be ahead by that

        async def sample() -> None:
            await sampler.sample_async(PROMPT, 1, PARAMS)
            sampled[number] += 1

        samples_of_mine = [asyncio.ensure_future(sample()) for _ in range(samples)]
        for _ in range(steps):
            passed = await run.forward_backward_async([datum()], "cross_entropy")
            await (await run.optim_step_async())
            await passed
            done[number] += 1
            if done[number] == steps and not behind:
                behind.append(min(done.values()))
            await asyncio.sleep(jitter.random() * 0.001)
        await asyncio.gather(*samples_of_mine)

    async def scenario() -> None:
        await asyncio.gather(*(train(number) for number in range(runs)))

    all_there = asyncio.Barrier(runs)
    asyncio.run(scenario())
    assert set(done.values()) == {steps}
    assert set(sampled.values()) == {samples}
    assert behind[0] >= steps - 2, f"when the first run had made {steps} steps, one had made {behind[0]}"
    assert stub.peak_connections < 400
    for run_id in {run for run, _, _ in stub.executed}:
        ops = [op for run, _, op in stub.executed if run == run_id]
        assert ops == ["forward_backward", "optim_step"] * steps, "each in its own order"
    close(service)


def test_the_example_runs_embedded(tmp_path: Path) -> None:
    model = tiny_tokenizer(tiny_model(tmp_path, "qwen3", eos_token_id=257, max_position_embeddings=256))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER", "TINKEX"))}
    options = ["--runs", "12", "--steps", "8", "--samples", "8"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--model", str(model), *options],
        env=kept | {"TINKEX_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "12 runs, 96 steps, 96 samples" in done.stdout
    found = re.search(r"the slowest had made (\d) of 8 steps", done.stdout)
    assert found is not None
    assert int(found[1]) >= 4
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0], "a higher rate learns a single sentence sooner"


@pytest.fixture(autouse=True)
def plenty_of_gap(stub: Stub) -> None:
    stub.gap_seconds = 30
