"""Mamba2, a recurrent mixer: in chunks for training and prefill, one step for decoding.

A head's state S maps the vector B to its inputs x. Token by token, with the step δ and the decay a = δ·A ≤ 0:
S ← e^a·S + B ⊗ δx; y = Sᵀc + D·x. The heads of a group have B and c in common. A chunk of up to 64 tokens
does the same by products. All of it is fp32.

Shapes: T tokens, B sequences, N chunks, C tokens of a chunk, H heads, G groups, R = H / G, P head dim,
S state dim, F conv channels, W conv width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, Site
from tinkex.engine.torch.models.architecture import MambaConfig, ModelConfig
from tinkex.engine.torch.models.block import Block, frozen_parameter
from tinkex.engine.torch.models.delta_net import Chunks, conv_silu, decay_between, mix_groups
from tinkex.engine.torch.models.projection import Projection, total

if TYPE_CHECKING:
    from tinkex.engine.torch.states import StateGroup


class Mamba(Block):
    """x, B and c through a short convolution and the recurrence; the result is gated and normed by groups.

    The stored `in_proj` has the rows of the gate and of x, which carry adapters, then those of B, c and δ.
    """

    def __init__(self, model: ModelConfig, config: MambaConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.eps = config, layer, model.norm.eps
        self.name = f"model.layers.{layer}.{config.name}"
        inner = config.width
        parts = tuple(Part(f"{self.name}.{name}", inner, "attn") for name in ("gate_proj", "x_proj"))
        self.gate_x = Projection(Site(layer, "gate_x"), model.width, parts, config.bias)
        out = Part(f"{self.name}.out_proj", model.width, "attn")
        self.out = Projection(Site(layer, "mamba_out"), inner, (out,), config.bias)
        rest = 2 * config.shared_width + config.heads
        self.rest = frozen_parameter(rest, model.width)
        self.rest_bias = frozen_parameter(rest) if config.bias else None
        self.conv = frozen_parameter(config.channels, 1, config.conv_width)
        self.conv_bias = frozen_parameter(config.channels) if config.conv_bias else None
        self.a_log, self.dt_bias, self.skip = (frozen_parameter(config.heads) for _ in range(3))
        self.norm = frozen_parameter(inner)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mamba:
        super()._apply(fn, recurse)
        for small in (self.a_log, self.dt_bias, self.skip):  # a decay over many tokens needs their precision
            small.data = small.data.float()
        return self

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        c = self.config
        z, x = total(self.gate_x(x_TD, context)).chunk(2, 1)
        bc, dt_TH = F.linear(x_TD, self.rest, self.rest_bias).split([2 * c.shared_width, c.heads], 1)
        dt_TH = F.softplus(dt_TH.float() + self.dt_bias).clamp(*c.step_limits)
        y = mix_groups(self._mix, context.states, torch.cat((x, bc), 1), dt_TH).flatten(1)
        y = (y * F.silu(z.float())).unflatten(1, (c.norm_groups, -1))
        if c.norm_over_ranks and context.shards is not None:
            square = context.shards.mean_square(y)
        else:
            square = y.square().mean(-1, keepdim=True)
        y = y * (square + self.eps).rsqrt()
        return self.out((y.flatten(1) * self.norm.float()).to(x_TD.dtype), context)

    def _mix(self, group: StateGroup, u_TF: Tensor, dt_TH: Tensor) -> Tensor:
        c, held = self.config, group.read(self.layer)
        before, state = (None, None) if held is None else held
        bias_F = None if self.conv_bias is None else self.conv_bias.float()
        weight_WF = self.conv[:, 0].t().float()
        u_TF, last = conv_silu(u_TF.float(), weight_WF, group.lengths, before, bias_F)
        x, b, read = u_TF.split([c.width, c.shared_width, c.shared_width], 1)
        x_THP, b_TGS, c_TGS = (
            x.unflatten(1, (c.heads, -1)),
            *(v.unflatten(1, (c.groups, -1)) for v in (b, read)),
        )
        a_TH, dx_THP = -self.a_log.exp() * dt_TH, x_THP * dt_TH[..., None]
        if state is not None and max(group.lengths) == 1:
            y_THP = mamba_step(dx_THP, a_TH, b_TGS, c_TGS, state)
        else:
            y_THP, state = mamba_chunks(dx_THP, a_TH, b_TGS, c_TGS, group.chunks, state)
        group.write(self.layer, (last, state))
        return y_THP + x_THP * self.skip[:, None]

    def weights(self) -> dict[str, Tensor]:
        own = {
            "in_proj_rest.weight": self.rest,
            "in_proj_rest.bias": self.rest_bias,
            "conv1d.weight": self.conv,
            "conv1d.bias": self.conv_bias,
            "A_log": self.a_log,
            "dt_bias": self.dt_bias,
            "D": self.skip,
            "norm.weight": self.norm,
        }
        return {f"{self.name}.{name}": weight.detach() for name, weight in own.items() if weight is not None}

    def stacked(self) -> dict[str, tuple[int, ...]]:
        shared = (self.config.shared_width,) * 2
        rest, channels = (*shared, self.config.heads), (self.config.width, *shared)
        return {f"{self.name}.in_proj_rest": rest, f"{self.name}.conv1d": channels}


def mamba_chunks(
    dx_THP: Tensor,
    a_TH: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    chunks: Chunks,
    state_BHSP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y_THP and the states after the last tokens; sequences start at `state_BHSP`, or at zero."""
    (_, G, S), (_, H, P) = b_TGS.shape, dx_THP.shape
    N, R = chunks.count, H // G
    b, c = (chunks.split(x).transpose(1, 2) for x in (b_TGS, c_TGS))  # [N, G, C, S]
    dx = chunks.split(dx_THP).unflatten(2, (G, R)).permute(0, 2, 3, 1, 4)  # [N, G, R, C, P]
    decayed = chunks.split(a_TH).unflatten(2, (G, R)).permute(0, 2, 3, 1).cumsum(-1)  # [N, G, R, C]
    end = decayed[..., -1:]
    y = ((c @ b.transpose(2, 3))[:, :, None] * decay_between(decayed)) @ dx
    left = dx * (end - decayed).exp()[..., None]  # of each token at the chunk's end
    added = (b.transpose(2, 3)[:, :, None] @ left).reshape(N, H, S, P)
    end = end.exp().reshape(N, H, 1, 1)
    if state_BHSP is None:
        state_BHSP = dx_THP.new_zeros(len(chunks.lengths), H, S, P)
    start, final = chunks.scan(lambda state, more, kept: (state, state * kept + more), state_BHSP, added, end)
    start = start.unflatten(1, (G, R))
    y = y + (c[:, :, None] @ start) * decayed.exp()[..., None]
    y = y.permute(0, 3, 1, 2, 4).flatten(2, 3)  # [N, C, H, P]
    return chunks.join(y), final


def mamba_step(dx_BHP: Tensor, a_BH: Tensor, b_BGS: Tensor, c_BGS: Tensor, state_BHSP: Tensor) -> Tensor:
    """y_BHP of one token of each sequence; `state_BHSP` becomes the state after it, in place."""
    repeat = dx_BHP.shape[1] // b_BGS.shape[1]
    b, c = (x.repeat_interleave(repeat, 1) for x in (b_BGS, c_BGS))
    state_BHSP.mul_(a_BH.exp()[..., None, None])
    flat = state_BHSP.view(-1, *state_BHSP.shape[2:])
    flat.baddbmm_(b.flatten(0, 1)[:, :, None], dx_BHP.flatten(0, 1)[:, None])
    return (c[:, :, None] @ state_BHSP).squeeze(2)
