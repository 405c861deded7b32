"""Groups a reply into typed blocks (reasoning, text, tool call), each started, extended and closed once.

Used by /v1/responses and /v1/messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tinkex.server.openai.chat_formats import ParsedCall, ReplyPart


@dataclass
class ReplyBlock:
    """`text` is what was said so far; of a call, its arguments."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    call: ParsedCall | None = None
    text: str = ""


BlockEvent = tuple[Literal["begin", "more", "end"], ReplyBlock, str]


class ReplyBlocks:
    """Blocks, as parts come in."""

    def __init__(self, hidden: str | None = None) -> None:
        """`hidden`: the kind of block that stays empty."""
        self.all, self._hidden = list[ReplyBlock](), hidden
        self._open: ReplyBlock | None = None

    def add(self, parts: Iterable[ReplyPart]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for part in parts:
            if self._open is None or self._open.kind != part.kind or part.call is not None:
                events += self.end()
                self._open = ReplyBlock(len(self.all), part.kind, part.call)
                self.all.append(self._open)
                events.append(("begin", self._open, ""))
            text = part.text if part.call is None else part.call.arguments
            if part.kind != self._hidden:
                self._open.text += text
                events.append(("more", self._open, text))
        return events

    def end(self) -> list[BlockEvent]:
        """The open block ends, if there is one."""
        ended, self._open = self._open, None
        return [] if ended is None else [("end", ended, "")]
