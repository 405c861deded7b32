"""`tinkex plan`: what fits on some GPUs, how to split them, and what they should reach. Nothing is loaded.

Memory is computed as the engine plans it. Speeds scale a GPU's peak by the utilisation measured for an 8B
model on an H200.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from tinkex.cli.model import place_of
from tinkex.cli.output import Whole, format_option, needing, plural, show, size
from tinkex.cli.serve import read_size
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.torch.sizing import ModelSizes

_RESERVED = 1.5 * 2**30  # bytes of a GPU for the driver, kernels and workspaces
_BATCH = 256  # sequences that a sampler decodes at once
_FLOPS_SHARE, _BANDWIDTH_SHARE = 0.58, 0.65  # of the peaks, reached by the 8B shape on an H200
_LENGTH = 2048  # tokens of a sequence that is decoded, if the context is longer
_SEQUENCE = 20e-6  # seconds that a sequence adds to a decode step
_PUBLISH_RATE = 25e9 / 8  # bytes a second between two nodes, at 25 Gbit/s


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes, its bandwidth in bytes a second, dense bf16 FLOP a second."""

    memory: float
    bandwidth: float
    flops: float


GPUS = {
    "h200": Gpu(141e9, 4.8e12, 989e12),
    "h100": Gpu(80e9, 3.35e12, 989e12),
    "a100": Gpu(80e9, 2.0e12, 312e12),
    "l40s": Gpu(48e9, 0.864e12, 362e12),
    "a10g": Gpu(24e9, 0.6e12, 70e12),
}


@dataclass(frozen=True)
class ClusterPlan:
    """One way to use some GPUs. Bytes are those of one engine, which has `tensor` GPUs."""

    tensor: int  # GPUs of an engine
    trainers: int
    samplers: int
    weights: float
    free: float  # after the weights
    resident_runs: int  # on all trainers at a time; others are evicted to disk and come back
    sequences: int  # of a full context, on one sampler at a time
    trained: float  # tokens a second of all trainers
    decoded: float  # tokens a second of all samplers
    publish_bytes: int  # to each node that samples
    publish_seconds: float


def estimate(sizes: ModelSizes, gpu: Gpu, gpus: int) -> ClusterPlan:
    """Split the GPUs so that trainers and samplers are equally busy if every sample is trained on."""
    from tinkex.engine.torch.engine import ADAPTER_SHARE, KV_SHARE_ALONE

    facts, room = sizes.facts, gpu.memory - _RESERVED
    one_context = facts.kv_bytes + sizes.state
    # Next to the weights, an engine needs room for one run's adapter or for one context's KV pages.
    least = facts.weight_bytes + max(one_context / KV_SHARE_ALONE, sizes.run / ADAPTER_SHARE)
    tensor = 1
    while tensor * room < least:
        tensor *= 2
        if tensor > gpus:
            raise InvalidInputError(
                f"the model needs {size(int(least))}, {plural(gpus, 'GPU')} have {size(int(gpus * room))}: "
                "give more GPUs, larger ones (--gpu), --quantize, or a shorter --context"
            )
    engines = gpus // tensor
    free = tensor * room - facts.weight_bytes
    train = tensor * gpu.flops * _FLOPS_SHARE / (4 * facts.active_parameters)
    fitting = max(1, int(KV_SHARE_ALONE * free / one_context))
    sequence = sizes.kv_token * min(_LENGTH, facts.context) + sizes.state
    batch = min(_BATCH, max(1, int(KV_SHARE_ALONE * free / sequence)))
    decode = batch / (facts.weight_bytes / (tensor * gpu.bandwidth * _BANDWIDTH_SHARE) + _SEQUENCE * batch)
    share = decode / (train + decode)  # of the time that is training's, token for token
    trainers = 1 if engines == 1 else min(engines - 1, max(1, round(engines * share)))
    return ClusterPlan(
        tensor, trainers, max(1, engines - trainers), facts.weight_bytes, free,
        resident_runs=trainers * int(ADAPTER_SHARE * free // sizes.run), sequences=fitting,
        trained=trainers * train, decoded=max(1, engines - trainers) * decode,
        publish_bytes=sizes.adapter, publish_seconds=sizes.adapter / _PUBLISH_RATE,
    )  # fmt: skip


def _read_gpu(text: str) -> Gpu:
    if (known := GPUS.get(text.lower())) is not None:
        return known
    try:
        memory = read_size(text)
    except InvalidInputError:
        raise click.BadParameter(f"{text!r}: give one of {', '.join(GPUS)}, or a size such as 80GB") from None
    return Gpu(memory, GPUS["a100"].bandwidth, GPUS["a100"].flops)


@click.command()
@click.option("--model", "name", required=True, help="A model on this machine: its directory, file or name.")
@click.option("--gpus", default=1, type=Whole(1), show_default=True, help="How many there are.")
@click.option("--gpu", default="h100", show_default=True, help=f"{', '.join(GPUS)}, or its memory: 80GB.")
@click.option("--runs", default=1, type=Whole(1), show_default=True, help="Runs that train at a time.")
@click.option("--rank", default=32, type=Whole(1), show_default=True, help="Of their adapters.")
@click.option("--context", type=Whole(1), help="Longest sequence, if less than the model's own.")
@click.option(
    "--quantize", default="none", type=click.Choice(["none", "nf4", "fp8", "int8"]), show_default=True,
    help="How the frozen matrices are kept.",
)  # fmt: skip
@format_option
def plan(name: str, gpus: int, gpu: str, runs: int, rank: int, context: int | None, quantize: str) -> None:
    """Estimate what fits on some GPUs, how to split them, and what they should reach.

    \b
    tinkex plan --model Qwen/Qwen3-8B --gpus 8 --gpu h100 --runs 64
    """
    with needing("engine"):
        from tinkex.engine.protocol import EngineConfig
        from tinkex.engine.torch.sizing import model_sizes
    config = EngineConfig("", device="cpu", dtype="bfloat16", max_context=context, quantize=quantize)  # type: ignore[arg-type]
    sizes = model_sizes(place_of(name), config, rank)
    found = estimate(sizes, _read_gpu(gpu), gpus)
    show(
        {"model": name, **asdict(found), "run_bytes": sizes.run},
        name,
        dict(_lines(name, sizes, found, gpus, runs)),
    )


def _lines(name: str, sizes: ModelSizes, found: ClusterPlan, gpus: int, runs: int):
    """What to print: a label and a text each."""
    each = f"{plural(found.tensor, 'GPU')} each" if found.tensor > 1 else "one GPU each"
    together = gpus // found.tensor == 1
    split = "one engine trains and samples" if together else (
        f"{plural(found.trainers, 'trainer')} and {plural(found.samplers, 'sampler')}, {each}"
    )  # fmt: skip
    left = gpus % found.tensor
    yield "Split", split + (f"; {plural(left, 'GPU')} left over" if left else "")
    yield "Weights", f"{size(int(found.weights))} an engine; {size(int(found.free))} left"
    fits = "all fit" if runs <= found.resident_runs else "the others wait on disk and come back in turn"
    yield "Runs", f"{size(sizes.run)} each; {found.resident_runs} resident of {runs}: {fits}"
    full = f"{found.sequences} of a full context ({sizes.facts.context} tokens) on each sampler"
    yield "Sequences", f"{size(math.ceil(sizes.kv_token))} a token; {full}"
    yield "Pass", f"{size(sizes.activation_token)} a token of a micro-batch, layers recomputed"
    seconds = f"{found.publish_seconds:.2f} s at 25 Gbit/s"
    yield "Publish", f"{size(found.publish_bytes)} to each node that samples: {seconds}"
    yield "Training", f"about {found.trained:,.0f} tokens/s in all"
    length = min(_LENGTH, sizes.facts.context)
    yield "Sampling", f"about {found.decoded:,.0f} tokens/s in all, at {length} tokens a sequence"
    split = f",tensor={found.tensor}" if found.tensor > 1 else ""
    placed = f"{split},trainers={found.trainers},samplers={found.samplers},gpus={found.tensor}"
    command = f"--model {name}{split}" if together else f"--cluster auto --model {name}{placed}"
    yield "Start", f"tinkex serve {command}"
