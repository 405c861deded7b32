"""The routed experts of a layer by kernels: `moe.ExpertMlp.routed` with many adapters, forward and backward.

Experts share the adapters' factor on the hidden side. So the first down-projection is computed once for each
token, not for each of its experts, and the last up-projection once for each token, after the experts' results
were added up. What is kept for the backward is x, gate and up.

Shapes: T tokens, K experts of a token, N = T·K rows, E experts, D width, F expert width, R rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.cuda import (
    elementwise,
    expert_gradients,
    lora_gradients,
    lora_kernels,
    packed_experts,
    router_kernels,
)
from tinkex.engine.cuda import expert_kernels as kernel
from tinkex.engine.cuda import expert_routing as routing
from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.expert_lora import ExpertSite, shrink_rows
from tinkex.engine.torch.hooks import Site
from tinkex.engine.torch.models.architecture import ClampedSwiGlu, ExpertsConfig
from tinkex.engine.torch.models.moe import ExpertMlp, Routing
from tinkex.engine.torch.quantised import QuantisedStack

# As measured on an H200: tokens up to which the last up-projection is faster without a separate launch.
_FEW, _MIXED = 16, 256  # of one adapter, of several


class ExpertLora(Protocol):
    """The adapters of a pass, as experts need them."""

    def site(self, site: Site) -> SiteAdapters | None: ...

    @property
    def slots_T(self) -> Tensor:
        """int32: each token's slot in the table; -1: none."""
        ...


class TrainedLora(ExpertLora, Protocol):
    """Adapters that get gradients."""

    atomic: bool  # an adapter has several segments
    segments_at: Tensor  # int32: each segment's first token
    of_segments: Tensor  # int32: each segment's slot; -1: none

    def into(self, at: SiteAdapters) -> SiteAdapters:
        """The gradients' addresses, and whole segments as tiles."""
        ...


class ExpertWeights(NamedTuple):
    """The frozen weights of one layer's experts; quantised ones are dequantised where rows are many."""

    layer: int
    gate_up: Tensor | QuantisedStack  # [E, 2F, D]
    down: Tensor | QuantisedStack  # [E, D, F]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: kernel.Activation = kernel.SWIGLU


def serves(experts: ExpertsConfig) -> bool:
    """Whether the kernels compute such experts: SwiGLU, weighted after they were computed."""
    router = experts.router
    routed = router.groups == 1 and not (router.norm or router.expert_scale or router.on_input)
    swiglu = experts.activation == "silu" or isinstance(experts.activation, ClampedSwiGlu)
    return swiglu and experts.gated and routed


def weights_of(experts: ExpertMlp) -> ExpertWeights:
    activation = kernel.SWIGLU
    if isinstance(experts.experts.activation, ClampedSwiGlu):
        activation = kernel.Activation(True, *map(float, experts.experts.activation))
    biases = experts.gate_up_bias, experts.down_bias
    return ExpertWeights(experts.layer, experts.gate_up, experts.down, *biases, activation)


class RouterLogits(torch.autograd.Function):
    """x · routerᵀ + bias, for autograd.

    A router's are in fp32, not rounded: close scores differ by less than bf16 can tell apart.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, router_ED: Tensor, bias_E: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(router_ED)
        return router_kernels.logits(x_TD, router_ED, bias_E, dtype=dtype)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (router_ED,) = ctx.saved_tensors
        return grads[0].to(router_ED.dtype) @ router_ED, None, None, None


class AddGated(torch.autograd.Function):
    """`elementwise.add_gated` for autograd."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, shared_TD: Tensor, x_TD: Tensor, gate_1D: Tensor) -> Tensor:
        ctx.save_for_backward(shared_TD, x_TD, gate_1D)
        return elementwise.add_gated(y_TD, shared_TD, x_TD, gate_1D)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shared_TD, x_TD, gate_1D = ctx.saved_tensors
        (grad_TD,), factor_T1 = grads, F.linear(x_TD, gate_1D).sigmoid()
        along_T1 = (grad_TD * shared_TD).sum(-1, keepdim=True)
        return grad_TD, grad_TD * factor_T1, along_T1 * factor_T1 * (1 - factor_T1) * gate_1D, None


def route(experts: ExpertMlp, x_TD: Tensor, known_TK: Tensor | None, lora: ExpertLora | None) -> Routing:
    """`ExpertMlp.route`, with weights in fp32, and the rows placed."""
    config, router, at = experts.experts, experts.experts.router, None
    of_router, graded = (experts.router, experts.router_bias), x_TD.requires_grad
    if lora is not None and not graded and len(x_TD) <= router_kernels.MAX_SHRUNK and experts.reads_input:
        at = lora.site(Site(experts.layer, "experts_gate_up"))
    if graded:
        logits_TE: Tensor = RouterLogits.apply(x_TD, *of_router, torch.float32)  # type: ignore[assignment]
        u = None
    else:
        logits_TE, u = router_kernels.logits(x_TD, *of_router, at)
    if known_TK is not None:
        rows = routing.place(known_TK, config.count)
        return Routing(experts.weigh(logits_TE, known_TK.long())[0], known_TK, rows._replace(u=u))
    weight_TK, known_TK, rows = routing.route(
        logits_TE.detach(), experts.selection_bias, config.per_token, router.score, router.normalise,
        router.scale,
    )  # fmt: skip
    if graded:  # the kernel's values, which are the sampler's, with plain torch's gradients
        plain_TK = experts.weigh(logits_TE, known_TK.long())[0]
        weight_TK = plain_TK + (weight_TK - plain_TK).detach()
    return Routing(weight_TK, known_TK, rows._replace(u=u))


def _sites(weights: ExpertWeights, lora: ExpertLora | None) -> list[ExpertSite | None]:
    if lora is None:
        return [None, None]
    found = (lora.site(Site(weights.layer, group)) for group in ("experts_gate_up", "experts_down"))
    return [None if at is None else ExpertSite(at, lora.slots_T) for at in found]


def forward(
    x_TD: Tensor, weight_TK: Tensor, rows: routing.ExpertRows, weights: ExpertWeights,
    lora: ExpertLora | None, keep: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:  # fmt: skip
    """The experts' results, added up, and what `backward` needs: u of gate and up, these, and u of down."""
    up, down = _sites(weights, lora)
    u1 = rows.u if up is None or rows.u is not None else lora_kernels.shrink(x_TD, up.at.a, splits=1)
    h, kept = _gate_up(x_TD, rows, weights, u1, up, keep)
    y_ND, u2_N = _down(h, rows, weights, down, keep)
    if down is None:
        return kernel.combine(y_ND, weight_TK, rows, dtype=x_TD.dtype)[0], (u1, kept, None)
    if not keep and len(x_TD) <= (_MIXED if down.at.table.mixed else _FEW):
        return kernel.combine(y_ND, weight_TK, rows, u2_N, down, x_TD.dtype)[0], ()
    y_TD, u2_T = kernel.combine(y_ND, weight_TK, rows, u2_N, dtype=x_TD.dtype)
    assert u2_T is not None
    lora_kernels.expand(u2_T[None], y_TD, down.at.b)
    return y_TD, (u1, kept, u2_T)


def _gate_up(
    x_TD: Tensor, rows: routing.ExpertRows, weights: ExpertWeights, u: Tensor | None,
    lora: ExpertSite | None, keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    how = weights.gate_up_bias, weights.activation
    if not keep and (packed := packed_experts.read_in_place(weights.gate_up, rows)) is not None:
        return packed_experts.gate_up(x_TD, packed, *how, rows, u, lora), None
    wide = packed_experts.dequantised(weights.gate_up, x_TD.dtype)
    return kernel.gate_up(x_TD, wide, rows, u, lora, keep, *how)


def _down(
    h_NF: Tensor, rows: routing.ExpertRows, weights: ExpertWeights, lora: ExpertSite | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The experts' results, and u of each row."""
    if not keep and (packed := packed_experts.read_in_place(weights.down, rows)) is not None:
        return packed_experts.product(h_NF, packed, weights.down_bias, rows, lora)
    wide = packed_experts.dequantised(weights.down, h_NF.dtype)
    if lora is None:
        return kernel.product(h_NF, wide, rows, weights.down_bias), None
    return kernel.product_and_shrink(h_NF, wide, rows, lora, weights.down_bias)


def backward(
    grad_TD: Tensor, x_TD: Tensor, weight_TK: Tensor, rows: routing.ExpertRows, weights: ExpertWeights,
    lora: TrainedLora, saved: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add to the adapters' gradients; returns those to x and to the routing weights."""
    (u1, kept, u2_T), (up, down) = saved, _sites(weights, lora)
    assert kept is not None
    bounds, grad_u2, grad_u1_N = routing.bounds_of(rows, lora.segments_at), None, None
    of_rows = rows, bounds, lora.of_segments
    if down is not None and u2_T is not None:
        grad_u2 = lora_kernels.summed(lora_kernels.shrink(grad_TD, down.at.b), x_TD.dtype)
        lora_gradients.add_outer(u2_T[None], grad_TD, lora.into(down.at).b, lora.atomic)
    wide = packed_experts.dequantised(weights.down, x_TD.dtype).transpose(1, 2)
    grad_h = kernel.product_of_tokens(grad_TD, wide, rows, grad_u2, down)
    del wide
    acting = kept, rows, weight_TK, weights.activation
    grads, h, grad_weight_TK = expert_gradients.activate_backward(grad_h, *acting)
    if weights.down_bias is not None:
        expert_TK = torch.searchsorted(rows.starts_E[1:], rows.place_N.view_as(weight_TK), right=True)
        by_bias_TE = grad_TD @ weights.down_bias.t()
        grad_weight_TK = grad_weight_TK + by_bias_TE.gather(1, expert_TK)
    if down is not None and grad_u2 is not None:
        expert_gradients.add_outer(grad_u2[0], h, weight_TK, *of_rows, lora.into(down.at), "A", lora.atomic)
    del grad_h, h
    if up is not None and u1 is not None:
        grad_u1_N, u1 = shrink_rows(grads, rows, up, "B"), lora_kernels.summed(u1, x_TD.dtype)
        expert_gradients.add_outer(u1[0], grads, None, *of_rows, lora.into(up.at), "B", lora.atomic)
    wide = packed_experts.dequantised(weights.gate_up, x_TD.dtype).transpose(1, 2)
    grad_x_N = kernel.product(grads, wide, rows)
    del wide
    grad_x, grad_u1 = kernel.combine(grad_x_N, None, rows, grad_u1_N)
    if up is not None and grad_u1 is not None:
        lora_gradients.add_outer(grad_u1[None], x_TD, lora.into(up.at).a, lora.atomic)
        lora_kernels.expand(grad_u1[None], grad_x, up.at.a)
    return grad_x, grad_weight_TK


class RoutedExperts(torch.autograd.Function):
    """`forward` and `backward` for autograd; adapters' gradients go to their buffers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_TK: Tensor, anchor: Tensor, rows: routing.ExpertRows,
        weights: ExpertWeights, lora: TrainedLora,
    ) -> Tensor:  # fmt: skip
        weight_TK = weight_TK.contiguous()
        y, saved = forward(x, weight_TK, rows, weights, lora, keep=True)
        ctx.save_for_backward(x, weight_TK, *saved)
        ctx.rows, ctx.weights, ctx.lora = rows, weights, lora
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight_TK, *saved = ctx.saved_tensors
        given = (x, weight_TK, ctx.rows, ctx.weights, ctx.lora, tuple(saved))
        return *backward(grads[0].contiguous(), *given), None, None, None, None
