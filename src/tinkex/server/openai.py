"""OpenAI's door: /v1/models, /v1/completions and /v1/chat/completions, streaming included.

Promises: the shapes that OpenAI's own client reads, errors too; the model is a base model's name or a
tinker:// path of a published adapter. It goes through the service's operations like everybody else: one
session for each user, one sampling session for each model. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tinkex._version import __version__
from tinkex.errors import InvalidInputError, RequestErrorCategory, TokenizerError
from tinkex.server.app import JSON, Backend, Door, Endpoint, Http
from tinkex.server.bodies import read_body, unless_gone
from tinkex.server.openai_replies import Reply, Shape, chat_shape, completion_shape, usage
from tinkex.server.openai_requests import Asked, model_of, read_chat, read_completion
from tinkex.server.streams import HEADERS, begun, kept_alive, sample_events, server_sent
from tinkex.service.published import name_of
from tinkex.service.refusal import Caller, Refusal
from tinkex.tokenizers import load_tokenizer_async
from tinkex.types.base import AnyJson
from tinkex.types.config import EmptyRequest
from tinkex.types.data import ModelInput
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.sampling import CreateSamplingSessionRequest, GetSamplerRequest, SampleRequest
from tinkex.types.sessions import CreateSessionRequest
from tinkex.wire import ops

REMEMBERED = 1024  # samplers
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
          429: "rate_limit_error"}  # fmt: skip
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def refused(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """A refusal as OpenAI's client reads it."""
    status = 400 if status == 422 else status
    return Response(orjson.dumps({"error": _error(status, message)}), status, {**JSON, **(headers or {})})


def _error(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "context_length_exceeded" if message.startswith("Prompt length plus") else _CODES.get(status)
    return {"message": message, "type": kind, "param": None, "code": code}


def _failure(outcome: RequestFailedResponse) -> Refusal:
    return Refusal(400 if outcome.category is RequestErrorCategory.User else 500, outcome.error)


# -- samplers --------------------------------------------------------------------------------------------


@dataclass
class _Sampler:
    """A sampling session that OpenAI requests of one user for one model share."""

    key: tuple[str, str | None, str]
    id: str
    base_model: str
    seq_ids: itertools.count[int] = field(default_factory=itertools.count)


class _Samplers:
    """Opened when first needed, one for each user and set of weights."""

    def __init__(self, service: Backend) -> None:
        self._service = service
        self._samplers: OrderedDict[tuple[str, str | None, str], _Sampler] = OrderedDict()
        self._opening = asyncio.Lock()

    async def get(self, model: str, caller: Caller) -> _Sampler:
        key = (caller.user, caller.project, self._meant(model, caller))
        async with self._opening:
            sampler = self._samplers.get(key)
            if sampler is None:
                sampler = self._samplers[key] = await self._open(model, key, caller)
                if len(self._samplers) > REMEMBERED:
                    self._samplers.popitem(last=False)
            self._samplers.move_to_end(key)
            return sampler

    def _meant(self, model: str, caller: Caller) -> str:
        """What `model` says at this moment: a checkpoint may have been replaced, deleted or made private."""
        if not model.startswith("tinker://"):
            return model
        return name_of(model, self._service.core.checkpoint(model, caller).created_at)

    def forget(self, sampler: _Sampler) -> None:
        self._samplers.pop(sampler.key, None)

    async def _open(self, model: str, key: tuple[str, str | None, str], caller: Caller) -> _Sampler:
        call, is_path = self._service.call, model.startswith("tinker://")
        session = await call(
            ops.CREATE_SESSION,
            CreateSessionRequest(tags=["openai"], user_metadata={}, sdk_version=__version__),
            caller,
        )
        request = CreateSamplingSessionRequest(
            session_id=session.session_id,
            sampling_session_seq_id=0,
            base_model=None if is_path else model,
            model_path=model if is_path else None,
        )
        opened = await call(ops.CREATE_SAMPLING_SESSION, request, caller)
        about = await call(ops.GET_SAMPLER, GetSamplerRequest(sampler_id=opened.sampling_session_id), caller)
        return _Sampler(key, opened.sampling_session_id, about.base_model)


# -- endpoints -------------------------------------------------------------------------------------------


def openai_routes(door: Door) -> list[Route]:
    """The routes under /v1."""
    samplers = _Samplers(door.service)

    async def models(http: Http) -> Response:
        listed = await _models(door.service, door.admit(http))
        return Response(orjson.dumps({"object": "list", "data": listed}), 200, JSON)

    async def model(http: Http) -> Response:
        caller, name = door.admit(http), http.path_params["model"]
        about = next((m for m in await _models(door.service, caller) if m["id"] == name), None)
        if about is None:
            await samplers.get(
                name, caller
            )  # a published adapter, or a variant of a name; refused if neither
            about = _model(name)
        return Response(orjson.dumps(about), 200, JSON)

    async def completions(http: Http) -> Response:
        return await _complete(door, samplers, http, chat=False)

    async def chat(http: Http) -> Response:
        return await _complete(door, samplers, http, chat=True)

    table = [
        ("/v1/models", "GET", "openai_models", models),
        ("/v1/models/{model:path}", "GET", "openai_model", model),
        ("/v1/completions", "POST", "openai_completions", completions),
        ("/v1/chat/completions", "POST", "openai_chat", chat),
    ]
    return [
        Route(path, Endpoint(door, name, answer, refused), methods=[method])
        for path, method, name, answer in table
    ]


async def _models(service: Backend, caller: Caller) -> list[dict[str, Any]]:
    known = await service.call(ops.GET_SERVER_CAPABILITIES, EmptyRequest(), caller)
    return [_model(model.model_name) for model in known.supported_models]


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tinkex"}


async def _complete(door: Door, samplers: _Samplers, http: Http, *, chat: bool) -> Response:
    caller = door.admit(http)
    fields = await _fields(door, http)
    name = model_of(fields)
    sampler = await samplers.get(name, caller)
    base = door.service.core.engines.find(sampler.base_model)
    tokenizer = await _tokenizer(base)
    asked = await asyncio.to_thread(read_chat if chat else read_completion, fields, tokenizer)
    token_bytes = (await base.stop_bytes([])).token_bytes if asked.alternatives is not None else ()
    frame = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": name,
    }
    shape = (chat_shape if chat else completion_shape)(frame)
    streams = [
        sample_events(door.service, _sample_request(asked, prompt, sampler), caller)
        for prompt in asked.prompts
    ]
    try:
        begun_streams = await unless_gone(http.receive, asyncio.gather(*map(_begun, streams)))
    except Refusal as refusal:
        if refusal.status in (404, 410):
            samplers.forget(sampler)  # its session was closed: the next request opens another
        raise
    reply = Reply(asked, tokenizer, token_bytes, base.eos_ids())
    if asked.stream:
        return StreamingResponse(kept_alive(_streamed(begun_streams, reply, shape)), headers=HEADERS)
    await unless_gone(http.receive, _collect_all(begun_streams, reply))
    return Response(orjson.dumps(shape.whole(reply)), 200, JSON)


async def _fields(door: Door, http: Http) -> dict[str, Any]:
    body = await read_body(http.receive, http.headers, door.bodies.limit)
    try:
        fields: AnyJson = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidInputError("the body must be a JSON object")
    return fields


async def _tokenizer(base: Any) -> Any:
    directory = await asyncio.to_thread(base.tokenizer_dir)
    if directory is None:
        raise Refusal(422, f"{base.name} has no tokenizer on this server: it samples tokens, not text")
    try:
        return await load_tokenizer_async(base.name, directory=directory)
    except TokenizerError as error:
        raise Refusal(503, str(error)) from None


def _sample_request(asked: Asked, prompt: Sequence[int], sampler: _Sampler) -> SampleRequest:
    wants_prompt = asked.echo and asked.alternatives is not None
    return SampleRequest(
        prompt=ModelInput.from_ints(list(prompt)),
        sampling_params=asked.params,
        num_samples=asked.choices,
        sampling_session_id=sampler.id,
        seq_id=next(sampler.seq_ids),
        prompt_logprobs=wants_prompt,
        topk_prompt_logprobs=(asked.alternatives or 0) if wants_prompt else 0,
        topk_sample_logprobs=asked.alternatives or 0,
    )


# -- samples ---------------------------------------------------------------------------------------------


async def _begun(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The stream, once it has begun; what fails before that is an HTTP status."""
    first, events = await begun(stream)
    if isinstance(first, RequestFailedResponse):
        raise _failure(first)
    return events


async def _collect_all(streams: Sequence[AsyncIterator[Any]], reply: Reply) -> None:
    """Every prompt's samples; one that fails ends those of the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for prompt, events in enumerate(streams):
                group.create_task(_collect(events, prompt, reply))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _collect(events: AsyncIterator[Any], prompt: int, reply: Reply) -> None:
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, RequestFailedResponse):
                raise _failure(event)
            if isinstance(event, SampleResponse):
                reply.finish(prompt, event)


async def _streamed(
    streams: Sequence[AsyncIterator[Any]], reply: Reply, shape: Shape
) -> AsyncIterator[bytes]:
    """Pieces of all choices, as they come."""
    merged: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def forward(prompt: int, events: AsyncIterator[Any]) -> None:
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                merged.put_nowait((prompt, event))

    tasks = [asyncio.create_task(forward(prompt, events)) for prompt, events in enumerate(streams)]
    open_streams = len(tasks)
    try:
        for choice in range(reply.choices):
            if (opening := shape.opening(choice)) is not None:
                yield server_sent("", opening)
        while open_streams:
            prompt, event = await merged.get()
            if isinstance(event, RequestFailedResponse):
                refusal = _failure(event)
                yield server_sent("", {"error": _error(refusal.status, refusal.message)})
                return
            if isinstance(event, NewTokens):
                pieces = reply.add(prompt, event)
            else:
                open_streams -= 1
                pieces = reply.finish(prompt, event)
            for piece in pieces:
                yield server_sent("", shape.piece(piece, reply))
        if reply.asked.stream_usage:
            yield server_sent("", shape.closing(usage(reply)))
        yield b"data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
