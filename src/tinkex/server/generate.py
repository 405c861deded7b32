"""POST /inference/v1/generate: tokens in, tokens out, as vLLM offers it to trainers.

Ids and logprobs are the sampler's, including the stop token. Nothing is detokenized.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from tinkex.server.bodies import IncomingRequest
from tinkex.server.gateway import Endpoint
from tinkex.server.json_values import as_object, refuse_rest
from tinkex.server.openai.replies import ChoiceDelta, CompletionReply, Json, TokenLogprob, error_fields
from tinkex.server.openai.requests import CompletionRequest, read_request
from tinkex.server.openai.routes import openai_error
from tinkex.server.openai.text_sampler import TextSampler
from tinkex.server.stream_sample import server_sent

_IGNORED = {"cache_salt", "priority", "request_id", "return_token_ids"}
_READ = {"model", "token_ids", "sampling_params", "stream", "stream_options"}
_OFF: dict[str, tuple[Any, ...]] = {"features": ({},), "content_parts": ([],), "kv_transfer_params": ({},)}
_PARAMS_IGNORED = {"routed_experts_prompt_start"}  # of what vLLM adds to its reply on request
_PARAMS_OFF: dict[str, tuple[Any, ...]] = {"output_kind": (0, 2), "detokenize": (True, False)}


def generate_routes(text: TextSampler) -> list[Route]:
    endpoint = Endpoint(text.gateway, "generate", partial(_generate, text), openai_error)
    return [Route("/inference/v1/generate", endpoint, methods=["POST"])]


async def _generate(text: TextSampler, http: IncomingRequest) -> Response:
    caller = text.admit(http)
    fields = await text.fields(http)
    refuse_rest({name: fields[name] for name in fields if name not in _IGNORED | _READ}, _OFF)
    asked: Json = {
        name: value
        for name, value in as_object(fields.get("sampling_params")).items()
        if name not in _PARAMS_IGNORED and value is not None and value not in _PARAMS_OFF.get(name, ())
    }
    model = fields.get("model") or next((m.name for m in text.gateway.service.models), "")
    if not asked.get("max_tokens"):
        _, base = await text.open(str(model), caller)
        asked["max_tokens"] = max(1, (base.max_context() or 1) - len(fields.get("token_ids") or ()))
    fixed: Json = {"prompt": fields.get("token_ids"), "model": model, "include_stop_str_in_output": True}
    fixed |= {name: fields[name] for name in ("stream", "stream_options") if name in fields}
    asked.setdefault("logprobs", 0)
    request = read_request(CompletionRequest, {**asked, **fixed, "return_token_ids": True})
    return await text.respond(http, caller, request, GenerateWriter)


class GenerateWriter:
    """Writes a reply as ids and logprobs."""

    def __init__(self, reply: CompletionReply) -> None:
        self._reply, self._id = reply, f"generate-{uuid.uuid4().hex}"

    def whole(self) -> Json:
        scores, usage = self._reply.prompt_scores.get(0), self._reply.usage()
        choices = [_choice(choice.deltas) for choice in self._reply.choices]
        return {**self._frame(choices), "prompt_logprobs": scores, "usage": usage}

    def begin(self) -> list[bytes]:
        return []

    def more(self, delta: ChoiceDelta) -> list[bytes]:
        return [server_sent("", self._frame([_choice([delta])]))]

    def end(self) -> list[bytes]:
        closing = {**self._frame([]), "usage": self._reply.usage()}
        wanted = self._reply.request.stream_options.include_usage
        return [*([server_sent("", closing)] if wanted else []), b"data: [DONE]\n\n"]

    def failed(self, status: int, message: str) -> bytes:
        return server_sent("", {"error": error_fields(status, message)})

    def _frame(self, choices: list[Json]) -> Json:
        prompt = self._reply.prepared.prompts[0]
        return {"request_id": self._id, "choices": choices, "prompt_token_ids": prompt}


def _choice(deltas: Sequence[ChoiceDelta]) -> Json:
    ids = [token for delta in deltas for token in delta.ids]
    content = [_shown(one) for delta in deltas for one in delta.tokens]
    named = {"index": deltas[0].choice, "finish_reason": deltas[-1].reason}
    return {**named, "token_ids": ids, "logprobs": {"content": content}}


def _shown(one: TokenLogprob) -> Json:
    token, logprob, others = one
    top = [{"token": f"token_id:{t}", "logprob": lp, "bytes": None} for t, lp in others]
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": top}
