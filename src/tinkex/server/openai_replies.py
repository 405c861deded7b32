"""What an OpenAI client is answered: choices from sampled tokens, whole or in pieces.

A `Reply` gathers the samples; a `Shape` writes them as completions or as chat. Promises: the streamed pieces
joined are the whole answer, logprobs too; a stop string and special tokens are in neither. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex.server.openai_requests import Asked
from tinkex.server.openai_text import TextStream
from tinkex.types.outputs import NewTokens, SampledSequence, SampleResponse

Alternatives = list[tuple[int, float]]


@dataclass(frozen=True)
class TokenInfo:
    """One token, as logprobs show it."""

    token: int
    logprob: float | None
    alternatives: Alternatives


@dataclass(frozen=True)
class Piece:
    """Some more of a choice; the last one has its reason."""

    choice: int
    text: str
    tokens: list[TokenInfo] = field(default_factory=list[TokenInfo])
    reason: str | None = None
    offset: int = 0  # of `text`, in the choice's text


@dataclass
class _Choice:
    stream: TextStream
    pieces: list[Piece] = field(default_factory=list[Piece])
    length: int = 0  # of the text so far
    shown: int = 0  # tokens whose logprobs have been told


class Reply:
    """The choices of one request, as their samples come in. Choice `prompt * n + k` is a prompt's k-th."""

    def __init__(
        self, asked: Asked, tokenizer: Any, token_bytes: Sequence[bytes], eos_ids: Collection[int] = ()
    ) -> None:
        self.asked = asked
        self._eos_ids = eos_ids
        self.token_bytes = token_bytes
        self.choices = asked.choices * len(asked.prompts)
        self.prompt_tokens = sum(map(len, asked.prompts))
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._tokenizer = tokenizer
        self._choices = [_Choice(TextStream(tokenizer, asked.stop)) for _ in range(self.choices)]

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; nothing, if its id is one that only pads the vocabulary."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def pieces(self, choice: int) -> list[Piece]:
        return self._choices[choice].pieces

    def add(self, prompt: int, event: NewTokens) -> list[Piece]:
        """More tokens of one sequence. With logprobs, or an echo, everything waits for the end of it."""
        if self.asked.alternatives is not None or self.asked.echo:
            return []
        index = prompt * self.asked.choices + event.sequence
        text = self._choices[index].stream.add(self._spoken(event.tokens))
        return self._said(index, [Piece(index, text)] if text else [])

    def finish(self, prompt: int, response: SampleResponse) -> list[Piece]:
        """The whole response for one prompt: what was not said yet, and why each choice ended."""
        self.cached_tokens += response.prompt_cache_hit_tokens
        pieces: list[Piece] = []
        for k, sequence in enumerate(response.sequences):
            index = prompt * self.asked.choices + k
            pieces += self._said(index, self._ending(index, prompt, sequence, response))
        return pieces

    def _ending(
        self, index: int, prompt: int, sequence: SampledSequence, response: SampleResponse
    ) -> list[Piece]:
        asked, choice = self.asked, self._choices[index]
        pieces: list[Piece] = []
        if asked.echo:
            told = [] if asked.alternatives is None else _prompt_infos(asked.prompts[prompt], response)
            pieces.append(Piece(index, self._decode(asked.prompts[prompt]), told))
        if asked.score_only:
            return [*pieces, Piece(index, "", reason="length")]
        self.completion_tokens += len(sequence.tokens)
        if not choice.length:  # nothing was streamed
            choice.stream = TextStream(self._tokenizer, asked.stop)
            text = choice.stream.add(self._spoken(sequence.tokens)) + choice.stream.finish()
        else:
            text = choice.stream.finish()
        told = [] if asked.alternatives is None else _infos(sequence)[: self._visible(sequence)]
        return [*pieces, Piece(index, text, told, sequence.stop_reason)]

    def _spoken(self, tokens: Iterable[int]) -> list[int]:
        """Without the end-of-sequence token, which tokenizers leave out only if it is a special one."""
        return [token for token in tokens if token not in self._eos_ids]

    def _visible(self, sequence: SampledSequence) -> int:
        """How many tokens made the text: those of a stop string, or the end-of-sequence token, did not."""
        if sequence.stop_reason == "length":
            return len(sequence.tokens)
        raw = b""
        starts: list[int] = []
        for token in sequence.tokens:
            starts.append(len(raw))
            raw += self.bytes_of(token)
        found = [at for stop in self.asked.stop if (at := raw.find(stop.encode())) >= 0]
        return sum(start < min(found) for start in starts) if found else len(starts) - 1

    def _said(self, index: int, pieces: list[Piece]) -> list[Piece]:
        choice = self._choices[index]
        placed: list[Piece] = []
        for piece in pieces:
            placed.append(Piece(piece.choice, piece.text, piece.tokens, piece.reason, choice.length))
            choice.length += len(piece.text)
        choice.pieces += placed
        return placed

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _infos(sequence: SampledSequence) -> list[TokenInfo]:
    tops = sequence.topk_logprobs or [None] * len(sequence.tokens)
    logprobs = sequence.logprobs or [None] * len(sequence.tokens)
    return [TokenInfo(t, lp, top or []) for t, lp, top in zip(sequence.tokens, logprobs, tops, strict=True)]


def _prompt_infos(prompt: list[int], response: SampleResponse) -> list[TokenInfo]:
    tops = response.topk_prompt_logprobs or [None] * len(prompt)
    logprobs = response.prompt_logprobs or [None] * len(prompt)
    return [TokenInfo(t, lp, top or []) for t, lp, top in zip(prompt, logprobs, tops, strict=True)]


def usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(reply.cached_tokens, reply.prompt_tokens)},
    }


# -- shapes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How a kind of answer is written; `frame` is what its every part carries."""

    frame: dict[str, Any]
    object: str
    chunk_object: str
    choice: Callable[[list[Piece], Reply], dict[str, Any]]  # of all its pieces
    delta: Callable[[Piece, Reply], dict[str, Any]]  # of one
    opens: dict[str, Any] | None = None  # what a stream says of each choice before anything else

    def whole(self, reply: Reply) -> dict[str, Any]:
        choices = [
            {"index": i, "finish_reason": _reason(reply.pieces(i)), **self.choice(reply.pieces(i), reply)}
            for i in range(reply.choices)
        ]
        return {**self.frame, "object": self.object, "choices": choices, "usage": usage(reply)}

    def opening(self, choice: int) -> dict[str, Any] | None:
        if self.opens is None:
            return None
        return self._chunk([{"index": choice, "finish_reason": None, "logprobs": None, **self.opens}])

    def piece(self, piece: Piece, reply: Reply) -> dict[str, Any]:
        told = {"index": piece.choice, "finish_reason": piece.reason, **self.delta(piece, reply)}
        return self._chunk([told], reply.asked.stream_usage)

    def closing(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": counts}

    def _chunk(self, choices: list[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
        return {
            **self.frame,
            "object": self.chunk_object,
            "choices": choices,
            **({"usage": None} if with_usage else {}),
        }


def _reason(pieces: list[Piece]) -> str | None:
    return pieces[-1].reason if pieces else None


def completion_shape(frame: dict[str, Any]) -> Shape:
    def choice(pieces: list[Piece], reply: Reply) -> dict[str, Any]:
        return {"text": "".join(piece.text for piece in pieces), "logprobs": _old_logprobs(pieces, reply)}

    return Shape(
        frame, "text_completion", "text_completion", choice, lambda piece, reply: choice([piece], reply)
    )


def chat_shape(frame: dict[str, Any]) -> Shape:
    def choice(pieces: list[Piece], reply: Reply) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": _chat_logprobs(pieces, reply)}

    def delta(piece: Piece, reply: Reply) -> dict[str, Any]:
        said = {"content": piece.text} if piece.text else {}
        return {"delta": said, "logprobs": _chat_logprobs([piece], reply)}

    opens = {"delta": {"role": "assistant", "content": ""}}
    return Shape(frame, "chat.completion", "chat.completion.chunk", choice, delta, opens)


def _text(token: int, reply: Reply) -> str:
    return reply.bytes_of(token).decode(errors="replace")


def _old_logprobs(pieces: list[Piece], reply: Reply) -> dict[str, Any] | None:
    if reply.asked.alternatives is None:
        return None
    infos: list[TokenInfo] = []
    offsets: list[int] = []
    for piece in pieces:
        at = piece.offset
        for info in piece.tokens:
            infos.append(info)
            offsets.append(at)
            at += len(_text(info.token, reply))
    tops = [{_text(t, reply): lp for t, lp in info.alternatives} or None for info in infos]
    return {
        "tokens": [_text(info.token, reply) for info in infos],
        "token_logprobs": [info.logprob for info in infos],
        "top_logprobs": tops if reply.asked.alternatives else None,
        "text_offset": offsets,
    }


def _chat_logprobs(pieces: list[Piece], reply: Reply) -> dict[str, Any] | None:
    if reply.asked.alternatives is None:
        return None

    def shown(token: int, logprob: float | None) -> dict[str, Any]:
        raw = reply.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = [
        {
            **shown(info.token, info.logprob),
            "top_logprobs": [shown(token, logprob) for token, logprob in info.alternatives],
        }
        for piece in pieces
        for info in piece.tokens
    ]
    return {"content": content, "refusal": None}
