"""The description of a decoder: frozen values that say what each layer is made of.

A layer is a norm placement, a mixer and an MLP. `families` makes a `ModelConfig` of a `config.json`;
`decoder` assembles the blocks that it describes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from tinkex.engine.torch.models.attend import Chunk
from tinkex.engine.torch.models.norms import PRE_NORMS, ExpertNorms, NormConfig, NormPlacement
from tinkex.engine.torch.models.rotary import Rope

T = TypeVar("T")


class KvShape(NamedTuple):
    """What a layer keeps of a token: a key and a value for each kv head."""

    heads: int
    head_dim: int
    value_dim: int
    values_in_keys: bool = False  # a value is the first numbers of its key


class Temperature(NamedTuple):
    """Queries of long contexts are multiplied with 1 + β·ln(1 + ⌊(position + offset) / length⌋)."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention, grouped by kv heads."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None  # how many positions, itself included, a token sees, or a `Chunk`; None: all
    # over each head, or over all heads together, or over each head after its rotation and without a weight
    qk_norm: Literal["head", "whole", "rotated"] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    scale: float | None = None  # of the logits; None: head_dim^-½
    temperature: Temperature | None = None
    sinks: bool = False  # a logit per query head that takes its share of the softmax and has no value
    gate: bool = False  # q_proj also gives, per head, a gate whose sigmoid multiplies the head's output
    fused: bool = False  # stored as one qkv_proj
    whole_images: bool = False  # a token of an image also sees the later ones of that image
    v_norm: bool = False  # values are normalised too, without a weight
    k_as_v: bool = False  # there is no v_proj: the projected key is the value as well
    share: int | None = None  # the earlier layer whose keys and values it uses instead of its own
    value_dim: int | None = None  # None: head_dim
    name: str = "self_attn"

    @property
    def kv_shape(self) -> KvShape | None:
        dims = self.head_dim, self.value_dim or self.head_dim
        return KvShape(self.kv_heads, *dims) if self.share is None else None


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (MLA)."""

    heads: int
    rank: int  # the width of the latent vector of which keys and values are made
    nope_dim: int  # dimensions of a head that are not rotated
    rope_dim: int
    value_dim: int
    rope: Rope
    scale: float  # of the logits
    query_rank: int | None = None  # None: one projection makes the queries
    bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(1, self.rank + self.rope_dim, self.rank, values_in_keys=True)


@dataclass(frozen=True)
class DeltaConfig:
    """A gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    by_key_head: bool = False  # stored as one matrix of q, k, v, z and one of b, a, key head by key head

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Of q, k, v and the gate z."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return keys, keys, values, values

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return sum(self.widths[:3])

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What a sequence carries on: the convolution's last inputs, and a matrix for each head."""
        inputs = self.conv_width - 1, self.channels
        return inputs, (self.value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class MambaConfig:
    """Mamba2."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int  # of heads that share B and C
    conv_width: int
    conv_bias: bool = True
    bias: bool = False  # of the projections
    norm_groups: int = 1  # of numbers that are normed together
    norm_over_ranks: bool = False  # one group, of which this is a rank's part
    step_limits: tuple[float, float] = (0.0, math.inf)
    name: str = "mamba"

    @property
    def width(self) -> int:
        """Of the gate and of x."""
        return self.heads * self.head_dim

    @property
    def shared_width(self) -> int:
        """Of B, and of C."""
        return self.groups * self.state_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.width + 2 * self.shared_width

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.conv_width - 1, self.channels), (self.heads, self.state_dim, self.head_dim)


@dataclass(frozen=True)
class RecurrentConfig:
    """A recurrent mixer that transformers computes, known by what a sequence carries on."""

    state_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MlpConfig:
    """down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate; "relu2" is relu(x)²."""

    width: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    fused: bool = False  # stored as one gate_up_proj
    gated: bool = True
    name: str = "mlp"
    matrices: tuple[str, str] = ("gate_up_proj", "down_proj")  # their names, where it is fused


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen and weighed.

    "softmax": over all experts, then the best; "softmax_of_best": only over the best; "sigmoid": of each.
    """

    score: Literal["softmax", "softmax_of_best", "sigmoid"] = "softmax"
    normalise: bool = True  # the chosen experts' weights sum to one
    bias: bool = False
    selection_bias: bool = False  # added to the scores to choose, not to weigh
    groups: int = 1  # of experts; only those of the `kept_groups` best can be chosen
    kept_groups: int = 1
    scale: float = 1.0  # of the weights
    norm: bool = False  # it reads x̂ times a stored vector and width^-½
    expert_scale: bool = False  # a stored number for each expert multiplies its weight
    on_input: bool = False  # the weights multiply what experts read, not what they give


class SharedExpert(NamedTuple):
    """The MLP of every token in addition to its experts; `gated`: times the sigmoid of a learned score.

    It is like one of them and stored inside their block, unless `mlp` says otherwise.
    """

    width: int
    name: str = "shared_experts"
    gated: bool = False
    mlp: MlpConfig | None = None


class ClampedSwiGlu(NamedTuple):
    """(up + 1)·gate·sigmoid(alpha·gate), with gate ≤ limit and |up| ≤ limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the dense MLP."""

    count: int
    per_token: int
    width: int
    router: RouterConfig = RouterConfig()
    activation: Literal["silu", "gelu_tanh", "relu2"] | ClampedSwiGlu = "silu"
    gated: bool = True
    bias: bool = False
    shared: SharedExpert | None = None
    latent_width: int | None = None  # experts read and write so many numbers, projected from and to the width
    transposed: bool | Literal["either"] = False  # stacked tensors are stored [E, in, out]
    interleaved: bool = False  # gate and up are stored in turn
    name: str = "mlp"  # "": of the layer itself
    norms: ExpertNorms | None = None

    @property
    def plain(self) -> bool:
        """Whether all experts are SwiGLU, clamped or not."""
        return (
            (self.activation == "silu" or isinstance(self.activation, ClampedSwiGlu))
            and self.gated
            and not (self.shared or self.latent_width)
            and not (self.norms or self.router.norm or self.router.expert_scale or self.router.on_input)
        )


@dataclass(frozen=True)
class LayerConfig:
    """What one layer is made of."""

    mixer: AttentionConfig | LatentConfig | DeltaConfig | MambaConfig | RecurrentConfig | None
    mlp: MlpConfig | ExpertsConfig | None
    norms: NormPlacement = PRE_NORMS


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Ids from `vocab_size` to `padded_vocab` are padding: logits of -inf."""

    arch: str
    width: int
    vocab_size: int
    padded_vocab: int
    max_context: int
    tied: bool
    norm: NormConfig
    stack: tuple[LayerConfig, ...]
    eos_ids: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()  # how names of tensors begin that are not read: vision towers, extra heads
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each block adds
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits become cap·tanh(logits / cap)
    layer_inputs: tuple[int, int] | None = None  # ids and width of a table of inputs of single layers
    layer_scalars: bool = False  # a stored number multiplies what leaves a layer
    vision_config: Mapping[str, Any] | None = None  # kept, not used: images are refused
    vocab_rows: int = 0  # of the embedding and the head, where they are a rank's part; 0: `padded_vocab`

    @property
    def layers(self) -> int:
        return len(self.stack)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct ropes: a pass computes the angles of each once."""
        found = (getattr(layer.mixer, "rope", None) for layer in self.stack)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @cached_property
    def attention(self) -> tuple[AttentionConfig, ...]:
        return tuple(layer.mixer for layer in self.stack if isinstance(layer.mixer, AttentionConfig))

    @property
    def _mlps(self) -> list[MlpConfig | ExpertsConfig | None]:
        return [layer.mlp for layer in self.stack]

    @cached_property
    def state_shapes(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """By recurrent layer: the shapes of the tensors that a sequence carries on."""
        mixers = enumerate(layer.mixer for layer in self.stack)
        kinds = DeltaConfig, MambaConfig, RecurrentConfig
        return {i: mixer.state_shapes for i, mixer in mixers if isinstance(mixer, kinds)}

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, as `AttentionConfig.window`."""
        return tuple(getattr(layer.mixer, "window", None) for layer in self.stack)

    @cached_property
    def whole_images(self) -> bool:
        return any(mixer.whole_images for mixer in self.attention)

    @cached_property
    def kv_shapes(self) -> tuple[KvShape | None, ...]:
        """Per layer: what its KV cache holds; None for a layer without one."""
        return tuple(
            layer.mixer.kv_shape if isinstance(layer.mixer, AttentionConfig | LatentConfig) else None
            for layer in self.stack
        )

    @cached_property
    def delta(self) -> DeltaConfig | None:
        return self._first(DeltaConfig)

    @cached_property
    def experts(self) -> ExpertsConfig | None:
        return self._first(ExpertsConfig)

    @cached_property
    def mamba(self) -> MambaConfig | None:
        return self._first(MambaConfig)

    def _first(self, kind: type[T]) -> T | None:
        """What the first layer has that has such a mixer or MLP."""
        found = (part for layer in self.stack for part in (layer.mixer, layer.mlp))
        return next((part for part in found if isinstance(part, kind)), None)

    @property
    def stored_key_heads(self) -> int:
        """Those that the rows of delta nets' projections are stored by; 0: they are not."""
        return self.delta.key_heads if self.delta and self.delta.by_key_head else 0

    @cached_property
    def kernels_serve(self) -> bool:
        """Whether kernels compute all of it on a GPU: pre-norm layers, each of attention or a gated delta net
        and of SwiGLU or experts. All attention is alike but for windows, and rotated by halves, whole heads
        or their first dimensions; q and k may be normalised head by head, and heads may have gates.
        """
        attention = self.attention
        if not attention or attention[0].rope is None or attention[0].rope.adjacent:
            return False
        first = attention[0]
        like = AttentionConfig(
            first.heads, first.kv_heads, first.head_dim, first.rope, None, first.qk_norm,
            first.qkv_bias, first.o_bias, sinks=first.sinks, gate=first.gate,
        )  # fmt: skip
        dense = [mlp for mlp in self._mlps if isinstance(mlp, MlpConfig)]
        experts = [mlp for mlp in self._mlps if isinstance(mlp, ExpertsConfig)]
        scales = self.embedding_scale, self.residual_scale, self.logit_scale
        return (
            all(isinstance(layer.mixer, AttentionConfig | DeltaConfig) for layer in self.stack)
            and all(replace(mixer, window=None) == like for mixer in attention)
            and first.qk_norm in (None, "head")
            and all(layer.norms == PRE_NORMS and layer.mlp is not None for layer in self.stack)
            and all(mlp.activation == "silu" and mlp.gated and not mlp.fused for mlp in dense)
            and all(replace(mlp, shared=None).plain for mlp in experts)
            and not any(mlp.shared and mlp.shared.mlp for mlp in experts)
            and scales == (1.0, 1.0, 1.0)
            and self.logit_softcap is None
            and not (self.layer_scalars or self.layer_inputs)
            and not any(isinstance(window, Chunk) for window in self.windows)
        )

    @cached_property
    def uniform(self) -> bool:
        """Whether compiled steps suit it: of what kernels serve, heads that rotate whole and plain SwiGLU."""
        if not self.kernels_serve or len(self.attention) < self.layers:
            return False
        first, experts = self.attention[0], [mlp for mlp in self._mlps if isinstance(mlp, ExpertsConfig)]
        return (
            (first.rope is not None and first.rope.whole(first.head_dim))
            and not (first.sinks or first.gate)
            and all(mlp.plain and mlp.activation == "silu" for mlp in experts)
            and self.norm.kind == "plain"
        )

    @property
    def rope(self) -> Rope:
        return self.ropes[0]

    @property
    def qkv_bias(self) -> bool:
        return self.attention[0].qkv_bias

    @property
    def o_bias(self) -> bool:
        return self.attention[0].o_bias

    @property
    def mlp_bias(self) -> bool:
        return any(isinstance(mlp, MlpConfig) and mlp.bias for mlp in self._mlps)
