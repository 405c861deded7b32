"""The engine contract: what a service may ask of one base model, and what it gets back.

A `Trainer` runs one command at a time and owns its device; a `Sampler` serves many requests at once.
Commands are frozen, picklable values, so a journal can replay them, Ray can carry them and a test can
record them. `tests/contract` is the definition of an engine: what it checks is what an engine promises.
Knows nothing of sessions, users, futures, names on disk or text; needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from tinkex.types.data import Datum
from tinkex.types.outputs import ForwardBackwardOutput, SampleResponse
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams
from tinkex.types.tensor import TensorData

R = TypeVar("R", covariant=True)

# Called with a fraction from 0 to 1 as long work goes on. It runs on the engine's thread: keep it short.
Progress = Callable[[float], None]


class EngineError(Exception):
    """A command that could not be done. `category` says whose fault it is: "user" or "server"."""

    def __init__(self, message: str, category: Literal["user", "server"] = "server") -> None:
        super().__init__(message)
        self.message = message
        self.category: Literal["user", "server"] = category


@dataclass(frozen=True)
class Failure:
    """One pass's failure inside a batch: a value, because the other passes of the batch succeeded."""

    category: Literal["user", "server"]
    message: str


# -- training ------------------------------------------------------------------------------------------


class Command(Generic[R]):
    """Something a trainer does; `R` is what it returns."""


@dataclass(frozen=True)
class CreateAdapter(Command[None]):
    """A fresh adapter for `run`: A uniform in ±1/√d_in from `lora.seed`, B zero."""

    run: str
    lora: LoraConfig


@dataclass(frozen=True)
class CustomLoss:
    """An uploaded loss graph: `nodes` as on the wire (wire-protocol §7.9), `inputs` in placeholder order."""

    inputs: tuple[str, ...]  # "logprobs" first
    nodes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Pass:
    """One run's forward or forward-backward over some datums; gradients add to that run's alone."""

    run: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True
    custom_loss: CustomLoss | None = None  # with loss_fn "custom"


@dataclass(frozen=True)
class ForwardBackward(Command[list[ForwardBackwardOutput | Failure]]):
    """Passes of one or many runs, executed together; one outcome per pass, in order.

    A pass with wrong content fails alone, with category "user", before anything of it was computed, and
    adds nothing to its run's gradients.
    """

    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class OptimStep(Command[dict[str, float]]):
    """One AdamW update of `run` from its gradients, which are cleared; returns metrics.

    With no gradients it changes nothing and says so (`skipped`: 1.0). A gradient that is not finite, or too
    large for its square to be, raises EngineError("…", "user"), clears the gradients and leaves adapter and
    moments as they were.
    """

    run: str
    params: AdamParams


@dataclass(frozen=True)
class ClearGradients(Command[None]):
    """Forget the gradients that `run` has accumulated since its last step."""

    run: str


@dataclass(frozen=True)
class SaveAdapter(Command[int]):
    """Write `run`'s adapter as a PEFT directory, atomically; with `optimizer`, its AdamW state too.

    Returns the bytes written. `directory` must not exist yet unless `overwrite`. Without `sync` they may be
    with the kernel alone: the device does not wait for the disk, and whoever asked sees to it.
    """

    run: str
    directory: Path
    optimizer: bool = False
    overwrite: bool = False
    sync: bool = True


@dataclass(frozen=True)
class LoadAdapter(Command[LoraConfig]):
    """Replace `run`'s adapter by a saved one, creating the run if it is not there; gradients are cleared.

    With `optimizer`, moments and step come back exactly; without, the optimizer starts anew. A rank, base
    model or train flags that do not fit an existing run are refused by name (category "user").
    """

    run: str
    directory: Path
    optimizer: bool = False


@dataclass(frozen=True)
class DropAdapter(Command[None]):
    """Free everything that `run` holds on the device. Dropping what is not there is not an error."""

    run: str


class Trainer(Protocol):
    """Blocking, one command at a time, owns its device. May be called from any thread."""

    def run(self, command: Command[R], progress: Progress | None = None) -> R: ...


# -- sampling ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StopBytes:
    """Stop sequences as bytes, with each token's bytes: a stop may span tokens; the engine knows no text."""

    sequences: tuple[bytes, ...]
    token_bytes: Sequence[bytes]  # indexed by token id; shared by every request of a base model


# sequence index, its new token ids (int32) and their logprobs (float32); runs on the engine's thread
OnTokens = Callable[[int, np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class SampleWork:
    """One sample request. Field meanings: wire-protocol §9; semantics: design §6.

    `params.stop` holds token ids, [] (never stop early) or None here; strings come as `stop_bytes`, with
    `params.stop` None.
    """

    prompt: np.ndarray  # int32 [P]
    params: SamplingParams
    adapter: str | None = None  # a published adapter's name; None: the base model
    num_samples: int = 1
    stop_bytes: StopBytes | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    on_tokens: OnTokens | None = None


@runtime_checkable
class Sampler(Protocol):
    """Many at a time. Cancelling the task that awaits `sample` frees what it held at once."""

    async def sample(self, work: SampleWork) -> SampleResponse: ...

    async def publish(self, source: str | Path, name: str) -> None:
        """Make an immutable copy of a live adapter (its run id) or of a saved one (its directory) sampleable.

        Publishing a name again is not an error if the name exists: published adapters never change.
        """
        ...

    async def retire(self, name: str) -> None:
        """Forget a published adapter once the requests that use it are done."""
        ...


# -- the engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineConfig:
    """Everything needed to build an engine for one base model."""

    model: str  # a Hugging Face directory or a GGUF file; for kind "fake", any name
    kind: Literal["torch", "fake"] = "torch"
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:0"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    max_context: int | None = None  # None: the model's own
    kv_bytes: int | None = None  # memory for KV pages; None: planned from what is free
    adapter_bytes: int | None = None  # memory for live adapters; None: planned
    max_pass_tokens: int | None = None  # tokens in one micro-batch; None: planned
    max_batch: int = 256  # sequences decoded at once
    threads: int | None = None  # CPU compute threads; None: chosen with care
    deterministic: bool = False  # the same bits alone and in any batch (docs/engine.md)
    name: str = ""  # what checkpoints call the model; "": as `model`


@dataclass(frozen=True)
class ModelInfo:
    """What a service needs to know of a base model."""

    arch: str
    vocab_size: int  # ids that may be used: padded ones excluded
    max_context: int
    eos_ids: tuple[int, ...]
    parameters: int
    layers: int
    losses: tuple[str, ...]
    fingerprint: str  # of its weights: an adapter goes with those that it was trained on, and no others


class Engine(Protocol):
    """One base model: its trainer, its sampler and the thread they share."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def trainer(self) -> Trainer: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def working(self) -> bool:
        """False once it can do nothing any more: it was closed, or its thread has died, or its device."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges for metrics: adapters live, KV pages used and free, sequences running and waiting."""
        ...

    def close(self) -> None:
        """Stop the thread and free the device; pending work fails with EngineError."""
        ...


def build_engine(config: EngineConfig) -> Engine:
    """The engine that `config` names. Heavy imports happen here, not at import."""
    match config.kind:
        case "fake":
            from tinkex.engine.fake import FakeEngine

            return FakeEngine(config)
        case "torch":
            from tinkex.engine.torch.engine import TorchEngine

            return TorchEngine(config)
