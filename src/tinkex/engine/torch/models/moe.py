"""A mixture of experts in place of the dense MLP: route, sort rows by expert, project, unsort.

Rows move by permutations whose backward is a permutation too, so results do not depend on the order of
atomic additions.

Shapes: T tokens, K experts of a token, N = T·K rows, D width, F expert width, E experts, I in, O out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from tinkex.engine.torch.functions import Stream, rms_norm
from tinkex.engine.torch.hooks import ForwardContext, Part, Site, Sites
from tinkex.engine.torch.models.architecture import ClampedSwiGlu, ExpertsConfig, MlpConfig, ModelConfig
from tinkex.engine.torch.models.block import Block, Slot, frozen_parameter
from tinkex.engine.torch.models.mlp import Mlp, activated
from tinkex.engine.torch.models.projection import Projection, total
from tinkex.engine.torch.quantised import QuantisedStack


class Routing(NamedTuple):
    """Each token's experts and their weights, [T, K] both."""

    weight_TK: Tensor
    expert_TK: Tensor
    rows: Any = None  # where a backend has placed them


class ExpertMlp(Block):
    """Top-K routed experts, and the shared expert that a model may have as well."""

    def __init__(self, model: ModelConfig, config: ExpertsConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.experts = layer, config
        self.name = f"model.layers.{layer}.{config.name}".removesuffix(".")
        self.norm, self.layer_name = model.norm, f"model.layers.{layer}"
        self.width = config.latent_width or model.width  # of the experts' inputs and outputs
        count, inner, router = config.count, config.width, config.router
        self.router = frozen_parameter(count, model.width)
        self.router_bias = frozen_parameter(count) if router.bias else None
        self.selection_bias = frozen_parameter(count) if router.selection_bias else None
        self.router_scale = frozen_parameter(model.width) if router.norm else None
        self.expert_scale = frozen_parameter(count) if router.expert_scale else None
        rows = (2 if config.gated else 1) * inner
        self.gate_up: Any = frozen_parameter(count, rows, self.width)  # or a `QuantisedStack`
        self.down: Any = frozen_parameter(count, self.width, inner)
        self.gate_up_bias = frozen_parameter(count, rows) if config.bias else None
        self.down_bias = frozen_parameter(count, self.width) if config.bias else None
        self.latent_in, self.latent_out, self.shared, self.shared_gate = None, None, None, None
        if config.latent_width:
            self.latent_in = self._latent("fc1_latent_proj", model.width, self.width)
            self.latent_out = self._latent("fc2_latent_proj", self.width, model.width)
        if config.shared:
            width, name, gated, mlp = config.shared
            activation = config.activation if isinstance(config.activation, str) else "silu"
            name = f"{config.name}.{name}"
            mlp = mlp or MlpConfig(width, activation=activation, gated=config.gated, name=name)
            self.shared = Mlp(model, mlp, layer, "shared_")
            self.shared_gate = frozen_parameter(1, model.width) if gated else None
        self.norms = frozen_parameter(len(config.norms), model.width) if config.norms else None

    def _latent(self, name: str, in_features: int, out_features: int) -> Projection:
        part = Part(f"{self.name}.{name}", out_features, "mlp")
        return Projection(Site(self.layer, name), in_features, (part,), bias=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertMlp:
        super()._apply(fn, recurse)
        if self.selection_bias is not None:  # close scores differ by less than bf16 can tell apart
            self.selection_bias.data = self.selection_bias.data.float()
        return self

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        known = None if context.chosen is None else context.chosen.get(self.layer)
        routing = context.backend.route(self, x_TD, known, context)
        if context.chosen is not None:
            context.chosen[self.layer] = routing.expert_TK
        h = self._normed(x_TD, 2, context)
        h = h if self.latent_in is None else total(self.latent_in(h, context))
        y_TD = context.backend.routed_experts(self, h, routing, context)
        if self.latent_out is not None:
            y_TD = total(self.latent_out(y_TD, context))
        y_TD = self._normed(y_TD, 3, context)
        if self.shared is None:
            return y_TD
        shared_TD = total(self.shared(self._normed(x_TD, 0, context), context))
        if self.shared_gate is not None and self.norms is None:
            return context.backend.add_gated(y_TD, shared_TD, x_TD, self.shared_gate)
        if self.shared_gate is not None:
            shared_TD = shared_TD * F.linear(x_TD, self.shared_gate).sigmoid()
        return y_TD + self._normed(shared_TD, 1, context)

    @property
    def reads_input(self) -> bool:
        """Whether experts read what the router reads."""
        return self.norms is None and self.latent_in is None

    def _normed(self, x_TD: Tensor, index: int, context: ForwardContext) -> Tensor:
        """By one of `ExpertNorms`, where there are any."""
        if self.norms is None:
            return x_TD
        factor, impl = self.norm.factor(self.norms[index]), context.backend.elementwise
        if context.shards is None or index in (0, 2):
            return rms_norm(Stream(x_TD), factor, self.norm.eps, impl)
        # a norm of what is summed over ranks: of the sum, in equal parts, which are summed again
        return rms_norm(Stream(context.shards.sum(x_TD)), factor, self.norm.eps, impl) / context.shards.count

    def routed(self, x_TD: Tensor, routing: Routing, context: ForwardContext) -> Tensor:
        """The sum of each token's experts' results, times their weights."""
        lora, weight_TK, expert_TK = context.lora, routing.weight_TK, routing.expert_TK
        expert_N, order_N = expert_TK.flatten().sort(stable=True)
        place_TK = torch.empty_like(expert_TK)  # the inverse permutation of `order_N`
        place_TK.view(-1)[order_N] = torch.arange(len(order_N), device=order_N.device)
        rows_N = order_N // self.experts.per_token
        counts_E = torch.bincount(expert_N, minlength=self.experts.count)

        def project(group: str, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
            y = context.backend.expert_linear(x, weight, counts_E)
            y = y if bias is None else y + bias[expert_N]
            return y if lora is None else lora(Site(self.layer, group), x, y, rows=rows_N, experts=expert_N)

        x_ND = _Gather.apply(x_TD, rows_N, place_TK)
        if self.experts.router.on_input:
            x_ND = x_ND * weight_TK.flatten()[order_N][:, None]
        gate_up = project("experts_gate_up", x_ND, self.gate_up, self.gate_up_bias)
        y_ND = project("experts_down", self._activate(gate_up, context), self.down, self.down_bias)
        y_TKD = _Gather.apply(y_ND, place_TK, order_N[:, None])
        if self.experts.router.on_input:
            return y_TKD.sum(1)
        return torch.einsum("tkd,tk->td", y_TKD, weight_TK)

    def _activate(self, gate_up: Tensor, context: ForwardContext) -> Tensor:
        if isinstance(self.experts.activation, ClampedSwiGlu):
            (gate, up), (alpha, limit) = gate_up.chunk(2, dim=-1), self.experts.activation
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * (gate * torch.sigmoid(alpha * gate))
        return activated(gate_up, self.experts.activation, self.experts.gated, context)

    def route(self, x_TD: Tensor, known_TK: Tensor | None = None) -> Routing:
        """`known_TK` are the experts where they have been chosen before. Probabilities are in fp32."""
        if self.router_scale is not None:
            wide = x_TD.float()
            unit = (wide * (wide.square().mean(-1, keepdim=True) + self.norm.eps).rsqrt()).to(x_TD.dtype)
            x_TD = unit * self.router_scale * x_TD.shape[-1] ** -0.5
        if self.experts.router.score == "sigmoid":
            logits_TE = F.linear(x_TD.float(), self.router.float())
        else:
            logits_TE = F.linear(x_TD, self.router, self.router_bias)
        weight_TK, expert_TK = self.weigh(logits_TE, known_TK)
        return Routing(weight_TK.to(x_TD.dtype), expert_TK)

    def weigh(self, logits_TE: Tensor, known_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, and the experts, [T, K] both."""
        router, best = self.experts.router, self.experts.per_token
        if router.score == "softmax_of_best":
            expert_TK = logits_TE.detach().topk(best, dim=-1).indices if known_TK is None else known_TK
            return logits_TE.gather(1, expert_TK).softmax(dim=-1), expert_TK
        if router.score == "softmax":
            score_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        else:
            score_TE = logits_TE.sigmoid()
        expert_TK = known_TK
        if expert_TK is None:
            expert_TK = self._preferred(score_TE.detach()).topk(best, dim=-1).indices
        weight_TK = score_TE.gather(1, expert_TK)
        if router.normalise:
            weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
        if self.expert_scale is not None:
            weight_TK = weight_TK * self.expert_scale[expert_TK]
        return weight_TK * router.scale, expert_TK

    def _preferred(self, score_TE: Tensor) -> Tensor:
        """The scores to choose by: with the selection bias, and none outside the best groups."""
        groups, kept = self.experts.router.groups, self.experts.router.kept_groups
        if self.selection_bias is not None:
            score_TE = score_TE + self.selection_bias
        if groups == 1:
            return score_TE
        score_TGE = score_TE.unflatten(1, (groups, -1))
        chosen_TG = score_TGE.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        open_TG = torch.zeros_like(score_TGE[..., 0], dtype=torch.bool).scatter_(1, chosen_TG, value=True)
        return score_TGE.masked_fill(~open_TG[..., None], -torch.inf).flatten(1)

    def weights(self) -> dict[str, Tensor]:
        own = {
            "gate.weight": self.router,
            "gate.bias": self.router_bias,
            "gate.e_score_correction_bias": self.selection_bias,
            "gate.scale": self.router_scale,
            "gate.per_expert_scale": self.expert_scale,
            "shared_expert_gate.weight": self.shared_gate,
        }
        named = {f"{self.name}.{name}": weight.detach() for name, weight in own.items() if weight is not None}
        if self.experts.norms and self.norms is not None:
            norms = zip(self.experts.norms, self.norms.detach(), strict=True)
            named |= {f"{self.layer_name}.{name}.weight": weight for name, weight in norms}
        parts = ("gate_proj", "up_proj") if self.experts.gated else ("up_proj",)
        kinds = (("weight", self.gate_up, self.down), ("bias", self.gate_up_bias, self.down_bias))
        for kind, gate_up_E, down_E in kinds:
            if not isinstance(gate_up_E, Tensor) or not isinstance(down_E, Tensor):
                continue
            for i, (gate_up, down) in enumerate(zip(gate_up_E.detach(), down_E.detach(), strict=True)):
                views = dict(zip(parts, gate_up.chunk(len(parts)), strict=True)) | {"down_proj": down}
                named |= {f"{self.name}.experts.{i}.{part}.{kind}": view for part, view in views.items()}
        return named

    def quantise(self, dtype: torch.dtype) -> None:
        del self.gate_up, self.down
        count, inner = self.experts.count, self.experts.width
        outs = [inner] * (2 if self.experts.gated else 1)
        self.gate_up = QuantisedStack(count, outs, self.width, dtype)
        self.down = QuantisedStack(count, [self.width], inner, dtype)

    def slots(self) -> dict[str, Slot]:
        if isinstance(self.gate_up, Tensor):
            return {}
        parts = ("gate_proj", "up_proj") if self.experts.gated else ("up_proj",)
        found: dict[str, Slot] = {}
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            places = {part: (gate_up, k) for k, part in enumerate(parts)} | {"down_proj": (down, 0)}
            found |= {f"{self.name}.experts.{i}.{part}.weight": slot for part, slot in places.items()}
        return found

    def settle(self, for_kernels: bool = False) -> None:
        if isinstance(self.gate_up, Tensor):
            return
        gate_up, down = self.gate_up.plain(), self.down.plain()
        if gate_up is not None and down is not None:
            del self.gate_up, self.down
            self.gate_up, self.down = (nn.Parameter(w, requires_grad=False) for w in (gate_up, down))
        elif for_kernels:
            self.gate_up.unite()
            self.down.unite()

    def sites(self) -> Sites:
        """As hosted Tinker names them: w1 is gate, or up where there is no gate; w2 down; w3 up."""
        name, count, inner = f"{self.name}.experts", self.experts.count, self.experts.width
        w1, w3 = (Part(f"{name}.{part}", inner, "mlp", count, "A") for part in ("w1", "w3"))
        w2 = Part(f"{name}.w2", self.width, "mlp", count, "B")
        return {
            Site(self.layer, "experts_gate_up"): (self.width, (w1, w3) if self.experts.gated else (w1,)),
            Site(self.layer, "experts_down"): (inner, (w2,)),
        }


def per_expert(
    name: str, tensor: Any, experts: ExpertsConfig | None = None, width: int = 0
) -> list[tuple[str, Any]]:
    """A stored weight, quantised or not, by our names: views of a stacked one's experts, any other by itself.

    `width` is the model's: by it a tensor that may be stored either way is recognised.
    """
    for old, new in _RENAMED.get(experts.name if experts else "mlp", ()):
        name = re.sub(old, new, name)
    found = re.fullmatch(r"(.*\.experts)\.((?:gate_)?up_proj|down_proj)(_bias|\.bias|\.weight)?", name)
    if found is None:
        return [(name, tensor)]
    stem, part, end = found.groups()
    kind = "bias" if (end or "").endswith("bias") else "weight"
    if experts and kind == "weight" and experts.transposed:
        side = 1 if part == "gate_up_proj" else 2  # where the width is if it is transposed
        if experts.transposed != "either" or tensor.shape[side] == width != tensor.shape[3 - side]:
            tensor = tensor.transpose(1, 2) if isinstance(tensor, Tensor) else tensor.transpose()
    views = {part: tensor}
    if part == "gate_up_proj":
        half, in_turn = tensor.shape[1] // 2, experts is not None and experts.interleaved
        slices = (slice(0, None, 2), slice(1, None, 2)) if in_turn else (slice(half), slice(half, None))
        halves = [tensor[:, rows] if isinstance(tensor, Tensor) else tensor.select(rows) for rows in slices]
        views = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
    return [(f"{stem}.{i}.{k}.{kind}", view[i]) for k, view in views.items() for i in range(len(view))]


# Other families' names of what most call mlp, gate, gate_proj, down_proj and up_proj.
_RENAMED = {
    "mlp": (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.router\.", ".mlp.gate."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    ),
    "": ((r"(\.layers\.\d+)\.router\.(proj\.)?", r"\1.gate."),),
    "feed_forward": ((r"\.feed_forward\.router\.", ".feed_forward.gate."),),
    "block_sparse_moe": (
        (r"\.block_sparse_moe\.router\.(layer\.)?", ".block_sparse_moe.gate."),
        (r"\.block_sparse_moe\.input_linear\.", ".block_sparse_moe.experts.gate_up_proj."),
        (r"\.block_sparse_moe\.output_linear\.", ".block_sparse_moe.experts.down_proj."),
    ),
}


def expert_linear(x_NI: Tensor, weight_EOI: Any, counts_E: Tensor) -> Tensor:
    """Rows sorted by expert, each through its expert's matrix, one expert after another."""
    pieces = x_NI.split(counts_E.tolist())
    pairs = [(x, weight) for x, weight in zip(pieces, weight_EOI, strict=True) if len(x)]
    return torch.cat([F.linear(x, w) if isinstance(w, Tensor) else w.linear(x) for x, w in pairs])


class _Gather(Function):
    """x[rows]. `places` [len(x), K] are the K rows of the result that hold each row of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (places,) = ctx.saved_tensors
        return grads[0].flatten(0, -2)[places].sum(1), None, None
