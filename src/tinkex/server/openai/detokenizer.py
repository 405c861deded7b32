"""Incremental detokenization: the text that is certain so far, cut before a stop string.

The pieces join to the same text however the tokens are split. Needs only the tokenizer's `decode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def decode(tokenizer: Any, tokens: Sequence[int], skip_special: bool = True) -> str:
    """The text of tokens, without special ones unless asked for."""
    return tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one sequence. Holds back an incomplete character and what may begin a stop string.

    Stop strings count from the end of the first `min_tokens` tokens on.

    >>> text = Detokenizer(tokenizer, stop=["END"])             # doctest: +SKIP
    >>> text.add([72, 105]) + text.finish()                     # doctest: +SKIP
    'Hi'
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), skip_special: bool = True, min_tokens: int = 0
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._stop, self._min_tokens = stop, min_tokens
        self.tokens: list[int] = []
        self._context = 0  # new tokens are decoded together with those from here: some join with a space
        self._decoded = 0  # tokens before this index are in the text
        self._text = ""
        self._stops_from = 0  # in the text
        self._emitted = 0
        self._stopped = False

    @property
    def text(self) -> str:
        """The text emitted so far."""
        return self._text[: self._emitted]

    def add(self, tokens: Iterable[int]) -> str:
        """The text that these tokens make certain."""
        tokens = list(tokens)
        early = max(0, self._min_tokens - 1 - len(self.tokens))
        for part in (tokens[:early], tokens[early:]) if early else (tokens,):
            self.tokens.extend(part)
            self._decode_new()
        return self._emit(self._held_back())

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        self._decode_new(unfinished=True)
        return self._emit(0)

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens, self._skip_special)

    def _decode_new(self, unfinished: bool = False) -> None:
        if self._stopped or self._decoded == len(self.tokens):
            return
        known = self._decode(self.tokens[self._context : self._decoded])
        text = self._decode(self.tokens[self._context :])
        if len(text) <= len(known) or (text.endswith(_UNFINISHED) and not unfinished):
            return
        self._text += text[len(known) :]
        self._context, self._decoded = self._decoded, len(self.tokens)
        if self._decoded < self._min_tokens:
            self._stops_from = len(self._text)
        found = [at for stop in self._stop if (at := self._text.find(stop, self._stops_from)) >= 0]
        cut = min(found, default=len(self._text))
        self._stopped = cut < len(self._text)
        self._text = self._text[:cut]

    def _held_back(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(self._text) - self._emitted), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0

    def _emit(self, held_back: int) -> str:
        end = max(self._emitted, len(self._text) - held_back)
        piece, self._emitted = self._text[self._emitted : end], end
        return piece
