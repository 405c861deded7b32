"""The block of experts against a loop over tokens, for every router and every shape of expert."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.hooks import ForwardContext
from tinkex.engine.torch.models.architecture import (
    ClampedSwiGlu,
    ExpertsConfig,
    ModelConfig,
    RouterConfig,
    SharedExpert,
)
from tinkex.engine.torch.models.moe import ExpertMlp, per_expert
from tinkex.engine.torch.models.norms import NormConfig

WIDTH, COUNT, BEST, INNER, TOKENS = 12, 8, 3, 10, 20
SHAPES: dict[str, ExpertsConfig] = {
    "softmax": ExpertsConfig(COUNT, BEST, INNER),
    "raw softmax": ExpertsConfig(COUNT, BEST, INNER, RouterConfig(normalise=False)),
    "router bias": ExpertsConfig(COUNT, BEST, INNER, RouterConfig(bias=True)),
    "softmax of the best": ExpertsConfig(COUNT, BEST, INNER, RouterConfig("softmax_of_best", bias=True)),
    "sigmoid": ExpertsConfig(
        COUNT, BEST, INNER, RouterConfig("sigmoid", selection_bias=True, groups=4, kept_groups=2, scale=2.5)
    ),
    "clamped, biased": ExpertsConfig(COUNT, BEST, INNER, activation=ClampedSwiGlu(1.7, 0.5), bias=True),
    "ungated, latent, shared": ExpertsConfig(
        COUNT, BEST, INNER, activation="relu2", gated=False, latent_width=6, shared=SharedExpert(14)
    ),
    "gated shared expert": ExpertsConfig(
        COUNT, BEST, INNER, shared=SharedExpert(14, "shared_expert", gated=True)
    ),
}


def by_hand(weights: dict[str, Tensor], config: ExpertsConfig, x: Tensor) -> Tensor:
    """One token's result."""
    get = {name.removeprefix("model.layers.0.mlp."): weight for name, weight in weights.items()}

    def mlp(name: str, x: Tensor, plain: bool = False) -> Tensor:
        def linear(part: str, x: Tensor) -> Tensor:
            return F.linear(x, get[f"{name}.{part}.weight"], get.get(f"{name}.{part}.bias"))

        up = linear("up_proj", x)
        if not config.gated:
            return linear("down_proj", F.relu(up) ** 2)
        gate = linear("gate_proj", x)
        if isinstance(config.activation, ClampedSwiGlu) and not plain:
            alpha, limit = config.activation
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            return linear("down_proj", up * gate * torch.sigmoid(alpha * gate))
        return linear("down_proj", F.silu(gate) * up)

    router = config.router
    logits = F.linear(x, get["gate.weight"], get.get("gate.bias"))
    score = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(0)
    liking = (score + get.get("gate.e_score_correction_bias", torch.zeros(COUNT))).tolist()
    size = COUNT // router.groups
    groups = [sorted(liking[i : i + size], reverse=True)[:2] for i in range(0, COUNT, size)]
    kept = sorted(range(router.groups), key=lambda g: -sum(groups[g]))[: router.kept_groups]
    chosen = sorted((e for e in range(COUNT) if e // size in kept), key=lambda e: -liking[e])[:BEST]
    weight = score[chosen]
    if router.normalise or router.score == "softmax_of_best":
        weight = weight / weight.sum()
    h = F.linear(x, get["fc1_latent_proj.weight"]) if config.latent_width else x
    y = sum(w * mlp(f"experts.{e}", h) for w, e in zip(router.scale * weight, chosen, strict=True))
    y = F.linear(y, get["fc2_latent_proj.weight"]) if config.latent_width else y
    if config.shared:
        shared = mlp(config.shared.name, x, plain=True)
        y = y + (
            shared * F.linear(x, get["shared_expert_gate.weight"]).sigmoid()
            if config.shared.gated
            else shared
        )
    return y


@pytest.mark.parametrize("name", SHAPES)
def test_experts_equal_a_loop_over_tokens(name: str) -> None:
    model = ModelConfig("", WIDTH, 9, 9, 99, False, NormConfig(), ())
    config, generator = SHAPES[name], torch.Generator().manual_seed(0)
    block = ExpertMlp(model, config, 0)
    weights = block.weights() | {
        key: view for one in block.modules() if one is not block for key, view in one.weights().items()
    }
    for view in weights.values():
        view.copy_(torch.randn(view.shape, generator=generator) / view.shape[-1] ** 0.5)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    context = ForwardContext(Backend(), (), lambda *_: x, None, lent={})
    want = torch.stack([by_hand(weights, config, token) for token in x])
    torch.testing.assert_close(block(x, context), want, atol=1e-5, rtol=1e-5)


def test_a_selection_bias_stays_in_fp32() -> None:
    model = ModelConfig("", WIDTH, 9, 9, 99, False, NormConfig(), ())
    block = ExpertMlp(model, SHAPES["sigmoid"], 0).to(torch.bfloat16)
    assert block.router.dtype == torch.bfloat16
    assert block.selection_bias is not None
    assert block.selection_bias.dtype == torch.float32


@pytest.mark.parametrize(("transposed", "interleaved"), [(False, False), (True, False), (True, True)])
def test_stacked_tensors_are_views_of_each_expert(transposed: bool, interleaved: bool) -> None:
    stacked = torch.arange(2 * 6 * 4.0).view(2, 6, 4)  # two experts, three rows each of gate and up
    stored = stacked.transpose(1, 2).contiguous() if transposed else stacked
    experts = ExpertsConfig(2, 1, 3, transposed=transposed, interleaved=interleaved)
    views = dict(per_expert("m.mlp.experts.gate_up_proj", stored, experts, width=4))
    rows = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 3), slice(3, 6))
    for i in range(2):
        for part, at in zip(("gate_proj", "up_proj"), rows, strict=True):
            view = views.pop(f"m.mlp.experts.{i}.{part}.weight")
            assert torch.equal(view, stacked[i, at])
            view.zero_()
    assert not views
    assert not stored.any()  # written through
