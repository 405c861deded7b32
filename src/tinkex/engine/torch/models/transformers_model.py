"""A transformers model as a decoder, for architectures that `families` does not know.

Its attention calls our `Attend` and its Linears call our adapters, so it trains and samples as our own
decoder does. transformers is imported when such a model is loaded, and runs no code of the model's directory.

Shapes: T tokens, N rows, D width, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from tinkex.engine.torch.hooks import Attend, ForwardContext, LoraHook, Part, SinkAttend, Site, Sites
from tinkex.engine.torch.models.architecture import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
)
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.models.block import Block
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.moe import ExpertMlp
from tinkex.engine.torch.models.projection import Projection, total
from tinkex.engine.torch.models.weights import UNEMBED
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.torch.backend import Backend
    from tinkex.engine.torch.images import FeatureRows
    from tinkex.engine.torch.states import StateGroup

log = logging.getLogger("tinkex")

_NAME = "tinkex"  # of our attention among transformers' implementations
_MIXER = re.compile(r"\.(\w*attn\w*|\w*attention\w*|mixer|mamba)\.")
_ROUTER = re.compile(r"(^|\.)(router|gate|\w+_gate)$")
_GAIN = 50.0  # of the head's input when a model is tried, so that a softcap shows
_TRIED = (5, 3)  # lengths of the sequences that a model is tried with
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")


class _Pass(NamedTuple):
    """What the modules of a model need to know of the pass that runs through it."""

    context: ForwardContext
    head: list[Tensor]  # takes the head's input
    checkpoint: bool = False
    gain: float = 1.0
    seen: dict[int, AttentionConfig] | None = None  # takes what attention is given, when a model is tried


_PASS: ContextVar[_Pass] = ContextVar("pass")


@contextlib.contextmanager
def _running(current: _Pass) -> Iterator[None]:
    token = _PASS.set(current)
    try:
        yield
    finally:
        _PASS.reset(token)


# -- the modules of a model that are ours --------------------------------------------------------------


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, s_aux: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls for every attention: the `Attend` of the pass that is running."""
    current, layer = _PASS.get(), module.layer_idx
    q_THC, k_TGC, v_TGC = (x[0].transpose(0, 1) for x in (query, key, value))
    if current.seen is not None:
        _check_attention(module, query, key, attention_mask, options)
        if layer in current.seen:
            raise InvalidInputError(
                f"two of its attentions are of layer {layer}, and our KV cache has one each"
            )
        (heads, dim), window = q_THC.shape[1:], _window(module, options)
        wide = None if v_TGC.shape[-1] == dim else v_TGC.shape[-1]
        current.seen[layer] = AttentionConfig(heads, k_TGC.shape[1], dim, None, window, value_dim=wide)
    if scaling is not None and scaling != (own := query.shape[-1] ** -0.5):
        q_THC = q_THC * (scaling / own)
    attend = current.context.attend
    if s_aux is None:
        o_THC = attend(layer, q_THC, k_TGC, v_TGC)
    else:
        o_THC = cast(SinkAttend, attend)(layer, q_THC, k_TGC, v_TGC, s_aux)
    return o_THC[None], None


def _check_attention(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> None:
    """Refuse attention that asks for more than `Attend` does."""
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise InvalidInputError("its attention is not causal")
    if mask is not None:
        raise InvalidInputError("its attention has a mask of its own (such as ALiBi)")
    if query.shape[2] != key.shape[2]:
        raise InvalidInputError("its attention has keys that are not of its own tokens")
    for name in ("softcap", "position_bias"):
        if options.get(name) is not None:
            raise InvalidInputError(f"its attention has {name}")


def _window(module: Any, options: Mapping[str, Any]) -> int | None:
    config, layer = module.config, module.layer_idx
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    kind = kinds[layer] if kinds else None
    if kind == "chunked_attention":
        raise InvalidInputError("it attends within chunks of its context")
    if (given := options.get("sliding_window")) is not None or kind is not None:
        return given or (window if kind == "sliding_attention" else None)
    if window is not None and "sliding_window" not in options:
        raise InvalidInputError("its sliding windows are in its masks alone")
    return None


class AdaptedLinear(Projection):
    """A Linear of the model: one site of one part."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        kind = "attn" if _MIXER.search(name) else "mlp"
        with torch.device("meta"):
            part = Part(name, linear.out_features, kind)
            super().__init__(
                Site(_layer_of(name), name), linear.in_features, (part,), linear.bias is not None
            )
        self.out_features = linear.out_features
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous().t(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y_NO = total(super().forward(x.reshape(-1, self.in_features), _PASS.get().context))
        return y_NO.view(*x.shape[:-1], self.out_features)


class AdaptedExperts(ExpertMlp):
    """Stacked experts of the model, whose own router chooses among them."""

    def __init__(self, inner: Any, name: str) -> None:
        Block.__init__(self)
        if getattr(inner, "has_post_expert_norm", False) or not name.endswith(".experts"):
            raise InvalidInputError(f"its experts ({name}) are not of a kind that adapters know")
        self.layer, self.name, self.selection_bias = _layer_of(name), name.removesuffix(".experts"), None
        self.router, self.router_bias, self.shared, self.shared_gate = None, None, None, None
        self.router_scale = self.expert_scale = self.norms = None
        self.in_turn = inner.has_gate and not inner.is_concatenated  # rows of gate and up
        first = "gate_up_proj" if inner.has_gate else "up_proj"
        self.gate_up = self._taken(inner, first, inner.is_transposed, self.in_turn)
        self.down = self._taken(inner, "down_proj", inner.is_transposed)
        self.gate_up_bias = self._taken(inner, f"{first}_bias", rows_in_turn=self.in_turn)
        self.down_bias = self._taken(inner, "down_proj_bias")
        self.inner = inner  # its activation
        count, self.width, width = self.down.shape
        self.experts = ExpertsConfig(count, 1, width, gated=inner.has_gate, bias=inner.has_bias)

    @staticmethod
    def _taken(inner: Any, name: str, transposed: bool = False, rows_in_turn: bool = False) -> Any:
        """A stacked weight [E, O, I] or bias [E, O], which the model's own module then has no more."""
        weight = getattr(inner, name, None)
        if weight is None:
            return None
        delattr(inner, name)
        weight = weight.detach().transpose(1, 2) if transposed else weight.detach()
        if rows_in_turn:
            weight = torch.cat((weight[:, 0::2], weight[:, 1::2]), dim=1)
        return nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:  # type: ignore[override]
        self.experts = replace(self.experts, per_token=expert_TK.shape[-1])
        if x.is_meta:
            return torch.empty_like(x)
        x_TD, weight_TK = x.reshape(-1, self.width), weight_TK.to(x.dtype)
        return self._routed(x_TD, weight_TK, expert_TK, _PASS.get().context).view(x.shape)

    def _activate(self, gate_up: Tensor, context: ForwardContext) -> Tensor:
        if not self.experts.gated:
            return self.inner.act_fn(gate_up)
        if self.in_turn:
            gate_up = torch.stack(gate_up.chunk(2, dim=-1), dim=-1).flatten(-2)
        return self.inner._apply_gate(gate_up)


class HeadInput(nn.Module):
    """In place of the head: keeps what it is given, which our own head takes."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        current = _PASS.get()
        current.head.append(x)
        return x * current.gain


def _layer_of(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _recomputed(layer: nn.Module) -> None:
    """Have a layer recompute itself in the backward of passes that ask for it."""
    forward = layer.forward

    def run(*args: Any, **options: Any) -> Any:
        current = _PASS.get()
        if not (current.checkpoint and torch.is_grad_enabled()):
            return forward(*args, **options)

        def again(*args: Any) -> Any:  # in the backward too, which may run in another thread
            with _running(current):
                return forward(*args, **options)

        return recompute(again, *args, use_reentrant=False, preserve_rng_state=False)

    layer.forward = run


# -- the decoder ---------------------------------------------------------------------------------------


class TransformersDecoder(Decoder):
    """A decoder whose layers are transformers' modules; `load_transformers` makes one."""

    def __init__(self, config: ModelConfig, model: Any, head_name: str, backend: Backend) -> None:
        """`model` has our modules already."""
        Block.__init__(self)
        self.config, self.backend, self.model, self.head_name = config, backend, model, head_name
        self.embedding = model.get_input_embeddings().weight
        self.head = None if config.tied else model.get_output_embeddings().weight
        self.packed_head = None

    @property
    def limits(self) -> tuple[str, ...]:
        """What it cannot do and most models can, in words."""
        return ("plain torch: no fast path", "not deterministic on CUDA")

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
        assert images is None, "these models read text alone"
        assert isinstance(positions, Tensor), "angles are transformers' own"
        context = ForwardContext(self.backend, (), attend, lora, {}, positions, states)
        h_TD = run(self.model, tokens_T, positions, _Pass(context, [], checkpoint))[0]
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


def run(model: Any, tokens_T: Tensor, positions_T: Tensor, current: _Pass) -> tuple[Tensor, Tensor]:
    """What the head of a model is given, and what the model makes of it; [T, D] both."""
    with _running(current):
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
    if fields.get("quantization_config"):
        raise InvalidInputError(f"{ours}: quantised files are read of those alone")
    transformers.AttentionInterface.register(_NAME, _attention)
    try:
        yield transformers
    except InvalidInputError as error:
        raise InvalidInputError(f"{ours}, and through transformers it cannot run: {error}") from error
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise InvalidInputError(
            f"{ours}, and transformers {transformers.__version__} cannot run it: {first or error!r}"
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
    tied = head.weight is model.get_input_embeddings().weight
    head_name = next(name for name, module in model.named_modules() if module is head)
    model.set_output_embeddings(HeadInput(head.weight))
    stacked = [(name, module) for name, module in model.named_modules() if hasattr(module, "is_transposed")]
    experts = [AdaptedExperts(module, name) for name, module in stacked]
    for (name, _), module in zip(stacked, experts, strict=True):
        _replace(model, name, module)
    attention, rows = _try(model, backend)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = {name: module for name, module in linears.items() if rows.get(name) == {sum(_TRIED)}}
    for name, linear in adapted.items():
        if not _ROUTER.search(name):
            _replace(model, name, AdaptedLinear(linear, name))
    count = getattr(text, "num_hidden_layers", 0) or 1 + max(attention, default=-1)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    for layer in stacks[0] if stacks else ():
        _recomputed(layer)
    blocks = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    if not blocks:
        raise InvalidInputError("it has no Linear layers for adapters")
    if wild := [layer for layer in range(count) if layer not in attention]:
        raise InvalidInputError(f"the attention of layer {wild[0]} does not go through AttentionInterface")
    widths = [0] * count  # of what the Linears of a layer read and make
    for block in blocks:
        if 0 <= block.site.layer < count:
            widths[block.site.layer] += block.in_features + block.out_features
    mlps: list[MlpConfig | ExpertsConfig] = [MlpConfig(width // 3) for width in widths]
    for module in experts:
        mlps[module.layer] = module.experts
    eos = fields.get("eos_token_id", getattr(text, "eos_token_id", None))
    vocab, width = head.weight.shape
    config = ModelConfig(
        arch=str(fields["model_type"]),
        width=width,
        vocab_size=min(vocab_size or vocab, vocab),
        padded_vocab=vocab,
        max_context=_max_context(text),
        tied=tied,
        norm=NormConfig(),
        stack=tuple(LayerConfig(attention[i], mlps[i]) for i in range(count)),
        eos_ids=() if eos is None else tuple(eos if isinstance(eos, list | tuple) else [int(eos)]),
        **({} if head.weight.is_meta else _of_logits(model, backend, attention)),
    )
    return TransformersDecoder(config, model, head_name, backend)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _max_context(text: Any) -> int:
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
    run(model, *_tokens(model), _Pass(ForwardContext(backend, (), attend, None, {}), [], seen=seen))
    for hook in hooks:
        hook.remove()
    return seen, rows


@torch.no_grad()
def _of_logits(model: Any, backend: Backend, attention: Mapping[int, AttentionConfig]) -> dict[str, Any]:
    """What the model does to its head's output; refuses one that computes otherwise than by itself."""
    tokens_T, positions_T = _tokens(model)
    windows = [attention[i].window for i in sorted(attention)]
    context = ForwardContext(backend, (), PackedAttend(_TRIED, windows), None, {})
    h_TD, out_TD = run(model, tokens_T, positions_T, _Pass(context, [], gain=_GAIN))
    close = 1e-3 if h_TD.dtype == torch.float32 else 3e-2
    model.set_attn_implementation("eager")
    pairs = zip(tokens_T.split(_TRIED), positions_T.split(_TRIED), strict=True)
    alone_TD = torch.cat([run(model, *pair, _Pass(context, []))[0] for pair in pairs])
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
