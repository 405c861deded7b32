"""`engine.torch.backend.Backend` by Triton kernels and captured graphs, for bf16 on a CUDA device.

Every method computes what `Backend` computes, to rounding. `invariant` makes every row's result bitwise
identical in any batch, and the sampler's logprobs bitwise identical to the trainer's.

Shapes: N rows, D width, V padded vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.cuda import (
    attention_hooks,
    elementwise,
    gated_heads,
    packed_experts,
    packed_weights,
    recurrence,
)
from tinkex.engine.cuda import experts as routed
from tinkex.engine.cuda import token_kernels as kernel
from tinkex.engine.cuda.attention_hooks import KernelAttend, RaggedAttend
from tinkex.engine.cuda.decode_graphs import DecodeGraphs, DecodePipeline
from tinkex.engine.cuda.grouped_lora import CudaLora
from tinkex.engine.cuda.invariant_product import InvariantLinear, product
from tinkex.engine.cuda.prefill_graphs import CapturedPrefill
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.backend import Backend, StepLead
from tinkex.engine.torch.continuous_batch import StepLimits
from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.hooks import ForwardContext, PartialProjection
from tinkex.engine.torch.kv import KVCache, TokenSpan
from tinkex.engine.torch.logprobs import logprob_chunk
from tinkex.engine.torch.models.architecture import ExpertsConfig, ModelConfig
from tinkex.engine.torch.models.attention import Attention
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.delta_net import DeltaNet
from tinkex.engine.torch.models.moe import ExpertMlp, Routing
from tinkex.engine.torch.models.projection import total
from tinkex.engine.torch.models.weights import UNEMBED
from tinkex.engine.torch.next_tokens import Choice, scaled
from tinkex.engine.torch.states import StateGroup, StatePool


class CudaBackend(Backend):
    """Kernels for `device`. `dtype` is bf16; Triton's interpreter computes in fp32."""

    elementwise: Any = elementwise
    reads_codes = True
    clears_pages = False  # kernels never read a masked key

    def __init__(self, device: torch.device, dtype: torch.dtype, *, invariant: bool = False) -> None:
        self._device, self._dtype, self.invariant = device, dtype, invariant

    def linear(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, packed: Tensor | None = None
    ) -> Tensor:
        if not isinstance(weight, Tensor):
            return packed_weights.linear(x, weight, bias)
        if not self.invariant:
            return F.linear(x, weight, bias)
        return InvariantLinear.apply(x, weight, bias) if x.requires_grad else product(x, weight, bias)

    def lora(
        self, adapters: Sequence[Adapter | None], lengths: Sequence[int], *, train: bool = False
    ) -> CudaLora:
        return CudaLora(adapters, lengths, self._device, self._dtype, train=train, invariant=self.invariant)

    def route(
        self, experts: ExpertMlp, x_TD: Tensor, known_TK: Tensor | None, context: ForwardContext
    ) -> Routing:
        if not routed.serves(experts.experts):
            return super().route(experts, x_TD, known_TK, context)
        lora: Any = context.lora  # a `CudaLora`, or a `CapturedLora`
        return routed.route(experts, x_TD, known_TK, lora)

    def routed_experts(
        self, experts: ExpertMlp, x_TD: Tensor, routing: Routing, context: ForwardContext
    ) -> Tensor:
        lora: Any = context.lora  # a `CudaLora`, or a `CapturedLora`
        eager = context.lora if isinstance(context.lora, CudaLora) else None
        if routing.rows is None or (eager is not None and not eager.readable):
            rounded = routing._replace(
                weight_TK=routing.weight_TK.to(x_TD.dtype), expert_TK=routing.expert_TK.long()
            )
            return super().routed_experts(experts, x_TD, rounded, context)
        given = (routing.rows, routed.weights_of(experts), lora)
        if eager is not None and eager.train and torch.is_grad_enabled():
            return routed.RoutedExperts.apply(x_TD, routing.weight_TK, eager._anchor, *given)  # type: ignore[return-value]
        return routed.forward(x_TD, routing.weight_TK, *given, keep=False)[0]

    def add_gated(self, y_TD: Tensor, shared_TD: Tensor, x_TD: Tensor, gate_1D: Tensor) -> Tensor:
        return routed.AddGated.apply(y_TD, shared_TD, x_TD, gate_1D)  # type: ignore[return-value]

    def few_outputs(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        return routed.RouterLogits.apply(x_TI, weight_OI, None, x_TI.dtype)  # type: ignore[return-value]

    def split_heads(
        self, attention: Attention, qkv: Tensor | PartialProjection, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        c, rope = attention.config, attention.rope
        assert rope is not None
        shape = gated_heads.HeadShape(c.heads, c.kv_heads, c.head_dim, c.gate)
        norms = attention.norms() or (None, None)
        eps, angles = attention.norm.eps, context.angles[rope]
        found: Any = gated_heads.SplitHeads.apply(total(qkv), *angles, shape, *norms, eps)
        return found if c.gate else (*found, None)

    def gated_heads(self, o_THC: Tensor, gate_THC: Tensor) -> Tensor:
        return gated_heads.GateHeads.apply(o_THC, gate_THC)  # type: ignore[return-value]

    def mixed_delta(self, net: DeltaNet, qkvz: Tensor, rates: Tensor, states: Sequence[StateGroup]) -> Tensor:
        (held,) = states
        assert isinstance(held, recurrence.KernelStates)
        return recurrence.mixed(net, qkvz, rates, held)

    def packed_states(
        self, config: ModelConfig, lengths: Sequence[int], device: torch.device
    ) -> Sequence[StateGroup]:
        return [recurrence.packed(lengths, device)] if config.state_shapes else []

    def slot_states(
        self, pool: StatePool, slots: Sequence[int], counts: Sequence[int]
    ) -> Sequence[StateGroup]:
        return [recurrence.of_slots(pool, slots, counts)]

    def expert_linear(self, x_NI: Tensor, weight_EOI: Any, counts_E: Tensor) -> Tensor:
        weight_EOI = packed_experts.dequantised(weight_EOI, x_NI.dtype)
        if x_NI.dtype != torch.bfloat16:
            return super().expert_linear(x_NI, weight_EOI, counts_E)
        return F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=counts_E.cumsum(0, dtype=torch.int32))

    def packed_attend(self, lengths: Sequence[int], windows: Sequence[int | None]) -> RaggedAttend:
        return RaggedAttend(lengths, windows, self._device, self.invariant)

    def paged_attend(
        self, cache: KVCache, pieces: Sequence[TokenSpan], windows: Sequence[int | None],
        min_split_keys: int = 0,
    ) -> KernelAttend:  # fmt: skip
        """For any mix of prompts and single tokens."""
        tokens = attention_hooks.tile_tokens(pieces, self.invariant)
        splits = attention_hooks.splits_for(len(pieces) * cache.heads, tokens)
        queries, slots_T = attention_hooks.lay_out(pieces, tokens, cache.device, splits, min_split_keys)
        return KernelAttend(cache, windows, queries, slots_T)

    def logprob_chunk(
        self, h_ND: Tensor, weight_VD: Tensor, vocab: int, lora: CudaLora, start: int,
        cells: tuple[Tensor, Tensor], grads: Callable[[Tensor], Tensor] | None, out_ND: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`logprobs.logprob_chunk` with logits that stay in bf16 and become their own gradient in place."""
        if not lora.readable:
            assert not self.invariant
            return logprob_chunk(h_ND, weight_VD, vocab, lora, start, cells, grads, out_ND)
        (rows, ids), part = cells, lora.part(start, start + len(h_ND))
        at, u = part.site(UNEMBED), None
        if at is None:
            logits_NV = self.linear(h_ND, weight_VD)
        else:
            logits_NV, u = part.product(at, h_ND, weight_VD)
        # a temperature of 1, as the sampler's kernel has it
        ones_N = torch.ones(len(h_ND), device=h_ND.device) if self.invariant else None
        normaliser_N = kernel.normaliser(logits_NV, vocab, ones_N)
        lp = logits_NV[rows, ids].float() - normaliser_N[rows]
        if grads is None or out_ND is None:
            return lp
        grad_M = grads(lp).float()
        if len(ids) == len(h_ND):
            kernel.gradient_(logits_NV, vocab, normaliser_N, ids, grad_M)
        else:  # some rows have several targets
            total_N = torch.zeros_like(normaliser_N).index_add_(0, rows, grad_M)
            none_N = torch.full_like(rows[: len(h_ND)], -1)
            kernel.gradient_(logits_NV, vocab, normaliser_N, none_N, total_N)
            logits_NV.index_put_((rows, ids), grad_M.to(logits_NV.dtype), accumulate=True)
        if at is None or u is None:
            torch.mm(logits_NV, weight_VD, out=out_ND)
        else:
            part.grad_x(at, logits_NV, part.backward(at, logits_NV, h_ND, u), weight_VD, out_ND)
        return lp

    def draw(self, logits_NV: Tensor, choice: Choice, vocab: int) -> tuple[list[int], list[float]]:
        device = logits_NV.device
        keys_N, temperature_N = (
            to_device(a, device) for a in (choice.keys.view(np.int64), choice.temperature)
        )
        tokens_N, chosen_N = torch.empty_like(keys_N), torch.empty_like(temperature_N)
        kernel.draw(logits_NV, temperature_N, keys_N, vocab, tokens_N, chosen_N, self.invariant)
        return tokens_N.tolist(), chosen_N.tolist()

    def logprobs(self, logits_NV: Tensor, temperature_N: Tensor, vocab: int) -> Tensor:
        if not self.invariant:
            return super().logprobs(logits_NV, temperature_N, vocab)
        normaliser_N = kernel.normaliser(logits_NV, vocab, temperature_N)
        logprobs_NV = scaled(logits_NV, temperature_N).sub_(normaliser_N[:, None])
        logprobs_NV[:, vocab:] = -math.inf
        return logprobs_NV

    def captured_steps(
        self, decoder: Decoder, cache: KVCache, limits: StepLimits, states: StatePool | None = None,
        lead: StepLead | None = None,
    ) -> tuple[DecodePipeline, CapturedPrefill] | tuple[None, None]:  # fmt: skip
        """None for models with experts that no kernel serves: their steps need the host."""
        experts = (layer.mlp for layer in decoder.config.stack if isinstance(layer.mlp, ExpertsConfig))
        if not all(map(routed.serves, experts)):
            return None, None
        graphs = DecodeGraphs(decoder, cache, limits.sequences, limits.context, states)
        return DecodePipeline(graphs, lead), CapturedPrefill(decoder, cache, limits, graphs)
