"""Read a GGUF file as if it were a Hugging Face directory, or convert it to one.

Weights are dequantised one at a time, and named and shaped as in Hugging Face files. Metadata that changes
the numbers and is not supported is refused by name. The tokenizer part is in `gguf_tokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tinkex import store
from tinkex.engine.torch.adapter_files import write_json
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.gguf_families import GGUF_FAMILIES
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.families import model_config
from tinkex.engine.torch.models.rotary import llama3_frequencies
from tinkex.errors import InvalidInputError

_SHARD_BYTES = 2 << 30
# How names of weights end with us, and as the table of names has them.
_ENDINGS = {
    r"\.e_score_correction_bias": ".e_score_correction.bias",
    r"\.sinks": ".sinks.weight",
    r"\.dt_bias": ".dt_proj.bias",
}
_UNUSED = 5  # tokenizer.ggml.token_type of ids that only pad the vocabulary


class GgufModel:
    """One GGUF file, mapped: its metadata, and its tensors under Hugging Face names."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise InvalidInputError(f"{path} cannot be read as GGUF: {error}") from error
        self._reader = reader
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.arch = self.get("general.architecture")
        if self.arch not in GGUF_FAMILIES:
            supported = ", ".join(GGUF_FAMILIES)
            raise InvalidInputError(
                f"{path}: general.architecture {self.arch!r} is not supported; supported: {supported}"
            )
        self._family = GGUF_FAMILIES[self.arch]
        if self.arch == "llama" and self.get("{arch}.expert_count", 0):
            raise InvalidInputError(f"{path}: llama with experts (Mixtral) is not a supported architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture's name."""
        field = self._reader.fields.get(key.replace("{arch}", getattr(self, "arch", "")))
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise InvalidInputError(f"{self.path} has no {key.replace('{arch}', self.arch)}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self._tensors

    def config(self) -> ModelConfig:
        fields, types = self.config_fields(), self.require("tokenizer.ggml.token_type")
        used = (i for i, kind in enumerate(types) if kind != _UNUSED)
        return model_config(fields, vocab_size=1 + max(used, default=-1))

    def config_fields(self) -> dict[str, Any]:
        """The file's metadata as the fields of a `config.json`."""
        heads, width = self.require("{arch}.attention.head_count"), self.require("{arch}.embedding_length")
        head_dim = self.get("{arch}.attention.key_length", width // heads)
        rotated = self.get("{arch}.rope.dimension_count", head_dim)
        if rotated != head_dim and not self._family.partial:
            raise InvalidInputError(
                f"{self.path}: {rotated} rotated dimensions of {head_dim} are not supported"
            )
        ends = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        fields = {
            "architectures": [self._family.class_name],
            "model_type": self._family.model_type,
            "hidden_act": "silu",
            "hidden_size": width,
            "intermediate_size": self._mlp_width(),
            "num_hidden_layers": self._layers(),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.require("{arch}.context_length"),
            "rms_norm_eps": self.require("{arch}.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.get("{arch}.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "vocab_size": self._rows("token_embd.weight"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": self._family.bias_of in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": sorted({int(end) for key in ends if (end := self.get(key)) is not None}),
        }
        if rotated != head_dim:
            fields["partial_rotary_factor"] = rotated / head_dim
        return fields | self._family.fields(self)

    def _layers(self) -> int:
        """Without the blocks at the end that predict further tokens, which are not read."""
        return self.require("{arch}.block_count") - self.get("{arch}.nextn_predict_layers", 0)

    def _mlp_width(self) -> int | None:
        """Files of experts alone may not say it."""
        key = "{arch}.feed_forward_length"
        return self.get(key) if self.get("{arch}.expert_count", 0) else self.require(key)

    def _rows(self, name: str) -> int:
        if name not in self._tensors:
            raise InvalidInputError(f"{self.path} has no tensor {name}")
        return int(self._tensors[name].shape[-1])  # GGUF lists dimensions from the innermost

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._tensors:
            return self._llama3_scaling(head_dim)
        if (kind := self.get("{arch}.rope.scaling.type", "none")) == "none":
            return None
        scaling = {"rope_type": kind, "factor": self.require("{arch}.rope.scaling.factor")}
        if (original := self.get("{arch}.rope.scaling.original_context_length")) is not None:
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _llama3_scaling(self, head_dim: int) -> dict[str, Any]:
        """Llama 3 files hold the frequencies' divisors: find the factor, and check that all fit it."""
        divisors = self._dequantise("rope_freqs.weight")
        scaling = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        theta = self.get("{arch}.rope.freq_base", 10000.0)
        plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if not torch.allclose(plain / divisors, llama3_frequencies(plain, scaling), rtol=1e-4):
            raise InvalidInputError(f"{self.path}: rope_freqs.weight does not follow Llama 3's rope scaling")
        return scaling

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, dequantised to fp32 one at a time.

        A tensor that our decoder does not have keeps its own name, so that a loader can refuse it.
        """
        layers = self._layers()
        named = decoder_names(self.arch, layers, self.config())
        for name in self._tensors:
            block = re.match(r"blk\.(\d+)\.", name)
            if name == "rope_freqs.weight" or (block and int(block[1]) >= layers):
                continue
            tensor, names = self._dequantise(name), named.get(name, [name])
            tensor = self._family.undo(self, name, tensor)
            yield from zip(names, tensor if "_exps." in name else [tensor], strict=True)

    def _dequantise(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise InvalidInputError(f"{self.path}: {name} is {kind}, which is not read") from error
        return torch.from_numpy(np.array(values, dtype=np.float32))


def decoder_names(arch: str, layers: int, config: ModelConfig) -> dict[str, list[str]]:
    """A decoder's weights by the name of the GGUF tensor that holds them; experts in their order."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    (found_arch,) = (one for one in MODEL_ARCH if MODEL_ARCH_NAMES[one] == arch)
    table = get_tensor_name_map(found_arch, layers)
    with torch.device("meta"):
        weights = Decoder(config, Backend()).weights()
    named: dict[str, list[str]] = {}
    for name in weights:
        merged = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        for ours, theirs in _ENDINGS.items():
            merged = re.sub(f"{ours}$", theirs, merged)
        if found := table.get_name(merged, (".weight", ".bias")):
            named.setdefault(found, []).append(name)
    return named


def convert_gguf(path: str | Path, directory: str | Path) -> Path:
    """Write a GGUF file as a Hugging Face directory: config, fp32 weights, tokenizer and chat template.

    `directory` must not exist, and appears only when it is complete.
    """
    from tinkex.engine.torch.gguf_tokenizer import write_tokenizer

    model = GgufModel(Path(path))
    fields = model.config_fields()
    ids = {key: fields[key] for key in ("bos_token_id", "eos_token_id") if fields[key] is not None}
    try:
        with store.atomic_directory(directory) as part:
            write_json(part / "config.json", fields | {"dtype": "float32"})
            write_json(part / "generation_config.json", ids)
            write_tokenizer(model, part)
            _write_weights(model, part)
    except store.LocationExistsError:
        raise InvalidInputError(
            f"{directory} exists already; convert {path} into a directory that does not"
        ) from None
    return Path(directory)


def _write_weights(model: GgufModel, directory: Path) -> None:
    """One file, or an index and shards of about 2 GiB, so that no more than that is in memory at once."""
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush(least: int) -> None:
        if sum(tensor.nbytes for tensor in shard.values()) >= least:
            file = f"model-{len(set(places.values())) + 1:05}.safetensors"
            save_file(shard, directory / file, metadata={"format": "pt"})
            places.update(dict.fromkeys(shard, file))
            shard.clear()

    for name, tensor in model.tensors():
        shard[name] = tensor.float().contiguous()
        flush(_SHARD_BYTES)
    flush(1)
    if len(set(places.values())) == 1:
        (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
    else:
        write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
