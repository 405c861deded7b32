"""Load a decoder from a Hugging Face directory or a GGUF file, straight onto its device.

Weights are mapped, converted and copied into place one at a time, so the model is never in memory twice.
Models of other families go to `models.transformers_model`. A model that cannot be loaded is refused with
InvalidInputError. Of a tokenizer, only the number of ids is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinkex.engine.torch.backend import Backend, choose_backend
from tinkex.engine.torch.huge_pages import HugeArena
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.delta_net import by_part
from tinkex.engine.torch.models.families import FAMILIES, model_config, our_name
from tinkex.engine.torch.models.moe import per_expert
from tinkex.engine.torch.quantised import SCHEMES, QuantisedWeight
from tinkex.engine.torch.quantised_files import QuantisedFiles, check_scheme, quantisation
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.torch.tensor_parallel.sharding import LoadedPart


def wanted_dtype(asked: str, device: torch.device) -> torch.dtype:
    """What `EngineConfig.dtype` means on a device."""
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, asked)


def load_decoder(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    quantize: str = "none",
    part: LoadedPart | None = None,
) -> Decoder:
    """A Hugging Face directory or a GGUF file as a decoder, with the fastest backend there is for it.

    `quantize` is how the matrices of its layers are kept: "none" (in `dtype`), "nf4", "fp8", "int8", or
    "file" (as the files hold them). With `part` it is one rank's, and never more than a tensor of the whole
    model is in memory.

    >>> decoder = load_decoder("models/Qwen3-0.6B", "cuda", torch.bfloat16)
    """
    path = Path(path)
    if quantize not in (allowed := ("none", *SCHEMES, "file")):
        raise InvalidInputError(f"quantize is {quantize!r}; allowed: {', '.join(allowed)}")
    if path.is_file() and path.suffix == ".gguf":
        from tinkex.engine.torch.gguf import GgufModel

        model = GgufModel(path)
        return fill(model.config(), model.tensors(), device, dtype, source=path, quantize=quantize, part=part)
    if not path.is_dir():
        found = "is not a .gguf file" if path.exists() else "does not exist"
        raise InvalidInputError(f"{path} {found}; a model is a Hugging Face directory or a .gguf file")
    if (fields := read_fields(path)).get("model_type") not in FAMILIES:
        from tinkex.engine.torch.models.transformers_model import load_transformers

        if part is not None:
            raise InvalidInputError(
                f"{fields.get('model_type')} is computed by transformers, on one GPU; leave out tensor="
            )
        backend = choose_backend(device, dtype, kernels=False)
        return load_transformers(path, fields, tokenizer_size(path), device, dtype, quantize, backend)
    tensors = read_tensors(path, dequantise=quantize != "file")
    return fill(read_config(path), tensors, device, dtype, source=path, quantize=quantize, part=part)


def fill(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor | QuantisedWeight]],
    device: str | torch.device,
    dtype: torch.dtype,
    *,
    source: Path,
    quantize: str = "none",
    part: LoadedPart | None = None,
) -> Decoder:
    """A decoder of `config` with every weight copied from `tensors`; `source` is for messages."""
    make = empty_decoder if part is None else part.empty_part
    decoder = make(config, device, dtype, quantised=quantize != "none")
    places, slots, unexpected = decoder.weights(), decoder.slots(), []
    for stored, name, tensor in our_weights(config, tensors):
        place, slot = places.pop(name, None), slots.pop(name, None)
        if place is None and slot is None:
            # Redundant are rotary tables of old files, and the copy of a tied embedding.
            known = name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")
            if not known and not stored.startswith(config.skipped):
                unexpected.append(name)
            continue
        shape = slot[0].part_shape(slot[1]) if slot is not None else place.shape  # type: ignore[union-attr]
        shape = shape if part is None else part.shape(name)
        if shape != tensor.shape:
            raise InvalidInputError(
                f"{source}: {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
            )
        if part is not None:
            part.put(name, tensor, place if slot is None else slot, quantize, torch.device(device), dtype)
        elif slot is not None:
            slot[0].put(slot[1], tensor, quantize, torch.device(device))
        elif place is not None:
            place.copy_(tensor if isinstance(tensor, Tensor) else tensor.dequantise())
    missing = [*places, *slots]
    if missing or unexpected:
        raise InvalidInputError(
            f"{source}: the weights do not fit config.json ({config.arch}); "
            f"missing: {_some(missing)}; unexpected: {_some(unexpected)}. Are both whole, and of one model?"
        )
    decoder.settle(decoder.backend.reads_codes)
    return decoder


def our_weights(
    config: ModelConfig, tensors: Iterable[tuple[str, Tensor | QuantisedWeight]]
) -> Iterator[tuple[str, str, Tensor | QuantisedWeight]]:
    """Each tensor with its stored name and our name; stacked experts and fused parts one by one."""
    for stored, tensor in tensors:
        for name, view in our_views(config, stored, tensor):
            for part, rows in by_part(name, view, config.delta):
                yield stored, part, rows


def our_views(config: ModelConfig | None, stored: str, tensor: Any) -> list[tuple[str, Any]]:
    """A stored tensor, quantised or not, by our names: views of it, where we have several; None: unknown."""
    name = our_name(stored)
    stem, found, kind = name.partition(".in_proj.")
    if config is None or config.mamba is None or not found:
        return per_expert(name, tensor, config.experts if config else None, config.width if config else 0)
    width = config.mamba.width
    rows = {
        "gate_proj": slice(width),
        "x_proj": slice(width, 2 * width),
        "in_proj_rest": slice(2 * width, None),
    }
    cut = (lambda part: tensor[part]) if isinstance(tensor, Tensor) else tensor.select
    return [(f"{stem}.{part}.{kind}", cut(places)) for part, places in rows.items()]


def outline(path: Path, backend: Backend) -> Decoder:
    """The decoder of a model on tensors without memory."""
    if path.suffix == ".gguf":
        from tinkex.engine.torch.gguf import GgufModel

        config = GgufModel(path).config()
    elif (fields := read_fields(path)).get("model_type") in FAMILIES:
        config = read_config(path)
    else:
        from tinkex.engine.torch.models.transformers_model import outline_transformers

        return outline_transformers(path, fields, tokenizer_size(path), backend)
    with torch.device("meta"):
        return Decoder(config, backend)


def empty_decoder(
    config: ModelConfig, device: str | torch.device, dtype: torch.dtype, *, quantised: bool = False
) -> Decoder:
    with torch.device("meta"):  # shapes only, so that memory is taken once, in the right dtype and place
        decoder = Decoder(config, choose_backend(device, dtype, kernels=config.kernels_serve))
        if quantised:
            decoder.quantise(dtype)
    # What `to_empty` does, which goes by way of torch's symbolic shapes and imports half a second of sympy.
    decoder, take = decoder.to(dtype), partial(torch.empty, device=device)
    if torch.device(device).type == "cpu":
        take = HugeArena(sum(HugeArena.size_of(t.shape, t.dtype) for t in decoder.parameters())).take
    return decoder._apply(lambda t: take(t.shape, dtype=t.dtype)).eval()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "none") + more


def read_config(directory: Path) -> ModelConfig:
    """config.json, with the end-of-sequence ids and the vocabulary from the files next to it."""
    return model_config(read_fields(directory), vocab_size=tokenizer_size(directory))


def read_fields(directory: Path) -> dict[str, Any]:
    """The fields of config.json, with the end-of-sequence ids of generation_config.json."""
    if not (directory / "config.json").is_file():
        raise InvalidInputError(
            f"{directory} has no config.json; a model is a Hugging Face directory or a .gguf file"
        )
    fields = _json(directory / "config.json")
    check_scheme(directory, fields)
    if (directory / "generation_config.json").is_file():
        given = _json(directory / "generation_config.json").get("eos_token_id")
        fields |= {} if given is None else {"eos_token_id": given}
    return fields


def read_tensors(
    directory: Path, *, dequantise: bool = True
) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
    """Every tensor of the directory's safetensors files; with `dequantise`, quantised ones in fp32."""
    files = QuantisedFiles(_weight_files(directory), quantisation(_json(directory / "config.json")))
    for name, tensor in files.tensors():
        yield name, tensor if isinstance(tensor, Tensor) or not dequantise else tensor.dequantise()


def _weight_files(directory: Path) -> list[Path]:
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        placed = _json(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise InvalidInputError(f"{index} has no weight_map from tensors to files; fetch it again")
        names = sorted(set(placed.values()))
        if absent := [name for name in names if not (directory / name).is_file()]:
            raise InvalidInputError(
                f"{directory}: {index.name} names files that are not there: {_some(absent)}; fetch them too"
            )
        return [directory / name for name in names]
    if whole.is_file():
        return [whole]
    raise InvalidInputError(
        f"{directory} has no {whole.name} and no {index.name}; weights in other formats are not read"
    )


def tokenizer_size(directory: Path) -> int | None:
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
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # bytes that are no text too
        raise InvalidInputError(f"{file} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"{file} must be a JSON object, got {type(found).__name__}")
    return found
