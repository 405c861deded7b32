"""Sampling: hop 4 of it. Sampling sessions, and the requests that run beside training, many at a time.

Promises: a sample is independent of every other; owners share an engine fairly; a published adapter never
changes under a sampler, and is loaded again if the engine has let go of it. Samples are not journaled: after
a restart one whose result was not fetched answers 410, on which clients ask anew. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace

from tinkex.engine.protocol import Engine, EngineError, OnTokens, SampleWork
from tinkex.errors import InvalidInputError
from tinkex.service.core import Core
from tinkex.service.engines import BaseModel
from tinkex.service.futures import Future
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import SamplerRow
from tinkex.types import sampling as types
from tinkex.types.futures import UntypedAPIFuture
from tinkex.types.outputs import SampleResponse

CLONE_STRIDE = 1_000_000_000
REMEMBERED = 100_000  # seq ids, for recognising repeats
PUBLISHED = 64  # adapters that an engine keeps; more are loaded from disk again when needed


class FairGate:
    """At most `capacity` sequences under way; whoever has the fewest goes next."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def used(self) -> int:
        return sum(self._used.values())

    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def enter(self, owner: str, units: int) -> None:
        if not self._waiting and (self.used == 0 or self.used + units <= self.capacity):
            self._used[owner] = self._used.get(owner, 0) + units
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(owner, units)
            raise

    def leave(self, owner: str, units: int) -> None:
        self._used[owner] -= units
        if not self._used[owner]:
            del self._used[owner]
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            owner = min(self._waiting, key=lambda o: self._used.get(o, 0))
            units, turn = self._waiting[owner][0]
            if not turn.done() and self.used and self.used + units > self.capacity:
                return
            self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not turn.done():
                self._used[owner] = self._used.get(owner, 0) + units
                turn.set_result(None)


class Samplers:
    """Sampling, one method per operation."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._gates: dict[str, FairGate] = {}
        self._repeats: OrderedDict[tuple[str, int], UntypedAPIFuture] = OrderedDict()
        self._published: dict[str, OrderedDict[str, None]] = {}  # base model -> adapters, least used first
        self._publishing: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Told of every finished sample: its sampler, how long it took, its outcome (None if it failed).
        self.observe: Callable[[SamplerRow, float, SampleResponse | None], None] = lambda *_: None

    # -- sampling sessions -------------------------------------------------------------------------------

    async def create_sampling_session(
        self, request: types.CreateSamplingSessionRequest, caller: Caller
    ) -> types.CreateSamplingSessionResponse:
        self._core.session(request.session_id, caller)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        row = self._describe(sampler_id, request.session_id, request.base_model, request.model_path, caller)
        row, _ = self._core.ledger.add_sampler(row)
        caller.must_own(row.owner, f"sampler {sampler_id}")
        return types.CreateSamplingSessionResponse(sampling_session_id=row.sampler_id)

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
        self._core.engines.find(checkpoint.base_model)
        return SamplerRow(
            sampler_id, session_id, caller.user, checkpoint.base_model, now, path, path, checkpoint.directory
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

    # -- samples -----------------------------------------------------------------------------------------

    async def sample(
        self, request: types.SampleRequest, caller: Caller, on_tokens: OnTokens | None = None
    ) -> UntypedAPIFuture:
        """Accept a sample; it runs as a task of its own."""
        row = self._row(request, caller)
        key = (row.sampler_id, -1 if request.seq_id is None else request.seq_id)
        promised = self._repeats.get(key)
        if promised is not None and self._core.futures.get(promised.request_id) is not None:
            return promised
        model = self._core.engines.find(row.base_model)
        if model.engine is not None:
            self._check(request, model.engine)
        clone = (request.seq_id or 0) // CLONE_STRIDE
        future = self._core.futures.create(caller.user, lane=f"{row.sampler_id}#{clone}")
        task = asyncio.get_running_loop().create_task(self._run(future, row, model, request, on_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        future.cancel = task.cancel
        ids = [f"{future.request_id}.{n}" for n in range(request.num_samples)]
        promise = UntypedAPIFuture(future.request_id, None, ids)
        if request.seq_id is not None:
            self._repeats[key] = promise
            if len(self._repeats) > REMEMBERED:
                self._repeats.popitem(last=False)
        return promise

    def _row(self, request: types.SampleRequest, caller: Caller) -> SamplerRow:
        if request.sampling_session_id is not None:
            return self._core.sampler(request.sampling_session_id, caller)
        return self._describe("", "", request.base_model, request.model_path, caller)

    def _check(self, request: types.SampleRequest, engine: Engine) -> None:
        """What must be a 400, because clients act on it: the prompt is too long, or is not text."""
        if request.num_samples > (most := self._core.config.max_samples):
            raise Refusal(400, f"num_samples must be at most {most}, got {request.num_samples}")
        try:
            length = len(request.prompt.to_numpy())
        except InvalidInputError as error:
            raise Refusal(400, f"this model reads text alone: {error}") from None
        limit, tokens = engine.info.max_context, request.sampling_params.max_tokens
        scoring = request.prompt_logprobs and tokens == 1  # needs no room for the token that nobody reads
        if length + (tokens or 1) > limit + scoring:
            raise Refusal(
                400,
                "Prompt length plus max_tokens exceeds the model's context window: "
                f"{length} + {tokens or 1} > {limit}",
            )

    async def _run(
        self,
        future: Future,
        row: SamplerRow,
        model: BaseModel,
        request: types.SampleRequest,
        on_tokens: OnTokens | None,
    ) -> None:
        started, response = time.monotonic(), None
        gate = self._gates.setdefault(model.name, FairGate(self._core.config.samples_in_flight))
        try:
            engine = await model.load()
            self._check(request, engine)
            await gate.enter(row.owner, request.num_samples)
            try:
                await self._ensure_published(engine, row)
                work = await self._work(request, row, model, on_tokens)
                response = await engine.sampler.sample(work)
            finally:
                gate.leave(row.owner, request.num_samples)
            future.resolve(response)
        except asyncio.CancelledError:
            future.fail("cancelled", "user")
            raise
        except (EngineError, Refusal) as error:
            category = error.category if isinstance(error, EngineError) else "user"
            future.fail(str(error), category)
        except Exception as error:
            future.fail(f"{type(error).__name__}: {error}")
        finally:
            self._account(row, request, response)
            self.observe(row, time.monotonic() - started, response)

    async def _work(
        self, request: types.SampleRequest, row: SamplerRow, model: BaseModel, on_tokens: OnTokens | None
    ) -> SampleWork:
        params, stop_bytes = request.sampling_params, None
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
        strings = [s for s in stops if isinstance(s, str)]
        if strings:
            stop_bytes = await model.stop_bytes(strings)
            params = replace(params, stop=None)
        return SampleWork(
            request.prompt.to_numpy(),
            params,
            row.adapter,
            request.num_samples,
            stop_bytes,
            request.prompt_logprobs,
            request.prompt_logprobs_last_n,
            request.topk_prompt_logprobs,
            request.topk_sample_logprobs,
            request.target_prompt_logprobs,
            request.prompt_alt_tokens_k,
            on_tokens,
        )

    async def _ensure_published(self, engine: Engine, row: SamplerRow) -> None:
        """The engine has this sampler's adapter; those used least make room for it."""
        if row.adapter is None or row.adapter_dir is None:
            return
        kept = self._published.setdefault(row.base_model, OrderedDict())
        if row.adapter in kept:
            kept.move_to_end(row.adapter)
            return
        lock = self._publishing.setdefault(row.adapter, asyncio.Lock())
        async with lock:
            if row.adapter not in kept:
                await engine.sampler.publish(self._core.home / row.adapter_dir, row.adapter)
                kept[row.adapter] = None
        self._publishing.pop(row.adapter, None)
        while len(kept) > PUBLISHED:
            oldest, _ = kept.popitem(last=False)
            await engine.sampler.retire(oldest)

    def _account(
        self, row: SamplerRow, request: types.SampleRequest, response: SampleResponse | None
    ) -> None:
        if response is None or not row.session_id:
            return
        cached = response.prompt_cache_hit_tokens
        self._core.count("sampling_prefill_cached", cached, row)
        self._core.count("sampling_prefill", max(0, request.prompt.length - cached), row)
        sampled = sum(0 if s.tokens_np is None else s.tokens_np.size for s in response.sequences)
        self._core.count("sampling_sample", sampled, row)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
