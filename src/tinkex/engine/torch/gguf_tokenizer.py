"""The tokenizer and chat template of a GGUF file, written as `tokenizer.json` and `tokenizer_config.json`.

Supports byte-level BPE ("gpt2" files) with the pre-tokenizers that `tokenizer.ggml.pre` names, and
SentencePiece-style BPE with scores ("llama" files). Others are refused by name: another pre-tokenizer than
the model was trained with would give wrong ids silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.models import BPE

from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.torch.gguf import GgufModel

_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF's word, transformers' word
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED_WORDS = (_WORDS % "").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(pattern: str | None = None) -> list[Any]:
    bytes_ = pre.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    return [bytes_] if pattern is None else [pre.Split(Regex(pattern), "isolated"), bytes_]


# tokenizer.ggml.pre: the pre-tokenizer
_PRE = {
    "gpt-2": _byte_level(),
    "smollm": [pre.Digits(individual_digits=True), *_byte_level()],
    "llama-bpe": _byte_level(_WORDS % "{1,3}"),
    "qwen2": _byte_level(_WORDS % ""),
    "qwen35": _byte_level(_MARKED_WORDS),
    "gpt-4o": _byte_level(_CASED_WORDS),  # gpt-oss
    "glm4": _byte_level(_WORDS % "{1,3}"),
}


def write_tokenizer(model: GgufModel, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which transformers' AutoTokenizer loads."""
    kind = model.require("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise InvalidInputError(f"{model.path}: tokenizer {kind!r} is not supported; allowed: gpt2, llama")
    tokens, types = model.require("tokenizer.ggml.tokens"), model.require("tokenizer.ggml.token_type")
    used = [(i, token, kind) for i, (token, kind) in enumerate(zip(tokens, types, strict=True))]
    used = [entry for entry in used if entry[2] != _UNUSED]
    tokenizer = _byte_bpe(model, used) if kind == "gpt2" else _sentencepiece(model, used)
    added = [
        AddedToken(token, normalized=False, special=kind != _USER)
        for _, token, kind in used
        if kind in (_CONTROL, _USER, _UNKNOWN)
    ]
    tokenizer.add_tokens(added)
    bos_by_default = kind == "llama" or model.get("tokenizer.ggml.pre") == "llama-bpe"
    tokenizer.post_processor = _marks(model, tokens, bos_by_default)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = json.dumps(_settings(model, tokens), ensure_ascii=False, indent=1)
    (directory / "tokenizer_config.json").write_text(settings, encoding="utf-8")


def _settings(model: GgufModel, tokens: list[str]) -> dict[str, Any]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.require("{arch}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for theirs, ours in _SPECIAL.items():
        if (token := model.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            settings[f"{ours}_token"] = tokens[token]
    if (template := model.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    return settings


def _marks(model: GgufModel, tokens: list[str], bos_by_default: bool) -> processors.TemplateProcessing:
    """The tokens at the ends of a text."""
    marks = {}
    for name, default in (("bos", bos_by_default), ("eos", False)):
        token = model.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and model.get(f"tokenizer.ggml.add_{name}_token", default):
            marks[name] = (tokens[token], int(token))

    def around(text: str, type_id: int) -> list[str]:
        ends = {name: [f"{token}:{type_id}"] for name, (token, _) in marks.items()}
        return [*ends.get("bos", ()), f"{text}:{type_id}", *ends.get("eos", ())]

    single, pair = around("$A", 0), around("$A", 0) + around("$B", 1)
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(marks.values()))


def _byte_bpe(model: GgufModel, used: list[tuple[int, str, int]]) -> Tokenizer:
    name = model.get("tokenizer.ggml.pre", "(none)")
    if name not in _PRE:
        raise InvalidInputError(
            f"{model.path}: tokenizer.ggml.pre {name!r} is not supported; allowed: {', '.join(_PRE)}"
        )
    merges = [tuple(merge.split(" ")) for merge in model.require("tokenizer.ggml.merges")]
    vocab = {token: i for i, token, _ in used}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=name == "llama-bpe"))
    if name in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence(_PRE[name])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(model: GgufModel, used: list[tuple[int, str, int]]) -> Tokenizer:
    vocab, merges = {token: i for i, token, _ in used}, list(_merges(model, used))
    unknown = model.get("tokenizer.ggml.unknown_token_id")
    extra = {} if unknown is None else {"unk_token": model.require("tokenizer.ggml.tokens")[unknown]}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, **extra))
    prefix = bool(model.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


def _merges(model: GgufModel, used: list[tuple[int, str, int]]) -> Iterator[tuple[str, str]]:
    """SentencePiece merges the pair with the best-scored result: all such pairs, best first."""
    scores = model.require("tokenizer.ggml.scores")
    pieces = {token: i for i, token, kind in used if kind not in (_CONTROL, _UNKNOWN, _BYTE)}
    pairs = [
        (-scores[i], pieces[token[:cut]], pieces[token[cut:]], token, cut)
        for token, i in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    for *_, token, cut in sorted(pairs):
        yield token[:cut], token[cut:]
