"""The engine contract: what a service may ask of one base model, and what it gets back.

Commands, work and results are frozen, picklable values: they can cross a process, and a journal can replay
them. `tests/contract` checks what every engine promises. Knows no sessions, users or text; needs only numpy.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from tinkex.engine.gpus import GpuReading
from tinkex.types.data import Datum
from tinkex.types.outputs import ForwardBackwardOutput, SampleResponse
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams
from tinkex.types.tensor import TensorData

R = TypeVar("R", covariant=True)

Location = str  # of adapter files: a directory of this machine, or a prefix of an object store (s3://…)


class EngineError(Exception):
    """A command or a request that failed. `category` says whose fault it is: "user" or "server"."""

    def __init__(self, message: str, category: Literal["user", "server"] = "server") -> None:
        super().__init__(message)
        self.message = message
        self.category: Literal["user", "server"] = category


class EngineLost(EngineError):
    """The engine was closed, or its thread or device is gone: pending futures and later calls raise it."""


@dataclass(frozen=True)
class Failure:
    """One pass's failure inside a batch: a value, because the other passes of the batch succeeded."""

    category: Literal["user", "server"]
    message: str


class Command(Generic[R]):
    """Something a trainer does; `R` is what it returns."""


@dataclass(frozen=True)
class RunCommand(Command[R]):
    """Something it does to one run."""

    run: str


@dataclass(frozen=True)
class CreateAdapter(RunCommand[None]):
    """Create an adapter for `run`: A uniform in ±1/√d_in from `lora.seed`, B zero."""

    lora: LoraConfig


@dataclass(frozen=True)
class CustomLoss:
    """An uploaded loss graph: `nodes` as they came over the wire, `inputs` in placeholder order."""

    inputs: tuple[str, ...]  # "logprobs" first
    nodes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Pass:
    """One run's forward or forward-backward over some datums; gradients add only to that run's."""

    run: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True
    custom_loss: CustomLoss | None = None  # with loss_fn "custom"
    finished: bool = False  # it was computed once: its uploaded loss has no limits, to have the same result


@dataclass(frozen=True)
class PassProgress:
    """A batch of passes is under way: `done` of its `total` parts are, micro-batches or checks."""

    ticket: str
    done: int
    total: int


@dataclass(frozen=True)
class PassPart:
    """What one trainer has of a shared pass: results by datum (None: it was refused), or why it failed."""

    results: tuple[dict[int, Any], ...] | None
    failure: Failure | None


@dataclass(frozen=True)
class SharedPasses:
    """Returned when one trainer has computed its share of the passes, in request order."""

    ticket: str
    parts: tuple[PassPart, ...]


PassOutcome = ForwardBackwardOutput | Failure
PassesResult = PassProgress | SharedPasses | list[PassOutcome]


@dataclass(frozen=True)
class ForwardBackward(Command[PassesResult]):
    """Compute the first micro-batch of some passes of one or many runs; `ContinuePasses` computes the others.

    The last one returns the outcomes, one per pass and in order; with `share`, SharedPasses. A pass with
    wrong content fails alone, with category "user", before any of it is computed. One that fails leaves its
    run without gradients.
    """

    passes: tuple[Pass, ...]
    share: tuple[int, int] = 0, 1  # n, of how many: only every n-th datum is computed


@dataclass(frozen=True)
class ContinuePasses(Command[PassesResult]):
    """Compute the next micro-batch of passes under way. Commands of other runs may come in between.

    Clearing, loading or dropping a run abandons its passes. A ticket with no other passes is then invalid.
    """

    ticket: str


@dataclass(frozen=True)
class FinishPasses(Command[list[PassOutcome]]):
    """The outcomes of shared passes, given the shares of all trainers; each of them must execute it."""

    ticket: str
    shares: tuple[SharedPasses, ...]


@dataclass(frozen=True)
class OptimStep(RunCommand[dict[str, float]]):
    """Make one AdamW update of `run` from its gradients, which are cleared; returns metrics.

    With no gradients it changes nothing and says so (`skipped`: 1.0). A gradient that is not finite, or too
    large for its square to be, raises EngineError("…", "user"), clears the gradients and changes no more.
    """

    params: AdamParams
    # Sums a row of numbers in place over the trainers that share the run's passes; set in their processes.
    total: Callable[[Any], None] | None = None


class ClearGradients(RunCommand[None]):
    """Discard the gradients that `run` has accumulated since its last step."""


@dataclass(frozen=True)
class SaveAdapter(RunCommand[int]):
    """Write `run`'s adapter as a PEFT directory, atomically; returns its bytes.

    With `sampling` only samplers read it: the files have the dtype in which those compute, and checksums;
    later commands may be executed before they are written.
    """

    location: Location
    optimizer: bool = False  # with AdamW's state
    overwrite: bool = False  # else `location` must not exist yet
    sync: bool = True  # else `tinkex.store.sync_tree` flushes the files
    sampling: bool = False


@dataclass(frozen=True)
class LoadAdapter(RunCommand[LoraConfig]):
    """Replace `run`'s adapter by a saved one, creating the run if it does not exist; clears its gradients.

    A rank, base model or train flags that do not fit an existing run are refused by name (category "user").
    """

    location: Location
    optimizer: bool = False  # restore moments and step exactly; else the optimizer starts from zero


class ExportedAdapter(Protocol):
    """An immutable copy of an adapter's weights, opaque to everyone but an engine of the same kind."""

    @property
    def lora(self) -> LoraConfig: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class ExportAdapter(RunCommand[ExportedAdapter]):
    """Copy `run`'s adapter as it is now, for `Sampler.publish` of any engine with the same base model."""

    saved: Location | None = None  # the same weights, for a sampler that cannot reach the copy


class DropAdapter(RunCommand[None]):
    """Free all device memory of `run`. Dropping a run that does not exist is not an error."""


@dataclass(frozen=True)
class CheckLoss(Command[None]):
    """Raise EngineError("…", "user") if the engine would refuse this uploaded loss."""

    loss: CustomLoss


class Trainer(Protocol):
    """Executes commands one at a time, in the order submitted; any thread may submit."""

    def submit(self, command: Command[R]) -> Future[R]:
        """Queue a command, never blocking; cancelling a future that has not started removes its command."""
        ...


def run_passes(trainer: Trainer, passes: Sequence[Pass]) -> list[PassOutcome]:
    """Execute `passes` to the end, blocking; for scripts and tests."""
    outcome = trainer.submit(ForwardBackward(tuple(passes))).result()
    while isinstance(outcome, PassProgress):
        outcome = trainer.submit(ContinuePasses(outcome.ticket)).result()
    assert isinstance(outcome, list)  # as these passes are not shared
    return outcome


@dataclass(frozen=True)
class SampleWork:
    """One sample request; the fields mean what they mean in `types.SampleRequest`.

    `params.stop` holds token ids, [] (never stop early) or None, as with strings: they come as `stop_bytes`.
    """

    prompt: np.ndarray  # int32 [P]
    params: SamplingParams
    adapter: str | None = None  # a published adapter's name; None: the base model
    num_samples: int = 1
    stop_bytes: tuple[bytes, ...] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    first_sample: int = 0  # the index of its first sample, in a part of a larger request: each has its stream


@dataclass(frozen=True)
class SampledTokens:
    """One piece of a stream: new tokens (int32) of sample `index`, and their logprobs (float32)."""

    index: int
    tokens: np.ndarray
    logprobs: np.ndarray


class Sampler(Protocol):
    """Serves many requests at once."""

    async def sample(self, work: SampleWork) -> SampleResponse:
        """Cancelling the task that awaits this frees the request's pages at once."""
        ...

    def stream(self, work: SampleWork) -> AsyncGenerator[SampledTokens | SampleResponse, None]:
        """Tokens as they are drawn, then the whole response. Closing the iterator cancels the request."""
        ...

    async def publish(self, name: str, source: Location | ExportedAdapter) -> None:
        """Make a saved or an exported adapter sampleable under `name`; an existing name stays as it is."""
        ...

    async def retire(self, name: str) -> None:
        """Drop a published adapter once the requests that use it are done."""
        ...


@dataclass(frozen=True)
class Placement:
    """Where an engine's parts run on a Ray cluster, and how many there are."""

    cluster: str  # "auto": Ray on this machine, for as long as this process lives; else a cluster's address
    trainers: int = 1  # each has its share of the runs
    data: int = 1  # processes of each trainer: they share the datums of every pass
    samplers: int = 1  # at least
    max_samplers: int = 1  # at most: between the two, as many as keep requests from waiting
    gpus: float | None = None  # of each trainer and sampler; None: one for each rank, if there are any


@dataclass(frozen=True)
class EngineConfig:
    """Everything needed to build an engine for one base model."""

    model: str  # a Hugging Face directory or a GGUF file; for kind "fake", any name
    kind: Literal["torch", "fake"] = "torch"
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:0"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    max_context: int | None = None  # None: the model's own
    quantize: Literal["none", "nf4", "fp8", "int8", "file"] = "none"  # how the frozen matrices are kept
    kv_bytes: int | None = None  # memory for KV pages; None: planned from what is free
    adapter_bytes: int | None = None  # memory for live adapters; None: planned
    max_pass_tokens: int | None = None  # tokens in one micro-batch; None: planned
    max_batch: int = 288  # sequences decoded at once; a service gives one owner 256 of them
    threads: int | None = None  # CPU compute threads; None: adjusted to the machine's load
    deterministic: bool = False  # batch-invariant: bitwise identical in any batch (docs/engine.md)
    name: str = ""  # what checkpoints call the model; "": as `model`
    tokenizer: str | None = None  # a directory with tokenizer.json, for `SampleWork.stop_bytes`
    role: Literal["both", "trainer", "sampler"] = "both"  # what its memory is planned for
    placement: Placement | None = None  # None: in this process
    tensor: int = 1  # GPUs of one machine that each have a part of the model, or as many CPU processes
    warm_up: bool = False  # when it is built, do what first requests would wait for (`engine.warm_up`)


@dataclass(frozen=True)
class ModelInfo:
    """What a service needs to know of a base model."""

    arch: str
    vocab_size: int  # ids that are drawn and normalised over: padding excluded
    max_context: int
    eos_ids: tuple[int, ...]
    parameters: int
    layers: int
    losses: tuple[str, ...]
    fingerprint: str  # of the weights: an adapter fits the base model with its fingerprint and no other


@dataclass(frozen=True)
class Heartbeat:
    """An engine's state as it last reported it, at most about a second ago unless a command takes longer."""

    alive: bool  # False once every call raises EngineLost
    trouble: str  # why, if not alive
    stats: Mapping[str, float]  # adapters, KV pages, sequences running and waiting
    memory: Mapping[str, int]  # bytes planned for each use
    node: str = ""  # the machine that it runs on, if that is not this process's
    gpus: tuple[GpuReading, ...] = ()  # of that machine


class Engine(Protocol):
    """One base model with its trainer and its sampler."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def trainer(self) -> Trainer: ...

    @property
    def sampler(self) -> Sampler: ...

    def heartbeat(self) -> Heartbeat:
        """The last report; never blocks, whatever the engine is doing."""
        ...

    def close(self) -> None:
        """Stop after the current micro-batch or decode step; pending work fails with EngineLost."""
        ...


@runtime_checkable
class PartitionedEngine(Engine, Protocol):
    """An engine with several trainers and one sampler; its own `trainer` is the first."""

    def partition(self, index: int) -> Engine:
        """A trainer's engine, rebuilt if it was lost; blocks meanwhile. Closing it ends no other trainer."""
        ...

    def processes(self) -> list[tuple[str, Heartbeat]]:
        """The last report of every process, by what it is."""
        ...


def build_engine(config: EngineConfig) -> Engine:
    """The engine that `config` names. Heavy imports happen here, not at import."""
    if config.placement is not None:
        from tinkex.engine.cluster.connection import connect

        connect(config.placement.cluster)  # first: it sets what Ray reads when it is imported
        from tinkex.engine.cluster.cluster_engine import ClusterEngine

        return ClusterEngine(config)
    if config.kind == "fake":
        from tinkex.engine.fake import FakeEngine

        return FakeEngine(config)
    from tinkex.engine.torch.engine import TorchEngine

    return TorchEngine(config)
