"""One prompt against several models or checkpoints, side by side: samples as they are drawn."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.console.event_pages import LiveStreams
from tinkex.server.console.formats import short
from tinkex.server.console.site import ConsoleSite, as_json
from tinkex.server.console.token_texts import TokenPieces, TokenTexts, pieces, top_texts
from tinkex.server.console.visitors import Visitor
from tinkex.server.openai.text_sampler import tokenizer_of
from tinkex.server.stream_sample import server_sent
from tinkex.service.refusal import Refusal
from tinkex.service.sample_events import SampleEvents
from tinkex.service.service import Service
from tinkex.tokenizers import render_chat
from tinkex.types.base import explain
from tinkex.types.data import ModelInput
from tinkex.types.futures import PendingFuture
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.params import SamplingParams
from tinkex.types.sampling import SampleRequest

MAX_BODY = 1024 * 1024
TOP = 5  # likely tokens beside each that was drawn
MOST_CHECKPOINTS = 200  # that are offered


class PlaygroundRequest(BaseModel):
    """What one column of the page asks for."""

    model_config = ConfigDict(strict=True)
    model: Annotated[str, Field(min_length=1, max_length=500)]
    mode: Literal["chat", "text"] = "chat"
    system: str = ""
    prompt: str
    max_tokens: int = Field(128, ge=1, le=100_000)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(-1, ge=-1)
    seed: int | None = None


class Playground:
    """The page, its prompt as tokens, and its streams of samples."""

    def __init__(self, site: ConsoleSite, service: Service, texts: TokenTexts, streams: LiveStreams) -> None:
        self._site, self._service, self._texts, self._streams = site, service, texts, streams
        site.add("/console/playground", self.show)
        site.add("/console/playground/tokens", self.tokens, "POST")
        site.add("/console/playground/sample", self.sample, "POST")

    async def show(self, request: Request, visitor: Visitor) -> Response:
        saved = self._service.ledger.checkpoints(visitor.scope, limit=MOST_CHECKPOINTS).rows
        usable = [one for one in saved if one.kind != "external_weights" and not one.encrypted]
        runs = {run_id: self._service.ledger.run(run_id) for run_id in {one.run_id for one in usable}}
        names = {run_id: (row and row.name) or short(run_id) for run_id, row in runs.items()}
        paths = {one.tinker_path: f"{names[one.run_id]} · {one.name}" for one in usable}
        models = [model.name for model in self._service.models]
        chosen = request.query_params.getlist("model") or models[:1]
        return self._site.render(
            "playground.html", visitor, models=models, paths=paths, chosen=(chosen + [""] * 4)[:4],
            url=visitor.caller.public_url,
        )  # fmt: skip

    async def _read(self, request: Request) -> PlaygroundRequest:
        try:
            return PlaygroundRequest.model_validate_json(await self._site.body(request, MAX_BODY))
        except ValidationError as error:
            raise Refusal(422, explain(error, "request")) from None

    def _base(self, asked: PlaygroundRequest, visitor: Visitor) -> str:
        if asked.model.startswith("tinker://"):
            return self._service.access.checkpoint(asked.model, visitor.caller).base_model
        return self._service.models.find(asked.model).name

    async def _prompt(self, asked: PlaygroundRequest, base: str) -> list[int]:
        tokenizer = await tokenizer_of(self._service.models.find(base))
        if asked.mode == "text":
            tokens: list[int] = list(tokenizer.encode(asked.prompt))
        else:
            system = [{"role": "system", "content": asked.system}] if asked.system else []
            messages = [*system, {"role": "user", "content": asked.prompt}]
            tokens = await self._site.off_loop(render_chat, tokenizer, messages)
        if not tokens:
            raise Refusal(422, "the prompt is empty")
        return tokens

    async def tokens(self, request: Request, visitor: Visitor) -> Response:
        """The prompt as the model reads it."""
        asked = await self._read(request)
        base = self._base(asked, visitor)
        tokens = await self._prompt(asked, base)
        table = await self._texts.table(base)
        return as_json({"ids": tokens, "pieces": pieces(tokens, table)})

    async def sample(self, request: Request, visitor: Visitor) -> Response:
        asked = await self._read(request)
        base = self._base(asked, visitor)
        prompt = await self._prompt(asked, base)
        params = SamplingParams(
            max_tokens=asked.max_tokens, temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k,
            seed=asked.seed,
        )  # fmt: skip
        path = asked.model if asked.model.startswith("tinker://") else None
        work = SampleRequest(
            ModelInput.from_ints(prompt), params, base_model=None if path else base, model_path=path,
            topk_sample_logprobs=TOP,
        )  # fmt: skip
        table = await self._texts.table(base)
        self._streams.check_room(visitor)  # before anything is drawn
        events = self._service.stream(work, visitor.caller)
        return self._streams.response(self._follow(events, table), request, visitor, used=events)

    async def _follow(self, events: SampleEvents, table: Any) -> AsyncGenerator[bytes]:
        texts = TokenPieces(table)
        async for one in events:
            if isinstance(one, NewTokens):
                drawn = {"ids": one.tokens, "pieces": texts.add(one.tokens), "logprobs": one.logprobs_np}
                yield server_sent("tokens", drawn)
            elif isinstance(one, PendingFuture):
                yield server_sent("waits", {"why": one.queue_state_reason or "it waits for its turn"})
            elif isinstance(one, SampleResponse):
                (sequence,) = one.sequences
                top = top_texts(sequence.topk_logprobs or [], table)
                yield server_sent("end", {"stop": sequence.stop_reason, "top": top})
            else:
                yield server_sent("failed", {"error": self._site.clean(one.error)})
