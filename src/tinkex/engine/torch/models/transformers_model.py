"""A transformers model as a decoder, for architectures that `families` does not know.

Its attention calls our `Attend` and its Linears call our adapters, so it trains and samples as our own
decoder does (`transformers_blocks`). transformers is imported when such a model is loaded, and runs no code
of the model's directory.

Shapes: T tokens, D width.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tinkex.engine.torch.hooks import Attend, ForwardContext, LoraHook, Sites
from tinkex.engine.torch.models.architecture import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    RecurrentConfig,
)
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.models.block import Block
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.norms import NormConfig
from tinkex.engine.torch.models.transformers_blocks import (
    AdaptedExperts,
    AdaptedLinear,
    HeadInput,
    ModelPass,
    attend_through,
    recomputed,
    recurrent_mixers,
    running,
)
from tinkex.engine.torch.models.weights import UNEMBED
from tinkex.engine.torch.states import StateGroup
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.torch.backend import Backend
    from tinkex.engine.torch.images import FeatureRows

log = logging.getLogger("tinkex")

_NAME = "tinkex"  # of our attention among transformers' implementations
_ROUTER = re.compile(r"(^|\.)(router|gate|\w+_gate)$")
_GAIN = 50.0  # of the head's input when a model is tried, so that a softcap shows
_TRIED = (5, 3)  # lengths of the sequences that a model is tried with
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")


# -- the decoder ---------------------------------------------------------------------------------------


class TransformersDecoder(Decoder):
    """A decoder whose layers are transformers' modules; `load_transformers` makes one."""

    def __init__(self, config: ModelConfig, model: Any, head_name: str, backend: Backend) -> None:
        """`model` has our modules already."""
        Block.__init__(self)
        self.config, self.backend, self.model, self.head_name = config, backend, model, head_name
        self.embedding = model.get_input_embeddings().weight
        self.head = None if config.tied else model.get_output_embeddings().weight
        self.packed_head, self.shards, self.vocab_rows = None, None, config.padded_vocab

    @property
    def limits(self) -> tuple[str, ...]:
        """What it cannot do and most models can, in words."""
        slow = "recurrent layers compute prompts one sequence after another"
        limits = "plain torch: no fast path", "not deterministic on CUDA"
        return (*limits, slow) if self.config.state_shapes else limits

    def forward(
        self,
        tokens_T: Tensor,
        positions: Tensor | tuple[Tensor, Tensor],
        attend: Attend,
        lora: LoraHook | None = None,
        *,
        states: Sequence[StateGroup] = (),
        images: FeatureRows | None = None,
        checkpoint: bool = False,
    ) -> Tensor:
        assert images is None, "these models read only text"
        assert isinstance(positions, Tensor), "angles are transformers' own"
        context = ForwardContext(self.backend, (), attend, lora, {}, positions, states)
        current = ModelPass(context, [], checkpoint, starts=_starts(context))
        h_TD, _ = run(self.model, tokens_T, positions, current)
        return h_TD if self.config.logit_scale == 1.0 else h_TD * self.config.logit_scale

    def sites(self) -> Sites:
        sites = super().sites()
        width, (head,) = sites[UNEMBED]
        return sites | {UNEMBED: (width, (head._replace(name=self.head_name),))}

    def weights(self) -> dict[str, Tensor]:
        inside = {id(weight) for block in self._blocks() for weight in block.parameters()}
        own = {
            name: weight.detach()
            for name, weight in self.model.named_parameters()
            if id(weight) not in inside
        }
        return own | {name: view for block in self._blocks() for name, view in block.weights().items()}


def _starts(context: ForwardContext) -> list[list[int]]:
    """The first position of every sequence of every group of states."""
    found = []
    for group in context.states:
        assert context.positions is not None
        positions_T = context.positions if group.rows_T is None else context.positions[group.rows_T]
        firsts = [0, *itertools.accumulate(group.lengths)][:-1]
        found.append(positions_T[firsts].tolist())
    return found


def run(model: Any, tokens_T: Tensor, positions_T: Tensor, current: ModelPass) -> tuple[Tensor, Tensor]:
    """What the head of a model is given, and what the model makes of it; [T, D] both."""
    with running(current):
        out = model(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False).logits
    (h,) = current.head
    return h[0], out[0]


# -- loading -------------------------------------------------------------------------------------------


def load_transformers(
    path: Path,
    fields: Mapping[str, Any],
    vocab_size: int | None,
    device: str | torch.device,
    dtype: torch.dtype,
    quantize: str,
    backend: Backend,
) -> TransformersDecoder:
    """The model of a directory, whose config.json has `fields`; the other arguments are `load_decoder`'s."""
    with _explained(path, fields) as transformers:
        options = {"dtype": dtype, "attn_implementation": _NAME, "output_loading_info": True}
        transformers.utils.logging.disable_progress_bar()
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, **options
        )
        if missing := sorted(info["missing_keys"]):
            raise InvalidInputError(f"its files have no {missing[0]} ({len(missing)} weights are missing)")
        model = loaded.eval().requires_grad_(False)
        decoder = _assemble(model, fields, vocab_size, backend)
    if quantize != "none":
        for block in decoder.modules():
            if isinstance(block, Block) and block is not decoder:
                _pack(block, quantize, dtype, torch.device(device))
    decoder = decoder.to(device)
    log.warning("%s: %r is not one of our families, so transformers %s computes it: %s",
                path, decoder.config.arch, transformers.__version__, "; ".join(decoder.limits))  # fmt: skip
    return decoder


def outline_transformers(
    path: Path, fields: Mapping[str, Any], vocab_size: int | None, backend: Backend
) -> TransformersDecoder:
    """The model of a directory on tensors without memory."""
    with _explained(path, fields) as transformers, torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=_NAME)
        return _assemble(model.eval().requires_grad_(False), fields, vocab_size, backend)


@contextlib.contextmanager
def _explained(path: Path, fields: Mapping[str, Any]) -> Iterator[Any]:
    """transformers, ready for our attention; what it says when it fails becomes one sentence."""
    arch, named = fields.get("model_type"), ", ".join(map(str, fields.get("architectures") or ()))
    what = f"{path}: model_type {arch!r} ({named or 'no architecture named'})"
    ours = f"{what} is not one of our families"
    try:
        import transformers
    except ImportError:
        raise InvalidInputError(
            f"{ours}; transformers may know it: pip install 'tinkex[tokenizers]'"
        ) from None
    if arch not in transformers.CONFIG_MAPPING:
        code = " and code in a model's directory is not run" if fields.get("auto_map") else ""
        raise InvalidInputError(
            f"{ours}, and transformers {transformers.__version__} does not know it{code}; "
            "a newer one may: pip install -U transformers"
        )
    if arch not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InvalidInputError(f"{ours}, and transformers has no causal language model of it")
    if fields.get("quantization_config"):
        raise InvalidInputError(f"{ours}: quantised files are read only of those")
    transformers.AttentionInterface.register(_NAME, attend_through)
    try:
        yield transformers
    except InvalidInputError as error:
        raise InvalidInputError(f"{ours}, and through transformers it cannot run: {error}") from error
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise InvalidInputError(
            f"{ours}, and transformers {transformers.__version__} cannot run it: {first or repr(error)}"
        ) from error


def _pack(block: Block, scheme: str, dtype: torch.dtype, device: torch.device) -> None:
    """Keep the matrices of a block quantised."""
    views = block.weights()
    block.quantise(dtype)
    for name, (matrix, part) in block.slots().items():
        matrix.put(part, views[name].contiguous(), scheme, device)
    block.settle()


def _assemble(
    model: Any, fields: Mapping[str, Any], vocab_size: int | None, backend: Backend
) -> TransformersDecoder:
    """Put our modules into a model, and describe it by what a first pass shows."""
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise InvalidInputError("its head has a bias" if head else "it has no head over a vocabulary")
    head_name = next(name for name, module in model.named_modules() if module is head)
    model.set_output_embeddings(HeadInput(head.weight))
    for name, module in list(model.named_modules()):
        if hasattr(module, "is_transposed"):  # experts that are stacked tensors
            _replace(model, name, AdaptedExperts(module, name))
    attention, rows = _try(model, backend)
    count = getattr(text, "num_hidden_layers", 0) or 1 + max(attention, default=-1)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    layers: list[nn.Module] = list(stacks[0]) if stacks else []
    others = [i for i in range(count) if i not in attention]
    if not attention or (others and not layers):
        raise InvalidInputError(f"the attention of layer {others[0]} does not go through AttentionInterface")
    mixers = recurrent_mixers(model, {i: layers[i] for i in others})
    for layer in layers:
        recomputed(layer)
    for name, linear in list(model.named_modules()):
        each_token = isinstance(linear, nn.Linear) and rows.get(name) == {sum(_TRIED)}
        if each_token and not _ROUTER.search(name):
            _replace(model, name, AdaptedLinear(linear, name))
    recurrent = {i: RecurrentConfig(mixer.shapes) for i, mixer in mixers.items()}
    mlps, eos = _mlps(model, count), fields.get("eos_token_id", getattr(text, "eos_token_id", None))
    vocab, width = head.weight.shape
    config = ModelConfig(
        arch=str(fields["model_type"]),
        width=width,
        vocab_size=min(vocab_size or vocab, vocab),
        padded_vocab=vocab,
        max_context=_max_context(text),
        tied=head.weight is model.get_input_embeddings().weight,
        norm=NormConfig(),
        stack=tuple(LayerConfig((attention | recurrent)[i], mlps[i]) for i in range(count)),
        eos_ids=() if eos is None else tuple(eos if isinstance(eos, list | tuple) else [int(eos)]),
        **({} if head.weight.is_meta else _of_logits(model, backend, attention, bool(mixers))),
    )
    return TransformersDecoder(config, model, head_name, backend)


def _mlps(model: nn.Module, count: int) -> list[MlpConfig | ExpertsConfig]:
    """What stands for the Linears of each layer in estimates of memory, or its experts."""
    widths, experts = [0] * count, {}
    for module in model.modules():
        if isinstance(module, AdaptedLinear) and 0 <= module.site.layer < count:
            widths[module.site.layer] += module.in_features + module.out_features
        if isinstance(module, AdaptedExperts):
            experts[module.layer] = module.experts
    if not any(widths):
        raise InvalidInputError("it has no Linear layers for adapters")
    return [experts.get(i) or MlpConfig(width // 3) for i, width in enumerate(widths)]


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)  # transformers' constructors take no modules of ours


def _max_context(text: Any) -> int:
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # its angles change beyond, of all sequences of a batch
        return rope.get("original_max_position_embeddings") or text.original_max_position_embeddings
    for name in _LENGTHS:
        if isinstance(length := getattr(text, name, None), int):
            return length
    raise InvalidInputError(f"config.json does not say how long its context is ({', '.join(_LENGTHS)})")


def _tokens(model: Any) -> tuple[Tensor, Tensor]:
    """The tokens and positions of the sequences that a model is tried with."""
    weight = model.get_input_embeddings().weight
    positions_T = torch.cat([torch.arange(n) for n in _TRIED]).to(weight.device)
    tokens_T = (7 + 13 * torch.arange(len(positions_T))) % weight.shape[0]
    return tokens_T.to(weight.device), positions_T


@torch.no_grad()
def _try(model: Any, backend: Backend) -> tuple[dict[int, AttentionConfig], dict[str, set[int]]]:
    """What attention is given, by layer, and how many rows every Linear is."""
    seen: dict[int, AttentionConfig] = {}
    rows: dict[str, set[int]] = {}

    def recorder(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows.setdefault(name, set()).add(args[0].shape[:-1].numel())

        return record

    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(recorder(name)) for name, module in linears]
    layers = 1 + max((getattr(m, "layer_idx", None) or 0 for m in model.modules()), default=0)
    attend = PackedAttend(_TRIED, [None] * layers)
    run(model, *_tokens(model), ModelPass(ForwardContext(backend, (), attend, None, {}), [], seen=seen))
    for hook in hooks:
        hook.remove()
    return seen, rows


@torch.no_grad()
def _of_logits(
    model: Any, backend: Backend, attention: Mapping[int, AttentionConfig], recurrent: bool
) -> dict[str, Any]:
    """What the model does to its head's output; refuses one that computes otherwise than by itself."""
    tokens_T, positions_T = _tokens(model)
    windows = [attention[i].window if i in attention else None for i in range(1 + max(attention))]
    context = ForwardContext(backend, (), PackedAttend(_TRIED, windows), None, {}, positions_T)
    packed = context._replace(states=[StateGroup(_TRIED, tokens_T.device)] if recurrent else ())
    asked = ModelPass(packed, [], gain=_GAIN, starts=_starts(packed))
    h_TD, out_TD = run(model, tokens_T, positions_T, asked)
    close = 1e-3 if h_TD.dtype == torch.float32 else 3e-2
    model.set_attn_implementation("eager")
    pairs = zip(tokens_T.split(_TRIED), positions_T.split(_TRIED), strict=True)
    alone_TD = torch.cat([run(model, *pair, ModelPass(context, []))[0] for pair in pairs])
    model.set_attn_implementation(_NAME)
    if not (h_TD - alone_TD).norm() <= close * alone_TD.norm():
        raise InvalidInputError("sequences of one packed batch change each other's results")
    given, out = (_GAIN * h_TD).double(), out_TD.double()
    ratio = float((given * out).sum() / given.square().sum())
    if (out - ratio * given).norm() <= close * out.norm():
        values = [v for v in model.config.to_dict().values() if isinstance(v, int | float) and v > 0]
        return {"logit_scale": min([1.0, *values, *(1 / v for v in values)], key=lambda v: abs(v - ratio))}
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap and (out - cap * torch.tanh(given / cap)).norm() <= close * out.norm():
        return {"logit_softcap": cap}
    raise InvalidInputError("its logits are neither its head's output, nor that scaled or capped")
