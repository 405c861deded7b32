"""A service over the fake engine, and users of it by bare operations: no client, no transport in between."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import Engine, EngineConfig
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.service import Service
from tinkex.types import checkpoints, futures, sampling, sessions, training
from tinkex.types.data import Datum, ForwardBackwardInput, ModelInput
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams
from tinkex.wire import ops

MODEL = "m/base"


def config(home: Path, **changes: Any) -> ServiceConfig:
    engine = EngineConfig(model="", kind="fake", max_context=64)
    fast = ServiceConfig(home, models={MODEL: "fake"}, engine=engine, long_poll=5.0)
    return replace(fast, **changes)


@asynccontextmanager
async def serving(
    home: Path, build: Callable[[EngineConfig], Engine] = FakeEngine, **changes: Any
) -> AsyncIterator[Service]:
    service = Service(config(home, **changes), build)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def killed_copy(home: Path, name: str = "copy") -> Path:
    """What a process that is killed now would leave: its files, and nothing of its memory.

    The event loop stands still meanwhile; other threads do not, so a copy counts only if nothing changed.
    """
    target = home.with_name(f"{home.name}-{name}")
    while True:
        before = _state(home)
        shutil.rmtree(target, ignore_errors=True)
        try:
            shutil.copytree(home, target, ignore=shutil.ignore_patterns("lock"))
        except (OSError, shutil.Error):
            continue
        if before is not None and _state(home) == before:
            return target


def _state(home: Path) -> list[tuple[str, int, int]] | None:
    try:
        return sorted((str(p), (stat := p.stat()).st_size, stat.st_mtime_ns) for p in home.rglob("*"))
    except FileNotFoundError:
        return None


def usage_of_run(service: Service, run: str) -> dict[str, float]:
    """What a run has used so far, by kind."""
    service.activity.flush()
    used = service.ledger._read("SELECT kind, sum(amount) FROM usage WHERE run_id = ? GROUP BY kind", [run])
    return dict(used)


def found(home: Path, pattern: str) -> list[Path]:
    """What there is below the home, by a pattern."""
    return sorted(home.rglob(pattern))


def datum(seed: int = 0, length: int = 6, **inputs: Any) -> Datum:
    ids = np.random.default_rng(seed).integers(2, 300, length + 1)
    weights = {"weights": np.ones(length, np.float32)} if not inputs else {}
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], **weights, **inputs})


class Failed(Exception):
    def __init__(self, failure: futures.RequestFailedResponse) -> None:
        super().__init__(failure.error)
        self.category = str(failure.category)


class User:
    """Someone who calls a service's operations."""

    def __init__(self, service: Service, name: str = "ann", project: str | None = None) -> None:
        self.service = service
        self.caller = Caller(name, project)

    async def call(self, op: ops.Op[Any, Any], request: Any) -> Any:
        return await self.service.call(op, request, self.caller)

    async def result(self, promise: futures.UntypedAPIFuture | str) -> Any:
        request_id = promise if isinstance(promise, str) else promise.request_id
        outcome = await self.call(ops.RETRIEVE_FUTURE, futures.FutureRetrieveRequest(request_id))
        assert not isinstance(outcome, futures.PendingFuture), outcome
        if isinstance(outcome, futures.RequestFailedResponse):
            raise Failed(outcome)
        return outcome

    async def status_of(self, op: ops.Op[Any, Any], request: Any) -> int:
        """The status of a refusal; 200 if there is none."""
        try:
            await self.call(op, request)
        except Refusal as refusal:
            return refusal.status
        return 200

    # -- sessions and runs -------------------------------------------------------------------------------

    async def session(self, **fields: Any) -> str:
        return (await self.call(ops.CREATE_SESSION, sessions.CreateSessionRequest(**fields))).session_id

    async def finish(self, session_id: str) -> None:
        reason = sessions.ClientSessionFinishSuccess()
        await self.call(
            ops.FINISH_SESSION, sessions.FinishSessionRequest(session_id=session_id, reason=reason)
        )

    async def run(self, session_id: str | None = None, number: int = 0, rank: int = 4, seed: int = 1) -> str:
        session_id = session_id or await self.session()
        request = training.CreateModelRequest(
            session_id=session_id, model_seq_id=number, base_model=MODEL, lora_config=LoraConfig(rank, seed)
        )
        return (await self.result(await self.call(ops.CREATE_MODEL, request))).model_id

    async def forward_backward(
        self, run: str, seq_id: int, *data: Datum, loss_fn: str = "cross_entropy", forward_only: bool = False
    ) -> futures.UntypedAPIFuture:
        work = ForwardBackwardInput(list(data) or [datum(seq_id)], loss_fn)
        request = training.ForwardBackwardRequest(work, run, seq_id, forward_only)
        return await self.call(ops.FORWARD_BACKWARD, request)

    async def step(self, run: str, seq_id: int, learning_rate: float = 0.05) -> futures.UntypedAPIFuture:
        request = training.OptimStepRequest(
            model_id=run, seq_id=seq_id, optim_params=AdamParams(learning_rate)
        )
        return await self.call(ops.OPTIM_STEP, request)

    async def train(self, run: str, first: int, steps: int) -> list[float]:
        """`steps` passes and steps, sent without waiting in between, from seq id `first` on: their losses."""
        promises = []
        for n in range(steps):
            promises.append(await self.forward_backward(run, first + 2 * n, datum(n)))
            await self.step(run, first + 2 * n + 1)
        return [(await self.result(promise)).metrics["loss:sum"] for promise in promises]

    async def loss(self, run: str, seq_id: int, *data: Datum) -> float:
        promise = await self.forward_backward(run, seq_id, *(data or (datum(0),)), forward_only=True)
        return (await self.result(promise)).metrics["loss:sum"]

    # -- checkpoints -------------------------------------------------------------------------------------

    async def save(self, run: str, seq_id: int, name: str, **fields: Any) -> str:
        request = checkpoints.SaveWeightsRequest(model_id=run, path=name, seq_id=seq_id, **fields)
        return (await self.result(await self.call(ops.SAVE_WEIGHTS, request))).path

    async def save_for_sampler(self, run: str, seq_id: int, name: str, **fields: Any) -> str:
        request = checkpoints.SaveWeightsForSamplerRequest(model_id=run, path=name, seq_id=seq_id, **fields)
        return (await self.result(await self.call(ops.SAVE_WEIGHTS_FOR_SAMPLER, request))).path

    async def unnamed_sampler(self, run: str, seq_id: int, number: int) -> str:
        request = checkpoints.SaveWeightsForSamplerRequest(
            model_id=run, seq_id=seq_id, sampling_session_seq_id=number
        )
        return (await self.result(await self.call(ops.SAVE_WEIGHTS_FOR_SAMPLER, request))).sampling_session_id

    async def load(self, run: str, seq_id: int, path: str, **fields: Any) -> None:
        request = checkpoints.LoadWeightsRequest(model_id=run, seq_id=seq_id, path=path, **fields)
        await self.result(await self.call(ops.LOAD_WEIGHTS, request))

    # -- sampling ----------------------------------------------------------------------------------------

    async def sampler(self, session_id: str, number: int = 0, path: str | None = None) -> str:
        request = sampling.CreateSamplingSessionRequest(
            session_id=session_id,
            sampling_session_seq_id=number,
            base_model=None if path else MODEL,
            model_path=path,
        )
        return (await self.call(ops.CREATE_SAMPLING_SESSION, request)).sampling_session_id

    async def sample(
        self, sampler: str, seq_id: int = 0, prompt: tuple[int, ...] = (5, 6, 7), num_samples: int = 1,
        **params: Any,
    ) -> futures.UntypedAPIFuture:  # fmt: skip
        params = {"max_tokens": 4, "seed": 3, **params}
        request = sampling.SampleRequest(
            ModelInput.from_ints(list(prompt)), SamplingParams(**params), num_samples, sampler, seq_id
        )
        return await self.call(ops.SAMPLE, request)


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for something that other tasks bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        await asyncio.sleep(0.005)


def name_of(path: str) -> dict[str, str]:
    run, _, rest = path.removeprefix("tinker://").partition("/")
    return {"training_run_id": run, "checkpoint_id": rest}


class Slow(FakeEngine):
    """Takes its time."""

    def __init__(self, config) -> None:
        super().__init__(config)
        run = self.trainer._execute

        def slowly(command):
            time.sleep(0.05)
            return run(command)

        self.trainer._execute = slowly  # type: ignore[method-assign]
