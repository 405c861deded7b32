"""Write an adapter with its base model in a format that others load; one function for all formats.

A base model other than the adapter's is refused by the fingerprint of its files, unless the caller chose it
explicitly. A GGUF file as the base is unpacked first.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator
from pathlib import Path

import torch

from tinkex.engine.request import user_error
from tinkex.engine.torch.adapter_files import fingerprint, read_facts
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.load import our_weights, outline, read_config, read_tensors
from tinkex.engine.torch.merge import MergedModel, merge_adapter, write_model
from tinkex.engine.torch.mlx_quantised import MlxQuantised, older_rope_fields
from tinkex.engine.torch.models.families import FAMILIES
from tinkex.engine.torch.peft_export import export_peft
from tinkex.engine.torch.tensor_stream import Progress


def write_export(
    adapter: Path,
    base: Path | None,
    out: Path,
    *,
    format: str,
    dtype: str | None = None,
    quantize: str | None = None,
    ollama: bool = False,
    overwrite: bool = False,
    trusted: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `adapter` to `out`, merged into `base` for all formats but peft.

    `trusted`: the caller chose this base, so that another fingerprint than the adapter's is no error.
    """
    if format == "peft":
        export_peft(adapter, out, base_dir=base, overwrite=overwrite)
        return
    assert base is not None, f"{format} needs a base model"
    with _directory(base) as directory:
        if not trusted:
            check_base(adapter, directory)
        if format == "merged":
            merge_adapter(directory, adapter, out, dtype=dtype, overwrite=overwrite, progress=progress)
        elif format == "mlx":
            merged = MergedModel(directory, adapter, dtype)
            merged.config.update(older_rope_fields(merged.config))
            if "num_local_experts" in merged.config:  # as transformers writes it now; mlx-lm reads the older
                merged.config.setdefault("num_experts", merged.config["num_local_experts"])
            model = MlxQuantised(merged, quantize) if quantize else merged
            write_model(model, out, overwrite=overwrite, progress=progress, kind="mlx")
        elif format == "gguf":
            from tinkex.engine.torch.gguf_export import export_gguf  # needs gguf and tokenizers

            export_gguf(
                directory, adapter, out, dtype=dtype, quantize=quantize, ollama=ollama, overwrite=overwrite,
                progress=progress,
            )  # fmt: skip
        else:
            raise user_error(f"the format {format!r} is not known")


@contextlib.contextmanager
def _directory(base: Path) -> Generator[Path]:
    """The base model as a Hugging Face directory."""
    if base.suffix != ".gguf":
        yield base
        return
    from tinkex.engine.torch.gguf import convert_gguf

    with tempfile.TemporaryDirectory(prefix="tinkex-base-") as scratch:
        yield convert_gguf(base, Path(scratch) / base.stem)


def check_base(adapter: Path, base: Path) -> None:
    """Refuse a base model whose weights are not those that the adapter was trained on."""
    saved = read_facts(adapter).get("base") or {}
    wanted, found = saved.get("fingerprint"), stored_fingerprint(base)
    if wanted and found and wanted != found:
        raise user_error(
            f"the adapter was trained on the base model {saved.get('name')!r} ({wanted}), and {base} is "
            f"another ({found}). Give the right one; if it was served with --quantize, name it (--base)"
        )


def stored_fingerprint(base: Path) -> str:
    """The fingerprint that an engine in plain weights would have; "" for a model of no family of ours."""
    if json.loads((base / "config.json").read_text()).get("model_type") not in FAMILIES:
        return ""
    shapes = {name: list(weight.shape) for name, weight in outline(base, Backend()).weights().items()}
    config, heads = read_config(base), {}
    for _, name, tensor in our_weights(config, read_tensors(base)):
        if name in shapes and isinstance(tensor, torch.Tensor):
            heads[name] = shapes[name], _first_row(tensor).clone()  # a view would keep all of the tensor
    return fingerprint(config.arch, heads, {}) if len(heads) == len(shapes) else ""


def _first_row(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.dim() > 1:
        tensor = tensor[0]
    return tensor[:16]
