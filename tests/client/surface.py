"""The public methods of every client, found by introspection, so that no test misses a new one.

`calls()` lists them; `Call.arguments()` gives each required parameter a valid value.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.client.conftest import PARAMS, PROMPT, datum
from tinkex import AdminClient, RestClient, SamplingClient, ServiceClient, TrainingClient
from tinkex.types import SessionSearchRequest

CLIENTS = (ServiceClient, TrainingClient, SamplingClient, RestClient, AdminClient)
PATH = "tinker://run:train:0/weights/step-1"

_ADAPTER = tempfile.TemporaryDirectory(prefix="tinkex-adapter-")  # files that are read, not understood
for _file in ("adapter_model.safetensors", "adapter_config.json"):
    Path(_ADAPTER.name, _file).write_text("{}")

FINE: dict[str, Any] = {
    "access_scope": "owned",
    "base_model": "stub/base",
    "checkpoint_id": "weights/step-1",
    "data": [datum()],
    "destination_project_id": "project",
    "ending_before": "2026-01-03T00:00:00Z",
    "fn": lambda logprobs: (-logprobs.sum(), {}),
    "input_ranks": {"logprobs": 1},
    "loss_fn": "cross_entropy",
    "metrics": {"reward": 0.5},
    "model_path": "tinker://run:train:0/sampler_weights/step-1",
    "name": "step-1",
    "num_samples": 1,
    "path": PATH,
    "project_id": "project",
    "prompt": PROMPT,
    "request": SessionSearchRequest(),
    "sampler_id": "sampler-1",
    "sampling_params": PARAMS,
    "session_id": "session-1",
    "source": _ADAPTER.name,
    "starting_on": "2026-01-02T00:00:00Z",
    "tinker_path": PATH,
    "training_run_id": "run:train:0",
    "ttl_seconds": 60,
}
# Where the same name means something else.
FINE_FOR: dict[str, dict[str, Any]] = {
    "forward_backward_custom": {"loss_fn": lambda data, logprobs: (sum(each.sum() for each in logprobs), {})},
    "get_external_weights_urls": {"tinker_path": "tinker://run:train:0/external_weights/step-1"},
    "copy_weights": {"destination_project_id": "project"},
    "create_sampling_client": {"model_path": FINE["model_path"]},
}


@dataclass(frozen=True)
class Call:
    """One public method of one client."""

    client: type
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self.client, self.name)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def gives(self) -> str:
        """Its return annotation, as it is written."""
        return str(inspect.signature(self.function).return_annotation)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        found = dict(inspect.signature(self.function).parameters)
        return {name: parameter for name, parameter in found.items() if name != "self"}

    def arguments(self, **changes: Any) -> dict[str, Any]:
        special = FINE_FOR.get(self.name.removesuffix("_async"), {})
        needed = {n for n, p in self.parameters.items() if p.default is p.empty or n in special}
        return {**{name: special.get(name, FINE.get(name)) for name in needed}, **changes}

    def __str__(self) -> str:
        return f"{self.client.__name__}.{self.name}"


def calls() -> Iterator[Call]:
    """Every public method, but for those that Python itself calls."""
    for client in CLIENTS:
        for name, _ in inspect.getmembers(client, inspect.isfunction):
            if not name.startswith("_"):
                yield Call(client, name)
