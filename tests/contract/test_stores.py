"""Engines read and write adapters where they are told: in a directory, and in an S3 server.

The other contract tests save in directories of this machine, with every kind of engine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.contract.conftest import LORA, do, logprobs, new_run, tokens, train
from tinkex import store
from tinkex.engine.protocol import DropAdapter, Engine, EngineError, LoadAdapter, SampleWork, SaveAdapter
from tinkex.types.params import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.parametrize("config", ["fake", "torch", "tensor"], indirect=True, scope="session"),
]


@pytest.fixture(params=["directory", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where nothing is yet."""
    place = str(tmp_path) if request.param == "directory" else request.getfixturevalue("s3")
    return store.join(place, "runs/one")


def test_a_run_resumes_exactly_from_a_store(engine: Engine, run: str, location: str):
    ids, resumed = tokens(engine, 0, 12), f"resumed-{run}"
    train(engine, run, ids, steps=2)
    written = do(engine, SaveAdapter(run, location, optimizer=True))
    assert written == store.directory_bytes(location) > 0
    train(engine, run, ids)
    assert do(engine, LoadAdapter(resumed, location, optimizer=True)).rank == LORA.rank
    train(engine, resumed, ids)
    np.testing.assert_array_equal(logprobs(engine, resumed, ids), logprobs(engine, run, ids))
    do(engine, DropAdapter(resumed))


def test_what_is_in_a_store_is_replaced_only_if_asked(engine: Engine, run: str, location: str):
    do(engine, SaveAdapter(run, location))
    with pytest.raises(EngineError, match="already exists") as caught:
        do(engine, SaveAdapter(run, location))
    assert caught.value.category == "user"
    ids = tokens(engine, 0, 12)
    train(engine, run, ids)
    do(engine, SaveAdapter(run, location, overwrite=True))
    other = new_run(engine)
    do(engine, LoadAdapter(other, location))
    np.testing.assert_array_equal(logprobs(engine, other, ids), logprobs(engine, run, ids))
    do(engine, DropAdapter(other))


@pytest.mark.parametrize("sampling", [False, True])
async def test_a_sampler_publishes_from_a_store(engine: Engine, run: str, location: str, sampling: bool):
    ids = tokens(engine, 0, 12)
    train(engine, run, ids, steps=2)
    do(engine, SaveAdapter(run, location, sampling=sampling))
    await engine.sampler.publish(run, location)
    work = SampleWork(ids, SamplingParams(max_tokens=1), adapter=run, prompt_logprobs=True)
    scored = (await engine.sampler.sample(work)).prompt_logprobs_np
    assert scored is not None
    np.testing.assert_allclose(scored[1:], logprobs(engine, run, ids), atol=1e-4)
    await engine.sampler.retire(run)


async def test_what_is_not_in_a_store_is_the_users_mistake(engine: Engine, location: str):
    with pytest.raises(EngineError, match="one") as caught:
        do(engine, LoadAdapter("nobody", location))
    assert caught.value.category == "user"
    with pytest.raises(EngineError, match="one") as caught:
        await engine.sampler.publish("nobody", location)
    assert caught.value.category == "user"
