"""From a request for text to its response: the sampler, the prompt's tokens, the samples, the written reply.

`TextSampler` is what every API for text shares. The model is a base model's name, the tinker:// path of a
published adapter, or an alias. Samples go through the service's operations, with one session and one sampling
session for each user and model. Knows no API's shapes: requests and writers do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

from tinkex._version import __version__
from tinkex.errors import InvalidInputError, RequestErrorCategory, TokenizerError
from tinkex.server.bodies import IncomingRequest, unless_disconnected
from tinkex.server.gateway import JSON, Gateway
from tinkex.server.openai.replies import CompletionReply, ReplyWriter
from tinkex.server.openai.requests import AnyRequest, Prepared
from tinkex.server.stream_sample import EventStream
from tinkex.service.adapter_cache import adapter_name
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.sample_events import SampleEvents
from tinkex.service.served_models import ServedModel
from tinkex.service.service import Service
from tinkex.tokenizers import load_tokenizer
from tinkex.types.base import AnyJson
from tinkex.types.data import ModelInput
from tinkex.types.futures import PendingFuture, RequestFailedResponse
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.sampling import CreateSamplingSessionRequest, GetSamplerRequest, SampleRequest
from tinkex.types.sessions import CreateSessionRequest
from tinkex.wire import large_json, ops

CACHED_SAMPLERS = 1024
MAX_BODY = 8 * 1024 * 1024
MOST_ALIASES = 1024  # of one user

SamplerKey = tuple[str, str | None, str]  # user, project, weights


@dataclass
class CachedSampler:
    """A sampling session shared by one user's requests for one model."""

    key: SamplerKey
    id: str
    base_model: str
    seq_ids: itertools.count[int] = field(default_factory=itertools.count)


class SamplerCache:
    """Sampling sessions, opened on first use, one for each user and set of weights."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._samplers: OrderedDict[SamplerKey, CachedSampler] = OrderedDict()
        self._opening = asyncio.Lock()

    async def get(self, model: str, caller: Caller) -> CachedSampler:
        weights = model
        if model.startswith("tinker://"):  # it may have been replaced, deleted or made private
            if self._service.peers is not None:
                await self._service.peers.refresh()  # and another server may just have saved it
            weights = adapter_name(model, self._service.access.checkpoint(model, caller).created_at)
        key = (caller.user, caller.project, weights)
        async with self._opening:
            sampler = self._samplers.get(key)
            if sampler is None:
                sampler = self._samplers[key] = await self._open(model, key, caller)
                if len(self._samplers) > CACHED_SAMPLERS:
                    self._samplers.popitem(last=False)
            self._samplers.move_to_end(key)
            return sampler

    def drop(self, sampler: CachedSampler) -> None:
        self._samplers.pop(sampler.key, None)

    async def _open(self, model: str, key: SamplerKey, caller: Caller) -> CachedSampler:
        call = self._service.call
        about = CreateSessionRequest(tags=["openai"], user_metadata={}, sdk_version=__version__)
        session = await call(ops.CREATE_SESSION, about, caller)
        which: dict[str, Any] = {"model_path" if model.startswith("tinker://") else "base_model": model}
        request = CreateSamplingSessionRequest(
            session_id=session.session_id, sampling_session_seq_id=0, **which
        )
        sampler_id = (await call(ops.CREATE_SAMPLING_SESSION, request, caller)).sampling_session_id
        sampler = await call(ops.GET_SAMPLER, GetSamplerRequest(sampler_id=sampler_id), caller)
        return CachedSampler(key, sampler_id, sampler.base_model)


class ModelAliases:
    """Short names of adapters, each user's own. They last as long as the server's process."""

    def __init__(self) -> None:
        self._paths: dict[str, dict[str, str]] = {}  # by user and alias

    def of(self, caller: Caller) -> dict[str, str]:
        return self._paths.setdefault(caller.user, {})

    def resolve(self, model: str, caller: Caller) -> str:
        return self._paths.get(caller.user, {}).get(model, model)

    def add(self, alias: str, path: str, caller: Caller) -> None:
        known = self.of(caller)
        if len(known) >= MOST_ALIASES and alias not in known:
            raise Refusal(429, f"you have {len(known)} aliases; unload some first")
        known[alias] = path

    def remove(self, alias: str, caller: Caller) -> None:
        if self.of(caller).pop(alias, None) is None:
            raise Refusal(
                404, f"there is no adapter {alias!r}; loaded: {', '.join(self.of(caller)) or 'none'}"
            )


# -- requests --------------------------------------------------------------------------------------------


class TextSampler:
    """What every API for text does with a request."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.samplers, self.aliases = SamplerCache(gateway.service), ModelAliases()

    def admit(self, http: IncomingRequest) -> Caller:
        """The caller; on a server without keys, programs of this machine may send none."""
        return self.gateway.admit(http, keyless=True)

    async def fields(self, http: IncomingRequest) -> dict[str, Any]:
        """The body, a JSON object."""
        bodies = self.gateway.bodies
        body = await bodies.read(http, min(bodies.limit, MAX_BODY))
        return await bodies.parse(http, body, lambda: _fields(body))

    async def open(self, model: str, caller: Caller) -> tuple[CachedSampler, ServedModel]:
        """The sampler of what a request calls its model."""
        sampler = await self.samplers.get(self.aliases.resolve(model, caller), caller)
        return sampler, self.gateway.service.models.find(sampler.base_model)

    async def respond(
        self,
        http: IncomingRequest,
        caller: Caller,
        request: AnyRequest,
        new_writer: Callable[[CompletionReply], ReplyWriter],
    ) -> Response:
        """Sample, and write the reply: whole, or as a stream."""
        sampler, base = await self.open(request.model, caller)
        tokenizer = await tokenizer_of(base)
        prepared = await asyncio.to_thread(request.prepare, tokenizer)
        token_bytes = await base.token_bytes() if request.alternatives is not None else ()
        async with AsyncExitStack() as samples:
            try:
                streams: list[SampleEvents] = []
                for one in sample_requests(request, prepared, sampler):
                    stream = self.gateway.service.stream(one, caller)
                    streams.append(await samples.enter_async_context(aclosing(stream)))
                # What fails before the first event is an HTTP error, not a streamed one.
                first = await unless_disconnected(http.receive, asyncio.gather(*map(_next_event, streams)))
            except Refusal as refusal:
                if refusal.status in (404, 410):
                    self.samplers.drop(sampler)  # its session was closed; the next request opens another
                raise
            reply = CompletionReply(request, prepared, tokenizer, token_bytes, base.eos_ids())
            events, writer = _merged(streams, first), new_writer(reply)
            if request.stream:
                return EventStream(_written(self.gateway, events, reply, writer), samples.pop_all())
            await unless_disconnected(http.receive, _collect(events, reply))
            return Response(orjson.dumps(writer.whole()), 200, JSON)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields: AnyJson = large_json.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidInputError("the body must be a JSON object")
    return fields


async def tokenizer_of(base: ServedModel) -> Any:
    """The tokenizer of a base model; loaded once, which takes seconds."""
    directory = await asyncio.to_thread(base.tokenizer_dir)
    if directory is None:
        raise Refusal(422, f"{base.name} has no tokenizer on this server: it samples tokens, not text")
    try:
        return await asyncio.to_thread(load_tokenizer, base.name, directory=directory)
    except TokenizerError as error:
        raise Refusal(503, str(error)) from None


async def load_tokenizers(service: Service) -> None:
    """Load the tokenizers of all loaded models, so that the first request for text does not wait."""
    for base in service.models:
        if base.engine is not None:
            with suppress(Refusal):  # it has no readable tokenizer: requests get the error
                await tokenizer_of(base)
                await base.token_bytes()


def sample_requests(request: AnyRequest, prepared: Prepared, sampler: CachedSampler) -> list[SampleRequest]:
    """One for each prompt."""
    params = request.params(prepared.grammar)
    alternatives = request.alternatives or 0
    scores = request.prompt_logprobs
    if scores is None and request.echo and request.alternatives is not None:
        scores = alternatives
    return [
        SampleRequest(
            prompt=ModelInput.from_ints(prompt), sampling_params=params, num_samples=request.n,
            sampling_session_id=sampler.id, seq_id=next(sampler.seq_ids), prompt_logprobs=scores is not None,
            topk_prompt_logprobs=scores or 0, topk_sample_logprobs=alternatives,
        )
        for prompt in prepared.prompts
    ]  # fmt: skip


# -- samples ---------------------------------------------------------------------------------------------

Drawn = NewTokens | SampleResponse
PromptEvents = AsyncGenerator[tuple[int, Drawn]]  # with the prompt's index


async def _next_event(stream: SampleEvents) -> Drawn:
    """The next tokens or the response; Refusal if the sample failed."""
    while isinstance(event := await anext(stream), PendingFuture):
        pass
    if isinstance(event, RequestFailedResponse):
        raise Refusal(400 if event.category is RequestErrorCategory.User else 500, event.error)
    return event


async def _merged(streams: Sequence[SampleEvents], first: Sequence[Drawn]) -> PromptEvents:
    """The events of all prompts as they come; Refusal if one fails."""
    queue: asyncio.Queue[tuple[int, Drawn | Refusal]] = asyncio.Queue()

    async def forward(prompt: int, event: Drawn) -> None:
        queue.put_nowait((prompt, event))
        try:
            while not isinstance(event, SampleResponse):
                event = await _next_event(streams[prompt])
                queue.put_nowait((prompt, event))
        except Refusal as refusal:
            queue.put_nowait((prompt, refusal))

    tasks = [asyncio.create_task(forward(prompt, event)) for prompt, event in enumerate(first)]
    open_streams = len(tasks)
    try:
        while open_streams:
            prompt, event = await queue.get()
            if isinstance(event, Refusal):
                raise event
            open_streams -= isinstance(event, SampleResponse)
            yield prompt, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(events: PromptEvents, reply: CompletionReply) -> None:
    async with aclosing(events):
        async for prompt, event in events:
            if isinstance(event, SampleResponse):
                reply.finish(prompt, event)


async def _written(
    gateway: Gateway, events: PromptEvents, reply: CompletionReply, writer: ReplyWriter
) -> AsyncGenerator[bytes]:
    """Deltas of all choices, in the order in which they are sampled."""
    for opening in writer.begin():
        yield opening
    try:
        async with aclosing(events):
            async for prompt, event in events:
                is_last = isinstance(event, SampleResponse)
                for delta in reply.finish(prompt, event) if is_last else reply.add(prompt, event):
                    for written in writer.more(delta):
                        yield written
    except Refusal as refusal:
        yield writer.failed(refusal.status, gateway.without_paths(refusal.message))
        return
    for closing in writer.end():
        yield closing
