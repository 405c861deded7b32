"""Where adapters and attention plug into the decoder: sites, their parts, and the two hooks.

A site is one fused frozen projection; its parts are the Hugging Face modules inside it, in fused order.

Shapes: T tokens, N rows, I in-features, O out-features, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from tinkex.engine.torch.backend import Backend
    from tinkex.engine.torch.states import StateGroup
    from tinkex.engine.torch.tensor_parallel.shards import Shards

Norms = tuple[Tensor, Tensor]  # the weights [C] of q's and of k's head norm


class Site(NamedTuple):
    """One fused frozen projection of the decoder."""

    layer: int  # -1: the unembedding
    group: str  # "qkv", "o", "gate_up", "down", "unembed"; of experts: "experts_gate_up", "experts_down"


class Part(NamedTuple):
    """One Hugging Face module inside a site; `kind` says which train_* flag covers it."""

    # "model.layers.0.self_attn.q_proj"; one name for all experts of a layer: "model.layers.0.mlp.experts.w1"
    name: str
    out_features: int
    kind: Literal["attn", "mlp", "unembed"]
    experts: int = 1  # with a matrix each
    shared: Literal["", "A", "B"] = ""  # the factor on the hidden side, which all experts have in common


Sites = dict[Site, tuple[int, tuple[Part, ...]]]  # in-features and parts


class PartialProjection(Protocol):
    """A split-K projection whose partial sums are not added yet: the kernel that reads it adds them."""

    def swiglu(self) -> Tensor: ...

    def rotate(
        self, cos: Tensor, sin: Tensor, heads: tuple[int, int], norms: Norms | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def total(self) -> Tensor: ...

    def addend(self) -> Tensor:
        """The total, or its partial sums [S, N, O], for a norm that adds it to the residual stream."""
        ...


class Frozen(NamedTuple):
    """The weights of one frozen Linear and the function that multiplies with them."""

    weight: Any  # a Tensor; in plain torch it may be a `QuantisedMatrix`
    bias: Tensor | None
    packed: Tensor | None  # the weight in the layout that `functions.pack` makes
    product: Callable[[Tensor, Any, Tensor | None, Tensor | None], Tensor]  # `Backend.linear`

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias, self.packed)


class LoraHook:
    """The adapters of a pass."""

    def __call__(
        self, site: Site, x: Tensor, y: Tensor, *, rows: Tensor | None = None, experts: Tensor | None = None
    ) -> Tensor:
        """y_NO plus the adapters' contribution; row i is token i, unless `rows` gives each row's token.

        `experts` (at expert sites) is each row's expert, ascending.
        """
        raise NotImplementedError

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor | PartialProjection:
        """frozen(x) plus the adapters' contribution. Partial only without gradients."""
        return self(site, x, frozen(x))

    def unread(self, site: Site) -> AbstractContextManager[None]:
        """A context where no one reads the result of `site`: its layer is recomputed for gradients alone."""
        return nullcontext()


class Attend(Protocol):
    """Attention within the caller's sequences; q and k are rotated already, q is scaled inside."""

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor: ...


class SinkAttend(Attend, Protocol):
    """Attention with a sink for each query head, or within whole images; kernels need not know of it."""

    def __call__(
        self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, sinks: Tensor | None = None,
        whole_images: bool = False,
    ) -> Tensor: ...  # fmt: skip


class ForwardContext(NamedTuple):
    """What all layers of one forward pass share."""

    backend: Backend
    angles: Sequence[tuple[Tensor, Tensor]]  # per `ModelConfig.ropes`: cos and sin of the tokens' positions
    attend: Attend
    lora: LoraHook | None
    lent: dict[int, tuple[Tensor, Tensor]]  # keys and values, by layer, that later layers share
    positions: Tensor | None = None  # of the tokens; None where only angles are known, of a uniform model
    states: Sequence[StateGroup] = ()  # of models with recurrent layers
    layer_inputs: Tensor | None = None  # [T, L, P] of `per_layer.LayerInputs`
    shards: Shards | None = None  # of a decoder that is one rank's
    chosen: dict[int, Tensor] | None = None  # experts [T, K] by layer: a recomputed layer takes the same
