"""Checkpoints as files that other programs load: PEFT adapters, merged weights, GGUF for llama.cpp, MLX.

    from tinkex.exports import export_checkpoint
    export_checkpoint("tinker://…/weights/final", "final.gguf", format="gguf", quantize="q4_k_m")

Needs the engine's packages but no running engine. The base model is found on this machine, or fetched. The
same call resumes an interrupted export.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.config import Settings
from tinkex.errors import InvalidInputError, ModelError
from tinkex.files import ByteProgress

FORMATS = ("peft", "merged", "gguf", "mlx")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportOptions:
    """How an export is written; what does not go together is refused here."""

    format: str = "peft"
    dtype: str | None = None  # of merged, gguf and mlx; None: the base model's
    quantize: str | None = None  # of gguf: q8_0, q6_k, q5_k_m, q4_k_m …; of mlx: q4, q8
    ollama: bool = False  # of gguf: a directory with a Modelfile
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidInputError(f"format is {self.format!r}; allowed: {', '.join(FORMATS)}")
        if self.dtype not in (None, *DTYPES):
            raise InvalidInputError(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if self.dtype is not None and self.format == "peft":
            raise InvalidInputError("dtype goes with the formats merged, gguf and mlx: adapters are float32")
        if self.quantize is not None and self.format not in ("gguf", "mlx"):
            raise InvalidInputError(f"quantize goes with the formats gguf and mlx, not with {self.format}")
        if self.quantize is not None and self.dtype is not None and self.format == "gguf":
            raise InvalidInputError("give dtype or quantize, not both")
        if self.ollama and self.format != "gguf":
            raise InvalidInputError("ollama reads GGUF: give format='gguf' with it")


def export_checkpoint(
    path: str,
    out: str | Path,
    *,
    format: str = "peft",
    base: str | Path | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    ollama: bool = False,
    overwrite: bool = False,
    progress: ByteProgress | None = None,
    rest: Any = None,
) -> Path:
    """Write a checkpoint to `out`; returns that. `rest` is a RestClient of the server that has it.

    `base` is the base model's directory or name, where the server's name of it means nothing here.
    """
    from tinkex.client.download import download_archive
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

    options = ExportOptions(format, dtype, quantize, ollama, overwrite)
    saved = ParsedCheckpointTinkerPath.from_tinker_path(path)
    if rest is None:
        import tinkex

        with tinkex.ServiceClient() as service:
            return export_checkpoint(
                path, out, format=format, base=base, dtype=dtype, quantize=quantize, ollama=ollama,
                overwrite=overwrite, progress=progress, rest=service.create_rest_client(),
            )  # fmt: skip
    name = rest.get_weights_info_by_tinker_path(saved.tinker_path).result().base_model
    with tempfile.TemporaryDirectory(prefix="tinkex-") as scratch:
        adapter = Path(scratch) / "adapter"
        adapter.mkdir()
        url = rest.get_checkpoint_archive_url_from_tinker_path(saved.tinker_path).result().url
        download_archive(url, adapter)
        return export_adapter(adapter, Path(out), options, base=base, base_name=name, progress=progress)


def export_adapter(
    adapter: Path,
    out: Path,
    options: ExportOptions,
    *,
    base: str | Path | None = None,
    base_name: str = "",
    progress: ByteProgress | None = None,
) -> Path:
    """Write an adapter of ours, a directory, in another format."""
    try:
        from tinkex.engine.protocol import EngineError
        from tinkex.engine.torch.export_formats import write_export
    except ImportError as error:
        raise InvalidInputError(
            f"exports need more packages: pip install 'tinkex[engine]' ({error})"
        ) from None
    if any(adapter.glob("*.age")):
        raise InvalidInputError(f"{adapter} is encrypted: only its recipients can export it")
    place = base_place(base, base_name) if options.format != "peft" or base is not None else None
    try:
        write_export(
            adapter, place, out, format=options.format, dtype=options.dtype, quantize=options.quantize,
            ollama=options.ollama, overwrite=options.overwrite, trusted=base is not None,
            progress=progress or (lambda done, total: None),
        )  # fmt: skip
    except EngineError as error:
        raise InvalidInputError(str(error)) from None
    return out


def base_place(base: str | Path | None, name: str) -> Path:
    """The base model's files on this machine; they are fetched if they can be."""
    from tinkex import models

    settings, asked = Settings.read(), str(base or name)
    try:
        return models.obtain(asked, settings.home / "models", offline=settings.offline)
    except ModelError as error:
        if base is not None:
            raise
        raise ModelError(
            f"the base model {name!r} is not on this machine: {error}. Give its directory (--base DIR)"
        ) from None
