"""What a service must know of text: which bytes each token stands for. Loads a tokenizer, lazily.

Tokenizers spell bytes in two ways: byte-level ones (GPT-2's alphabet) and SentencePiece's, with a marker for
a space and <0xNN> for raw bytes. Knows nothing of models or requests.
"""

from __future__ import annotations

import re
from pathlib import Path

_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's space


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable bytes stand for themselves, the others are moved up out of the way."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(moved)}


def token_bytes(directory: Path) -> list[bytes]:
    """The bytes of every token id, special tokens as they are written."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    byte_level = '"ByteLevel"' in tokenizer.to_str()
    alphabet = _byte_alphabet()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        if token in added:
            table[index] = token.encode()
        elif byte_level and all(char in alphabet for char in token):
            table[index] = bytes(alphabet[char] for char in token)
        elif raw := _RAW_BYTE.fullmatch(token):
            table[index] = bytes([int(raw[1], 16)])
        else:
            table[index] = token.replace(_SPACE, " ").encode()
    return table
