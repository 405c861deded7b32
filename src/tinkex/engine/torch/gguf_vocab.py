"""A Hugging Face tokenizer as the metadata of a GGUF file; the other direction of `gguf_tokenizer`.

Byte-level BPE whose pre-tokenizer is one that llama.cpp knows by name, and SentencePiece-style BPE. The
pre-tokenizer is identified by its output on sample texts, not by its definition. Any other is refused: a
wrong one gives wrong ids silently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers import pre_tokenizers as pre

from tinkex.engine.request import user_error
from tinkex.engine.torch.gguf_tokenizer import _BYTE, _CONTROL, _PRE, _UNKNOWN, _UNUSED, _USER

_NORMAL = 1
# They tell the known pre-tokenizers apart.
_PROBES = (
    "Hello, world! It's 2024 and 1234567 items; don't  stop\n\n  now.\t\tTabs",
    "naïve café ÉCOLE MixedCase HTTPServer fooBar's I'LL we'Re x=1;//y\r\n a/b\n/c",
    "日本語 한국어 αβγ नमस्ते e\u0301a\u0308 👩‍👩‍👧 ½²",
    "   leading\n \n  x   trailing   ",
)


def vocabulary(directory: Path, size: int, model_type: str) -> dict[str, Any]:
    """Metadata `tokenizer.…` of a model with `size` rows of embeddings."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise user_error(f"{directory} has no tokenizer.json, which a GGUF file needs")
    saved = json.loads(file.read_text(encoding="utf-8"))
    settings = _json(directory / "tokenizer_config.json")
    tokenizer, model = Tokenizer.from_file(str(file)), saved["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise user_error(f"{file}: a tokenizer of kind {model.get('type')} is not written to GGUF; BPE is")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    byte_level = not model.get("byte_fallback")
    tokens, types = _tokens(saved, size, byte_level=byte_level)
    found: dict[str, Any] = {
        "model": "gpt2" if byte_level else "llama",
        "tokens": tokens,
        "token_type": types,
    }
    if byte_level:
        found |= {"pre": _pre_name(file, tokenizer, model, model_type), "merges": merges}
    else:
        found |= {"pre": "default", "scores": _scores(tokens, types, merges)}
        found["add_space_prefix"] = any(
            "prepend" in json.dumps(step).lower()
            for step in (saved.get("normalizer"), saved.get("pre_tokenizer"))
        )
    found |= _special(directory, tokenizer, settings)
    values = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    if template := chat_template(directory):
        values["tokenizer.chat_template"] = template
    return values


def _tokens(saved: dict[str, Any], size: int, *, byte_level: bool) -> tuple[list[str], list[int]]:
    tokens, types = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    for token, i in saved["model"]["vocab"].items():
        tokens[i], types[i] = token, _NORMAL
        if not byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[i] = _BYTE
    for added in saved.get("added_tokens") or ():
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added.get("special") else _USER
    unknown = saved["model"].get("unk_token")
    if unknown in saved["model"]["vocab"] and not byte_level:
        types[saved["model"]["vocab"][unknown]] = _UNKNOWN
    return tokens, types


def _pre_name(file: Path, tokenizer: Tokenizer, model: dict[str, Any], model_type: str) -> str:
    """The name by which llama.cpp knows the pre-tokenizer."""

    def words(splitter: Any) -> list[list[str]]:
        return [[word for word, _ in splitter.pre_tokenize_str(text)] for text in _PROBES]

    given = tokenizer.pre_tokenizer
    ours = [] if given is None else words(given)
    matching = [name for name, steps in _PRE.items() if ours == words(pre.Sequence(steps))]
    if not matching:
        raise user_error(
            f"{file}: its pre-tokenizer is none of those that are written to GGUF ({', '.join(_PRE)})"
        )
    if "llama-bpe" in matching and "glm4" in matching:
        return "glm4" if model_type.startswith("glm") and not model.get("ignore_merges") else "llama-bpe"
    return matching[0]


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """SentencePiece merges the pair with the best-scored result first: earlier merges score higher."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    alone = -float(len(merges) + 1)  # never the result of a merge
    return [
        0.0 if kind in (_CONTROL, _UNKNOWN, _BYTE) else -float(ranks[token]) if token in ranks else alone
        for token, kind in zip(tokens, types, strict=True)
    ]


def _special(directory: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for theirs, ours in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        given = settings.get(f"{theirs}_token")
        text = given.get("content") if isinstance(given, dict) else given
        if text is not None and (number := tokenizer.token_to_id(text)) is not None:
            found[f"{ours}_token_id"] = number
    ends = _ends(directory)
    if ends and "eos_token_id" not in found:
        found["eos_token_id"] = ends[0]
    if others := [end for end in ends if end != found.get("eos_token_id")]:
        found["eot_token_id"] = others[0]
    found["add_bos_token"] = adds_first(tokenizer, found.get("bos_token_id"))
    found["add_eos_token"] = False
    return found


def adds_first(tokenizer: Tokenizer, bos: int | None) -> bool:
    """Does the tokenizer begin every text with this token? llama.cpp and Ollama then do so too."""
    return bos is not None and tokenizer.encode("a").ids[:1] == [bos]


def _ends(directory: Path) -> list[int]:
    """The ids that end a text, as generation_config.json or config.json lists them."""
    for name in ("generation_config.json", "config.json"):
        fields = _json(directory / name)
        given = fields.get("eos_token_id", (fields.get("text_config") or {}).get("eos_token_id"))
        if given is not None:
            return list(given) if isinstance(given, list) else [given]
    return []


def chat_template(directory: Path) -> str:
    """The model's chat template; "" if it has none."""
    if (file := directory / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    given = _json(directory / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(given, list):
        given = next((one["template"] for one in given if one.get("name") == "default"), "")
    return given


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
