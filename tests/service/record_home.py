"""Record a home directory as a killed server leaves it: later versions must still open it.

    python -m tests.service.record_home KIND TARGET.tar.gz        KIND: fake | torch

A child process serves a home over the KIND engine, works on it, and is killed with SIGKILL. The archive holds
that home, `facts.json` (ids, and the results that clients have seen or wait for) and `later.json` (what the
recording version computes when it goes on from there). `test_recorded_home.py` opens the archives with the
present code. Record a new archive only when the format on disk has changed; keep the old ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.service.harness import MODEL, Failed, User, datum, until
from tinkex.engine.protocol import EngineConfig, build_engine
from tinkex.service.config import ServiceConfig
from tinkex.service.service import Service
from tinkex.types import training
from tinkex.types.params import LoraConfig
from tinkex.wire import ops

Facts = dict[str, Any]


@asynccontextmanager
async def opened(directory: Path, kind: str) -> AsyncIterator[Service]:
    """A service over `directory`/home, with the model beside it."""
    engine = EngineConfig(
        model="",
        kind=kind,
        device="cpu",
        max_context=64,
        kv_bytes=2 << 20,
        threads=1,  # type: ignore[arg-type]
    )
    model = "fake" if kind == "fake" else str(directory / "model")
    config = ServiceConfig(
        directory / "home", models={MODEL: model}, engine=engine, long_poll=30.0, snapshot_steps=2
    )
    service = Service(config, build_engine)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def work(user: User) -> Facts:
    """What the killed process has done for its clients."""
    session = await user.session(display_name="recorded", tags=["old"])
    stepped = await user.run(session, 0, seed=1)
    seen = await user.train(stepped, 1, 5)  # snapshots after steps 2 and 4
    state = await user.save(stepped, 11, "state")
    weights = await user.save_for_sampler(stepped, 12, "weights")
    unnamed = await user.unnamed_sampler(stepped, 13, 0)
    unfetched = await user.forward_backward(stepped, 14, datum(7), forward_only=True)

    waiting = await user.run(session, 1, seed=2)
    pending = [await user.forward_backward(waiting, n, datum(n)) for n in (1, 2)]
    await user.result(pending[0])
    beyond_gap = await user.step(waiting, 4)  # request 3 has not arrived: this one waits
    unreadable = await user.service.training.fail("forward", waiting, 5, "not a request", user.caller)

    evicted = await user.run(session, 2, seed=3)
    await user.train(evicted, 1, 3)

    named = await user.sampler(session, 5, weights)
    drawn = await user.result(await user.sample(named, 0))
    lost = await user.sample(named, 1)
    return {
        "session": session,
        "stepped": stepped,
        "waiting": waiting,
        "evicted": evicted,
        "losses": seen,
        "paths": {"state": state, "weights": weights},
        "samplers": {"named": named, "unnamed": unnamed},
        "sample": [float(x) for x in drawn.sequences[0].logprobs],
        "requests": {
            "seen": f"{stepped}#9",
            "unfetched": unfetched.request_id,
            "pending": [promise.request_id for promise in pending],
            "beyond_gap": beyond_gap.request_id,
            "unreadable": unreadable.request_id,
            "lost_sample": lost.request_id,
        },
    }


async def go_on(user: User, facts: Facts) -> Facts:
    """What a later process computes from there."""
    requests, later = facts["requests"], Facts()

    async def loss_of(request_id: str) -> float:
        return (await user.result(request_id)).metrics["loss:sum"]

    later["seen"] = await loss_of(requests["seen"])
    later["unfetched"] = await loss_of(requests["unfetched"])
    later["pending"] = [await loss_of(request_id) for request_id in requests["pending"]]
    stepped, waiting, evicted = facts["stepped"], facts["waiting"], facts["evicted"]
    later["stepped"] = await user.train(stepped, 15, 3)
    repeated = await user.forward_backward(waiting, 2, datum(2))
    assert repeated.request_id == requests["pending"][1], "a repeated request has a new id"
    later["gap"] = await loss_of((await user.forward_backward(waiting, 3, datum(3))).request_id)
    later["beyond_gap"] = (await user.result(requests["beyond_gap"])).metrics["optimizer_step"]
    try:
        await user.result(requests["unreadable"])
    except Failed as failed:
        later["unreadable"] = str(failed)
    later["waiting"] = await user.loss(waiting, 6)
    later["evicted"] = await user.train(evicted, 7, 2)
    for name, sampler in facts["samplers"].items():
        answer = await user.result(await user.sample(sampler, 7))
        later[f"sample {name}"] = [float(x) for x in answer.sequences[0].logprobs]
    loaded = await _from_state(user, facts)
    later["loaded"] = await user.train(loaded, 2, 2)
    return later


async def _from_state(user: User, facts: Facts) -> str:
    request = training.CreateModelRequest(
        session_id=facts["session"], model_seq_id=9, base_model=MODEL, lora_config=LoraConfig(4, 1)
    )
    run = (await user.result(await user.call(ops.CREATE_MODEL, request))).model_id
    await user.load(run, 1, facts["paths"]["state"], optimizer=True)
    return run


async def _serve_and_work(directory: Path, kind: str) -> None:
    async with opened(directory, kind) as service:
        service.ledger.add_key(
            name="laptop", note="ann's", hash="0" * 64, owner="ann", project_id=None, created_at=time.time()
        )
        user = User(service)
        facts = await work(user)
        for run, next_seq in ((facts["stepped"], 9), (facts["evicted"], 5)):
            journal = service.runs.get(run).journal  # type: ignore[union-attr]
            await until(lambda journal=journal, next_seq=next_seq: journal.next_seq >= next_seq)
        run = service.runs.get(facts["evicted"])
        assert run is not None
        assert await service.runs.evict(run)
        await service.upkeep.tick()
        print(json.dumps(facts, default=str), flush=True)
        await asyncio.sleep(600)  # until it is killed


def record(kind: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        if kind == "torch":
            from tests.engine.tiny import tiny_model

            tiny_model(directory, "llama3", hidden_size=32, intermediate_size=48, num_hidden_layers=1).rename(
                directory / "model"
            )
        command = [sys.executable, "-m", "tests.service.record_home", kind, "--work-in", place]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            os.kill(child.pid, signal.SIGKILL)
        facts = json.loads(line)
        (directory / "facts.json").write_text(json.dumps(facts, indent=1))
        copy = directory / "copy"
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("copy"))
        later = asyncio.run(_later(copy, kind, facts))
        (directory / "later.json").write_text(json.dumps(later, indent=1))
        shutil.rmtree(copy)
        with tarfile.open(target, "w:gz") as archive:
            for item in sorted(directory.iterdir()):
                archive.add(item, item.name)
    print(f"{target}: {target.stat().st_size} bytes")


async def _later(directory: Path, kind: str, facts: Facts) -> Facts:
    async with opened(directory, kind) as service:
        return await go_on(User(service), facts)


if __name__ == "__main__":
    if sys.argv[2] == "--work-in":
        asyncio.run(_serve_and_work(Path(sys.argv[3]), sys.argv[1]))
    else:
        record(sys.argv[1], Path(sys.argv[2]))
