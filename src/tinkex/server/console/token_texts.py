"""Shows token ids as text, by the tokenizers of a server's models; as numbers where there is none."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tinkex.engine.token_bytes import token_bytes
from tinkex.service.refusal import Refusal
from tinkex.service.service import Service


class TokenTexts(Protocol):
    """Finds the bytes of a base model's tokens."""

    async def table(self, base_model: str) -> Sequence[bytes] | None: ...


class ServedTokenTexts:
    """By the tokenizers of the models that a service serves."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def table(self, base_model: str) -> Sequence[bytes] | None:
        try:
            return await self._service.models.find(base_model).token_bytes()
        except (Refusal, OSError, ImportError):
            return None


class HomeTokenTexts:
    """By the models that were fetched into a home; none, if the base model is not among them."""

    def __init__(self, home: Path) -> None:
        self._models = home / "models"
        self._tables: dict[str, Sequence[bytes] | None] = {}

    async def table(self, base_model: str) -> Sequence[bytes] | None:
        if base_model not in self._tables:
            self._tables[base_model] = await asyncio.to_thread(self._read, base_model)
        return self._tables[base_model]

    def _read(self, base_model: str) -> Sequence[bytes] | None:
        for name in (base_model, base_model.replace("/", "--")):
            place = self._models / name  # a base model may be named by its path, too
            if (place / "tokenizer.json").is_file():
                try:
                    return token_bytes(place)
                except (OSError, ValueError, ImportError):
                    return None
        return None


class TokenPieces:
    """A text for each token of a sequence that goes on; where there is no table, its number."""

    def __init__(self, table: Sequence[bytes] | None) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Iterable[int]) -> list[str]:
        table = self._table or ()
        return [
            self._decoder.decode(table[token]) if token < len(table) else f"⟨{token}⟩" for token in tokens
        ]


def pieces(tokens: Iterable[int], table: Sequence[bytes] | None) -> list[str]:
    """A text for each token. A character that is split over several belongs to the last of them.

    >>> pieces([0, 1, 2], [b"a", "é".encode()[:1], "é".encode()[1:]])
    ['a', '', 'é']
    """
    return TokenPieces(table).add(tokens)


def text_of(tokens: Sequence[int], table: Sequence[bytes] | None) -> str:
    """All tokens as one text."""
    if table is None or max(tokens, default=0) >= len(table):
        return "".join(pieces(tokens, table))
    return b"".join(map(table.__getitem__, tokens)).decode(errors="replace")


def top_texts(
    rows: Sequence[Sequence[tuple[int, float]] | None], table: Sequence[bytes] | None
) -> list[list[tuple[str, float]]]:
    """The likely tokens of each position as texts, with their logprobs."""
    return [[(pieces([token], table)[0], logprob) for token, logprob in row or ()] for row in rows]
