"""A mixture of experts in place of the dense MLP: route, sort rows by expert, project, unsort.

Rows move by permutations whose backward is a permutation too, so results do not depend on the order of
atomic additions.

Shapes: T tokens, K experts of a token, N = T·K rows, D width, F expert width, E experts, I in, O out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.torch.functions import swiglu
from tinkex.engine.torch.hooks import ForwardContext, Part, Site, Sites
from tinkex.engine.torch.models.architecture import ExpertsConfig, ModelConfig
from tinkex.engine.torch.models.projection import Block, frozen_parameter


class ExpertMlp(Block):
    """Top-K routed SwiGLU experts."""

    def __init__(self, model: ModelConfig, config: ExpertsConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.width, self.experts = layer, model.width, config
        self.name = f"model.layers.{layer}.mlp"
        count, inner = self.experts.count, self.experts.width
        self.router = frozen_parameter(count, self.width)
        self.gate_up = frozen_parameter(count, 2 * inner, self.width)
        self.down = frozen_parameter(count, self.width, inner)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        lora = context.lora
        weight_TK, expert_TK = self.route(x_TD)
        expert_N, order_N = expert_TK.flatten().sort(stable=True)
        place_TK = torch.empty_like(expert_TK)  # the inverse permutation of `order_N`
        place_TK.view(-1)[order_N] = torch.arange(len(order_N), device=order_N.device)
        rows_N = order_N // self.experts.per_token
        counts_E = torch.bincount(expert_N, minlength=self.experts.count)

        def project(group: str, x: Tensor, weight: Tensor) -> Tensor:
            y = context.backend.expert_linear(x, weight, counts_E)
            return y if lora is None else lora(Site(self.layer, group), x, y, rows=rows_N, experts=expert_N)

        gate_up = project("experts_gate_up", _Gather.apply(x_TD, rows_N, place_TK), self.gate_up)
        y_ND = project("experts_down", swiglu(gate_up, context.backend.elementwise), self.down)
        y_TKD = _Gather.apply(y_ND, place_TK, order_N[:, None])
        return torch.einsum("tkd,tk->td", y_TKD, weight_TK)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights, [T, K] both; probabilities in fp32."""
        probabilities = F.linear(x_TD, self.router).softmax(dim=-1, dtype=torch.float32)
        weight_TK, expert_TK = probabilities.topk(self.experts.per_token, dim=-1)
        if self.experts.router.normalise:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        return weight_TK.to(x_TD.dtype), expert_TK

    def weights(self) -> dict[str, Tensor]:
        named = {f"{self.name}.gate.weight": self.router.detach()}
        for i, (gate_up, down) in enumerate(zip(self.gate_up.detach(), self.down.detach(), strict=True)):
            gate, up = gate_up.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            named |= {f"{self.name}.experts.{i}.{part}.weight": weight for part, weight in parts.items()}
        return named

    def sites(self) -> Sites:
        name, inner = f"{self.name}.experts", self.experts.width
        w1, w2, w3 = (
            Part(f"{name}.{part}", out, "mlp", self.experts.count, shared)
            for part, out, shared in (("w1", inner, "A"), ("w2", self.width, "B"), ("w3", inner, "A"))
        )
        return {
            Site(self.layer, "experts_gate_up"): (self.width, (w1, w3)),
            Site(self.layer, "experts_down"): (inner, (w2,)),
        }


def expert_linear(x_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Rows sorted by expert, each through its expert's matrix, one expert after another."""
    pieces = x_NI.split(counts_E.tolist())
    return torch.cat([F.linear(x, weight) for x, weight in zip(pieces, weight_EOI, strict=True) if len(x)])


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
