"""Merge an adapter into its base model: a full Hugging Face directory from the two.

W + scale·B·A is computed in fp32, some rows at a time, and written in the base's dtype or another. One tensor
is in memory at a time, with the matrices of one layer's adapter. A trained unembedding unties a tied head:
`lm_head.weight` is written, and config.json says so. All other files are copied. An interrupted merge is
resumed by the next one, and the directory appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch.adapter_files import CONFIG, WEIGHTS, present, read_peft_config, verify, write_json
from tinkex.engine.torch.load import our_views
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.families import FAMILIES, model_config, our_name
from tinkex.engine.torch.peft_export import join_qkv
from tinkex.engine.torch.quantised_files import method_name, quantisation
from tinkex.engine.torch.tensor_stream import (
    Progress,
    ResumedFile,
    Stored,
    data_of,
    fingerprint_of,
    resumed_directory,
    safetensors_header,
    stored_tensors,
)
from tinkex.store import CHECKSUMS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX, HEAD = "model.safetensors.index.json", "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", CHECKSUMS)
_ROWS_BYTES = 32 << 20  # of fp32 rows that are computed at a time

Delta = tuple[Tensor, Tensor]  # A [R, I] and scale·B [O, R]


def merge_adapter(
    base_dir: Path,
    adapter_dir: Path,
    out_dir: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `base_dir` with the adapter of `adapter_dir` merged into it; `dtype` None: as the base's.

    >>> merge_adapter(Path("models/Qwen3-0.6B"), Path("adapters/final"), Path("merged"))    # doctest: +SKIP
    """
    model = MergedModel(base_dir, adapter_dir, dtype)
    write_model(model, out_dir, overwrite=overwrite, progress=progress)


class WritableModel(Protocol):
    """Tensors by shard, each made when it is asked for."""

    @property
    def base_dir(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def shards(self) -> dict[str, list[str]]: ...
    @property
    def total(self) -> int: ...
    def about(self, kind: str) -> dict[str, Any]: ...
    def form(self, name: str, /) -> tuple[torch.dtype, tuple[int, ...]]: ...
    def nbytes(self, name: str, /) -> int: ...
    def tensor(self, name: str, /) -> Tensor: ...


def write_model(
    model: WritableModel, out_dir: Path, *, overwrite: bool, progress: Progress, kind: str = "pt"
) -> None:
    """Write a Hugging Face directory; `kind` is what the files' metadata say of them: "pt", or "mlx"."""
    with resumed_directory(out_dir, model.about(f"merged {kind}"), overwrite=overwrite) as part:
        done = 0
        for shard, names in model.shards.items():
            header = safetensors_header({name: model.form(name) for name in names}, kind)
            with ResumedFile(part / shard, header).writing() as file:
                at = file.start
                for name in names:
                    at += model.nbytes(name)
                    if at > file.position:  # else it was written before
                        file.write(data_of(model.tensor(name)))
                        file.end_tensor()
                    progress(done := done + model.nbytes(name), model.total)
        if len(model.shards) > 1:
            places = {name: shard for shard, names in model.shards.items() for name in names}
            places = dict(sorted(places.items()))
            write_json(part / INDEX, {"metadata": {"total_size": model.total}, "weight_map": places})
        write_json(part / "config.json", model.config)
        copy_others(model.base_dir, part)


def copy_others(base_dir: Path, part: Path) -> None:
    """Everything of the base model that is not weights: tokenizer, template, generation settings."""
    for path in base_dir.iterdir():
        copied = path.name.endswith(NOT_COPIED) or (part / path.name).exists()
        if path.is_file() and not copied:
            shutil.copy2(path, part / path.name)


class MergedModel:
    """A base model with an adapter in it: what tensors there are, and each of them when it is asked for."""

    def __init__(self, base_dir: Path, adapter_dir: Path | None, dtype: str | None = None) -> None:
        if dtype not in (None, *DTYPES):
            raise user_error(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
        self.base_dir, self._dtype = base_dir, DTYPES.get(dtype or "")
        files = _shards(base_dir)
        self.config: dict[str, Any] = json.loads((base_dir / "config.json").read_text())
        if scheme := quantisation(self.config):
            raise user_error(
                f"{base_dir} is quantised ({method_name(scheme)}), and an adapter can be merged into plain "
                "weights only; give the base model's directory in bfloat16"
            )
        self.base = model_config(self.config) if self.config.get("model_type") in FAMILIES else None
        self._deltas = _Deltas(adapter_dir, self.base)
        self._stored = {name: stored for tensors in files.values() for name, stored in tensors.items()}
        self._untied = self._untie()
        self._weights = {name: self._changed(name) for name in self._stored}
        self.shards = {shard: self._ordered(list(tensors)) for shard, tensors in files.items()}
        self._check(adapter_dir)
        self.total = sum(self.nbytes(name) for names in self.shards.values() for name in names)
        if self._dtype is not None:
            for fields in (self.config, self.config.get("text_config") or {}):
                fields |= {key: dtype for key in ("dtype", "torch_dtype") if key in fields}

    def about(self, kind: str) -> dict[str, Any]:
        """What is made of what, for a later process that may go on with it."""
        files = {stored.file.name: stored.file for stored in self._stored.values()}
        files["config.json"] = self.base_dir / "config.json"
        base, adapter = fingerprint_of(files), self._deltas.fingerprint
        return {"kind": kind, "dtype": str(self._dtype), "base": base, "adapter": adapter}

    def _untie(self) -> str | None:
        """The embedding that a tied head becomes a changed copy of; None if the head is not such a one."""
        ours = {our_name(name): name for name in self._stored}
        tied = self.config.get("tie_word_embeddings") or HEAD not in ours
        if not tied or HEAD not in self._deltas.names:
            return None
        embedding = next((ours[name] for name in EMBEDDINGS if name in ours), None)
        if embedding is None:
            raise user_error(
                f"the adapter adapts the head, and {self.base_dir} has no {EMBEDDINGS[0]} to untie"
            )
        self.config["tie_word_embeddings"] = False
        if HEAD in ours:  # a file may hold a copy of the tied embedding under the head's name
            del self._stored[ours[HEAD]]
        return embedding

    def _changed(self, name: str) -> list[str]:
        """The adapter's weights that are in this tensor."""
        views = our_views(self.base, name, self._stored[name].outline())
        for ours, view in views:
            needed = self._deltas.shapes.get(ours)
            if needed is not None and needed != view.shape:
                raise user_error(
                    f"the adapter changes {ours} {list(needed)}, and that of {self.base_dir} is "
                    f"{list(view.shape)}: it was made for another base model"
                )
        return [ours for ours, _ in views if ours in self._deltas.names]

    def _ordered(self, names: list[str]) -> list[str]:
        """As they are stored, the wider types first, so that all are aligned; an untied head at the end."""
        names = [name for name in names if name in self._stored]
        names.sort(key=lambda name: -self.form(name)[0].itemsize)
        return [*names, *([HEAD] if self._untied in names else [])]

    def _check(self, adapter_dir: Path | None) -> None:
        found = {ours for names in self._weights.values() for ours in names} | {HEAD} & {
            HEAD if self._untied else ""
        }
        if missing := sorted(self._deltas.names - found):
            raise user_error(f"{adapter_dir} adapts {missing[0]}, which {self.base_dir} does not have")

    def form(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor as it is written."""
        stored = self._stored[self._untied if name == HEAD and self._untied else name]
        plain = stored.dtype in (*DTYPES.values(), torch.float64)
        return (self._dtype if self._dtype is not None and plain else stored.dtype), stored.shape

    def nbytes(self, name: str) -> int:
        dtype, shape = self.form(name)
        return dtype.itemsize * torch.Size(shape).numel()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, merged; in fp32 where it is added to, and rounded once to its dtype."""
        dtype = dtype or self.form(name)[0]
        if name == HEAD and self._untied:
            stored, changed = self._stored[self._untied].read(), [HEAD]
            views = [(HEAD, stored)]
        else:
            stored, changed = self._stored[name].read(), self._weights[name]
            views = our_views(self.base, name, stored)
        if not changed:
            return stored.to(dtype)
        out = stored if stored.dtype == dtype else stored.to(dtype)
        targets = [(HEAD, out)] if name == HEAD and self._untied else our_views(self.base, name, out)
        for (ours, view), (_, target) in zip(views, targets, strict=True):
            if ours in changed:
                _add(view, target, self._deltas[ours])
        return out


def _add(weight: Tensor, out: Tensor, delta: Delta) -> None:
    """out = weight + B·A, some rows at a time; they may be the same memory."""
    a, b = delta
    step = max(1, _ROWS_BYTES // (4 * weight.shape[1]))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        out[rows] = torch.addmm(weight[rows].float(), b[rows], a).to(out.dtype)


def _shards(base_dir: Path) -> dict[str, dict[str, Stored]]:
    files = sorted(base_dir.glob("*.safetensors")) if base_dir.is_dir() else []
    if not files or not (base_dir / "config.json").exists():
        raise user_error(
            f"{base_dir} is not a Hugging Face directory: merging needs config.json and *.safetensors"
        )
    if (base_dir / INDEX).exists():
        used = set(json.loads((base_dir / INDEX).read_text())["weight_map"].values())
        files = [file for file in files if file.name in used]
    return {path.name: stored_tensors(path) for path in files}


class _Deltas:
    """An adapter's matrices by the weight that they change, read layer by layer."""

    def __init__(self, adapter_dir: Path | None, base: ModelConfig | None) -> None:
        self._base, self._groups, self._places = base, {}, {}
        self._group, self._loaded = "", {}
        self.fingerprint = ""
        self.names: set[str] = set()
        self.shapes: dict[str, torch.Size] = {}  # of the weights that it changes
        if adapter_dir is None:
            return
        verify(adapter_dir, (WEIGHTS, CONFIG))
        peft = read_peft_config(adapter_dir)
        self._scale = peft["lora_alpha"] / peft["r"]
        files = {name: adapter_dir / name for name in (WEIGHTS, CONFIG)}
        self.fingerprint = fingerprint_of(files)
        for key, stored in stored_tensors(adapter_dir / WEIGHTS).items():
            found = re.match(r".*?\.(?:layers|h)\.\d+\.", key)
            self._groups.setdefault(found[0] if found else "", {})[key] = stored
        for group, stored in self._groups.items():
            outline = {key: one.outline() for key, one in stored.items()}
            pairs = _by_weight(outline, 1.0, base, adapter_dir)
            self._places |= dict.fromkeys(pairs, group)
            self.shapes |= {name: torch.Size((len(b), a.shape[1])) for name, (a, b) in pairs.items()}
        self.names = set(self._places)
        self._directory = adapter_dir

    def __getitem__(self, name: str) -> Delta:
        group = self._places[name]
        if not self._loaded or group != self._group:
            tensors = {key: stored.read() for key, stored in self._groups[group].items()}
            self._group = group
            self._loaded = _by_weight(tensors, self._scale, self._base, self._directory)
        return self._loaded[name]


def _by_weight(
    tensors: dict[str, Tensor], scale: float, base: ModelConfig | None, source: Path
) -> Mapping[str, Delta]:
    """Matrices by the name of the weight that they change; one pair per expert."""
    deltas: dict[str, Delta] = {}
    tensors, suffix = present(tensors), ".lora_A.weight"
    tensors = join_qkv(tensors, base.stored_key_heads if base else 0) or tensors
    for key, a in tensors.items():
        if not key.endswith(suffix):
            # PEFT also writes the base weights of an adapted head; merging would lose anything else.
            if not key.endswith((".lora_B.weight", ".base_layer.weight")):
                raise user_error(f"{source} holds {key}, which is not part of a low-rank adapter")
            continue
        name = key.removeprefix("base_model.model.").removesuffix(suffix)
        a, b = a.float(), scale * tensors[key.replace("lora_A", "lora_B")].float()
        if a.dim() == 2:
            deltas[f"{name}.weight"] = a, b
            continue
        stem, part = name.rsplit(".", 1)
        gated = key.replace(part, "w3") in tensors
        parts = {"w1": "gate_proj" if gated else "up_proj", "w2": "down_proj", "w3": "up_proj"}
        for i in range(max(len(a), len(b))):  # either side may be shared by all experts
            pair = a[i % len(a)], b[i % len(b)]
            deltas[f"{stem}.{i}.{parts[part]}.weight"] = pair
    return deltas
