"""Sampling sessions, and samples: requests that run in parallel with training, many at a time.

Owners share an engine fairly. A published adapter never changes under a sampler, and is loaded again if the
engine has retired it. Samples are not journaled: after a restart one whose result was not fetched answers
410, on which clients sample again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Protocol

from tinkex import tracing
from tinkex.engine.protocol import Engine, EngineError, EngineLost, SampledTokens, SampleWork
from tinkex.fair_permits import FewestTokensFirst
from tinkex.service.access import Access
from tinkex.service.activity import Activity, own_run
from tinkex.service.adapter_cache import AdapterCaches, adapter_name
from tinkex.service.config import ServiceConfig
from tinkex.service.futures import Completions, Future, Futures, failure
from tinkex.service.group_commit import GroupCommit
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import SamplerRow, UsageKind
from tinkex.service.sample_requests import check_sample, fingerprint, sample_parts, sample_work
from tinkex.service.saved_files import SavedFiles
from tinkex.service.served_models import ServedModel, ServedModels
from tinkex.types import sampling as types
from tinkex.types.futures import RequestFailedResponse, UntypedAPIFuture
from tinkex.types.outputs import MAX_SAMPLE_BYTES, NewTokens, SampleResponse

PART = 64  # samples; a larger request is sampled in parts
MAX_HELD = 4 * MAX_SAMPLE_BYTES  # of one owner's samples that list likely tokens or score prompts
LOST_ANSWER = 10.0  # seconds for which a large result is kept after it was fetched
REMEMBERED = 100_000  # seq ids, for recognising repeats
STOPPING = "the server is stopping: sample anew"
Outcome = SampleResponse | RequestFailedResponse
Pieces = asyncio.Queue[types.SampleEvent]  # of a sample that is streamed


class SampleObserver(Protocol):
    """Counts or records finished samples."""

    def sampled(
        self, row: SamplerRow, seconds: float, outcome: Outcome, request: types.SampleRequest, /
    ) -> None: ...


@dataclass(slots=True)
class RunningSample:
    """A request under way."""

    future: Future
    row: SamplerRow
    model: ServedModel
    request: types.SampleRequest
    pieces: Pieces | None
    context: Context  # of its request, for tracing
    task: asyncio.Task[None] | None = None  # once it has begun
    outcome: Outcome | None = None  # once it has ended; its future has it a moment later
    seconds: float = 0.0  # that it took
    streamed: bool = False  # something of it was


@dataclass(eq=False)
class Samplers:
    """Sampling, one method per operation."""

    config: ServiceConfig
    _ledger: Ledger
    _files: SavedFiles
    _disk: GroupCommit
    _access: Access
    _activity: Activity
    _models: ServedModels
    _futures: Futures
    _completions: Completions
    _adapters: AdapterCaches
    _observers: Sequence[SampleObserver]

    def __post_init__(self) -> None:
        self._permits: dict[str, FewestTokensFirst] = {}  # by base model
        self._repeats: OrderedDict[tuple[str, int, int], str] = OrderedDict()  # their request ids
        self._used_at: dict[str, float] = {}  # unnamed samplers
        self._running: dict[str, RunningSample] = {}  # by request id
        # Those of this turn of the event loop: what is done for all of them at once costs less.
        self._accepted: list[RunningSample] = []
        self._ended: list[RunningSample] = []
        self._removals: set[asyncio.Task[None]] = set()
        self._stopped = False

    def _permits_of(self, model: ServedModel) -> FewestTokensFirst:
        """As many as the engine decodes at once: a sample that is admitted does not wait there."""
        if model.name not in self._permits:
            permits = min(self.config.samples_in_flight, self.config.engine.max_batch)
            if (placement := self.config.placements.get(model.name)) is not None:
                permits *= placement.max_samplers
            self._permits[model.name] = FewestTokensFirst(permits)
        return self._permits[model.name]

    # -- sampling sessions -------------------------------------------------------------------------------

    async def create_sampling_session(self, request: types.CreateSamplingSessionRequest, caller: Caller):
        self._access.active_session(request.session_id, caller)
        number = request.sampling_session_seq_id
        sampler_id = f"{request.session_id}:sample:{number}"
        row = self._describe(sampler_id, request.session_id, request.base_model, request.model_path, caller)
        kept, _ = self._ledger.add_sampler(row)
        caller.must_own(kept.owner, f"sampler {sampler_id}")
        if kept.unnamed or (kept.base_model, kept.model_path) != (row.base_model, row.model_path):
            raise Refusal(422, f"sampling_session_seq_id {number} was another sampler")
        return types.CreateSamplingSessionResponse(sampling_session_id=kept.sampler_id)

    def _describe(
        self, sampler_id: str, session_id: str, base_model: str | None, path: str | None, caller: Caller
    ) -> SamplerRow:
        now = time.time()
        if path is None:
            if base_model is None:
                raise Refusal(400, "base_model is required, or a model_path")
            return SamplerRow(sampler_id, session_id, caller.user, self._models.find(base_model).name, now)
        checkpoint = self._access.checkpoint(path, caller)
        if checkpoint.kind == "external_weights":
            raise Refusal(400, f"{path} was exported, not saved for sampling; use a sampler_weights path")
        model = self._models.find(checkpoint.base_model)
        if base_model is not None and self._models.find(base_model) is not model:
            raise Refusal(400, f"{path} is for {model.name}, not for {base_model}")
        return SamplerRow(
            sampler_id, session_id, caller.user, model.name, now, path,
            adapter_name(path, checkpoint.created_at), checkpoint.directory,
        )  # fmt: skip

    async def join_sampling_session(self, request: types.JoinSamplingSessionRequest, caller: Caller):
        self._access.sampler(request.sampling_session_id, caller)
        number = self._ledger.join_sampler(request.sampling_session_id)
        return types.JoinSamplingSessionResponse(client_counter=number or 0)

    async def get_sampler(self, request: types.GetSamplerRequest, caller: Caller) -> types.GetSamplerResponse:
        row = self._access.sampler(request.sampler_id, caller)
        return types.GetSamplerResponse(
            sampler_id=row.sampler_id, base_model=row.base_model, model_path=row.model_path
        )

    # -- samples -----------------------------------------------------------------------------------------

    async def sample(self, request: types.SampleRequest, caller: Caller) -> UntypedAPIFuture:
        """Accept a sample; it runs as a task of its own."""
        request_id = self.start(request, caller).request_id
        await asyncio.sleep(0)  # callbacks run in order: `_begin` has recorded it then
        return UntypedAPIFuture(request_id, None, sequence_ids(request_id, request.num_samples))

    def start(self, request: types.SampleRequest, caller: Caller, pieces: Pieces | None = None) -> Future:
        """Accept a sample; with `pieces`, its tokens are put there as they are drawn."""
        row = self._row(request, caller)
        model = self._models.find(row.base_model)
        size = check_sample(request, model.max_context())
        key = None  # of what may be repeated
        if row.sampler_id and request.seq_id is not None:
            key = row.sampler_id, request.seq_id, fingerprint(request)
            if (future := self._futures.get(self._repeats.get(key, ""))) is not None:
                return future
        if self._stopped:
            raise Refusal(503, STOPPING)
        if size:
            self._check_held(caller.user, size)
        future = self._promise(row, request, caller, size)
        sample = RunningSample(future, row, model, request, pieces, copy_context())
        self._running[future.request_id] = sample
        if not self._accepted:
            asyncio.get_running_loop().call_soon(self._begin)
        self._accepted.append(sample)
        if key is not None:
            self._repeats[key] = future.request_id
            if len(self._repeats) > REMEMBERED:
                self._repeats.popitem(last=False)
        return future

    def _begin(self) -> None:
        """Record what was accepted, and begin it."""
        samples, self._accepted = self._accepted, []
        self._completions.write()
        loop = asyncio.get_running_loop()
        for sample in samples:
            if not sample.future.done:  # else it was cancelled
                sample.task = loop.create_task(self._run(sample), context=sample.context)

    def cancel(self, future: Future) -> None:
        """Stop a sample, if it is running."""
        if (sample := self._running.pop(future.request_id, None)) is not None:
            if sample.task is not None:
                sample.task.cancel()
            # Not left to the task: one that has not begun would do nothing.
            self._resolve(future, failure("cancelled", "user"))

    def discard(self, future: Future) -> None:
        """Stop a sample, and forget its result."""
        self.cancel(future)
        self._completions.fetched(self._futures.drop([future.request_id]))

    def _row(self, request: types.SampleRequest, caller: Caller) -> SamplerRow:
        if request.sampling_session_id is None:
            return self._describe("", "", request.base_model, request.model_path, caller)
        row = self._access.sampler(request.sampling_session_id, caller)
        self._activity.heard_of(row.session_id, own_run(row))
        if row.unnamed:
            self._used_at[row.sampler_id] = time.time()
        return row

    def _check_held(self, owner: str, size: int) -> None:
        """Refuse, for now, a result for which the owner's pending and kept results leave no room."""
        futures = self._futures
        if futures.held[owner] + size > MAX_HELD:
            old = futures.large_delivered(owner, time.monotonic() - LOST_ANSWER)
            self._completions.fetched(futures.drop(old))
        if (held := futures.held[owner]) + size > MAX_HELD:
            why = f"your pending and unfetched samples may take {held} of {MAX_HELD} bytes, {size} do not fit"
            raise Refusal(429, f"{why}; fetch their results, and ask again")

    def _promise(self, row: SamplerRow, request: types.SampleRequest, caller: Caller, size: int) -> Future:
        if not row.sampler_id:
            return self._futures.create(caller.user, size=size)
        feed = f"{row.sampler_id}#{(request.seq_id or 0) // types.CLONE_STRIDE}"
        future = self._futures.create(caller.user, feed=feed, size=size)
        self._completions.begin(feed, future.request_id)
        return future

    def _resolve(self, future: Future, outcome: Outcome | None) -> None:
        if not future.done:
            future.resolve(outcome)
            if future.feed:
                self._completions.end(future.feed, future.request_id, failed=future.failed)

    async def _run(self, sample: RunningSample) -> None:
        started = time.monotonic()
        try:
            sample.outcome = await self._sampled(sample)
        except asyncio.CancelledError:
            sample.outcome = failure(STOPPING)
            raise
        except EngineError as error:
            sample.outcome = failure(str(error), error.category)
        except Refusal as error:
            sample.outcome = failure(str(error), "server" if error.status >= 500 else "user")
        except Exception as error:
            sample.outcome = failure(f"{type(error).__name__}: {error}")
        finally:
            sample.seconds = time.monotonic() - started
            if not self._ended:
                asyncio.get_running_loop().call_soon(self._end)
            self._ended.append(sample)

    def _end(self) -> None:
        """Resolve all that ended; then count them and tell the observers, before any poll can wake up.

        What goes wrong in counting one leaves no other without its result.
        """
        samples, self._ended = self._ended, []
        for sample in samples:
            self._running.pop(sample.future.request_id, None)
            self._resolve(sample.future, sample.outcome)
        for sample in samples:
            self._count(sample.row, sample.request, sample.future.outcome)
        for observer in self._observers:
            for sample in samples:
                observer.sampled(sample.row, sample.seconds, sample.future.outcome, sample.request)

    async def _sampled(self, sample: RunningSample) -> SampleResponse:
        """Sample; if the engine is lost, sample again on the next one."""
        while True:
            engine = sample.model.engine or await self._loaded(sample)
            try:
                return await self._sample_on(engine, sample)
            except EngineLost as error:
                sample.model.lose_engine(str(error), engine)
            del engine  # it must be free before the next one is built

    async def _loaded(self, sample: RunningSample) -> Engine:
        sample.future.pause(f"the base model {sample.model.name} is being loaded")
        engine = await sample.model.load()
        sample.future.resume()
        check_sample(sample.request, engine.info.max_context)  # it may not have been known before
        return engine

    def _sample_on(self, engine: Engine, sample: RunningSample) -> Awaitable[SampleResponse]:
        work, permits = sample_work(sample.request, sample.row), self._permits_of(sample.model)
        if work.num_samples <= min(PART, permits.most):
            return self._sample_part(engine, sample, work, permits)
        return self._sample_in_parts(engine, sample, work, permits)

    async def _sample_in_parts(
        self, engine: Engine, sample: RunningSample, work: SampleWork, permits: FewestTokensFirst
    ) -> SampleResponse:
        """Sample a large request in parts: other owners have their turn in between."""
        works = sample_parts(work, min(PART, permits.most))
        parts = [self._sample_part(engine, sample, part, permits) for part in works]
        tasks = [asyncio.get_running_loop().create_task(part) for part in parts]
        try:
            responses = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # then nothing of theirs holds the engine
        return replace(responses[0], sequences=[one for part in responses for one in part.sequences])

    async def _sample_part(
        self, engine: Engine, sample: RunningSample, work: SampleWork, permits: FewestTokensFirst
    ) -> SampleResponse:
        """Wait for permits among other owners' samples, have the adapter published, and sample."""
        row, count = sample.row, work.num_samples
        adapters = None if row.adapter is None else self._adapters.of(engine)
        tokens = count * (len(work.prompt) + (work.params.max_tokens or engine.info.max_context))
        traced = tracing.is_on()
        if traced or not permits.try_acquire(row.owner, count, tokens):
            with tracing.span("scheduler sample", within=True):
                sample.future.pause(f"{len(permits) + 1} requests wait for room to be sampled")
                await permits.acquire(row.owner, count, tokens)
                sample.future.resume()
        try:
            if adapters is not None:
                await adapters.acquire(row)
            try:
                sampling = (
                    engine.sampler.sample(work) if sample.pieces is None else _stream(engine, sample, work)
                )
                return await (tracing.traced("engine sample", sampling) if traced else sampling)
            finally:
                if adapters is not None:
                    adapters.release(row)
        finally:
            permits.release(row.owner, count, tokens)

    def _count(self, row: SamplerRow, request: types.SampleRequest, response: Outcome) -> None:
        if not isinstance(response, SampleResponse):
            return
        cached, sampled = response.prompt_cache_hit_tokens, 0
        for sequence in response.sequences:
            sampled += 0 if sequence.tokens_np is None else sequence.tokens_np.size
        read = max(0, len(request.prompt.to_numpy()) - cached)
        amounts: dict[UsageKind, float] = {
            "sampling_prefill_cached": cached, "sampling_prefill": read, "sampling_sample": sampled,
        }  # fmt: skip
        self._activity.count(row, amounts)

    # -- unnamed samplers --------------------------------------------------------------------------------

    async def clean(self, session_id: str, *, ended: bool) -> None:
        """Delete unnamed adapters: all of a session that has ended, else those unused for long."""
        rows = [row for row in self._ledger.samplers_of_session(session_id) if row.unnamed]
        config, now = self.config, time.time()
        newest = {PurePosixPath(row.adapter_dir or "").parent: row.sampler_id for row in rows}  # of each run
        for row in rows:
            used_at = self._used_at.get(row.sampler_id, row.created_at)
            unused = now - max(used_at, self._activity.awake_since)
            is_newest = newest[PurePosixPath(row.adapter_dir or "").parent] == row.sampler_id
            if ended or unused > (config.keep_unused if is_newest else config.keep_superseded):
                await self._remove(row)

    async def _remove(self, row: SamplerRow) -> None:
        self._access.delete_sampler(row.sampler_id)
        self._used_at.pop(row.sampler_id, None)
        with contextlib.suppress(Refusal):  # its base model may not be offered any more
            engine = self._models.find(row.base_model).engine
            if engine is not None and row.adapter is not None:
                removal = asyncio.create_task(self._adapters.of(engine).remove(row.adapter))
                self._removals.add(removal)  # it ends when no sample uses the adapter any more
                removal.add_done_callback(self._removals.discard)
        if row.adapter_dir is not None:
            await self._disk.synced()  # else a power cut could bring back the row without its files
            await self._files.remove(row.adapter_dir)

    @property
    def running(self) -> list[asyncio.Task[None]]:
        return [sample.task for sample in self._running.values() if sample.task is not None]

    def under_way(self) -> dict[str, list[RunningSample]]:
        """The samples that runs' own sessions draw from them, by run."""
        found: defaultdict[str, list[RunningSample]] = defaultdict(list)
        for sample in self._running.values():
            if (run_id := own_run(sample.row)) is not None:
                found[run_id].append(sample)
        return found

    async def stop(self) -> None:
        """Cancel what is being sampled, and refuse what comes after; waiting clients get a failure."""
        self._stopped = True
        for sample in self._accepted:
            self._resolve(sample.future, failure(STOPPING))
        tasks = [*self.running, *self._removals]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def sequence_ids(request_id: str, count: int) -> list[str]:
    return [f"{request_id}.{n}" for n in range(count)]


async def _stream(engine: Engine, sample: RunningSample, work: SampleWork) -> SampleResponse:
    assert sample.pieces is not None
    try:
        async with aclosing(engine.sampler.stream(work)) as events:
            async for event in events:
                if not isinstance(event, SampledTokens):
                    return event
                sample.streamed = True
                sample.pieces.put_nowait(NewTokens(event.index, event.tokens, event.logprobs))
    except EngineLost as error:
        if sample.streamed:  # what was streamed cannot be taken back, so it cannot be sampled again
            raise EngineError(str(error)) from error
        raise
    raise EngineError("the engine's stream ended without a response")
