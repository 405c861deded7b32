"""OpenAI's response bodies, built from sampled tokens: a whole response, or chunks of a stream.

`CompletionReply` collects the samples; `OpenAIWriter` writes them as completions or as chat. The chunks of a
stream join to the whole response, logprobs included. Stop strings and special tokens are in neither.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinkex.server.openai.chat_formats import AnyParser, ReplyPart
from tinkex.server.openai.detokenizer import Detokenizer, decode
from tinkex.server.openai.requests import AnyRequest, ChatRequest, Prepared
from tinkex.server.stream_sample import server_sent
from tinkex.types.outputs import NewTokens, SampledSequence, SampleResponse

# A token, its logprob, and the most likely tokens in its place with theirs.
TokenLogprob = tuple[int, float | None, list[tuple[int, float]]]
Json = dict[str, Any]


@dataclass(frozen=True)
class ChoiceDelta:
    """More of one choice; the last delta has the finish reason."""

    choice: int
    offset: int  # of its text, in the choice's text
    parts: Sequence[ReplyPart]
    ids: Sequence[int] = ()
    tokens: Sequence[TokenLogprob] = ()
    reason: str | None = None
    stopped_at: str | None = None  # the stop string, with a reason

    def text(self, kind: str = "text") -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)


@dataclass
class _Choice:
    index: int
    detokenizer: Detokenizer
    parser: AnyParser | None
    length: int = 0  # of the text so far
    ids: int = 0  # tokens given so far
    drawn: int = 0  # tokens sampled so far
    calls: int = 0
    deltas: list[ChoiceDelta] = field(default_factory=list[ChoiceDelta])

    def add(
        self,
        text: str,
        ids: Sequence[int] = (),
        tokens: Sequence[TokenLogprob] = (),
        reason: str | None = None,
        stopped_at: str | None = None,
    ) -> ChoiceDelta:
        parts = [ReplyPart("text", text)] if text else []
        if self.parser is not None:
            parts = self.parser.add(text) + (self.parser.finish() if reason else [])
        self.calls += sum(part.kind == "call" for part in parts)
        if reason == "stop" and self.calls:
            reason = "tool_calls"
        delta = ChoiceDelta(self.index, self.length, parts, ids, tokens, reason, stopped_at)
        self.deltas.append(delta)
        self.length += len(text)
        self.ids += len(ids)
        return delta


@dataclass
class CompletionReply:
    """The choices of one request, as their samples come in. Choice `prompt * n + k` is a prompt's k-th."""

    request: AnyRequest
    prepared: Prepared
    _tokenizer: Any
    _token_bytes: Sequence[bytes]
    _eos_ids: Collection[int]

    def __post_init__(self) -> None:
        request, prepared = self.request, self.prepared
        skip = request.skip_special_tokens and not prepared.kept
        self._dropped = set(self._eos_ids)  # tokens that are in no text
        if not request.include_stop_str_in_output:
            self._dropped.update(request.stop_token_ids)
        if request.skip_special_tokens and prepared.kept:
            self._dropped.update(set(self._tokenizer.all_special_ids) - prepared.kept)

        def detokenizer() -> Detokenizer:
            return Detokenizer(self._tokenizer, request.hidden_stops, skip, request.min_tokens)

        new_parser = prepared.new_parser
        self.choices = [
            _Choice(i, detokenizer(), new_parser() if new_parser else None)
            for i in range(request.n * len(prepared.prompts))
        ]
        self.prompt_scores: dict[int, list[Json | None]] = {}  # by prompt
        self._cached_tokens = 0

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; none if its id only pads the vocabulary."""
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    def add(self, prompt: int, event: NewTokens) -> list[ChoiceDelta]:
        """Add tokens of one sequence. With logprobs or an echo, all deltas come from `finish`."""
        if self.request.alternatives is not None or self.request.echo:
            return []
        choice = self.choices[prompt * self.request.n + event.sequence]
        choice.drawn += len(event.tokens)
        ids = list(event.tokens) if self.request.return_token_ids else []
        text = choice.detokenizer.add(self._visible_tokens(event.tokens))
        delta = choice.add(text, ids)
        return [delta] if delta.parts or ids else []

    def finish(self, prompt: int, response: SampleResponse) -> list[ChoiceDelta]:
        """Add the whole response for one prompt: the rest of its text, and the finish reasons."""
        self._cached_tokens += response.prompt_cache_hit_tokens
        tokens = self.prepared.prompts[prompt]
        if self.request.prompt_logprobs is not None:
            self.prompt_scores[prompt] = self._scores(tokens, response)
        deltas: list[ChoiceDelta] = []
        for k, sequence in enumerate(response.sequences):
            choice = self.choices[prompt * self.request.n + k]
            if self.request.echo:
                logprobs = self._logprobs(tokens, response.prompt_logprobs, response.topk_prompt_logprobs)
                deltas.append(choice.add(decode(self._tokenizer, tokens), (), logprobs))
            deltas.append(self._end(choice, sequence))
        return deltas

    def _end(self, choice: _Choice, sequence: SampledSequence) -> ChoiceDelta:
        if not isinstance(self.request, ChatRequest) and self.request.max_tokens == 0:
            return choice.add("", reason="length")
        choice.drawn = len(sequence.tokens)
        detokenizer = choice.detokenizer
        rest = self._visible_tokens(sequence.tokens)[len(detokenizer.tokens) :]  # all, if none was streamed
        text = detokenizer.add(rest) + detokenizer.finish()
        logprobs = self._logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs)
        stop = sequence.stop_match if isinstance(sequence.stop_match, str) else None
        ids = sequence.tokens[choice.ids :] if self.request.return_token_ids else []
        return choice.add(text, ids, logprobs[: self._visible(sequence)], sequence.stop_reason, stop)

    def _logprobs(
        self, tokens: list[int], logprobs: Sequence[Any] | None, alternatives: Sequence[Any] | None
    ) -> list[TokenLogprob]:
        if self.request.alternatives is None:
            return []
        nothing = [None] * len(tokens)
        rows = zip(tokens, logprobs or nothing, alternatives or nothing, strict=True)
        return [(token, logprob, others or []) for token, logprob, others in rows]

    def _scores(self, tokens: list[int], response: SampleResponse) -> list[Json | None]:
        """vLLM's prompt_logprobs: for each token but the first, its logprob and likely ones', by id."""
        shown: list[Json | None] = []
        own, others = response.prompt_logprobs or [], response.topk_prompt_logprobs or [None] * len(tokens)
        for token, logprob, top in zip(tokens, own, others, strict=True):
            ranked = {t: (lp, rank) for rank, (t, lp) in enumerate(top or (), 1)}
            ranked.setdefault(token, (logprob, None))  # type: ignore[arg-type]
            scores = {
                str(t): {"logprob": lp, "rank": rank, "decoded_token": decode(self._tokenizer, [t], False)}
                for t, (lp, rank) in ranked.items()
            }
            shown.append(scores if logprob is not None else None)
        return shown

    def _visible_tokens(self, tokens: Iterable[int]) -> list[int]:
        """Without the end-of-sequence token, which tokenizers skip only if it is marked as special."""
        return [token for token in tokens if token not in self._dropped]

    def _visible(self, sequence: SampledSequence) -> int:
        """The number of tokens in the text, without those of a stop string and the end-of-sequence token."""
        if sequence.stop_reason == "length" or self.request.include_stop_str_in_output:
            return len(sequence.tokens)
        raw = b""
        starts: list[int] = []
        for token in sequence.tokens:
            starts.append(len(raw))
            raw += self.bytes_of(token)
        early = starts[min(self.request.min_tokens, len(starts)) - 1] if self.request.min_tokens else 0
        found = [at for stop in self.request.stop if (at := raw.find(stop.encode(), early)) >= 0]
        return sum(start < min(found) for start in starts) if found else len(starts) - 1

    def usage(self) -> Json:
        prompt_tokens = sum(map(len, self.prepared.prompts))
        drawn = sum(choice.drawn for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": prompt_tokens + drawn,
            "prompt_tokens_details": {"cached_tokens": min(self._cached_tokens, prompt_tokens)},
        }

    def shown(self, tokens: Iterable[TokenLogprob]) -> list[Json]:
        """Logprobs as chats and responses show them."""

        def one(token: int, logprob: float | None) -> Json:
            raw = self.bytes_of(token)
            return {"token": _spelled(raw), "logprob": logprob, "bytes": list(raw)}

        return [{**one(t, lp), "top_logprobs": [one(*other) for other in others]} for t, lp, others in tokens]


class ReplyWriter(Protocol):
    """Writes a reply in some API's shape: whole, or as the events of a stream."""

    def whole(self) -> Json: ...

    def begin(self) -> list[bytes]: ...

    def more(self, delta: ChoiceDelta) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...

    def failed(self, status: int, message: str) -> bytes: ...


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}

_NAMED = re.compile(r"request\.(\w+)|the request has no '(\w+)'")  # messages that begin with a field's name


def error_fields(status: int, message: str) -> Json:
    """An error as OpenAI's client reads it."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "context_length_exceeded" if message.startswith("Prompt length plus") else _CODES.get(status)
    named = _NAMED.match(message) if kind == "invalid_request_error" else None
    return {"message": message, "type": kind, "param": named and (named[1] or named[2]), "code": code}


class OpenAIWriter:
    """Writes a reply as completions or as chat."""

    def __init__(self, reply: CompletionReply) -> None:
        self._reply = reply
        self._is_chat = isinstance(reply.request, ChatRequest)
        self._object = "chat.completion" if self._is_chat else "text_completion"
        self._frame = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": reply.request.model,
        }
        self._calls: dict[int, int] = {}  # of each choice, streamed so far

    def whole(self) -> Json:
        reply = self._reply
        choices = [self._choice(choice.deltas, whole=True) for choice in reply.choices]
        more: Json = {}
        if self._is_chat and reply.request.return_token_ids:
            more["prompt_token_ids"] = reply.prepared.prompts[0]
        if self._is_chat and reply.request.prompt_logprobs is not None:
            more["prompt_logprobs"] = reply.prompt_scores[0]
        return {**self._frame, "object": self._object, "choices": choices, "usage": reply.usage(), **more}

    def begin(self) -> list[bytes]:
        """The first chunk of each choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        fields = {"finish_reason": None, "logprobs": None, "delta": delta}
        choices = self._reply.choices if self._is_chat else []
        more: Json = {}
        if self._reply.request.return_token_ids:
            more["prompt_token_ids"] = self._reply.prepared.prompts[0]
        chunks = [self._chunk([{"index": choice.index, **fields}], **more) for choice in choices]
        return [server_sent("", chunk) for chunk in chunks]

    def more(self, delta: ChoiceDelta) -> list[bytes]:
        request = self._reply.request
        options, more = request.stream_options, dict[str, Any]()
        if options.include_usage or options.continuous_usage_stats:
            more["usage"] = self._reply.usage() if options.continuous_usage_stats else None
        if self._is_chat and delta.reason and request.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._reply.prompt_scores[0]
        return [server_sent("", self._chunk([self._choice([delta], whole=False)], **more))]

    def end(self) -> list[bytes]:
        closing = [server_sent("", self._chunk([], usage=self._reply.usage()))]
        return [*(closing if self._reply.request.stream_options.include_usage else []), b"data: [DONE]\n\n"]

    def failed(self, status: int, message: str) -> bytes:
        return server_sent("", {"error": error_fields(status, message)})

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        kind = f"{self._object}.chunk" if self._is_chat else self._object
        return {**self._frame, "object": kind, "choices": choices, **more}

    def _choice(self, deltas: list[ChoiceDelta], *, whole: bool) -> Json:
        text = "".join(delta.text() for delta in deltas)
        index, request = deltas[0].choice, self._reply.request
        fields: Json = {"index": index, "finish_reason": deltas[-1].reason}
        if request.return_token_ids:
            fields["token_ids"] = [token for delta in deltas for token in delta.ids]
        if not self._is_chat:
            prompt = index // request.n
            if request.return_token_ids and (whole or deltas[-1].reason):
                fields["prompt_token_ids"] = self._reply.prepared.prompts[prompt]
            if request.prompt_logprobs is not None and (whole or deltas[-1].reason):
                fields["prompt_logprobs"] = self._reply.prompt_scores[prompt]
            return {**fields, "text": text, "logprobs": self._completion_logprobs(deltas)}
        thought = "".join(delta.text("reasoning") for delta in deltas)
        calls = self._tool_calls(index, deltas, whole=whole)
        if whole:
            said: Json = {
                "role": "assistant",
                "content": text if text or not calls else None,
                "refusal": None,
            }
            fields["message"] = said
        else:
            said = fields["delta"] = {"content": text} if text else {}
        if thought:
            said["reasoning_content"] = thought
        if calls:
            said["tool_calls"] = calls
        return {**fields, "logprobs": self._chat_logprobs(deltas)}

    def _tool_calls(self, index: int, deltas: Sequence[ChoiceDelta], *, whole: bool) -> list[Json]:
        shown: list[Json] = []
        for call in (part.call for delta in deltas for part in delta.parts if part.call is not None):
            function = {"name": call.name, "arguments": call.arguments}
            shown.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        if not whole:
            first = self._calls.get(index, 0)
            self._calls[index] = first + len(shown)
            shown = [{"index": first + i, **call} for i, call in enumerate(shown)]
        return shown

    def _completion_logprobs(self, deltas: list[ChoiceDelta]) -> Json | None:
        if (wanted := self._reply.request.alternatives) is None:
            return None
        shown = [each for delta in deltas for each in delta.tokens]
        offsets: list[int] = []
        for delta in deltas:
            at = delta.offset
            for token, _, _ in delta.tokens:
                offsets.append(at)
                at += len(self._reply.bytes_of(token).decode(errors="replace"))
        tops = [{self._text(token): logprob for token, logprob in others} or None for *_, others in shown]
        return {
            "tokens": [self._text(token) for token, _, _ in shown],
            "token_logprobs": [logprob for _, logprob, _ in shown],
            "top_logprobs": tops if wanted else None,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, deltas: list[ChoiceDelta]) -> Json | None:
        if self._reply.request.alternatives is None:
            return None
        tokens = [one for delta in deltas for one in delta.tokens]
        return {"content": self._reply.shown(tokens), "refusal": None}

    def _text(self, token: int) -> str:
        return _spelled(self._reply.bytes_of(token), "bytes:")


def _spelled(raw: bytes, mark: str = "") -> str:
    """A token as OpenAI shows it: part of a character as escaped bytes, so that no two tokens look alike."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)
