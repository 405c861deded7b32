"""OpenAI's response bodies, built from sampled tokens: a whole response, or chunks of a stream.

`CompletionReply` collects the samples; `ReplyFormat` writes them as completions or as chat. The chunks of a
stream join to the whole response, logprobs included. Stop strings and special tokens are in neither. This
module knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex.server.openai.detokenizer import Detokenizer
from tinkex.server.openai.requests import CompletionRequest
from tinkex.types.outputs import NewTokens, SampledSequence, SampleResponse

Alternatives = list[tuple[int, float]]


@dataclass(frozen=True)
class TokenLogprob:
    """One token in a logprobs object."""

    token: int
    logprob: float | None
    alternatives: Alternatives


@dataclass(frozen=True)
class ChoiceDelta:
    """More text of one choice; the last delta has the finish reason."""

    choice: int
    text: str
    tokens: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    reason: str | None = None
    offset: int = 0  # of `text`, in the choice's text


@dataclass
class _ChoiceState:
    detokenizer: Detokenizer
    deltas: list[ChoiceDelta] = field(default_factory=list[ChoiceDelta])
    length: int = 0  # of the text so far


class CompletionReply:
    """The choices of one request, as their samples come in. Choice `prompt * n + k` is a prompt's k-th."""

    def __init__(
        self,
        request: CompletionRequest,
        tokenizer: Any,
        token_bytes: Sequence[bytes],
        eos_ids: Collection[int] = (),
    ) -> None:
        self.request = request
        self._eos_ids = eos_ids
        self.token_bytes = token_bytes
        self.choices = request.choices * len(request.prompts)
        self.prompt_tokens = sum(map(len, request.prompts))
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._tokenizer = tokenizer
        self._choices = [_ChoiceState(Detokenizer(tokenizer, request.stop)) for _ in range(self.choices)]

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; none if its id only pads the vocabulary."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def deltas(self, choice: int) -> list[ChoiceDelta]:
        return self._choices[choice].deltas

    def add(self, prompt: int, event: NewTokens) -> list[ChoiceDelta]:
        """Add tokens of one sequence. With logprobs or an echo, all deltas come from `finish`."""
        if self.request.alternatives is not None or self.request.echo:
            return []
        index = prompt * self.request.choices + event.sequence
        text = self._choices[index].detokenizer.add(self._without_eos(event.tokens))
        return self._placed(index, [ChoiceDelta(index, text)] if text else [])

    def finish(self, prompt: int, response: SampleResponse) -> list[ChoiceDelta]:
        """Add the whole response for one prompt: the rest of its text, and the finish reasons."""
        self.cached_tokens += response.prompt_cache_hit_tokens
        deltas: list[ChoiceDelta] = []
        for k, sequence in enumerate(response.sequences):
            index = prompt * self.request.choices + k
            deltas += self._placed(index, self._ending(index, prompt, sequence, response))
        return deltas

    def _ending(
        self, index: int, prompt: int, sequence: SampledSequence, response: SampleResponse
    ) -> list[ChoiceDelta]:
        request, choice = self.request, self._choices[index]
        deltas: list[ChoiceDelta] = []
        if request.echo:
            tokens = request.prompts[prompt]
            logprobs = self._logprobs(tokens, response.prompt_logprobs, response.topk_prompt_logprobs)
            deltas.append(ChoiceDelta(index, self._decode(tokens), logprobs))
        if request.score_only:
            return [*deltas, ChoiceDelta(index, "", reason="length")]
        self.completion_tokens += len(sequence.tokens)
        if not choice.length:  # nothing was streamed
            choice.detokenizer = Detokenizer(self._tokenizer, request.stop)
            text = choice.detokenizer.add(self._without_eos(sequence.tokens)) + choice.detokenizer.finish()
        else:
            text = choice.detokenizer.finish()
        logprobs = self._logprobs(sequence.tokens, sequence.logprobs, sequence.topk_logprobs)
        return [*deltas, ChoiceDelta(index, text, logprobs[: self._visible(sequence)], sequence.stop_reason)]

    def _logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None] | None,
        alternatives: Sequence[Alternatives | None] | None,
    ) -> list[TokenLogprob]:
        if self.request.alternatives is None:
            return []
        nothing = [None] * len(tokens)
        rows = zip(tokens, logprobs or nothing, alternatives or nothing, strict=True)
        return [TokenLogprob(token, logprob, others or []) for token, logprob, others in rows]

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

    def _placed(self, index: int, deltas: list[ChoiceDelta]) -> list[ChoiceDelta]:
        choice = self._choices[index]
        placed: list[ChoiceDelta] = []
        for delta in deltas:
            placed.append(ChoiceDelta(delta.choice, delta.text, delta.tokens, delta.reason, choice.length))
            choice.length += len(delta.text)
        choice.deltas += placed
        return placed

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def usage(reply: CompletionReply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(reply.cached_tokens, reply.prompt_tokens)},
    }


# -- formats ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplyFormat:
    """How a kind of response is written; `frame` has the fields that the response and every chunk share."""

    frame: dict[str, Any]
    object: str
    chunk_object: str
    choice: Callable[[list[ChoiceDelta], CompletionReply], dict[str, Any]]  # a whole choice
    delta: Callable[[ChoiceDelta, CompletionReply], dict[str, Any]]  # a choice in a chunk
    first_delta: dict[str, Any] | None = None  # of each choice in a stream, before its text

    def whole(self, reply: CompletionReply) -> dict[str, Any]:
        choices = [
            {"index": i, "finish_reason": _reason(reply.deltas(i)), **self.choice(reply.deltas(i), reply)}
            for i in range(reply.choices)
        ]
        return {**self.frame, "object": self.object, "choices": choices, "usage": usage(reply)}

    def opening(self, choice: int) -> dict[str, Any] | None:
        if self.first_delta is None:
            return None
        return self._chunk([{"index": choice, "finish_reason": None, "logprobs": None, **self.first_delta}])

    def chunk(self, delta: ChoiceDelta, reply: CompletionReply) -> dict[str, Any]:
        choice = {"index": delta.choice, "finish_reason": delta.reason, **self.delta(delta, reply)}
        return self._chunk([choice], reply.request.stream_usage)

    def closing(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": counts}

    def _chunk(self, choices: list[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
        return {
            **self.frame,
            "object": self.chunk_object,
            "choices": choices,
            **({"usage": None} if with_usage else {}),
        }


def _reason(deltas: list[ChoiceDelta]) -> str | None:
    return deltas[-1].reason if deltas else None


def completion_format(frame: dict[str, Any]) -> ReplyFormat:
    def choice(deltas: list[ChoiceDelta], reply: CompletionReply) -> dict[str, Any]:
        return {
            "text": "".join(delta.text for delta in deltas),
            "logprobs": _completion_logprobs(deltas, reply),
        }

    return ReplyFormat(
        frame, "text_completion", "text_completion", choice, lambda delta, reply: choice([delta], reply)
    )


def chat_format(frame: dict[str, Any]) -> ReplyFormat:
    def choice(deltas: list[ChoiceDelta], reply: CompletionReply) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": _chat_logprobs(deltas, reply)}

    def delta(delta: ChoiceDelta, reply: CompletionReply) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return {"delta": content, "logprobs": _chat_logprobs([delta], reply)}

    first_delta = {"delta": {"role": "assistant", "content": ""}}
    return ReplyFormat(frame, "chat.completion", "chat.completion.chunk", choice, delta, first_delta)


def _text(token: int, reply: CompletionReply) -> str:
    return reply.bytes_of(token).decode(errors="replace")


def _completion_logprobs(deltas: list[ChoiceDelta], reply: CompletionReply) -> dict[str, Any] | None:
    if reply.request.alternatives is None:
        return None
    shown: list[TokenLogprob] = []
    offsets: list[int] = []
    for delta in deltas:
        at = delta.offset
        for each in delta.tokens:
            shown.append(each)
            offsets.append(at)
            at += len(_text(each.token, reply))
    tops = [{_text(t, reply): lp for t, lp in each.alternatives} or None for each in shown]
    return {
        "tokens": [_text(each.token, reply) for each in shown],
        "token_logprobs": [each.logprob for each in shown],
        "top_logprobs": tops if reply.request.alternatives else None,
        "text_offset": offsets,
    }


def _chat_logprobs(deltas: list[ChoiceDelta], reply: CompletionReply) -> dict[str, Any] | None:
    if reply.request.alternatives is None:
        return None

    def shown(token: int, logprob: float | None) -> dict[str, Any]:
        raw = reply.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = [
        {
            **shown(each.token, each.logprob),
            "top_logprobs": [shown(token, logprob) for token, logprob in each.alternatives],
        }
        for delta in deltas
        for each in delta.tokens
    ]
    return {"content": content, "refusal": None}
