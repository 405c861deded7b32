"""Settings shared by all training recipes. Field help is the CLI's help.

`tinkex.cli.train` makes a command's options of the fields of its config.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import tinkex
from tinkex.config import Settings
from tinkex.data import held_out
from tinkex.errors import InvalidInputError
from tinkex.recipes.progress import Progress
from tinkex.recipes.run_directory import RunDirectory, trained
from tinkex.recipes.schedule import Schedule

MODEL = "SmolLM2-135M-Instruct"
# Settings that do not change what a run computes: its place, its name, where its metrics go.
_FREE = ("out", "name", "log", "fresh", "show_batch")


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a config, with the help of its option; `names` are further names of it."""
    return field(default=default, metadata={"help": help, **more})


def sampler_of(service: tinkex.ServiceClient, model: str) -> tinkex.SamplingClient:
    """A sampler of a base model, or of an adapter by its tinker:// path or its run's directory."""
    model = trained(model)
    if model.startswith("tinker://"):
        return service.create_sampling_client(model_path=model)
    return service.create_sampling_client(base_model=model)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings that all recipes share."""

    model: str = option(MODEL, "A base model: its name or directory.")
    start_from: str | None = option(
        None, "Start from a saved adapter (tinker://…/weights/…, or a run's directory).", names=("--from",)
    )
    out: str | None = option(None, "Directory of the run; the same one again resumes it.")
    name: str | None = option(
        None, "What lists and the console call the run; by default as its directory.", names=("-n", "--name")
    )
    rank: int = option(32, "Rank of the LoRA adapter.")
    learning_rate: float | None = option(None, "The highest learning rate; by default that of the model.")
    schedule: Schedule = option("linear", "How the learning rate falls.")  # noqa: RUF009
    warmup: int = option(0, "Steps over which the learning rate rises at first.")
    steps: int | None = option(None, "Optimizer steps; by default as many as the epochs take.")
    seed: int = option(0, "Of the adapter, the order of the data, and sampling.")
    save_every: int = option(20, "Steps between two checkpoints to resume from.")
    train_unembed: bool = option(False, "Train the unembedding too; vLLM cannot serve that.")
    log: str | None = option(None, "Send metrics to wandb, trackio or tensorboard too.", names=("--log",))
    fresh: bool = option(False, "Start anew where the directory has a run already.")
    adam: tinkex.AdamParams = field(
        default_factory=lambda: tinkex.AdamParams(eps=1e-8, grad_clip_norm=1.0), metadata={"hidden": True}
    )

    def __post_init__(self) -> None:
        for name in ("rank", "save_every", "steps"):
            value = asdict(self)[name]
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {value}")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise InvalidInputError(f"learning_rate must be between 0 and 1, got {self.learning_rate}")

    def settings(self, recipe: str, **facts: Any) -> dict[str, Any]:
        """The settings that determine what the run computes, for config.json."""
        own = {each.name: asdict(self)[each.name] for each in fields(self) if each.name not in _FREE}
        return {"recipe": recipe, **own, **facts}

    def open(self, recipe: str, what: str, progress: Progress, **facts: Any) -> RunDirectory:
        """The run's directory: `out`, or one named by the recipe and its data. `facts` are about the data."""
        named = Path("runs") / f"{recipe}-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(what).stem)}"
        place = Path(self.out).expanduser() if self.out else named
        settings = self.settings(recipe, **facts)
        # Only Tinkex servers know names of runs.
        name = self.name or (None if Settings.read().hosted else place.absolute().name)
        return RunDirectory(place, settings, progress, fresh=self.fresh, tracker=self.log, name=name)

    def reference(self, service: tinkex.ServiceClient) -> tinkex.SamplingClient:
        """A sampler of the model that training starts from."""
        if self.start_from is None:
            return service.create_sampling_client(base_model=self.model)
        start = service.create_training_client_from_state(trained(self.start_from, state=True))
        return start.save_weights_and_get_sampling_client()


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig(TrainConfig):
    """The settings of recipes that learn from what others wrote: examples, or pairs of answers."""

    data: str = option("", "Examples: a file, or a hub dataset org/name[:split].", argument=True)
    batch_size: int = option(16, "Examples of a step.")
    epochs: float = option(3.0, "Passes over the data, unless --steps is given.")
    max_length: int = option(2048, "Tokens of an example; longer ones are cut.")
    shuffle: bool = option(True, "A new order in every epoch.")
    eval_share: float = option(0.1, "The share of the data that is held out, at most 100 examples.")
    eval_every: int = option(20, "Steps between two evaluations.")
    skip_bad: bool = option(False, "Leave out rows that cannot be used, and count them.")
    show_batch: bool = option(False, "Show the first batch, with what is learnt, and do not train.")

    def held_out(self, count: int) -> tuple[list[int], list[int]]:
        """Which of `count` examples are trained on, and which are kept for evaluation."""
        return held_out(count, min(100, int(count * self.eval_share)), self.seed)
