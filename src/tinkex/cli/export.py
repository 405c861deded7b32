"""`tinkex export`: a checkpoint as files that PEFT, transformers, llama.cpp, Ollama or MLX load."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from tinkex.cli.output import bar, note, show, size
from tinkex.cli.target import rest


@click.command()
@click.argument("checkpoint_path", metavar="CHECKPOINT|RUN")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format", "kind", default="peft", show_default=True,
    type=click.Choice(["peft", "merged", "gguf", "mlx"]), help="What to write.",
)  # fmt: skip
@click.option("--base", metavar="DIR|NAME", help="The base model.  [default: the checkpoint's]")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="[default: the base model's]"
)
@click.option("--quantize", metavar="TYPE", help="Of gguf: q8_0, q6_k, q5_k_m, q4_k_m …; of mlx: q4, q8.")
@click.option("--ollama", is_flag=True, help="Of gguf: OUT is a directory with a Modelfile too.")
@click.option("--push", metavar="hf://OWNER/NAME", help="Upload it to the Hugging Face Hub afterwards.")
@click.option("--public", is_flag=True, help="With --push: a public repository.  [default: private]")
@click.option("--data-note", help="With --push: a line on the training data, for the model card.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def export(
    checkpoint_path: str, out: Path, kind: str, base: str | None, dtype: str | None, quantize: str | None,
    ollama: bool, push: str | None, public: bool, data_note: str | None, force: bool,
) -> None:  # fmt: skip
    """Write a checkpoint to OUT for other programs.

    The checkpoint is given by its tinker:// path, or by the directory of the training run that made it.

    \b
    tinkex export runs/chats model.gguf --format gguf       what `train` made
    tinkex export tinker://RUN/weights/final adapter        for PEFT
    tinkex export tinker://RUN/weights/final merged --format merged
    tinkex export tinker://RUN/weights/final model.gguf --format gguf \\
                  --quantize q4_k_m                         for llama.cpp
    tinkex export tinker://RUN/weights/final folder --format gguf --ollama

    Type an interrupted command again to continue it. One tensor is in memory at a time.
    """
    from tinkex.cli.hub import hub_api, model_card, repository, upload
    from tinkex.cli.transfer import fetch_checkpoint
    from tinkex.exports import ExportOptions, export_adapter
    from tinkex.models import hub_name
    from tinkex.recipes.run_directory import trained
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

    options = ExportOptions(kind, dtype, quantize, ollama, force)
    checkpoint_path = trained(checkpoint_path)
    saved = ParsedCheckpointTinkerPath.from_tinker_path(checkpoint_path)
    if out.exists() and not force:
        raise click.ClickException(f"{out} exists; --force overwrites it")
    repo = repository(push) if push else ""
    api = hub_api() if push else None  # before the work: without access to the hub it would be in vain
    with tempfile.TemporaryDirectory(prefix="tinkex-") as scratch:
        adapter = Path(scratch) / "adapter"
        with rest() as client:
            name = client.get_weights_info_by_tinker_path(saved.tinker_path).result().base_model
            fetch_checkpoint(client, saved, adapter, overwrite=False)
        with bar(f"Writing {out.name}", of_bytes=True) as progress:
            export_adapter(adapter, out, options, base=base, base_name=name, progress=progress)
    url = ""
    if api is not None:
        with rest() as client:
            card = model_card(client, saved, repo, kind, base or name, data_note)
        known = hub_name(base or name) or base or name
        repo = upload(api, repo, out, known, card, public=public, message=f"Add {saved.checkpoint_id}")
        url = f"{api.endpoint}/{repo}"
    count = sum(file.stat().st_size for file in (out, *out.rglob("*")) if file.is_file())
    fields = {"checkpoint_path": checkpoint_path, "destination": str(out), "format": kind, "bytes": count}
    fields |= {"url": url} if url else {}
    facts = {"To": out, "Format": kind, "Size": size(count), "Base model": base or name}
    facts |= {"Pushed to": url} if url else {}
    show(fields, f"Exported {saved.checkpoint_id}", facts)
    note(_next_step(out, kind, ollama))


def _next_step(out: Path, kind: str, ollama: bool) -> str:
    if ollama:
        return f"try it: ollama create NAME -f {out / 'Modelfile'} && ollama run NAME"
    return {
        "peft": f"load it: PeftModel.from_pretrained(base, {str(out)!r})",
        "merged": f"load it: AutoModelForCausalLM.from_pretrained({str(out)!r}); or tinkex chat {out}",
        "gguf": f"try it: llama-cli -m {out}; or tinkex chat {out}",
        "mlx": f"try it: mlx_lm.chat --model {out}",
    }[kind]
