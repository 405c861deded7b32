"""OpenAI's and vLLM's routes under /v1, streaming included.

Every error on them has OpenAI's shape. `/oai/api/v1` is the hosted service's name for the same routes.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response
from starlette.routing import Route

from tinkex._version import __version__
from tinkex.errors import InvalidInputError
from tinkex.server.bodies import IncomingRequest
from tinkex.server.gateway import JSON, NOT_READY, Endpoint, Handler
from tinkex.server.json_values import as_list
from tinkex.server.openai.replies import OpenAIWriter, error_fields
from tinkex.server.openai.requests import AnyRequest, ChatRequest, CompletionRequest, read_request
from tinkex.server.openai.text_sampler import TextSampler, tokenizer_of
from tinkex.service.refusal import Caller, Refusal
from tinkex.types.checkpoints import ListUserCheckpointsRequest
from tinkex.types.config import EmptyRequest
from tinkex.wire import ops

PREFIXES = ("/v1", "/oai/api/v1")
_LISTED = 1000  # adapters
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def openai_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error response as OpenAI's client reads it."""
    status = 400 if status == 422 else status
    body = orjson.dumps({"error": error_fields(status, message)})
    return Response(body, status, {**JSON, **(headers or {})})


def openai_routes(text: TextSampler) -> list[Route]:
    """The routes under /v1 that no other API has."""
    catalogue, tokens, gateway = _Catalogue(text), _Tokens(text), text.gateway
    table: list[tuple[str, str, str, Handler]] = [
        ("/models", "GET", "openai_models", catalogue.listed),
        ("/models/{model:path}", "GET", "openai_model", catalogue.one),
        ("/load_lora_adapter", "POST", "load_lora_adapter", catalogue.load),
        ("/unload_lora_adapter", "POST", "unload_lora_adapter", catalogue.unload),
        ("/completions", "POST", "openai_completions", partial(_complete, text, CompletionRequest)),
        ("/chat/completions", "POST", "openai_chat", partial(_complete, text, ChatRequest)),
    ]
    beside: list[tuple[str, str, str, Handler]] = [
        ("/tokenize", "POST", "tokenize", tokens.tokenize),
        ("/detokenize", "POST", "detokenize", tokens.detokenize),
        ("/health", "GET", "health", partial(_health, text)),
        ("/version", "GET", "version", _version),
    ]
    rows = [(f"{prefix}{path}", *rest) for prefix in PREFIXES for path, *rest in table] + beside
    return [
        Route(path, Endpoint(gateway, name, handler, openai_error), methods=[method])  # type: ignore[arg-type]
        for path, method, name, handler in rows
    ]


def unknown_routes(text: TextSampler) -> list[Route]:
    """All other paths under /v1: an error in OpenAI's shape. These must be the last routes."""
    endpoint = Endpoint(text.gateway, "openai_unknown", _unknown, openai_error)
    return [Route(f"{prefix}/{{rest:path}}", endpoint, methods=_METHODS) for prefix in PREFIXES]


async def _unknown(http: IncomingRequest) -> Response:
    rest = http.path_params["rest"]
    message = f"{http.scope['method']} {http.scope['path']} is not offered here"
    if rest.startswith("embeddings"):
        message = "embeddings are not offered: the models of this server generate text, and embed none"
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": "unknown_url"}
    return Response(orjson.dumps({"error": fields}), 404, JSON)


async def _complete(text: TextSampler, kind: type[AnyRequest], http: IncomingRequest) -> Response:
    caller = text.admit(http)
    request = read_request(kind, await text.fields(http))
    return await text.respond(http, caller, request, OpenAIWriter)


async def _health(text: TextSampler, http: IncomingRequest) -> Response:
    if not text.gateway.service.ready or text.gateway.draining:
        raise Refusal(503, NOT_READY)
    return Response(b"", 200)


async def _version(http: IncomingRequest) -> Response:
    return Response(orjson.dumps({"version": __version__, "server": "tinkex"}), 200, JSON)


class _Catalogue:
    """Base models, the caller's adapters, and aliases of adapters."""

    def __init__(self, text: TextSampler) -> None:
        self._text, self._gateway = text, text.gateway

    async def listed(self, http: IncomingRequest) -> Response:
        listed = await self._models(self._text.admit(http))
        return Response(orjson.dumps({"object": "list", "data": listed}), 200, JSON)

    async def one(self, http: IncomingRequest) -> Response:
        caller, name = self._text.admit(http), http.path_params["model"]
        about = next((m for m in await self._models(caller) if m["id"] == name), None)
        if about is None:
            # A published adapter, or another spelling of a base model; anything else is refused.
            _, base = await self._text.open(name, caller)
            about = _model(name, base.max_context())
        return Response(orjson.dumps(about), 200, JSON)

    async def load(self, http: IncomingRequest) -> Response:
        caller, fields = self._text.admit(http), await self._text.fields(http)
        alias, path = fields.get("lora_name"), fields.get("lora_path")
        if not isinstance(alias, str) or not isinstance(path, str) or not alias:
            raise InvalidInputError("load_lora_adapter needs lora_name and lora_path, both strings")
        if not path.startswith("tinker://"):
            raise InvalidInputError(f"lora_path must be the tinker:// path of an adapter, got {path!r:.80}")
        await self._text.open(path, caller)
        self._text.aliases.add(alias, path, caller)
        return Response(f"Success: LoRA adapter '{alias}' added successfully.", 200)

    async def unload(self, http: IncomingRequest) -> Response:
        caller, fields = self._text.admit(http), await self._text.fields(http)
        self._text.aliases.remove(str(fields.get("lora_name")), caller)
        return Response(f"Success: LoRA adapter '{fields['lora_name']}' removed successfully.", 200)

    async def _models(self, caller: Caller) -> list[dict[str, Any]]:
        service = self._gateway.service
        known = await service.call(ops.GET_SERVER_CAPABILITIES, EmptyRequest(), caller)
        names = [model.model_name for model in known.supported_models]
        listed = [_model(name, service.models.find(name).max_context()) for name in names]
        saved = await service.call(
            ops.LIST_USER_CHECKPOINTS, ListUserCheckpointsRequest(limit=_LISTED), caller
        )
        paths = [c.tinker_path for c in saved.checkpoints if c.checkpoint_id.startswith("sampler_weights/")]
        aliases = self._text.aliases.of(caller).items()
        return [*listed, *map(_model, paths), *({**_model(a), "root": path} for a, path in aliases)]


def _model(name: str, context: int | None = None) -> dict[str, Any]:
    about = {"id": name, "object": "model", "created": 0, "owned_by": "tinkex", "root": name}
    return about if context is None else {**about, "max_model_len": context}


class _Tokens:
    """Texts and conversations as tokens, and back."""

    def __init__(self, text: TextSampler) -> None:
        self._text = text

    async def tokenize(self, http: IncomingRequest) -> Response:
        tokenizer, fields, context = await self._read(http)
        if "messages" in fields:
            chat = read_request(ChatRequest, {**fields, "model": ""})
            tokens = (await asyncio.to_thread(chat.rendered, tokenizer)).prompt
        elif isinstance(prompt := fields.get("prompt"), str):
            special = fields.get("add_special_tokens", True)
            tokens = list(tokenizer.encode(prompt, add_special_tokens=bool(special)))
        else:
            raise InvalidInputError("tokenize needs prompt, a string, or messages")
        reply = {"count": len(tokens), "max_model_len": context, "tokens": tokens}
        return Response(orjson.dumps(reply), 200, JSON)

    async def detokenize(self, http: IncomingRequest) -> Response:
        tokenizer, fields, _ = await self._read(http)
        tokens = as_list(fields.get("tokens"))
        if not all(type(token) is int and 0 <= token < len(tokenizer) for token in tokens):
            raise InvalidInputError(f"tokens must be a list of ids from 0 to {len(tokenizer) - 1}")
        text = await asyncio.to_thread(tokenizer.decode, tokens, clean_up_tokenization_spaces=False)
        return Response(orjson.dumps({"prompt": text}), 200, JSON)

    async def _read(self, http: IncomingRequest) -> tuple[Any, dict[str, Any], int | None]:
        gateway = self._text.gateway
        caller, fields = self._text.admit(http), await self._text.fields(http)
        model = fields.pop("model", None) or next((m.name for m in gateway.service.models), "")
        if not isinstance(model, str):
            raise InvalidInputError(f"model must be a string, got {model!r:.80}")
        _, base = await self._text.open(model, caller)
        return await tokenizer_of(base), fields, base.max_context()
