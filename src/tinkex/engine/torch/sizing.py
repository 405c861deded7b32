"""What a model takes, before it is loaded: `ModelFacts`, and bytes by use for `tinkex plan`.

Reads only the model's configuration; tensors are on the meta device. Knows no prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.facts import ModelFacts
from tinkex.engine.protocol import EngineConfig
from tinkex.engine.torch import memory
from tinkex.engine.torch.adapters import lay_out
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.engine import choose_device
from tinkex.engine.torch.kv import PAGE, page_bytes
from tinkex.engine.torch.load import outline, read_fields
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.transformers_model import TransformersDecoder
from tinkex.engine.torch.quantised_files import method_name, quantisation
from tinkex.engine.torch.states import slot_bytes
from tinkex.types.params import LoraConfig

_BYTES = {"nf4": 0.5 + 4 / 64, "fp8": 1.0, "int8": 1.0}  # of a packed value; a row's scale is little
_KINDS = ("attn", "mlp", "unembed")
_PARTS = 4  # of a live adapter: parameters, gradients, two moments


def model_facts(path: Path, engine: EngineConfig) -> ModelFacts:
    """The facts of the model at `path` on an engine of these settings.

    >>> model_facts(Path("models/Qwen3-8B"), EngineConfig("", quantize="nf4")).fits     # doctest: +SKIP
    True
    """
    device, dtype = choose_device(engine)
    scheme = ""
    if path.suffix == ".gguf":
        scheme = "gguf"
    elif given := quantisation(read_fields(path)):
        scheme = method_name(given)
    decoder, packed = outline(path, Backend()), outline(path, Backend())
    packed.quantise(dtype)
    config = decoder.config
    in_matrices = sum(matrix.part_shape(i).numel() for matrix, i in packed.slots().values())
    plain = decoder.parameter_count - in_matrices
    # Files that stay as they are: unknown until they are read, so as if dequantised.
    each = _BYTES.get(engine.quantize, float(dtype.itemsize))
    context = min(engine.max_context or config.max_context, config.max_context)
    weights = int(plain * dtype.itemsize + in_matrices * each)
    kv = -(-context // PAGE) * page_bytes(config.kv_shapes, dtype)
    free = int(memory.free_bytes(device))
    return ModelFacts(
        family=config.arch,
        parameters=decoder.parameter_count,
        active_parameters=decoder.parameter_count - _idle(packed, config),
        layers=config.layers,
        context=context,
        quantisation=scheme,
        lora_per_rank={kind: _per_rank(decoder, kind) for kind in _KINDS},
        weight_bytes=weights,
        kv_bytes=kv,
        free_bytes=free,
        fits=weights + kv <= free,
        limits=decoder.limits if isinstance(decoder, TransformersDecoder) else (),
    )


def _idle(packed: Decoder, config: ModelConfig) -> int:
    """Parameters of the experts that a token does not use."""
    if config.experts is None:
        return 0
    routed = sum(m.part_shape(i).numel() for name, (m, i) in packed.slots().items() if ".experts." in name)
    return routed - routed * config.experts.per_token // config.experts.count


def _per_rank(decoder: Decoder, kind: str) -> int:
    lora = LoraConfig(rank=1, **{f"train_{one}": one == kind for one in _KINDS})
    return sum(shape.size for shape in lay_out(decoder.sites(), lora).values())


@dataclass(frozen=True)
class ModelSizes:
    """Bytes by use."""

    facts: ModelFacts
    adapter: int  # published, or as a file: fp32
    run: int  # resident, with gradients and moments
    kv_token: float  # of one token's keys and values, in all layers
    state: int  # of a sequence's recurrent states
    activation_token: int  # of one token of a pass, layers recomputed


def model_sizes(path: Path, config: EngineConfig, rank: int) -> ModelSizes:
    """What the model at `path` takes on an engine of these settings, with adapters of one rank."""
    facts = model_facts(path, config)
    decoder = outline(path, Backend())
    shape, itemsize = decoder.config, 4 if config.dtype == "float32" else 2
    parameters = sum(one.size for one in lay_out(decoder.sites(), LoraConfig(rank=rank)).values())
    pages = -(-facts.context // PAGE)
    return ModelSizes(
        facts=facts,
        adapter=4 * parameters,
        run=4 * parameters * _PARTS,
        kv_token=facts.kv_bytes / (pages * PAGE),
        state=slot_bytes(shape.state_shapes),
        activation_token=memory.activation_bytes(shape, itemsize, recompute=True),
    )
