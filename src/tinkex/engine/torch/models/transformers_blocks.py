"""What we put into a transformers model: its attention, Linears, experts, recurrent mixers and head.

Modules read the state of the running pass from `CURRENT`, because the transformers modules around them do not
pass it on.

Shapes: T tokens, N rows, B sequences of L tokens, D width, H query heads, G kv heads, C head dim,
K experts of a token, E experts, I in-features, O out-features.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from tinkex.engine.torch.hooks import ForwardContext, Frozen, Part, SinkAttend, Site
from tinkex.engine.torch.models.architecture import AttentionConfig, ExpertsConfig
from tinkex.engine.torch.models.block import Block
from tinkex.engine.torch.models.moe import ExpertMlp, Routing
from tinkex.engine.torch.models.projection import Projection, total
from tinkex.errors import InvalidInputError

_MIXER = re.compile(r"\.(\w*attn\w*|\w*attention\w*|mixer|mamba)\.")


class ModelPass(NamedTuple):
    """What the modules of a model need to know of the pass that runs through it."""

    context: ForwardContext
    head: list[Tensor]  # takes the head's input
    checkpoint: bool = False
    gain: float = 1.0
    starts: Sequence[Sequence[int]] = ()  # the first position of every sequence of every `context.states`
    rows_N: Tensor | None = None  # the tokens that a recurrent mixer computes; None: all
    seen: dict[int, AttentionConfig] | None = None  # takes what attention is given, when a model is tried


CURRENT: ContextVar[ModelPass] = ContextVar("model_pass")


@contextlib.contextmanager
def running(current: ModelPass) -> Iterator[None]:
    token = CURRENT.set(current)
    try:
        yield
    finally:
        CURRENT.reset(token)


# -- the modules of a model that are ours --------------------------------------------------------------


def attend_through(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, s_aux: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls for every attention: the `Attend` of the pass that is running."""
    current, layer = CURRENT.get(), module.layer_idx
    q_THC, k_TGC, v_TGC = (x[0].transpose(0, 1) for x in (query, key, value))
    if current.seen is not None:
        _check(module, query, key, attention_mask, options)
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


def _check(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> None:
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
        raise InvalidInputError("its sliding windows are only in its masks")
    return None


class AdaptedLinear(Projection):
    """A Linear of the model: one site of one part."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        kind = "attn" if _MIXER.search(name) else "mlp"
        with torch.device("meta"):
            part = Part(name, linear.out_features, kind)
            super().__init__(Site(layer_of(name), name), linear.in_features, (part,), linear.bias is not None)
        self.out_features = linear.out_features
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous().t(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        current, x_NI = CURRENT.get(), x.reshape(-1, self.in_features)
        if current.rows_N is None or current.context.lora is None:
            y_NO = total(super().forward(x_NI, current.context))
        else:
            y_NO = Frozen(self.weight, self.bias, self.packed, current.context.backend.linear)(x_NI)
            y_NO = current.context.lora(self.site, x_NI, y_NO, rows=current.rows_N)
        return y_NO.view(*x.shape[:-1], self.out_features)


class AdaptedExperts(ExpertMlp):
    """Stacked experts of the model, whose own router chooses among them."""

    def __init__(self, inner: Any, name: str) -> None:
        Block.__init__(self)
        if getattr(inner, "has_post_expert_norm", False) or not name.endswith(".experts"):
            raise InvalidInputError(f"its experts ({name}) are not of a kind that adapters know")
        self.layer, self.name, self.selection_bias = layer_of(name), name.removesuffix(".experts"), None
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
        routing = Routing(weight_TK, expert_TK)
        return self.routed(x_TD, routing, CURRENT.get().context).view(x.shape)

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
        current = CURRENT.get()
        current.head.append(x)
        return x * current.gain


class RecurrentMixer:
    """A recurrent module of the model: runs it on one sequence after another, each with its own state.

    Sequences that decode, one token each, run together. transformers' modules do not all go on from a state
    with several tokens at once, so those of a sequence that has a state run one by one.
    """

    def __init__(self, module: Any, layer: int, cache_layer: Any, x_BLD: Tensor) -> None:
        """`cache_layer` is transformers' own for this layer; any input `x_BLD` shows the states' shapes."""
        self.forward, self.layer, self._cache_layer = module.forward, layer, cache_layer
        self._argument = _cache_argument(module)
        tried = self._fresh()
        self._run(x_BLD, {}, tried)
        self._dtypes = [(kind, i, state.dtype) for kind, i, state in _kept(tried)]
        if not self._dtypes:
            raise InvalidInputError(f"its layer {layer} keeps no state that we know")
        self.shapes = tuple(tuple(state.shape[1:]) for _, _, state in _kept(tried))
        module.forward = self  # a hook of torch runs before or after a forward, never instead

    def __call__(self, *args: Any, **options: Any) -> Any:
        current = CURRENT.get()
        if not current.context.states:
            return self.forward(*args, **options)
        x_TD, y_TD = (args[0] if args else options.pop("hidden_states"))[0], None
        for group, starts in zip(current.context.states, current.starts, strict=True):
            rows_T = torch.arange(len(x_TD), device=x_TD.device) if group.rows_T is None else group.rows_T
            held = group.read(self.layer)
            new_TD, states = self._group(x_TD, rows_T.split(group.lengths), held, starts, options)
            if states:
                group.write(self.layer, states)
            if group.rows_T is not None:  # one of several groups
                y_TD = torch.empty_like(x_TD) if y_TD is None else y_TD
                y_TD[rows_T] = new_TD
            else:
                y_TD = new_TD
        assert y_TD is not None
        return y_TD[None]

    def _group(
        self, x_TD: Tensor, rows: Sequence[Tensor], held: Sequence[Tensor] | None, starts: Sequence[int],
        options: dict[str, Any],
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The results of a group's tokens, in their order, and the states after them."""
        if held is None:
            return torch.cat([self._on(x_TD, of_one[None], None, options) for of_one in rows]), []
        if all(starts) and max(map(len, rows)) == 1:
            cache = self._with(held)
            return self._on(x_TD, torch.stack(list(rows)), cache, options), self._states(cache)
        pieces, after = [], []
        for i, (of_one, start) in enumerate(zip(rows, starts, strict=True)):
            cache = self._fresh() if start == 0 else self._with([state[i : i + 1] for state in held])
            steps = of_one.split(len(of_one) if start == 0 else 1)
            pieces += [self._on(x_TD, step[None], cache, options) for step in steps]
            after.append(self._states(cache))
        return torch.cat(pieces), [torch.cat(states) for states in zip(*after, strict=True)]

    def _on(self, x_TD: Tensor, rows_BL: Tensor, cache: Any, options: dict[str, Any]) -> Tensor:
        """The results [B·L, D] of the tokens of B sequences, from the states in `cache` on."""
        with running(CURRENT.get()._replace(rows_N=rows_BL.flatten())):
            return self._run(x_TD[rows_BL], options, cache).flatten(0, 1)

    def _run(self, x_BLD: Tensor, options: dict[str, Any], cache: Any) -> Tensor:
        given = {**options, self._argument: None if cache is None else self._cache_of(cache)}
        y = self.forward(x_BLD, **given)
        return y if isinstance(y, Tensor) else y[0]

    def _cache_of(self, cache_layer: Any) -> Any:
        from transformers.cache_utils import Cache

        return Cache(layers=[cache_layer] * (self.layer + 1))

    def _fresh(self) -> Any:
        return type(self._cache_layer)(number_of_states=self._cache_layer.number_of_states)

    def _with(self, states: Sequence[Tensor]) -> Any:
        cache_layer = self._fresh()
        for (kind, i, dtype), state in zip(self._dtypes, states, strict=True):
            state = state.to(dtype, copy=True)
            cache_layer.lazy_initialization(**{kind: state}, state_idx=i)
            getattr(cache_layer, kind)[i] = state
            cache_layer.has_previous_state[i] = True
        return cache_layer

    def _states(self, cache_layer: Any) -> list[Tensor]:
        return [state.float() for _, _, state in _kept(cache_layer)]


def _cache_argument(module: Any) -> str:
    """The name under which a module's forward takes the cache; "" if it takes none."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in names), "")


def recurrent_mixers(model: Any, layers: Mapping[int, nn.Module]) -> dict[int, RecurrentMixer]:
    """The mixers of layers that have no attention, if they are all recurrent."""
    if not layers:
        return {}
    from transformers.cache_utils import DynamicCache

    caches, weight = DynamicCache(config=model.config).layers, model.get_input_embeddings().weight
    found = {}
    for index, layer in layers.items():
        modules = (m for m in layer.modules() if m is not layer and getattr(m, "layer_idx", None) == index)
        module = next((m for m in modules if _cache_argument(m)), None)
        if module is None or not hasattr(caches[index], "recurrent_states"):
            raise InvalidInputError(f"the attention of layer {index} does not go through AttentionInterface")
        with torch.no_grad():
            found[index] = RecurrentMixer(module, index, caches[index], weight[None, :3])
    return found


def _kept(cache_layer: Any) -> list[tuple[str, int, Tensor]]:
    """The states that a layer of transformers' cache holds, with the names of their kinds and numbers."""
    kinds = ("conv_states", "recurrent_states")
    found = ((kind, i, state) for kind in kinds for i, state in getattr(cache_layer, kind).items())
    return [(kind, i, state) for kind, i, state in found if state is not None]


def layer_of(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def recomputed(layer: nn.Module) -> None:
    """Have a layer recompute itself in the backward of passes that ask for it."""
    forward = layer.forward

    def run(*args: Any, **options: Any) -> Any:
        current = CURRENT.get()
        if not (current.checkpoint and torch.is_grad_enabled()):
            return forward(*args, **options)

        def again(*args: Any) -> Any:  # in the backward too, which may run in another thread
            with running(current):
                return forward(*args, **options)

        return recompute(again, *args, use_reentrant=False, preserve_rng_state=False)

    layer.forward = run  # transformers' own checkpointing is for training mode, in all layers or none
