"""OpenAI's response bodies, built from sampled tokens: a whole response, or chunks of a stream.

`CompletionReply` collects the samples; `ReplyWriter` writes them as completions or as chat. The chunks of a
stream join to the whole response, logprobs included. Stop strings and special tokens are in neither.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex.server.openai.detokenizer import Detokenizer, decode
from tinkex.server.openai.requests import AnyRequest, ChatRequest
from tinkex.types.outputs import NewTokens, SampledSequence, SampleResponse

# A token, its logprob, and the most likely tokens in its place with theirs.
TokenLogprob = tuple[int, float | None, list[tuple[int, float]]]
Json = dict[str, Any]


@dataclass(frozen=True)
class ChoiceDelta:
    """More text of one choice; the last delta has the finish reason."""

    choice: int
    offset: int  # of `text`, in the choice's text
    text: str
    tokens: Sequence[TokenLogprob] = ()
    reason: str | None = None


@dataclass
class _Choice:
    index: int
    detokenizer: Detokenizer
    length: int = 0  # of the text so far
    deltas: list[ChoiceDelta] = field(default_factory=list[ChoiceDelta])

    def add(self, text: str, tokens: Sequence[TokenLogprob] = (), reason: str | None = None) -> ChoiceDelta:
        self.deltas.append(ChoiceDelta(self.index, self.length, text, tokens, reason))
        self.length += len(text)
        return self.deltas[-1]


@dataclass
class CompletionReply:
    """The choices of one request, as their samples come in. Choice `prompt * n + k` is a prompt's k-th."""

    request: AnyRequest
    _prompts: list[list[int]]
    _tokenizer: Any
    _token_bytes: Sequence[bytes]
    _eos_ids: Collection[int]

    def __post_init__(self) -> None:
        count = self.request.n * len(self._prompts)
        self.choices = [_Choice(i, Detokenizer(self._tokenizer, self.request.stop)) for i in range(count)]
        self._completion_tokens = self._cached_tokens = 0

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; none if its id only pads the vocabulary."""
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    def add(self, prompt: int, event: NewTokens) -> list[ChoiceDelta]:
        """Add tokens of one sequence. With logprobs or an echo, all deltas come from `finish`."""
        if self.request.alternatives is not None or self.request.echo:
            return []
        choice = self.choices[prompt * self.request.n + event.sequence]
        text = choice.detokenizer.add(self._without_eos(event.tokens))
        return [choice.add(text)] if text else []

    def finish(self, prompt: int, response: SampleResponse) -> list[ChoiceDelta]:
        """Add the whole response for one prompt: the rest of its text, and the finish reasons."""
        self._cached_tokens += response.prompt_cache_hit_tokens
        deltas: list[ChoiceDelta] = []
        for k, sequence in enumerate(response.sequences):
            choice = self.choices[prompt * self.request.n + k]
            if self.request.echo:
                tokens = self._prompts[prompt]
                logprobs = self._logprobs(tokens, response.prompt_logprobs, response.topk_prompt_logprobs)
                deltas.append(choice.add(decode(self._tokenizer, tokens), logprobs))
            deltas.append(self._end(choice, sequence))
        return deltas

    def _end(self, choice: _Choice, sequence: SampledSequence) -> ChoiceDelta:
        if self.request.max_tokens == 0:
            return choice.add("", reason="length")
        self._completion_tokens += len(sequence.tokens)
        detokenizer = choice.detokenizer
        rest = self._without_eos(sequence.tokens)[len(detokenizer.tokens) :]  # all, if nothing was streamed
        text = detokenizer.add(rest) + detokenizer.finish()
        logprobs = self._logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs)
        return choice.add(text, logprobs[: self._visible(sequence)], sequence.stop_reason)

    def _logprobs(
        self, tokens: list[int], logprobs: Sequence[Any] | None, alternatives: Sequence[Any] | None
    ) -> list[TokenLogprob]:
        if self.request.alternatives is None:
            return []
        nothing = [None] * len(tokens)
        rows = zip(tokens, logprobs or nothing, alternatives or nothing, strict=True)
        return [(token, logprob, others or []) for token, logprob, others in rows]

    def _without_eos(self, tokens: Iterable[int]) -> list[int]:
        """Tokenizers skip the end-of-sequence token only if it is marked as special."""
        return [token for token in tokens if token not in self._eos_ids]

    def _visible(self, sequence: SampledSequence) -> int:
        """How many tokens are in the text: not those of a stop string, nor the end-of-sequence token."""
        if sequence.stop_reason == "length":
            return len(sequence.tokens)
        raw = b""
        starts: list[int] = []
        for token in sequence.tokens:
            starts.append(len(raw))
            raw += self.bytes_of(token)
        found = [at for stop in self.request.stop if (at := raw.find(stop.encode())) >= 0]
        return sum(start < min(found) for start in starts) if found else len(starts) - 1

    def usage(self) -> Json:
        prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self._cached_tokens, prompt_tokens)},
        }


class ReplyWriter:
    """Writes a reply as completions or as chat: whole, or as the chunks of a stream."""

    def __init__(self, reply: CompletionReply) -> None:
        self._reply = reply
        self._is_chat = isinstance(reply.request, ChatRequest)
        self._object = "chat.completion" if self._is_chat else "text_completion"
        self._frame = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": reply.request.model,
        }

    def whole(self) -> Json:
        choices = [self._choice(choice.deltas, whole=True) for choice in self._reply.choices]
        return {**self._frame, "object": self._object, "choices": choices, "usage": self._reply.usage()}

    def openings(self) -> list[Json]:
        """The first chunk of each choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        fields = {"finish_reason": None, "logprobs": None, "delta": delta}
        choices = self._reply.choices if self._is_chat else []
        return [self._chunk([{"index": choice.index, **fields}]) for choice in choices]

    def chunk(self, delta: ChoiceDelta) -> Json:
        usage = {"usage": None} if self._reply.request.stream_options.include_usage else {}
        return self._chunk([self._choice([delta], whole=False)], **usage)

    def closing(self) -> Json:
        return self._chunk([], usage=self._reply.usage())

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        kind = f"{self._object}.chunk" if self._is_chat else self._object
        return {**self._frame, "object": kind, "choices": choices, **more}

    def _choice(self, deltas: list[ChoiceDelta], *, whole: bool) -> Json:
        text = "".join(delta.text for delta in deltas)
        fields: Json = {"index": deltas[0].choice, "finish_reason": deltas[-1].reason}
        if not self._is_chat:
            return {**fields, "text": text, "logprobs": self._completion_logprobs(deltas)}
        if whole:
            fields["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            fields["delta"] = {"content": text} if text else {}
        return {**fields, "logprobs": self._chat_logprobs(deltas)}

    def _completion_logprobs(self, deltas: list[ChoiceDelta]) -> Json | None:
        if (wanted := self._reply.request.alternatives) is None:
            return None
        shown = [each for delta in deltas for each in delta.tokens]
        offsets: list[int] = []
        for delta in deltas:
            at = delta.offset
            for token, _, _ in delta.tokens:
                offsets.append(at)
                at += len(self._text(token))
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

        def shown(token: int, logprob: float | None) -> Json:
            raw = self._reply.bytes_of(token)
            return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

        content = [
            {**shown(token, logprob), "top_logprobs": [shown(*other) for other in others]}
            for delta in deltas
            for token, logprob, others in delta.tokens
        ]
        return {"content": content, "refusal": None}

    def _text(self, token: int) -> str:
        return self._reply.bytes_of(token).decode(errors="replace")
