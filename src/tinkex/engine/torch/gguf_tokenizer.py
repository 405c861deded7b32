"""The tokenizer and chat template of a GGUF file, written as `tokenizer.json` and `tokenizer_config.json`.

Supports byte-level BPE ("gpt2" files) with the pre-tokenizers that `tokenizer.ggml.pre` names, and
SentencePiece-style BPE with scores ("llama" files). Others are refused by name: another pre-tokenizer than
the model was trained with would give wrong ids silently. Does not need the tokenizers library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.torch.gguf import GgufModel

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF's word, transformers' word

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# tokenizer.ggml.pre: the pre-tokenizer
_PRE = {
    "gpt-2": _byte_level(regex=True),
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, _byte_level(regex=True)),
    "llama-bpe": _sequence(_split(_WORDS % "{1,3}"), _byte_level(regex=False)),
    "qwen2": _sequence(_split(_WORDS % ""), _byte_level(regex=False)),
}


def write_tokenizer(model: GgufModel, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which transformers' AutoTokenizer loads."""
    kind = model.require("tokenizer.ggml.model")
    match kind:
        case "gpt2":
            tokenizer = _byte_bpe(model)
        case "llama":
            tokenizer = _sentencepiece(model)
        case _:
            raise InvalidInputError(
                f"{model.path}: tokenizer {kind!r} is not supported; allowed: gpt2, llama"
            )
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": _settings(model)}
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _settings(model: GgufModel) -> dict[str, Any]:
    tokens = model.require("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {
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


def _vocabulary(model: GgufModel) -> list[tuple[int, str, int]]:
    """(id, token, type) of every id that may be used."""
    tokens, types = model.require("tokenizer.ggml.tokens"), model.require("tokenizer.ggml.token_type")
    return [
        (i, token, kind) for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED
    ]


def _tokenizer(source: GgufModel, bos_by_default: bool, **parts: Any) -> dict[str, Any]:
    """The parts that both kinds share: added tokens, and the marks at the ends of a text."""
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER,
        }
        for i, token, kind in _vocabulary(source)
        if kind in (_CONTROL, _USER, _UNKNOWN)
    ]
    post = _post_processor(source, bos_by_default)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": post,
    } | parts


def _post_processor(model: GgufModel, bos_by_default: bool) -> dict[str, Any]:
    tokens, marks = model.require("tokenizer.ggml.tokens"), {}
    for name, default in (("bos", bos_by_default), ("eos", False)):
        token = model.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and model.get(f"tokenizer.ggml.add_{name}_token", default):
            marks[name] = (tokens[token], int(token))

    def template(*texts: str) -> list[dict[str, Any]]:
        steps = []
        for type_id, text in enumerate(texts):
            mark = {
                name: {"SpecialToken": {"id": token, "type_id": type_id}}
                for name, (token, _) in marks.items()
            }
            steps += [mark.get("bos"), {"Sequence": {"id": text, "type_id": type_id}}, mark.get("eos")]
        return [step for step in steps if step is not None]

    special = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in marks.values()}
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": special,
    }


def _bpe(**fields: Any) -> dict[str, Any]:
    blank = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    return (
        blank
        | {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        | fields
    )


def _byte_bpe(model: GgufModel) -> dict[str, Any]:
    pre = model.get("tokenizer.ggml.pre", "(none)")
    if pre not in _PRE:
        raise InvalidInputError(
            f"{model.path}: tokenizer.ggml.pre {pre!r} is not supported; allowed: {', '.join(_PRE)}"
        )
    llama3 = pre == "llama-bpe"
    return _tokenizer(
        model,
        bos_by_default=llama3,
        normalizer={"type": "NFC"} if pre == "qwen2" else None,
        pre_tokenizer=_PRE[pre],
        decoder=_byte_level(regex=True),
        model=_bpe(
            vocab={token: i for i, token, _ in _vocabulary(model)},
            merges=[merge.split(" ") for merge in model.require("tokenizer.ggml.merges")],
            ignore_merges=llama3,
        ),
    )


def _sentencepiece(model: GgufModel) -> dict[str, Any]:
    vocabulary, scores = _vocabulary(model), model.require("tokenizer.ggml.scores")
    prefix = bool(model.get("tokenizer.ggml.add_space_prefix", True))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    unspace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [unspace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = model.get("tokenizer.ggml.unknown_token_id")
    return _tokenizer(
        model,
        bos_by_default=True,
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, space] if prefix else [space],
        },
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model=_bpe(
            vocab={token: i for i, token, _ in vocabulary},
            merges=list(_merges(vocabulary, scores)),
            unk_token=None if unknown is None else model.require("tokenizer.ggml.tokens")[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    )


def _merges(vocabulary: list[tuple[int, str, int]], scores: list[float]) -> Iterator[list[str]]:
    """SentencePiece merges the pair with the best-scored result: all such pairs, best first."""
    pieces = {token: i for i, token, kind in vocabulary if kind not in (_CONTROL, _UNKNOWN, _BYTE)}
    pairs = [
        (-scores[i], pieces[token[:cut]], pieces[token[cut:]], token, cut)
        for token, i in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    for *_, token, cut in sorted(pairs):
        yield [token[:cut], token[cut:]]
