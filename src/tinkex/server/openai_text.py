"""Tokens into text, piece by piece: what of it is certain, without what stopped it.

Promises: the pieces joined are the text, however the tokens were cut; half a character, or the beginning of
what may become a stop string, is held back until it is known. Knows a tokenizer's `decode`, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """One sequence's text.

    >>> text = TextStream(tokenizer, stop=["END"])              # doctest: +SKIP
    >>> text.add([72, 105]) + text.finish()                     # doctest: +SKIP
    'Hi'
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._context = 0  # from here tokens are decoded together with the new ones: some join with a space
        self._decoded = 0  # up to here tokens have become text
        self._text = ""
        self._said = 0
        self._stopped = False

    @property
    def text(self) -> str:
        """All that is certain so far."""
        return self._text[: self._said]

    def add(self, tokens: Iterable[int]) -> str:
        """The text that has become certain with these tokens."""
        self._tokens.extend(tokens)
        self._take()
        return self._say(self._held_back())

    def finish(self) -> str:
        """What is left, now that no more tokens come."""
        self._take(unfinished=True)
        return self._say(0)

    def _take(self, unfinished: bool = False) -> None:
        if self._stopped:
            return
        known = self._decode(self._tokens[self._context : self._decoded])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(known) or (text.endswith(_UNFINISHED) and not unfinished):
            return
        self._text += text[len(known) :]
        self._context, self._decoded = self._decoded, len(self._tokens)
        cut = min((at for stop in self._stop if (at := self._text.find(stop)) >= 0), default=len(self._text))
        self._stopped = cut < len(self._text)
        self._text = self._text[:cut]

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _held_back(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(self._text) - self._said), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0

    def _say(self, held_back: int) -> str:
        end = max(self._said, len(self._text) - held_back)
        piece, self._said = self._text[self._said : end], end
        return piece
