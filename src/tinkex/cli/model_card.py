"""The model card of an export, and its upload to the Hugging Face Hub.

The card says what is known: base model and its licence, settings of the adapter, how the loss went, a note on
the data if one was given. What is not known is left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tinkex import errors
from tinkex.client.rest import RestClient
from tinkex.models import CATALOGUE, hub_name
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

_LIBRARY = {"peft": "peft", "merged": "transformers", "gguf": "gguf", "mlx": "mlx"}
_CURVE_ROWS = 12


def repository(target: str) -> str:
    """OWNER/NAME of hf://OWNER/NAME."""
    repo = target.removeprefix("hf://").strip("/")
    if not target.startswith("hf://") or repo.count("/") != 1:
        raise click.ClickException(f"--push takes hf://OWNER/NAME, got {target!r}")
    return repo


def model_card(
    client: RestClient, saved: ParsedCheckpointTinkerPath, repo: str, kind: str, base: str, note: str | None
) -> str:
    """README.md for the repository."""
    info = client.get_weights_info_by_tinker_path(saved.tinker_path).result()
    name, licence = hub_name(base) or base, _licence(base)
    head = ["---", f"library_name: {_LIBRARY[kind]}"]
    head += [f"base_model: {name}"] * (not Path(name).is_absolute())
    head += [f"license: {licence.lower()}"] * bool(licence)
    head += [f"tags: [lora, tinkex{', gguf' if kind == 'gguf' else ''}]", "---"]
    trained = [n for n in ("attn", "mlp", "unembed") if getattr(info, f"train_{n}")]
    settings = {"base model": f"`{name}`", "licence of the base model": licence, "LoRA rank": info.lora_rank}
    settings |= {"LoRA alpha": 32, "trained": ", ".join(trained), "saved as": f"`{saved.tinker_path}`"}
    lines = [*head, "", f"# {repo.rpartition('/')[2]}", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in settings.items() if value)]
    lines += ["", "## Data", "", note] if note else []
    lines += _curve(client, saved)
    return "\n".join([*lines, "", "Trained and exported with Tinkex.", ""])


def _licence(base: str) -> str:
    entry = next((e for e in CATALOGUE.values() if base in (e.name, e.hub_id)), None)
    return entry.licence if entry and " " not in entry.licence else ""


def _curve(client: RestClient, saved: ParsedCheckpointTinkerPath) -> list[str]:
    """The loss over the run's steps, a few of them; nothing where the server keeps no metrics."""
    try:
        steps: list[dict[str, Any]] = list(client.get_run_metrics(saved.training_run_id).result())
    except errors.TinkerError:
        return []
    rows = [row for row in steps if "loss" in row and "step" in row]
    if not rows:
        return []
    chosen = rows[:: max(1, -(-len(rows) // _CURVE_ROWS))]
    chosen += [rows[-1]] * (chosen[-1] is not rows[-1])
    rates = [f"{row['learning_rate']:g}" if "learning_rate" in row else "" for row in chosen]
    lines = [
        f"| {row['step']} | {row['loss']:.4f} | {rate} |" for row, rate in zip(chosen, rates, strict=True)
    ]
    return ["", "## Training", "", "| step | loss | learning rate |", "|---|---|---|", *lines]


def upload(api: Any, repo: str, out: Path, card: str, *, public: bool, what: str) -> str:
    """Upload what was exported, with its card; the repository's URL."""
    made = api.create_repo(repo_id=repo, private=not public, exist_ok=True)
    repo = getattr(made, "repo_id", repo)
    from huggingface_hub import CommitOperationAdd

    files = sorted(file for file in out.rglob("*") if file.is_file()) if out.is_dir() else [out]
    names = [file.relative_to(out).as_posix() if out.is_dir() else file.name for file in files]
    operations = [
        CommitOperationAdd(name, str(file))
        for name, file in zip(names, files, strict=True)
        if name not in ("README.md", "tinkex.json", "optimizer.safetensors")
    ]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    _name_base(operations, card)
    api.create_commit(repo_id=repo, operations=operations, commit_message=f"Add {what}")
    return f"{api.endpoint}/{repo}"


def _name_base(operations: list[Any], card: str) -> None:
    """An adapter's config names its base as the card does: the file may name a path of this machine."""
    base = next(
        (line.partition(": ")[2] for line in card.splitlines() if line.startswith("base_model: ")), ""
    )
    for operation in operations:
        if operation.path_in_repo == "adapter_config.json" and base:
            config = json.loads(Path(str(operation.path_or_fileobj)).read_text(encoding="utf-8"))
            text = json.dumps(config | {"base_model_name_or_path": base}, indent=2) + "\n"
            operations[operations.index(operation)] = type(operation)("adapter_config.json", text.encode())
