"""Write a base model with an adapter merged into it as one GGUF file, which llama.cpp and Ollama load.

Tensors are merged, laid out as llama.cpp's converter does, quantised some rows at a time and written one
after another; an interrupted export is resumed. Rows whose width is no multiple of a block get the next
simpler type, as in llama.cpp.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch.gguf import decoder_names
from tinkex.engine.torch.gguf_layouts import layout_of
from tinkex.engine.torch.gguf_metadata import metadata_of, rope_factors
from tinkex.engine.torch.gguf_vocab import vocabulary
from tinkex.engine.torch.k_quants import QUANTISERS
from tinkex.engine.torch.load import our_weights, read_config
from tinkex.engine.torch.merge import MergedModel
from tinkex.engine.torch.models.families import our_name, text_fields
from tinkex.engine.torch.ollama import modelfile
from tinkex.engine.torch.tensor_stream import Progress, ResumedFile, resumed_directory

# --quantize: the type of most matrices, that of the important ones, and llama.cpp's name of the mixture
MIXTURES = {
    "q8_0": ("Q8_0", "Q8_0", "MOSTLY_Q8_0"),
    "q6_k": ("Q6_K", "Q6_K", "MOSTLY_Q6_K"),
    "q5_k_m": ("Q5_K", "Q6_K", "MOSTLY_Q5_K_M"),
    "q5_k_s": ("Q5_K", "Q5_K", "MOSTLY_Q5_K_S"),
    "q4_k_m": ("Q4_K", "Q6_K", "MOSTLY_Q4_K_M"),
    "q4_k_s": ("Q4_K", "Q4_K", "MOSTLY_Q4_K_S"),
    "q5_1": ("Q5_1", "Q5_1", "MOSTLY_Q5_1"),
    "q5_0": ("Q5_0", "Q5_0", "MOSTLY_Q5_0"),
    "q4_1": ("Q4_1", "Q4_1", "MOSTLY_Q4_1"),
    "q4_0": ("Q4_0", "Q4_0", "MOSTLY_Q4_0"),
}
_PLAIN = {
    "float32": ("F32", "F32", "ALL_F32"),
    "float16": ("F16", "F16", "MOSTLY_F16"),
    "bfloat16": ("BF16", "BF16", "MOSTLY_BF16"),
}
_SIMPLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that 256 does not divide
_KEPT = re.compile(r"norm|ffn_gate_inp|ssm_(a|d|conv1d|dt)|attn_sinks|rope_freqs|exp_probs_b|\.bias$")
_ROWS_BYTES = 16 << 20  # of fp32 rows that are quantised at a time
_ALIGNMENT = 32

Piece = tuple[str, str]  # a stored tensor, and our name of what is needed of it; "": all of it


def export_gguf(
    base_dir: Path,
    adapter_dir: Path | None,
    out: Path,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    ollama: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the file `out`; with `ollama` a directory with that file and a Modelfile.

    >>> export_gguf(Path("models/Qwen3-0.6B"), Path("adapter"), Path("m.gguf"))    # doctest: +SKIP
    """
    model = GgufExport(base_dir, adapter_dir, dtype, quantize)
    only = "" if ollama else "model.gguf"
    with resumed_directory(out, model.about, overwrite=overwrite, only=only) as part:
        model.write(part / "model.gguf", progress)
        if ollama:
            (part / "Modelfile").write_text(modelfile(base_dir, "model.gguf"), encoding="utf-8")


class GgufExport:
    """What goes into a GGUF file: metadata, and tensors in the order in which they are written."""

    def __init__(
        self, base_dir: Path, adapter_dir: Path | None, dtype: str | None, quantize: str | None
    ) -> None:
        if quantize is not None and quantize.lower() not in MIXTURES:
            raise user_error(f"quantize is {quantize!r}; allowed: {', '.join(MIXTURES)}")
        self._model = MergedModel(base_dir, adapter_dir)
        self._fields = text_fields(self._model.config)
        self._fields["model_type"] = self._model.config["model_type"]
        self._config = read_config(base_dir)
        self._fields.setdefault("num_hidden_layers", self._config.layers)
        self._layout, self._base_dir = layout_of(self._fields), base_dir
        stored = self._model.form(next(iter(next(iter(self._model.shards.values())))))[0]
        plain = dtype or str(stored).removeprefix("torch.")
        self._types = MIXTURES[quantize.lower()] if quantize else _PLAIN[plain]
        self.about = self._model.about("gguf") | {"types": self._types}
        self._metadata = metadata_of(self._fields)
        self._pieces = self._find_pieces()
        self._read: tuple[str, dict[str, Any]] = ("", {})

    def _find_pieces(self) -> dict[str, list[Piece]]:
        """By GGUF tensor: what it is made of, one piece or one for each expert."""
        tied = not self._model.config.get("tie_word_embeddings")
        names = decoder_names(self._layout.arch, self._fields["num_hidden_layers"], self._config)
        places: dict[str, Piece] = {}
        for shard in self._model.shards.values():
            for stored in shard:
                form = self._model.form(stored)
                outline = torch.empty(form[1], dtype=form[0], device="meta")
                views = [ours for _, ours, _ in our_weights(self._config, [(stored, outline)])]
                places |= {ours: (stored, ours) for ours in views}
                if self._named_here(our_name(stored)) and our_name(stored) not in views:
                    places = {ours: piece for ours, piece in places.items() if piece[0] != stored}
                    places[our_name(stored)] = stored, ""  # written whole
        names = self._with_own_names(names, places)
        if tied and "lm_head.weight" in places:  # an adapted head was untied
            names.setdefault("output.weight", ["lm_head.weight"])
        missing = [ours for group in names.values() for ours in group if ours not in places]
        unnamed = [o for o in places if o not in {n for g in names.values() for n in g} and self._matters(o)]
        if missing or unnamed:
            raise user_error(f"llama.cpp's {self._layout.arch} has no place for {(missing or unnamed)[0]}")
        return {name: [places[ours] for ours in group] for name, group in names.items()}

    def _named_here(self, ours: str) -> tuple[str, ...]:
        """The tensors of a block that the layout, not the table of names, makes of a weight."""
        block = re.match(r"model\.layers\.(\d+)\.", ours)
        if block is None:
            return ()
        rest, own = ours[block.end() :], self._layout.names(self._fields)
        found = (theirs for pattern, theirs in own.items() if re.fullmatch(pattern, rest))
        return tuple(f"blk.{block[1]}.{each}" for each in next(found, ()))

    def _with_own_names(
        self, names: dict[str, list[str]], places: Mapping[str, Piece]
    ) -> dict[str, list[str]]:
        own: dict[str, list[str]] = {}
        for ours in places:
            for name in self._named_here(ours):
                own.setdefault(name, []).append(ours)
        named = {ours for group in own.values() for ours in group}
        others = {name: [ours for ours in group if ours not in named] for name, group in names.items()}
        return {name: group for name, group in others.items() if group} | own

    def _matters(self, ours: str) -> bool:
        """Not a copy of a tied embedding, a table of rotations, or a tower."""
        copy = ours == "lm_head.weight" and self._model.config.get("tie_word_embeddings")
        return not (copy or ours.endswith("rotary_emb.inv_freq") or ours.startswith(self._config.skipped))

    def write(self, file: Path, progress: Progress) -> None:
        factors = rope_factors(self._fields)
        plan = {name: self._planned(name) for name in self._pieces}
        sizes = {name: size for name, (_, _, size) in plan.items()}
        header = self._header(plan, factors)
        total = sum(_padded(size) for size in sizes.values())
        with ResumedFile(file, header).writing() as opened:
            at = opened.start
            if factors is not None:
                at += _padded(factors.nbytes)
                if at > opened.position:
                    _write(opened, factors.numpy().tobytes())
            done = 0
            for name, size in sizes.items():
                at += _padded(size)
                if at > opened.position:
                    written = 0
                    for data in self._data(name, plan[name][0]):
                        opened.write(data)
                        written += len(data)
                    assert written == size, f"{name}: {written} bytes, {size} planned"
                    opened.write(bytes(_padded(size) - size))
                    opened.end_tensor()
                progress(done := done + _padded(size), total)

    def _planned(self, name: str) -> tuple[Any, tuple[int, ...], int]:
        """Its type, shape and size in the file."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        pieces = self._pieces[name]
        shape = self._turned_shape(name, pieces[0])
        if "_exps." in name and pieces[0][1]:  # not stacked yet
            shape = (len(pieces), *shape)
        kind = GGMLQuantizationType[self._type_of(name, shape)]
        count, size = GGML_QUANT_SIZES[kind]
        return kind, shape, torch.Size(shape).numel() // count * size

    def _turned_shape(self, name: str, piece: Piece) -> tuple[int, ...]:
        stored, ours = piece
        form = self._model.form(stored)
        outline = torch.empty(form[1], dtype=form[0], device="meta")
        views: dict[str, Any] = {n: v for _, n, v in our_weights(self._config, [(stored, outline)])}
        return tuple(self._layout.turn(self._fields, name, views[ours] if ours else outline).shape)

    def _type_of(self, name: str, shape: tuple[int, ...]) -> str:
        most, important, _ = self._types
        if len(shape) < 2 or _KEPT.search(name):
            return "F32"
        kind = important if self._is_important(name) else most
        if kind in _SIMPLER and shape[-1] % 256:
            kind = _SIMPLER[kind]
        return "F16" if kind.startswith("Q") and shape[-1] % 32 else kind

    def _is_important(self, name: str) -> bool:
        """The head, and in some layers the values and the last matrix, as llama.cpp chooses them."""
        if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in self._pieces):
            return True
        block = re.fullmatch(r"blk\.(\d+)\.(attn_v|ffn_down|ffn_down_exps|attn_qkv)\.weight", name)
        if block is None:
            return False
        layer, count = int(block[1]), self._fields["num_hidden_layers"]
        return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2

    def _data(self, name: str, kind: Any) -> Iterator[bytes | memoryview]:
        for stored, ours in self._pieces[name]:
            tensor = self._layout.turn(self._fields, name, self._view(stored, ours))
            rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor[None]
            step = max(1, _ROWS_BYTES // (4 * rows.shape[1]))
            for start in range(0, len(rows), step):
                yield _encoded(rows[start : start + step].float().contiguous(), kind)

    def _view(self, stored: str, ours: str) -> Tensor:
        if not ours:
            return self._model.tensor(stored)
        if self._read[0] != stored:
            self._read = "", {}  # free the last one first
            whole = self._model.tensor(stored)
            self._read = stored, {n: view for _, n, view in our_weights(self._config, [(stored, whole)])}
        return self._read[1][ours]

    def _header(self, plan: dict[str, tuple[Any, tuple[int, ...], int]], factors: Tensor | None) -> bytes:
        """Everything before the tensors' bytes, by `gguf`'s own writer."""
        from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
        from gguf.gguf_writer import TensorInfo

        with tempfile.TemporaryDirectory(prefix="tinkex-gguf-") as scratch:
            file = Path(scratch) / "header"
            writer = GGUFWriter(file, self._layout.arch)
            writer.add_name(Path(str(self._model.config.get("_name_or_path") or self._base_dir)).name)
            writer.add_file_type(LlamaFileType[self._types[2]])
            writer.add_quantization_version(2)
            values = {f"{self._layout.arch}.{key}": value for key, value in self._metadata.items()}
            values |= vocabulary(self._base_dir, self._rows(), self._fields["model_type"])
            for key, value in values.items():
                _add(writer, key, value)
            if factors is not None:
                about = GGMLQuantizationType.F32, tuple(factors.shape), factors.nbytes
                plan = {"rope_freqs.weight": about, **plan}
            for name, (kind, shape, size) in plan.items():
                writer.tensors[-1][name] = TensorInfo(shape=shape, dtype=kind, nbytes=size)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            header = file.read_bytes()
        return header + bytes(-len(header) % _ALIGNMENT)

    def _rows(self) -> int:
        """Rows of the embedding."""
        return self._turned_shape("token_embd.weight", self._pieces["token_embd.weight"][0])[0]


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _write(file: ResumedFile, data: bytes) -> None:
    file.write(data + bytes(-len(data) % _ALIGNMENT))
    file.end_tensor()


def _encoded(rows: Tensor, kind: Any) -> memoryview:
    from gguf.quants import quantize

    quantiser: Callable[[Tensor], np.ndarray] | None = QUANTISERS.get(kind.name)
    made = quantiser(rows) if quantiser else quantize(rows.numpy(), kind)
    return np.ascontiguousarray(made).view(np.uint8).reshape(-1).data


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
