"""Compiles every Triton kernel of engine/cuda for Hopper, without a GPU: a script, not for the interpreter.

Triton's interpreter accepts code that does not compile. Host functions are called with tensors on the CPU,
and a launch compiles its kernel instead of running it. Prints the kernels that were compiled.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tinkex.engine.cuda import (
    deferred_expand,
    delta_gradients,
    delta_kernels,
    elementwise,
    expert_gradients,
    expert_kernels,
    expert_lora,
    expert_routing,
    fused_projection,
    gated_heads,
    invariant_product,
    launch,
    lora_gradients,
    narrow_projection,
    packed_attention,
    packed_experts,
    packed_weights,
    paged_attention,
    router_kernels,
    token_kernels,
)
from tinkex.engine.cuda import lora_kernels as lora
from tinkex.engine.cuda.adapter_table import AdapterTable, RowTiles, SiteAdapters
from tinkex.engine.torch.models.architecture import DeltaConfig
from tinkex.engine.torch.quantised import FP4, NF4, QuantisedWeight

TARGET = GPUTarget("cuda", 90, 32)
SHARED = 232_448  # bytes of shared memory on Hopper
INT64, INT32, FP32 = torch.int64, torch.int32, torch.float32
compiled: set[str] = set()


def compile_instead(
    self: launch.Launcher, grid: tuple[int, ...], *args: Any, clusters: bool = False, **constants: Any
) -> None:
    """In place of `Launcher._launch`."""
    backend, kernel = make_backend(TARGET), self._kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, special, rest = bind(*args, **constants)
    options, *given = kernel._pack_args(backend, constants, bound, special, rest)
    done = triton.compile(ASTSource(kernel, *given), target=TARGET, options=options.__dict__)
    assert done.metadata.shared <= SHARED, (kernel.__name__, done.metadata.shared)
    compiled.add(f"{kernel.__module__.split('.')[-1]}.{kernel.__name__}")


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def lora_of(rows: int, tile: int, count: int, invariant: bool) -> None:
    table = AdapterTable(some(3, 32, dtype=INT64), some(3, dtype=FP32), 32, invariant, vectors=True)
    tiles, segments = RowTiles(some(6, count, dtype=INT32), tile), RowTiles(some(3, 2, dtype=INT32), 1500)
    heads, angles, norms = (16, 8), (some(rows, 64), some(rows, 64)), (some(128), some(128))
    for column, in_features, outs in (
        (5, 1024, [2048, 1024, 1024]),
        (9, 1024, [3072, 3072]),
        (13, 3072, [1024]),
        (17, 1024, [1024, 1024, 2048, 2048]),
    ):
        at = SiteAdapters(table, tiles, column, in_features, outs)
        x, y = some(rows, in_features), some(rows, sum(outs))
        fused = fused_projection.FusedProjection(x, some(in_features, y.shape[1]).t(), at)
        fused.addend()
        if rows <= narrow_projection.MAX_ROWS:
            narrow_projection.product_and_shrink(x, some(in_features, y.shape[1]).t(), some(y.shape[1]), at)
        for splits in (None, 1, 2):
            u = lora.shrink(x, at.a, splits, beside=True)
            lora.expand(u, y, at.b)
            lora.unite(u, some(len(u), *y.shape, dtype=FP32), x.dtype, at.b)
            lora.write(u, y, at.b)
            deferred = deferred_expand.DeferredExpand(y, u, at)
            if len(outs) == 2:
                fused.swiglu()
                deferred.swiglu()
            if len(outs) == 3:
                deferred.rotate(*angles, heads, norms, 1e-6)
        into = SiteAdapters(table, segments, column, in_features, outs)
        grad_u = lora_gradients.backward(y, x, some(1, rows, 96), at, into, atomic=not invariant)
        lora.expand(grad_u, x, at.a)


def elementwise_steps() -> None:
    x, rstd, angles = some(40, 1024), some(40, 1, dtype=FP32), (some(40, 64), some(40, 64))
    for delta in (None, x, some(4, 40, 1024, dtype=FP32)):
        elementwise.normalise(x, x, delta, some(1024), 1e-6)
    elementwise.add(x, x, x)
    elementwise.normalise_backward(x, x, rstd, some(1024), x)
    for norms in (None, (some(128), some(128))):
        qkv, grads = some(40, 32 * 128), (some(40, 16, 128), some(40, 8, 128), some(40, 8, 128))
        elementwise.rotate(qkv, *angles, (16, 8), norms, 1e-6)
        elementwise.rotate_backward(grads, qkv, *angles, norms, some(40, 24, dtype=FP32))
    elementwise.swiglu(some(40, 6144))
    elementwise.add_gated(x, x, x, some(1, 1024))
    elementwise.swiglu_backward(some(40, 3072), some(40, 6144))
    for rows in (1, 40, 300, 2000):
        invariant_product.product(some(rows, 1024), some(1024, 4096).t(), some(4096))


def logits_and_steps() -> None:
    logits, ids, fp32 = some(40, 151_936), some(40, dtype=INT64), some(40, dtype=FP32)
    token_kernels.gradient_(logits, 151_669, token_kernels.normaliser(logits, 151_669), ids, fp32)
    token_kernels.draw(logits, fp32, ids, 151_669, ids, fp32, invariant=True)
    known, tiles, table = (some(512, 64), some(512, 64)), some(4, 40, dtype=INT32), some(40, 32, dtype=INT32)
    angles = (some(40, 64), some(40, 64))
    token_kernels.begin(
        some(token_kernels.ORDERS, 40, dtype=INT64), ids, ids, ids, tiles, table, 16, known, angles
    )


def delta_nets() -> None:
    config, cpu = DeltaConfig(16, 32, 128, 128, 4), torch.device("cpu")
    vectors = some(config.channels, 1, 4), some(32), some(32), some(128)
    weights = delta_kernels.DeltaWeights(config, *vectors, 1e-6)
    qkvz, rates = some(256, 12288), some(256, 64)
    layout = delta_kernels.lay_out([100, 156], cpu)
    pools = some(4, *config.state_shapes[0], dtype=FP32), some(4, *config.state_shapes[1], dtype=FP32)
    for dtype in (INT32, INT64):
        states = delta_kernels.SlotStates(*pools, some(256, dtype=dtype))
        delta_kernels.mixed(qkvz, rates, weights, layout, states)
        delta_kernels.step(qkvz, rates, weights, states)
    delta_gradients.backward(some(256, 4096), qkvz, rates, weights, layout)


def gated_attention() -> None:
    shape, angles = gated_heads.HeadShape(16, 4, 256, True), (some(40, 32), some(40, 32))
    norms, qkv = (some(256, dtype=FP32), some(256, dtype=FP32)), some(40, shape.width)
    q, k, v, gate, rstd = gated_heads.split(qkv, *angles, shape, norms, 1e-6)
    assert gate is not None
    gated_heads.split_backward((q, k, v, gate), qkv, *angles, shape, norms, rstd)
    gated_heads.gate_backward(gated_heads.gate(q, gate), q, gate)


def wide_heads(groups: int) -> None:
    """Heads of 256, four or eight of which share their keys."""
    q, k, cpu = some(700, 16, 256), some(700, groups, 256), torch.device("cpu")
    for lengths in ([300, 400], [100_000]):  # with slopes stored, and without
        tiles = packed_attention.cut(lengths, cpu)
        out, lse = packed_attention.forward(q, k, k, tiles, None)
        packed_attention.backward(q, q, k, k, out, lse, tiles, None)
    paged(groups, 256, None)


def attention(window: int | None, sinks: Tensor | None = None) -> None:
    q, k, tiles = some(700, 16, 128), some(700, 8, 128), packed_attention.cut([300, 400], torch.device("cpu"))
    out, lse = packed_attention.forward(q, k, k, tiles, window, sinks)
    packed_attention.backward(q, q, k, k, out, lse, tiles, window)
    paged(8, 128, window, sinks)


def paged(groups: int, dim: int, window: int | None, sinks: Tensor | None = None) -> None:
    pool = some(64, 16 * groups * dim)
    for tokens, splits, exact, count in ((16, 1, 0, 44), (1, 1, 0, 256), (1, 1, 2048, 256), (1, 16, 0, 4)):
        cells, table = some(4, count, dtype=INT32), some(count, 32, dtype=INT32)
        queries = paged_attention.Queries(cells, table, tokens, splits, exact)
        q, k = some(count, 16, dim), some(count, groups, dim)
        paged_attention.attend(q, k, k, pool, pool, queries, some(count, dtype=INT64), 16, window, sinks)


def experts(tokens: int, rank: int, count: int, best: int) -> None:
    width, inner = 2048, 768
    logits, slots = some(tokens, count, dtype=FP32), some(tokens, dtype=INT32)
    for score in expert_routing.SCORES:
        weight_TK, ids, rows = expert_routing.route(logits, None, best, score, True, 1.0)
    expert_routing.place(ids, count)
    expert_routing.slots_of(some(6, 4, dtype=INT32), tokens, 64)
    bounds = expert_routing.bounds_of(rows, some(2, dtype=INT32))
    x, kept = some(tokens, width), some(tokens * best, 2 * inner)
    gate_up, down_weight = some(count, 2 * inner, width), some(count, width, inner)
    expert_kernels.combine(some(tokens * best, width), weight_TK, rows)
    for mixed, u in ((False, some(1, tokens, 2 * rank)), (True, some(4, tokens, 2 * rank, dtype=FP32))):
        table = AdapterTable(some(3, 64, dtype=INT64), some(3, dtype=FP32), rank, vectors=True, mixed=mixed)
        tiles = RowTiles(some(6, 4, dtype=INT32), 64)
        up = expert_lora.ExpertSite(SiteAdapters(table, tiles, 5, width, [inner, inner]), slots)
        down = expert_lora.ExpertSite(SiteAdapters(table, tiles, 9, inner, [width]), slots)
        router_kernels.logits(x, some(count, width), some(count), up.at if tokens <= 16 else None)
        expert_kernels.gate_up(x, gate_up, rows, None, None, keep=mixed)
        h, _ = expert_kernels.gate_up(x, gate_up, rows, u, up, keep=mixed)
        y, u_N = expert_kernels.product_and_shrink(h, down_weight, rows, down)
        expert_kernels.combine(y, weight_TK, rows, u_N, down)
        _, u_T = expert_kernels.combine(y, weight_TK, rows, u_N)
        assert u_T is not None
        grad_h = expert_kernels.product_of_tokens(x, down_weight.transpose(1, 2), rows, u_T[None], down)
        grads, h, _ = expert_gradients.activate_backward(grad_h, kept, rows, weight_TK)
        expert_gradients.add_outer(u_T, h, weight_TK, rows, bounds, slots[:2], down.at, "A", False)
        grad_u = expert_lora.shrink_rows(grads, rows, up, "B")
        expert_gradients.add_outer(u[0].bfloat16(), grads, None, rows, bounds, slots[:2], up.at, "B", True)
        grad_x = expert_kernels.product(grads, gate_up.transpose(1, 2), rows)
        expert_kernels.combine(grad_x, None, rows, grad_u)


def quantised(kind: str, *shape: int) -> QuantisedWeight:
    """As the kernels read it."""
    *rest, columns = shape
    wide = {"nf4": 64, "fp4": 32, "table": 32}.get(kind)
    if wide is None:
        codes = some(*shape, dtype=torch.float8_e4m3fn if kind == "fp8" else torch.int8)
        return QuantisedWeight(codes, some(*rest, 1), (1, columns))
    table = torch.tensor({"nf4": NF4, "fp4": FP4}.get(kind, tuple(map(float, range(16)))))
    codes, scale = some(*rest, columns // 2, dtype=torch.uint8), some(*rest, columns // wide)
    zero = some(*scale.shape, dtype=torch.uint8) if kind == "table" else None
    return QuantisedWeight(codes, scale, (1, wide), table, zero).for_kernels(torch.bfloat16)


def packed(kind: str) -> None:
    weight = quantised(kind, 5760, 2880)
    packed_weights.dequantise(weight, torch.bfloat16)
    for rows in (1, 64, 128, 256) if kind != "table" else ():
        packed_weights.product(some(rows, 2880), weight)
    if kind not in ("fp4", "fp8"):
        return
    stack, down, activation = quantised(kind, 4, 5760, 2880), quantised(kind, 4, 2880, 2880), (True, 1.7, 7.0)
    for tokens in (1, 64):
        rows = expert_routing.place(some(tokens, 4, dtype=INT32), 32)
        table = AdapterTable(some(3, 64, dtype=INT64), some(3, dtype=FP32), 32, vectors=True)
        tiles = RowTiles(some(6, 4, dtype=INT32), 64)
        at = SiteAdapters(table, tiles, 5, 2880, [2880, 2880])
        lora = expert_lora.ExpertSite(at, some(tokens, dtype=INT32))
        x, u, acts = some(tokens, 2880), some(1, tokens, 64), expert_kernels.Activation(*activation)
        h = packed_experts.gate_up(x, stack, some(4, 5760), acts, rows, u, lora)
        of_down = expert_lora.ExpertSite(SiteAdapters(table, tiles, 9, 2880, [2880]), lora.slots_T)
        packed_experts.product(h, down, some(4, 2880), rows, of_down)
        wide, kept = some(4, 2880, 2880), some(len(h), 5760)
        expert_kernels.gate_up(x, some(4, 5760, 2880), rows, u, lora, True, some(4, 5760), acts)
        expert_kernels.product(h, wide, rows, some(4, 2880))
        expert_gradients.activate_backward(h, kept, rows, some(tokens, 4, dtype=FP32), acts)


if __name__ == "__main__":
    launch.Launcher._launch = compile_instead
    for rows, tile, count, invariant in ((16, 16, 1, False), (256, 64, 4, False), (256, 16, 16, True)):
        lora_of(rows, tile, count, invariant)
    elementwise_steps()
    logits_and_steps()
    for tokens in (1, 64, 128, 4096):
        experts(tokens, 32, 128, 8)
    attention(None)
    attention(100)
    wide_heads(4)
    wide_heads(2)
    delta_nets()
    gated_attention()
    attention(100, some(16))
    for kind in ("nf4", "fp4", "table", "fp8", "int8"):
        packed(kind)
    print(*sorted(compiled))
