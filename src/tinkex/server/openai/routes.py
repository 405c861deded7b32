"""/v1/models, /v1/completions and /v1/chat/completions, streaming included, as OpenAI's client expects them.

The model is a base model's name or the tinker:// path of a published adapter. Requests go through the
service's operations, with one session and one sampling session for each user and model.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response
from starlette.routing import Route

from tinkex._version import __version__
from tinkex.errors import InvalidInputError, RequestErrorCategory, TokenizerError
from tinkex.server.bodies import IncomingRequest, unless_disconnected
from tinkex.server.gateway import JSON, Endpoint, Gateway
from tinkex.server.openai.replies import CompletionReply, ReplyWriter
from tinkex.server.openai.requests import AnyRequest, ChatRequest, CompletionRequest, read_request
from tinkex.server.stream_sample import EventStream, server_sent
from tinkex.service.adapter_cache import adapter_name
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.samplers import SampleEvents
from tinkex.service.served_models import ServedModel
from tinkex.service.service import Service
from tinkex.tokenizers import load_tokenizer
from tinkex.types.base import AnyJson
from tinkex.types.config import EmptyRequest
from tinkex.types.data import ModelInput
from tinkex.types.futures import PendingFuture, RequestFailedResponse
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.params import SamplingParams
from tinkex.types.sampling import CreateSamplingSessionRequest, GetSamplerRequest, SampleRequest
from tinkex.types.sessions import CreateSessionRequest
from tinkex.wire import large_json, ops

CACHED_SAMPLERS = 1024
MAX_BODY = 8 * 1024 * 1024
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def openai_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error response as OpenAI's client reads it."""
    status = 400 if status == 422 else status
    body = orjson.dumps({"error": _error_fields(status, message)})
    return Response(body, status, {**JSON, **(headers or {})})


def _error_fields(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "context_length_exceeded" if message.startswith("Prompt length plus") else _CODES.get(status)
    return {"message": message, "type": kind, "param": None, "code": code}


# -- samplers --------------------------------------------------------------------------------------------

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


# -- endpoints -------------------------------------------------------------------------------------------


def openai_routes(gateway: Gateway) -> list[Route]:
    """The routes under /v1."""
    samplers = SamplerCache(gateway.service)

    async def models(http: IncomingRequest) -> Response:
        listed = await _models(gateway.service, gateway.admit(http))
        return Response(orjson.dumps({"object": "list", "data": listed}), 200, JSON)

    async def model(http: IncomingRequest) -> Response:
        caller, name = gateway.admit(http), http.path_params["model"]
        about = next((m for m in await _models(gateway.service, caller) if m["id"] == name), None)
        if about is None:
            # A published adapter, or another spelling of a base model's name; refused if it is neither.
            await samplers.get(name, caller)
            about = _model(name)
        return Response(orjson.dumps(about), 200, JSON)

    complete = partial(_complete, gateway, samplers)
    table = [
        ("/v1/models", "GET", "openai_models", models),
        ("/v1/models/{model:path}", "GET", "openai_model", model),
        (
            "/v1/completions",
            "POST",
            "openai_completions",
            partial(complete, CompletionRequest),
        ),
        ("/v1/chat/completions", "POST", "openai_chat", partial(complete, ChatRequest)),
    ]
    return [
        Route(path, Endpoint(gateway, name, handler, openai_error), methods=[method])
        for path, method, name, handler in table
    ]


async def _models(service: Service, caller: Caller) -> list[dict[str, Any]]:
    known = await service.call(ops.GET_SERVER_CAPABILITIES, EmptyRequest(), caller)
    return [_model(model.model_name) for model in known.supported_models]


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tinkex"}


async def _complete(
    gateway: Gateway, samplers: SamplerCache, kind: type[AnyRequest], http: IncomingRequest
) -> Response:
    caller, service = gateway.admit(http), gateway.service
    bodies = gateway.bodies
    body = await bodies.read(http, min(bodies.limit, MAX_BODY))
    request = await bodies.parse(http, body, lambda: read_request(kind, _fields(body)))
    sampler = await samplers.get(request.model, caller)
    base = service.models.find(sampler.base_model)
    tokenizer = await _tokenizer(base)
    prompts, inputs = await asyncio.to_thread(_inputs, request, tokenizer)
    token_bytes = await base.token_bytes() if request.alternatives is not None else ()
    async with AsyncExitStack() as samples:
        try:
            streams: list[SampleEvents] = []
            for one in inputs:
                stream = service.stream(_sample_request(request, one, sampler), caller)
                streams.append(await samples.enter_async_context(aclosing(stream)))
            # What fails before the first event is an HTTP error, not a streamed one.
            first = await unless_disconnected(http.receive, asyncio.gather(*map(_next_event, streams)))
        except Refusal as refusal:
            if refusal.status in (404, 410):
                samplers.drop(sampler)  # its session was closed; the next request opens another
            raise
        reply = CompletionReply(request, prompts, tokenizer, token_bytes, base.eos_ids())
        events, writer = _merged(streams, first), ReplyWriter(reply)
        if request.stream:
            return EventStream(_sse_chunks(gateway, events, reply, writer), samples.pop_all())
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


async def _tokenizer(base: ServedModel) -> Any:
    directory = await asyncio.to_thread(base.tokenizer_dir)
    if directory is None:
        raise Refusal(422, f"{base.name} has no tokenizer on this server: it samples tokens, not text")
    try:
        return await asyncio.to_thread(load_tokenizer, base.name, directory=directory)
    except TokenizerError as error:
        raise Refusal(503, str(error)) from None


def _inputs(request: AnyRequest, tokenizer: Any) -> tuple[list[list[int]], list[ModelInput]]:
    prompts = request.prompts(tokenizer)
    return prompts, [ModelInput.from_ints(prompt) for prompt in prompts]


def _sample_request(request: AnyRequest, prompt: ModelInput, sampler: CachedSampler) -> SampleRequest:
    alternatives = request.alternatives or 0
    scores_prompt = request.echo and request.alternatives is not None
    params = SamplingParams(
        max_tokens=request.most_tokens, seed=request.seed, stop=request.stop or None,
        temperature=request.temperature, top_p=request.top_p, top_k=request.top_k or -1,
    )  # fmt: skip
    return SampleRequest(
        prompt=prompt, sampling_params=params, num_samples=request.n,
        sampling_session_id=sampler.id, seq_id=next(sampler.seq_ids), prompt_logprobs=scores_prompt,
        topk_prompt_logprobs=alternatives if scores_prompt else 0, topk_sample_logprobs=alternatives,
    )  # fmt: skip


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


async def _sse_chunks(
    gateway: Gateway, events: PromptEvents, reply: CompletionReply, writer: ReplyWriter
) -> AsyncGenerator[bytes]:
    """Deltas of all choices, in the order in which they are sampled."""
    for opening in writer.openings():
        yield server_sent("", opening)
    try:
        async with aclosing(events):
            async for prompt, event in events:
                is_last = isinstance(event, SampleResponse)
                for delta in reply.finish(prompt, event) if is_last else reply.add(prompt, event):
                    yield server_sent("", writer.chunk(delta))
    except Refusal as refusal:
        why = gateway.without_paths(refusal.message)
        yield server_sent("", {"error": _error_fields(refusal.status, why)})
        return
    if reply.request.stream_options.include_usage:
        yield server_sent("", writer.closing())
    yield b"data: [DONE]\n\n"
