"""Load a decoder from a Hugging Face directory or a GGUF file, straight onto its device.

Weights are mapped, converted and copied into place one at a time, so the model is never in memory twice.
What cannot be loaded is refused with InvalidInputError. Reads of a tokenizer only how many ids it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.torch.backend import choose_backend
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.families import model_config, our_name
from tinkex.engine.torch.models.moe import per_expert
from tinkex.engine.torch.quantised_files import QuantisedFiles, check_scheme, quantisation
from tinkex.errors import InvalidInputError


def load_decoder(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """A Hugging Face directory or a GGUF file as a decoder, with the fastest backend there is for it.

    >>> decoder = load_decoder("models/Qwen3-0.6B", "cuda", torch.bfloat16)
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        from tinkex.engine.torch.gguf import GgufModel

        model = GgufModel(path)
        return fill(model.config(), model.tensors(), device, dtype, source=path)
    if not path.is_dir():
        found = "is not a .gguf file" if path.exists() else "does not exist"
        raise InvalidInputError(f"{path} {found}; a model is a Hugging Face directory or a .gguf file")
    return fill(read_config(path), read_tensors(path), device, dtype, source=path)


def fill(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    device: str | torch.device,
    dtype: torch.dtype,
    *,
    source: Path,
) -> Decoder:
    """A decoder of `config` with every weight copied from `tensors`; `source` is for messages."""
    decoder = empty_decoder(config, device, dtype)
    places, unexpected = decoder.weights(), []
    for stored, name, tensor in _ours(config, tensors):
        place = places.pop(name, None)
        if place is None:
            # Redundant are rotary tables of old files, and the copy of a tied embedding.
            known = name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")
            if not known and not stored.startswith(config.skipped):
                unexpected.append(name)
            continue
        if place.shape != tensor.shape:
            raise InvalidInputError(
                f"{source}: {name} has shape {list(tensor.shape)}, config.json asks for {list(place.shape)}"
            )
        place.copy_(tensor)
    if places or unexpected:
        raise InvalidInputError(
            f"{source}: the weights do not fit config.json ({config.arch}); "
            f"missing: {_some(list(places))}; unexpected: {_some(unexpected)}"
        )
    return decoder


def _ours(config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    """Each tensor with its stored name and our name; stacked experts one by one."""
    experts = config.experts
    stored_as = (experts.transposed, experts.interleaved) if experts else (False, False)
    for stored, tensor in tensors:
        for name, view in per_expert(our_name(stored), tensor, *stored_as):
            yield stored, name, view


def empty_decoder(config: ModelConfig, device: str | torch.device, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):  # shapes only, so that memory is taken once, in the right dtype and place
        decoder = Decoder(config, choose_backend(device, dtype, uniform=config.uniform))
    # What `to_empty` does, which goes by way of torch's symbolic shapes and imports half a second of sympy.
    return decoder.to(dtype)._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device)).eval()


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more


def read_config(directory: Path) -> ModelConfig:
    """config.json, with the end-of-sequence ids and the vocabulary that the files beside it give."""
    if not (directory / "config.json").is_file():
        raise InvalidInputError(
            f"{directory} has no config.json; a model is a Hugging Face directory or a .gguf file"
        )
    fields = _json(directory / "config.json")
    check_scheme(directory, fields)
    if (directory / "generation_config.json").is_file():
        given = _json(directory / "generation_config.json").get("eos_token_id")
        fields |= {} if given is None else {"eos_token_id": given}
    return model_config(fields, vocab_size=_tokenizer_size(directory))


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the directory's safetensors files; quantised ones are expanded to fp32."""
    files = QuantisedFiles(_weight_files(directory), quantisation(_json(directory / "config.json")))
    for name, tensor in files.tensors():
        yield name, tensor if isinstance(tensor, Tensor) else tensor.expand()


def _weight_files(directory: Path) -> list[Path]:
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        names = sorted(set(_json(index)["weight_map"].values()))
        if absent := [name for name in names if not (directory / name).is_file()]:
            raise InvalidInputError(
                f"{directory}: {index.name} names files that are not there: {_some(absent)}"
            )
        return [directory / name for name in names]
    if whole.is_file():
        return [whole]
    raise InvalidInputError(
        f"{directory} has no {whole.name} and no {index.name}; weights in other formats are not read"
    )


def _tokenizer_size(directory: Path) -> int | None:
    """The tokenizer's largest id plus one, added tokens included."""
    if not (directory / "tokenizer.json").is_file():
        return None
    tokenizer = _json(directory / "tokenizer.json")
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in tokenizer.get("added_tokens") or ()]
    return max(ids) + 1 if ids else None


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{file} is not valid JSON: {error}") from error
