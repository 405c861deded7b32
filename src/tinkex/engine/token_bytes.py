"""The bytes that each token id stands for: what stop strings are matched against.

Tokenizers spell bytes in two ways: byte-level BPE with GPT-2's alphabet, and SentencePiece with a marker for
a space and <0xNN> for raw bytes. Imports `tokenizers` on first use.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from tinkex.engine.protocol import EngineConfig, EngineError, SampleWork

_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


class TokenTable:
    """One engine's table of token bytes, built in a worker thread when first needed."""

    def __init__(self, config: EngineConfig) -> None:
        self._directory, self._model = config.tokenizer, config.name or config.model
        self._lock = threading.Lock()
        self._table: list[bytes] | None = None

    async def of(self, work: SampleWork) -> Sequence[bytes]:
        """Indexed by token id; () if `work` needs none. Raises EngineError if there is no tokenizer."""
        if not work.stop_bytes:
            return ()
        return self._table if self._table is not None else await asyncio.to_thread(self.whole)

    def whole(self) -> list[bytes]:
        """The table, built if it was not yet: seconds, for a large vocabulary."""
        if self._directory is None or not Path(self._directory, "tokenizer.json").is_file():
            message = (
                f"{self._model} has no tokenizer here, so it cannot stop at strings or follow a grammar; "
                "stop at ids"
            )
            raise EngineError(message, "user")
        with self._lock:
            if self._table is None:
                self._table = token_bytes(Path(self._directory))
        return self._table


def token_bytes(directory: Path) -> list[bytes]:
    """The bytes of every token id, special tokens as they are written."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    byte_level = '"ByteLevel"' in tokenizer.to_str()
    alphabet = _gpt2_alphabet()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        if token in added:
            table[index] = token.encode()
        elif byte_level and all(char in alphabet for char in token):
            table[index] = bytes(alphabet[char] for char in token)
        elif raw := _RAW_BYTE.fullmatch(token):
            table[index] = bytes([int(raw[1], 16)])
        else:
            table[index] = token.replace(_SENTENCEPIECE_SPACE, " ").encode()
    return table


def _gpt2_alphabet() -> dict[str, int]:
    """Printable bytes stand for themselves; the others are shifted to characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(moved)}
