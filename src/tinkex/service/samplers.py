"""Sampling: hop 4 of it. Sampling sessions, and the requests that run beside training, many at a time.

Promises: a sample is independent of every other; owners share an engine fairly; a published adapter never
changes under a sampler, and is loaded again if the engine has let go of it. Samples are not journaled: after
a restart one whose result was not fetched answers 410, on which clients ask anew. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from tinkex import tracing
from tinkex.engine.protocol import Engine, EngineError, OnTokens, SampleWork, StopBytes
from tinkex.errors import InvalidInputError
from tinkex.service.core import Core
from tinkex.service.engines import BaseModel
from tinkex.service.fairness import FairGate
from tinkex.service.futures import ACTIVE, Future
from tinkex.service.lanes import Lanes
from tinkex.service.published import Published, name_of
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import SamplerRow
from tinkex.types import sampling as types
from tinkex.types.futures import (
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    RequestFailedResponse,
    UntypedAPIFuture,
)
from tinkex.types.outputs import SampleResponse

CLONE_STRIDE = 1_000_000_000
REMEMBERED = 100_000  # seq ids, for recognising repeats
STOPPING = "the server is stopping: sample anew"
Outcome = SampleResponse | RequestFailedResponse


class Samplers:
    """Sampling, one method per operation."""

    def __init__(self, core: Core, lanes: Lanes) -> None:
        self._core = core
        self._lanes = lanes
        self._gates: dict[str, FairGate] = {}
        self._repeats: OrderedDict[tuple[str, int, int], UntypedAPIFuture] = OrderedDict()
        self._published: dict[str, Published] = {}  # by base model
        self._used_at: dict[str, float] = {}  # unnamed samplers
        self._running: dict[str, asyncio.Task[None]] = {}  # samples, by request id
        self._removals: set[asyncio.Task[None]] = set()
        self._stopped = False
        # Told of every finished sample: its sampler, how long it took, what came of it.
        self.observers: list[Callable[[SamplerRow, float, Outcome], None]] = []

    # -- sampling sessions -------------------------------------------------------------------------------

    async def create_sampling_session(
        self, request: types.CreateSamplingSessionRequest, caller: Caller
    ) -> types.CreateSamplingSessionResponse:
        self._core.active_session(request.session_id, caller)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        row = self._describe(sampler_id, request.session_id, request.base_model, request.model_path, caller)
        kept, _ = self._core.ledger.add_sampler(row)
        caller.must_own(kept.owner, f"sampler {sampler_id}")
        of_a_run = kept.adapter is not None and kept.model_path is None
        if of_a_run or (kept.base_model, kept.model_path) != (row.base_model, row.model_path):
            number = request.sampling_session_seq_id
            raise Refusal(422, f"sampling_session_seq_id {number} was another sampler")
        return types.CreateSamplingSessionResponse(sampling_session_id=kept.sampler_id)

    def _describe(
        self, sampler_id: str, session_id: str, base_model: str | None, path: str | None, caller: Caller
    ) -> SamplerRow:
        now = time.time()
        if path is None:
            if base_model is None:
                raise Refusal(400, "base_model is required, or a model_path")
            model = self._core.engines.find(base_model)
            return SamplerRow(sampler_id, session_id, caller.user, model.name, now)
        checkpoint = self._core.checkpoint(path, caller)
        if checkpoint.kind == "external_weights":
            raise Refusal(400, f"{path} was exported, not saved for sampling; use a sampler_weights path")
        model = self._core.engines.find(checkpoint.base_model)
        if base_model is not None and self._core.engines.find(base_model) is not model:
            raise Refusal(400, f"{path} is for {model.name}, not for {base_model}")
        adapter = name_of(path, checkpoint.created_at)
        return SamplerRow(
            sampler_id, session_id, caller.user, model.name, now, path, adapter, checkpoint.directory
        )

    async def join_sampling_session(
        self, request: types.JoinSamplingSessionRequest, caller: Caller
    ) -> types.JoinSamplingSessionResponse:
        self._core.sampler(request.sampling_session_id, caller)
        number = self._core.ledger.join_sampler(request.sampling_session_id)
        return types.JoinSamplingSessionResponse(client_counter=number or 0)

    async def get_sampler(self, request: types.GetSamplerRequest, caller: Caller) -> types.GetSamplerResponse:
        row = self._core.sampler(request.sampler_id, caller)
        return types.GetSamplerResponse(
            sampler_id=row.sampler_id, base_model=row.base_model, model_path=row.model_path
        )

    async def retrieve_futures(
        self, request: FuturesRetrieveRequest, caller: Caller
    ) -> FuturesRetrieveResponse:
        """What ended since the last poll of a sampler, or of one of its clones."""
        target, futures = request.target, self._core.futures
        self._core.sampler(target.sampling_session_id, caller)
        fetched = [futures.get(i) for i in request.retrieved_request_ids]
        futures.drop(f.request_id for f in fetched if f is not None and f.owner == caller.user)
        lane = f"{target.sampling_session_id}#{target.cloned_sampler_id}"
        wait = futures.long_poll if request.timeout is None else min(request.timeout, futures.long_poll)
        if request.retrieved_request_ids and not self._lanes.is_open(lane):
            wait = 0.0  # a client's last word: it waits for nothing
        completions, cursor = await self._lanes.poll(lane, request.prev_cursor, max(0.0, wait))
        return FuturesRetrieveResponse(completions=completions, cursor=cursor)

    # -- samples -----------------------------------------------------------------------------------------

    async def sample(
        self, request: types.SampleRequest, caller: Caller, on_tokens: OnTokens | None = None
    ) -> UntypedAPIFuture:
        """Accept a sample; it runs as a task of its own."""
        row = self._row(request, caller)
        model = self._core.engines.find(row.base_model)
        self._check(request, model.max_context())
        key = None  # of what may be repeated
        if row.sampler_id and request.seq_id is not None:
            key = row.sampler_id, request.seq_id, _fingerprint(request)
            promised = self._repeats.get(key)
            if promised is not None and self._core.futures.get(promised.request_id) is not None:
                return promised
        if self._stopped:
            raise Refusal(503, STOPPING)
        future = self._promise(row, request, caller)
        work = self._run(future, row, model, request, on_tokens)
        self._running[future.request_id] = asyncio.get_running_loop().create_task(work)
        future.cancel = partial(self._cancel, future)
        ids = [f"{future.request_id}.{n}" for n in range(request.num_samples)]
        promise = UntypedAPIFuture(future.request_id, None, ids)
        if key is not None:
            self._repeats[key] = promise
            if len(self._repeats) > REMEMBERED:
                self._repeats.popitem(last=False)
        return promise

    def _cancel(self, future: Future) -> None:
        self._running.pop(future.request_id).cancel()
        future.fail("cancelled", "user")  # not left to the task: one that has not begun does nothing

    def _row(self, request: types.SampleRequest, caller: Caller) -> SamplerRow:
        if request.sampling_session_id is None:
            return self._describe("", "", request.base_model, request.model_path, caller)
        row = self._core.sampler(request.sampling_session_id, caller)
        self._core.heard_of(row.session_id)
        if row.adapter is not None and row.model_path is None:
            self._used_at[row.sampler_id] = time.time()
        return row

    def _promise(self, row: SamplerRow, request: types.SampleRequest, caller: Caller) -> Future:
        if not row.sampler_id:
            return self._core.futures.create(caller.user)
        lane = f"{row.sampler_id}#{(request.seq_id or 0) // CLONE_STRIDE}"
        future = self._core.futures.create(caller.user, lane=lane)
        self._lanes.begin(lane, future.request_id)
        future.on_done = self._tell_lane
        return future

    def _tell_lane(self, done: Future) -> None:
        self._lanes.end(done.lane, done.request_id, failed=done.failed)

    def _check(self, request: types.SampleRequest, limit: int | None) -> None:
        """What must be a 400, because clients act on it: the prompt is too long, or is not text."""
        if request.num_samples > (most := self._core.config.max_samples):
            raise Refusal(400, f"num_samples must be at most {most}, got {request.num_samples}")
        try:
            length = len(request.prompt.to_numpy())
        except InvalidInputError as error:
            raise Refusal(400, f"this model reads text alone: {error}") from None
        tokens = request.sampling_params.max_tokens or 1
        # A prompt that is scored needs no room for the token that nobody reads.
        scoring = tokens == 1 and bool(
            request.prompt_logprobs
            or request.topk_prompt_logprobs
            or request.prompt_alt_tokens_k
            or request.target_prompt_logprobs is not None
        )
        if limit is not None and length + tokens > limit + scoring:
            raise Refusal(
                400,
                "Prompt length plus max_tokens exceeds the model's context window: "
                f"{length} + {tokens} > {limit}",
            )

    async def _run(
        self,
        future: Future,
        row: SamplerRow,
        model: BaseModel,
        request: types.SampleRequest,
        on_tokens: OnTokens | None,
    ) -> None:
        started = time.monotonic()
        try:
            engine = model.engine or await self._loaded(future, model, request)
            future.resolve(await self._sampled(future, row, model, engine, request, on_tokens))
        except asyncio.CancelledError:
            future.fail(STOPPING, "server")
            raise
        except (EngineError, Refusal) as error:
            is_ours = isinstance(error, Refusal) and error.status >= 500
            category = error.category if isinstance(error, EngineError) else "server" if is_ours else "user"
            future.fail(str(error), category)
        except Exception as error:
            future.fail(f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(future.request_id, None)
            self._account(row, request, future.outcome)
            seconds = time.monotonic() - started
            for observer in self.observers:
                observer(row, seconds, future.outcome)

    async def _loaded(self, future: Future, model: BaseModel, request: types.SampleRequest) -> Engine:
        future.why = lambda: ("paused_capacity", f"the base model {model.name} is being loaded")
        engine = await model.load()
        future.why = lambda: ACTIVE
        self._check(request, engine.info.max_context)  # it may not have been known before
        return engine

    async def _sampled(
        self,
        future: Future,
        row: SamplerRow,
        model: BaseModel,
        engine: Engine,
        request: types.SampleRequest,
        on_tokens: OnTokens | None,
    ) -> SampleResponse:
        """Wait for room among other owners' samples, have the adapter there, and sample."""
        gate, published = self._gate_of(model), self._published_of(model)
        if tracing.is_on() or not gate.try_enter(row.owner, request.num_samples):
            await self._wait_for_room(future, row, gate, request.num_samples)
        try:
            await published.take(engine, row)
            try:
                stops = await _stop_bytes(request, model) if request.sampling_params.stop else None
                sampling = engine.sampler.sample(_work(request, row, stops, on_tokens))
                return await (tracing.traced("engine sample", sampling) if tracing.is_on() else sampling)
            finally:
                published.leave(row)
        finally:
            gate.leave(row.owner, request.num_samples)

    async def _wait_for_room(self, future: Future, row: SamplerRow, gate: FairGate, units: int) -> None:
        with tracing.span("scheduler sample", within=True):
            future.why = lambda: ("paused_capacity", f"{gate.waiting()} requests wait for room to be sampled")
            await gate.enter(row.owner, units)
            future.why = lambda: ACTIVE

    def _gate_of(self, model: BaseModel) -> FairGate:
        if model.name not in self._gates:
            self._gates[model.name] = FairGate(self._core.config.samples_in_flight)
        return self._gates[model.name]

    def _account(self, row: SamplerRow, request: types.SampleRequest, response: Outcome) -> None:
        if not isinstance(response, SampleResponse) or not row.session_id:
            return
        cached, sampled = response.prompt_cache_hit_tokens, 0
        for sequence in response.sequences:
            sampled += 0 if sequence.tokens_np is None else sequence.tokens_np.size
        read = max(0, len(request.prompt.to_numpy()) - cached)
        self._core.count(
            row,
            {"sampling_prefill_cached": cached, "sampling_prefill": read, "sampling_sample": sampled},
        )

    # -- published adapters ------------------------------------------------------------------------------

    def _published_of(self, model: BaseModel) -> Published:
        if model.name not in self._published:
            self._published[model.name] = Published(self._core)
        return self._published[model.name]

    async def publish(self, engine: Engine, row: SamplerRow, run: str) -> None:
        """Make a run's adapter sampleable as it is now, under an unnamed sampler."""
        await self._published_of(self._core.engines.find(row.base_model)).add(engine, row, run)

    async def clean(self, session_id: str, *, ended: bool) -> None:
        """Remove unnamed adapters: all of a session that is over, else those unused for long."""
        rows = [
            row
            for row in self._core.ledger.samplers_of_session(session_id)
            if row.adapter_dir is not None and row.model_path is None
        ]
        config, now = self._core.config, time.time()
        newest = {PurePosixPath(row.adapter_dir or "").parent: row.sampler_id for row in rows}  # of each run
        for row in rows:
            used_at = self._used_at.get(row.sampler_id, row.created_at)
            unused = now - max(used_at, self._core.awake_since)
            is_newest = newest[PurePosixPath(row.adapter_dir or "").parent] == row.sampler_id
            if ended or unused > (config.keep_unused if is_newest else config.keep_superseded):
                await self._remove(row)

    async def _remove(self, row: SamplerRow) -> None:
        self._core.forget_sampler(row.sampler_id)
        self._used_at.pop(row.sampler_id, None)
        with contextlib.suppress(Refusal):  # its base model may not be offered any more
            model = self._core.engines.find(row.base_model)
            if model.engine is not None and row.adapter is not None:
                removal = asyncio.create_task(self._published_of(model).remove(model.engine, row.adapter))
                self._removals.add(removal)  # it ends when nobody uses the adapter any more
                removal.add_done_callback(self._removals.discard)
        if row.adapter_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._core.home / row.adapter_dir, True)

    @property
    def running(self) -> list[asyncio.Task[None]]:
        return list(self._running.values())

    async def stop(self) -> None:
        """End what is being sampled, and refuse what comes after; whoever waits for it is told."""
        self._stopped = True
        tasks = [*self._running.values(), *self._removals]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fingerprint(request: types.SampleRequest) -> int:
    """Of what is to be sampled: copies of a sampler may count alike, and none shall get another's answer."""
    params = request.sampling_params
    drawn = params.max_tokens, params.seed, params.temperature, request.num_samples, request.prompt_logprobs
    return hash((request.prompt.to_numpy().tobytes(), *drawn))


async def _stop_bytes(request: types.SampleRequest, model: BaseModel) -> StopBytes | None:
    """The strings to stop at as the engine checks them; None if there are none."""
    given = request.sampling_params.stop
    stops = [given] if isinstance(given, str) else given or []
    strings = [s for s in stops if isinstance(s, str)]
    return await model.stop_bytes(strings) if strings else None


def _work(
    request: types.SampleRequest, row: SamplerRow, stops: StopBytes | None, on_tokens: OnTokens | None
) -> SampleWork:
    params = request.sampling_params
    return SampleWork(
        request.prompt.to_numpy(),
        params if stops is None else replace(params, stop=None),
        row.adapter,
        request.num_samples,
        stops,
        request.prompt_logprobs,
        request.prompt_logprobs_last_n,
        request.topk_prompt_logprobs,
        request.topk_sample_logprobs,
        request.target_prompt_logprobs,
        request.prompt_alt_tokens_k,
        on_tokens,
    )
