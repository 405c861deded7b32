"""The gated delta net, a recurrent mixer: in chunks for training and prefill, one step for decoding.

A head's state S maps keys to values. Token by token, with the decay g ≤ 0 and the rate β:
S ← e^g·S; S ← S + k ⊗ β(v − Sᵀk); o = Sᵀq. A chunk of up to 64 tokens does the same by products and one
triangular solve. All of it is fp32. `cuda.delta_kernels` has the same as kernels.

Shapes: T tokens, B sequences, N chunks, C tokens of a chunk, H value heads, K key heads, R = H / K,
D key dim, V value dim, F conv channels, W conv width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, Site
from tinkex.engine.torch.models.architecture import DeltaConfig, ModelConfig
from tinkex.engine.torch.models.block import Block, frozen_parameter
from tinkex.engine.torch.models.projection import Projection, total

if TYPE_CHECKING:
    from tinkex.engine.torch.states import StateGroup

CHUNK = 64  # tokens


class DeltaNet(Block):
    """q, k and v through a short convolution and the delta rule; the result is normed and gated."""

    def __init__(self, model: ModelConfig, config: DeltaConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.eps = config, layer, model.norm.eps
        self.name = f"model.layers.{layer}.linear_attn"
        sizes = dict(zip(("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"), config.widths, strict=True))
        parts = tuple(Part(f"{self.name}.{name}", size, "attn") for name, size in sizes.items())
        stored = Part(f"{self.name}.in_proj_qkv", config.channels, "attn"), parts[3]
        self.qkvz = Projection(Site(layer, "qkvz"), model.width, parts, False, stored)
        out = Part(f"{self.name}.out_proj", model.width, "attn")
        self.out = Projection(Site(layer, "delta_out"), sizes["in_proj_z"], (out,), False)
        self.rates = frozen_parameter(2 * config.value_heads, model.width)  # β's rows, then the decay's
        self.conv = frozen_parameter(config.channels, 1, config.conv_width)
        self.a_log, self.dt_bias = (frozen_parameter(config.value_heads) for _ in range(2))
        self.norm = frozen_parameter(config.value_dim)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        qkvz, rates = total(self.qkvz(x_TD, context)), context.backend.few_outputs(x_TD, self.rates)
        return self.out(context.backend.mixed_delta(self, qkvz, rates, context.states), context)

    def mixed(self, qkvz: Tensor, rates: Tensor, states: Sequence[StateGroup]) -> Tensor:
        """What is projected out, [T, H·V], from the projections of all tokens."""
        u_TF, z = qkvz.split([self.config.channels, self.config.widths[3]], 1)
        b_TH, a_TH = rates.float().chunk(2, 1)
        g_TH = -self.a_log.float().exp() * F.softplus(a_TH + self.dt_bias.float())
        o_THV = mix_groups(self._mix, states, u_TF, g_TH, b_TH.sigmoid())
        o_THV = o_THV * (o_THV.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.norm.float()
        return (o_THV.flatten(1) * F.silu(z.float())).to(qkvz.dtype)

    def _mix(self, group: StateGroup, u_TF: Tensor, g_TH: Tensor, beta_TH: Tensor) -> Tensor:
        c, held = self.config, group.read(self.layer)
        before, state = (None, None) if held is None else held
        weight_WF = self.conv[:, 0].t().float()
        u_TF, last = conv_silu(u_TF.float(), weight_WF, group.lengths, before)
        dims, parts = (c.key_dim, c.key_dim, c.value_dim), u_TF.split(c.widths[:3], 1)
        q, k, v_THV = (x.unflatten(1, (-1, dim)) for x, dim in zip(parts, dims, strict=True))
        q, k = unit(q) * c.key_dim**-0.5, unit(k)
        if state is not None and max(group.lengths) == 1:
            o_THV = delta_step(q, k, v_THV, g_TH, beta_TH, state)
        else:
            o_THV, state = delta_chunks(q, k, v_THV, g_TH, beta_TH, group.chunks, state)
        group.write(self.layer, (last, state))
        return o_THV

    def weights(self) -> dict[str, Tensor]:
        b, a = self.rates.detach().chunk(2)
        own = {"in_proj_b.weight": b, "in_proj_a.weight": a, "conv1d.weight": self.conv, "A_log": self.a_log}
        own |= {"dt_bias": self.dt_bias, "norm.weight": self.norm}
        return {f"{self.name}.{name}": weight.detach() for name, weight in own.items()}

    def stacked(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.{module}": self.config.widths[:3] for module in ("in_proj_qkv", "conv1d")}


def mix_groups(mix: Callable[..., Tensor], groups: Sequence[StateGroup], *inputs: Tensor) -> Tensor:
    """What a recurrent mixer makes of the inputs of all tokens, group by group."""
    if groups[0].rows_T is None:
        return mix(groups[0], *inputs)
    mixed = [mix(group, *(x[group.rows_T] for x in inputs)) for group in groups]
    out = mixed[0].new_empty(len(inputs[0]), *mixed[0].shape[1:])
    for group, rows in zip(groups, mixed, strict=True):
        assert group.rows_T is not None
        out.index_copy_(0, group.rows_T, rows)
    return out


def by_part(name: str, tensor: Any, config: DeltaConfig | None) -> list[tuple[str, Any]]:
    """A stored weight by our names: the parts of a matrix that is stored key head by key head."""
    stem, _, last = name.removesuffix(".weight").rpartition(".")
    if config is None or not config.by_key_head or last not in ("in_proj_qkvz", "in_proj_ba"):
        return [(name, tensor)]
    whole = tensor if isinstance(tensor, Tensor) else tensor.dequantise()
    widths = config.widths if last == "in_proj_qkvz" else (config.value_heads,) * 2
    split = whole.unflatten(0, (config.key_heads, -1)).split([w // config.key_heads for w in widths], 1)
    parts = [part.flatten(0, 1) for part in split]
    if last == "in_proj_qkvz":
        parts = [torch.cat(parts[:3]), parts[3]]
    names = ("in_proj_qkv", "in_proj_z") if last == "in_proj_qkvz" else ("in_proj_b", "in_proj_a")
    return [(f"{stem}.{part}.weight", rows) for part, rows in zip(names, parts, strict=True)]


def by_key_head(parts: Sequence[Tensor], key_heads: int) -> Tensor:
    """Rows of q, k, v and z as one matrix that is stored key head by key head."""
    return torch.cat([part.unflatten(0, (key_heads, -1)) for part in parts], 1).flatten(0, 1)


class Chunks:
    """Where the tokens of packed sequences of `lengths` lie in chunks, which advance step by step.

    A step has the next chunk of every sequence that has one, the longest sequence first, so that the states
    of a step are the first ones of the step before.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.size = list(lengths), min(CHUNK, max(lengths))
        counts = -(-np.asarray(lengths) // self.size)
        order = np.argsort(-counts, kind="stable")
        self.steps = [int((counts > step).sum()) for step in range(counts.max())]
        first = np.asarray([0, *accumulate(self.steps)])
        self.count = int(first[-1])
        rank = np.argsort(order)
        places = [
            (first[at // self.size] + rank[i]) * self.size + at % self.size
            for i, at in enumerate(np.arange(length) for length in lengths)
        ]
        place = np.concatenate(places)
        self.whole = len(place) == self.count * self.size and bool((np.diff(place) == 1).all())
        self.place_T = torch.from_numpy(place).to(device)
        self.sorted = bool((np.diff(order) == 1).all())
        self.order_B, self.rank_B = (torch.from_numpy(x.copy()).to(device) for x in (order, rank))

    def split(self, x: Tensor) -> Tensor:
        """[T, …] as [N, C, …], zero where a chunk has no token."""
        if not self.whole:
            x = _Move.apply(x, self.place_T, self.count * self.size, True)
        return x.unflatten(0, (self.count, self.size))

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        x = x.flatten(0, 1)
        return x if self.whole else _Move.apply(x, self.place_T, len(self.place_T), False)

    def scan(
        self, step: Callable[..., tuple[Tensor, Tensor]], state_B: Tensor, *inputs_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`step` maps a state and one chunk's inputs to its output and the next state.

        Returns the outputs of all chunks, and the states after the last tokens.
        """
        state = state_B if self.sorted else state_B[self.order_B]
        ended, outputs = list[Tensor](), list[Tensor]()
        for inputs in zip(*(x.split(self.steps) for x in inputs_N), strict=True):
            if len(inputs[0]) < len(state):
                ended.append(state[len(inputs[0]) :])
                state = state[: len(inputs[0])]
            output, state = step(state, *inputs)
            outputs.append(output)
        final = torch.cat([state, *reversed(ended)]) if ended else state
        return torch.cat(outputs), final if self.sorted else final[self.rank_B]


class _Move(Function):
    """Rows to `places` of a larger tensor of zeros, or (not `out`) back from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, rows: int, out: bool) -> Tensor:
        ctx.save_for_backward(places)
        ctx.out, ctx.rows = out, len(x)
        return _move(x, places, rows, out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _move(grads[0], ctx.saved_tensors[0], ctx.rows, not ctx.out), None, None, None


def _move(x: Tensor, places: Tensor, rows: int, out: bool) -> Tensor:
    if not out:
        return x.index_select(0, places)
    return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, places, x)


def decay_between(decayed: Tensor) -> Tensor:
    """e^(sum of the decays after token j up to token i), 0 for j > i; `decayed` [..., C] are running sums."""
    size = decayed.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=decayed.device).triu(1)
    return (decayed[..., None] - decayed[..., None, :]).masked_fill(later, float("-inf")).exp()


def delta_chunks(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    chunks: Chunks,
    state_BHDV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o_THV and the states after the last tokens; sequences start at `state_BHDV`, or at zero."""
    (_, K, D), (_, H, V) = k_TKD.shape, v_THV.shape
    N, C, R = chunks.count, chunks.size, H // K
    q, k = (chunks.split(x).transpose(1, 2) for x in (q_TKD, k_TKD))  # [N, K, C, D]
    v = chunks.split(v_THV).unflatten(2, (K, R)).permute(0, 2, 3, 1, 4)  # [N, K, R, C, V]
    decayed = chunks.split(g_TH).unflatten(2, (K, R)).permute(0, 2, 3, 1).cumsum(-1)  # [N, K, R, C]
    beta = chunks.split(beta_TH).unflatten(2, (K, R)).permute(0, 2, 3, 1)[..., None]
    decay = decay_between(decayed)
    k_t = k.transpose(2, 3)
    system = (k @ k_t)[:, :, None] * decay * beta
    seen = (q @ k_t)[:, :, None] * decay
    grown = decayed.exp()[..., None]
    k, q = k[:, :, None], q[:, :, None]
    right = torch.cat((v, (k * grown).expand(N, K, R, C, D)), -1) * beta
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    heads = (N, H, C, -1)
    u, w = solved.reshape(heads).split([V, D], -1)
    q, seen = (q * grown).reshape(heads), seen.reshape(heads)
    end = decayed[..., -1:]
    k_t = (k * (end - decayed).exp()[..., None]).reshape(heads).transpose(2, 3)
    end = end.exp().reshape(N, H, 1, 1)

    def step(state: Tensor, u: Tensor, w: Tensor, q: Tensor, seen: Tensor, k_t: Tensor, end: Tensor):
        new = u - w @ state
        return q @ state + seen @ new, state * end + k_t @ new

    if state_BHDV is None:
        state_BHDV = v_THV.new_zeros(len(chunks.lengths), H, D, V)
    o, final = chunks.scan(step, state_BHDV, u, w, q, seen, k_t, end)
    return chunks.join(o.transpose(1, 2)), final  # [N, C, H, V]


def delta_step(
    q_BKD: Tensor, k_BKD: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor, state_BHDV: Tensor
) -> Tensor:
    """o_BHV of one token of each sequence; `state_BHDV` becomes the state after it, in place."""
    repeat = v_BHV.shape[1] // k_BKD.shape[1]
    q, k = (x.repeat_interleave(repeat, 1) for x in (q_BKD, k_BKD)) if repeat > 1 else (q_BKD, k_BKD)
    grown_BH1 = g_BH.exp()[..., None]
    read_BH2V = torch.stack((k, q), 2) @ state_BHDV  # both products read the state once
    old, o = (read_BH2V * grown_BH1[..., None]).unbind(2)
    new_BHV = (v_BHV - old) * beta_BH[..., None]
    state_BHDV.mul_(grown_BH1[..., None])
    flat = state_BHDV.view(-1, *state_BHDV.shape[2:])
    flat.baddbmm_(k.flatten(0, 1)[:, :, None], new_BHV.flatten(0, 1)[:, None])
    return o + (q * k).sum(-1, keepdim=True) * new_BHV


def conv_silu(
    x_TF: Tensor,
    weight_WF: Tensor,
    lengths: Sequence[int],
    before_BWF: Tensor | None,
    bias_F: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """silu of a causal depthwise convolution within each sequence, and the last W − 1 inputs of each.

    `before_BWF` are the W − 1 inputs before the first token; None: zeros.
    """
    kept = len(weight_WF) - 1
    if before_BWF is None:
        before_BWF = x_TF.new_zeros(len(lengths), kept, x_TF.shape[1])
    if max(lengths) == 1:
        seen_BWF = torch.cat((before_BWF, x_TF[:, None]), 1)
        y = (seen_BWF * weight_WF).sum(1)
        return F.silu(y if bias_F is None else y + bias_F), seen_BWF[:, 1:]
    # before each sequence's tokens those that it sees
    pieces = [piece for pair in zip(before_BWF, x_TF.split(list(lengths)), strict=True) for piece in pair]
    ends = list(accumulate(length + kept for length in lengths))
    laid = torch.cat(pieces)
    last = torch.stack([laid[end - kept : end] for end in ends]).detach()
    y = _ConvSilu.apply(laid, weight_WF, bias_F)
    if len(lengths) > 1:
        firsts = [end - kept - length for end, length in zip(ends, lengths, strict=True)]
        y = torch.cat([y[first : first + n] for first, n in zip(firsts, lengths, strict=True)])
    return y, last


class _ConvSilu(Function):
    """Row i of the result sees rows i … i + W − 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = len(x) - len(weight) + 1
        y = x[:rows] * weight[0] if bias is None else torch.addcmul(bias, x[:rows], weight[0])
        for i in range(1, len(weight)):
            y.addcmul_(x[i : i + rows], weight[i])
        ctx.save_for_backward(y, weight)
        return F.silu(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, weight = ctx.saved_tensors
        grad = torch.ops.aten.silu_backward(grads[0], y)
        out = grad.new_zeros(len(grad) + len(weight) - 1, grad.shape[1])
        for i in range(len(weight)):
            out[i : i + len(grad)].addcmul_(grad, weight[i])
        return out, None, None


def unit(x: Tensor) -> Tensor:
    """x over its length along the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
