"""The kernels of experts against plain torch: routing, sorting, products with adapters, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.by_kernels import BF16, DEVICE, INTERPRETED, MARKS, random
from tests.engine.plain_lora import PlainLora
from tinkex.engine.cuda import expert_routing as routing
from tinkex.engine.cuda import packed_experts, router_kernels
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.hooks import ForwardContext, Part, Site
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.architecture import ClampedSwiGlu, ExpertsConfig, ModelConfig, RouterConfig
from tinkex.engine.torch.models.moe import ExpertMlp
from tinkex.engine.torch.models.norms import NormConfig
from tinkex.engine.torch.quantised import FP4, QuantisedWeight
from tinkex.types.params import LoraConfig

pytestmark = [*MARKS, pytest.mark.slow]
BOUND = 1e-5 if INTERPRETED else 2e-2
WIDTH, INNER, COUNT, BEST = 64, 64, 8, 3


def near(got: Tensor, want: Tensor, bound: float = BOUND) -> None:
    assert got.shape == want.shape
    assert (got.float() - want.float()).norm() <= bound * want.float().norm()


@pytest.mark.parametrize("router", [
    RouterConfig(), RouterConfig(normalise=False), RouterConfig("softmax_of_best", bias=True),
    RouterConfig("sigmoid", selection_bias=True, scale=2.5),
], ids=lambda router: f"{router.score} {router.normalise}")  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_routing_equals_the_plain_one(router: RouterConfig, tokens: int) -> None:
    block, x = experts(router), random(tokens, WIDTH, seed=3)
    kernels = CudaBackend(DEVICE, BF16)
    weight, expert, _ = kernels.route(block, x, None, ForwardContext(kernels, (), lambda *_: x, None, {}))
    want_weight, want_expert = block.float().weigh(F.linear(x.float(), block.router, block.router_bias))
    assert torch.equal(expert.long().sort(1).values, want_expert.sort(1).values)
    order, want_order = expert.long().argsort(1), want_expert.argsort(1)
    near(weight.gather(1, order), want_weight.gather(1, want_order))


@pytest.mark.parametrize("segments", [[(0, 1)], [(0, 9)], [(1, 7), (None, 5), (0, 4)]])
@pytest.mark.parametrize("width", [64, 80, 1100])
def test_logits_and_the_down_projection_beside_them(
    segments: list[tuple[int | None, int]], width: int
) -> None:
    lengths, tokens = [n for _, n in segments], sum(n for _, n in segments)
    x, weight, bias = random(tokens, width), random(40, width, seed=1), random(40, seed=2)
    sites = {Site(0, "experts_gate_up"): (width, (Part("gate", 24, "mlp"), Part("up", 24, "mlp")))}
    held = [Adapter.fresh(LoraConfig(rank=rank, seed=rank), sites, DEVICE) for rank in (8, 12)]
    used = [None if i is None else held[i] for i, _ in segments]
    at = CudaBackend(DEVICE, BF16).lora(used, lengths).site(Site(0, "experts_gate_up"))
    logits, u = router_kernels.logits(x, weight, bias, at)
    near(logits, x.float() @ weight.float().t() + bias.float(), 1e-5 if INTERPRETED else 1e-3)
    assert u is not None
    start = 0
    for one, length in zip(used, lengths, strict=True):
        rows = slice(start, start := start + length)
        if one is not None:
            a = one.flat_as(BF16)[: 2 * one.lora.rank * width].view(-1, width)
            near(u[0, rows, : len(a)], x[rows].float() @ a.float().t())


@pytest.mark.parametrize("score", ["softmax", "softmax_of_best", "sigmoid"])
@pytest.mark.parametrize("tokens", [5, 60])
def test_a_row_that_is_not_finite_goes_to_experts_that_exist(tokens: int, score: str) -> None:
    """An adapter that has diverged, or a row that pads a step: the others' rows stay where they were."""
    logits = random(tokens, 6, dtype=torch.float32)
    _, want, _ = routing.route(logits, None, BEST, score, True, 1.0)
    logits[1], logits[3, 2:], logits[4, 0] = float("nan"), float("nan"), float("inf")
    weight, chosen, rows = routing.route(logits, None, BEST, score, True, 1.0)
    sound = torch.tensor([i not in (1, 3, 4) for i in range(tokens)], device=DEVICE)
    assert torch.equal(chosen[sound], want[sound])
    assert weight[sound].isfinite().all()
    assert 0 <= chosen.min() <= chosen.max() < 6
    assert torch.equal(rows.order_N.long().sort().values, torch.arange(tokens * BEST, device=DEVICE))
    assert not weight[1].isfinite().any()


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 21, 40, 70])
def test_rows_are_sorted_by_expert_and_tiles_cover_them(tokens: int, routed: bool) -> None:
    logits = random(tokens, COUNT, dtype=torch.float32)
    logits[:, 5] = -9.0  # one that nobody chooses
    _, chosen, rows = routing.route(logits, None, BEST, "softmax", True, 1.0)
    if not routed:
        rows = routing.place(chosen, COUNT)
    flat, tile = chosen.flatten().long(), rows.tile
    order = flat.sort(stable=True).indices
    assert torch.equal(rows.order_N.long(), order)
    assert torch.equal(rows.place_N.long()[order], torch.arange(len(order), device=DEVICE))
    counts = torch.bincount(flat, minlength=COUNT)
    assert torch.equal(rows.starts_E.long(), torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
    covered = []
    for expert, start, count in rows.tiles.t().tolist():
        assert count <= tile
        assert (flat[order[start : start + count]] == expert).all()
        covered += range(start, start + count)
    assert covered == list(range(len(flat)))


@pytest.mark.parametrize("segments", [[(1, 7), (None, 5), (0, 9)], [(0, 6), (1, 8), (0, 7)], [(0, 50)]])
@pytest.mark.parametrize("tile", [None, 16, 64])
def test_experts_with_adapters_and_their_gradients(
    segments: list[tuple[int | None, int]], tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        monkeypatch.setattr(routing, "tile_rows", lambda rows, count: tile)
    check_gradients(experts(RouterConfig()), segments)


@pytest.mark.parametrize("scheme", ["none", "fp4", "nf4"])
def test_clamped_experts_with_biases_and_quantised_ones(scheme: str) -> None:
    router = RouterConfig("softmax_of_best", bias=True)
    block = experts(router, scheme, activation=ClampedSwiGlu(1.702, 0.9), bias=True)
    check_gradients(block, [(0, 6), (None, 2), (1, 8)])


def check_gradients(block: ExpertMlp, segments: list[tuple[int | None, int]]) -> None:
    """Oracle: the plain block in fp32 with adapters in plain autograd operations.

    Clamps have steps in their derivatives, so that bf16 may be far off: the kernels as far as plain bf16.
    """
    lengths = [length for _, length in segments]
    held = [adapter(block, 8, 1), adapter(block, 16, 2)]
    used = [None if i is None else held[i] for i, _ in segments]
    x, grad = random(sum(lengths), WIDTH, seed=3), random(sum(lengths), WIDTH, seed=4)
    chosen = block.route(x).expert_TK  # the same for both, whatever their rounding

    def run(backend: Backend, lora: LoraBatch, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = block(x, ForwardContext(backend, (), lambda *_: x, lora, {}, chosen={0: chosen}))
        y.backward(grad.to(y.dtype))
        assert x.grad is not None
        if isinstance(lora, PlainLora):
            lora.collect()
        grads = (one.take_grad() for one in held)
        return [y.detach(), x.grad, *(one.clone() for one in grads if one is not None)]

    kernels = CudaBackend(DEVICE, BF16)
    got = run(kernels, kernels.lora(used, lengths, train=True), x)
    plain = run(Backend(), PlainLora(used, lengths, train=True), x)
    block.float()
    want = run(Backend(), PlainLora(used, lengths, train=True), x.float())
    assert len(got) == len(want) == 2 + len({one for one in used if one is not None})
    for one, rounded, other in zip(got, plain, want, strict=True):
        near(one, other, max(BOUND, 1.5 * float((rounded.float() - other.float()).norm() / other.norm())))


@pytest.mark.parametrize("segments", [[(None, 4)], [(0, 1)], [(1, 7), (None, 5), (0, 9)], [(0, 300)]])
def test_experts_without_gradients(segments: list[tuple[int | None, int]]) -> None:
    check_sampling(experts(RouterConfig()), segments)


@pytest.mark.parametrize("segments", [[(None, 4)], [(0, 1)], [(1, 7), (None, 5), (0, 9)]])
@pytest.mark.parametrize("scheme", ["none", "fp4", "nf4", "fp8"])
def test_clamped_and_quantised_experts_without_gradients(
    scheme: str, segments: list[tuple[int | None, int]]
) -> None:
    """A step of the sampler, for which quantised weights are dequantised in registers."""
    router = RouterConfig("softmax_of_best", bias=True)
    block = experts(router, scheme, activation=ClampedSwiGlu(1.702, 0.9), bias=True)
    if scheme != "none":
        rows = routing.place(torch.zeros(9, BEST, dtype=torch.int32, device=DEVICE), COUNT)
        assert packed_experts.read_in_place(block.gate_up, rows) is not None
        assert packed_experts.read_in_place(block.down, rows) is not None
    check_sampling(block, segments)


@pytest.mark.parametrize("segments", [[(0, 1)], [(1, 2), (None, 1), (0, 2)]])
def test_sums_of_few_tokens_are_split(
    segments: list[tuple[int | None, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the features of codes; five and three tiles of them do not come out even."""
    monkeypatch.setitem(globals(), "WIDTH", 320)
    monkeypatch.setitem(globals(), "INNER", 192)
    router = RouterConfig("softmax_of_best", bias=True)
    block = experts(router, "fp4", activation=ClampedSwiGlu(1.702, 0.9), bias=True)
    check_sampling(block, segments)


def check_sampling(block: ExpertMlp, segments: list[tuple[int | None, int]]) -> None:
    lengths = [length for _, length in segments]
    held = [adapter(block, 8, 1), adapter(block, 16, 2)]
    used, x = [None if i is None else held[i] for i, _ in segments], random(sum(lengths), WIDTH, seed=3)
    kernels = CudaBackend(DEVICE, BF16)
    lora = kernels.lora(used, lengths) if any(used) else None
    with torch.inference_mode():
        context = ForwardContext(kernels, (), lambda *_: x, lora, {})
        got, chosen = block(x, context), kernels.route(block, x, None, context).expert_TK.long()
        plain = ForwardContext(Backend(), (), lambda *_: x, PlainLora(used, lengths), {}, chosen={0: chosen})
        near(got, block.float()(x.float(), plain))


def experts(router: RouterConfig, scheme: str = "none", **config: Any) -> ExpertMlp:
    model = ModelConfig("", WIDTH, 9, 9, 99, False, NormConfig(), ())
    block = ExpertMlp(model, ExpertsConfig(COUNT, BEST, INNER, router, **config), 0)
    generator = torch.Generator().manual_seed(0)
    for view in block.weights().values():
        view.copy_(torch.randn(view.shape, generator=generator) / view.shape[-1] ** 0.5)
    block = block.to(DEVICE, BF16)
    if scheme != "none":
        plain = block.weights()
        block.quantise(BF16)
        for name, (matrix, index) in block.slots().items():
            weight = mxfp4(plain[name]) if scheme == "fp4" else plain[name]
            matrix.put(index, weight, "file" if scheme == "fp4" else scheme, DEVICE)
        block.settle(for_kernels=True)
    return block


def mxfp4(weight: Tensor) -> QuantisedWeight:
    """Of random codes: the values do not matter."""
    out, columns = weight.shape
    codes = torch.randint(0, 256, (out, columns // 2), dtype=torch.uint8)
    scale = torch.full((out, columns // 32), 2.0**-4).mul_(2.0 ** torch.randint(0, 3, (out, columns // 32)))
    return QuantisedWeight(codes, scale, (1, 32), torch.tensor(FP4))


def adapter(block: ExpertMlp, rank: int, seed: int) -> Adapter:
    one = Adapter.fresh(LoraConfig(rank=rank, seed=seed), block.sites(), DEVICE)
    one.flat.copy_(0.3 * torch.randn(one.flat.shape, generator=torch.Generator().manual_seed(seed)))
    return one
