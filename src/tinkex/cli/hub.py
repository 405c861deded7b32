"""Uploads to the Hugging Face Hub, with a model card.

The card says what is known: base model and its licence, settings of the adapter, how the loss went, a note on
the data if one was given. What is not known is left out. Only what other programs read is uploaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tinkex import errors
from tinkex.client.rest import RestClient
from tinkex.models import CATALOGUE, hub_name
from tinkex.store import CHECKSUMS
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

_LIBRARY = {"peft": "peft", "merged": "transformers", "gguf": "gguf", "mlx": "mlx"}
_CURVE_ROWS = 12
_OURS = ("optimizer.safetensors", "tinkex.json", CHECKSUMS)
_LOAD = """
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{repo}")
```"""


def hub_api() -> Any:
    """huggingface_hub's API client, logged in."""
    try:
        from huggingface_hub import HfApi  # type: ignore[import-not-found]
    except ImportError:
        raise click.ClickException("the hub's library is missing: pip install huggingface_hub") from None
    api = HfApi()
    try:
        api.whoami()  # pyright: ignore[reportUnknownMemberType]  # a decorator of the hub's is untyped
    except Exception as error:  # its errors have no common base class
        reason = str(error).partition(".")[0].strip()
        raise click.ClickException(
            f"no access to the hub ({reason}); `hf auth login`, or set HF_TOKEN"
        ) from None
    return api


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
    lines += _LOAD.format(base=name, repo=repo).splitlines() if kind == "peft" else []
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


def upload(
    api: Any, repo: str, place: Path, base: str, card: str | None, *, public: bool, message: str,
    allow: Sequence[str] = (), ignore: Sequence[str] = (), **commit: Any,
) -> str:  # fmt: skip
    """Upload a file or a directory, with a card; the repository's id.

    An adapter's config names the base model as the hub does: the file may name a path of a machine.
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.utils import filter_repo_objects

    made = api.create_repo(repo_id=repo, private=not public, exist_ok=True)
    repo = getattr(made, "repo_id", repo)  # with its owner
    found = sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
    root = place if place.is_dir() else place.parent
    files: dict[str, Any] = {file.relative_to(root).as_posix(): str(file) for file in found}
    if (config := files.get("adapter_config.json")) and not Path(base).is_absolute():
        fields = json.loads(Path(config).read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
        files["adapter_config.json"] = f"{json.dumps(fields, indent=2)}\n".encode()
    if card is not None:
        files["README.md"] = card.encode()
    chosen = filter_repo_objects(files, allow_patterns=list(allow) or None, ignore_patterns=[*_OURS, *ignore])
    operations = [CommitOperationAdd(name, files[name]) for name in chosen]
    api.create_commit(repo_id=repo, operations=operations, commit_message=message, **commit)
    return repo
