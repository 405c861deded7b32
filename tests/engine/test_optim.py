"""AdamW steps against torch.optim.AdamW, and the steps that must not happen."""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.protocol import EngineError
from tinkex.engine.torch.hooks import Part, Site
from tinkex.engine.torch.lora import Adapter
from tinkex.engine.torch.optim import adamw_step
from tinkex.types.params import AdamParams, LoraConfig

SITES = {Site(-1, "unembed"): (40, (Part("lm_head", 3000, "unembed"),))}


@pytest.fixture
def adapter(device: torch.device) -> Adapter:
    return Adapter.fresh(LoraConfig(4, seed=1), SITES, device)


def accumulate(adapter: Adapter, grad: torch.Tensor) -> None:
    adapter.open_grad()
    assert adapter.grad is not None
    adapter.grad += grad.to(adapter.grad.device)


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(),
        AdamParams(learning_rate=1e-2, weight_decay=0.1, eps=1e-8),
        AdamParams(learning_rate=3e-3, beta1=0.0, beta2=0.999, grad_clip_norm=0.5),
        AdamParams(learning_rate=3e-3, grad_clip_norm=1e6),
    ],
)
def test_ten_steps_equal_torch_optim(adapter: Adapter, params: AdamParams) -> None:
    theirs = adapter.flat.clone().requires_grad_()
    optimizer = torch.optim.AdamW(
        [theirs],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        foreach=False,
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(10):
        grad = torch.randn(adapter.flat.shape, generator=generator) * 10.0 ** (step % 3 - 2)
        accumulate(adapter, grad)
        theirs.grad = grad.clone().to(theirs.device)
        norm = torch.linalg.vector_norm(grad.double())
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([theirs], params.grad_clip_norm)
        optimizer.step()
        metrics = adamw_step(adapter, params)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert metrics["learning_rate"] == params.learning_rate
        assert metrics["grad_clipped"] == float(0 < params.grad_clip_norm < norm)
        assert (metrics["skipped"], metrics["optimizer_step"]) == (0.0, step + 1.0)
        torch.testing.assert_close(adapter.flat, theirs.detach(), atol=1e-6, rtol=1e-6)


def test_a_step_clears_the_gradients(adapter: Adapter) -> None:
    accumulate(adapter, torch.ones_like(adapter.flat))
    adamw_step(adapter, AdamParams())
    assert adapter.grad is None
    adapter.open_grad()
    assert adapter.grad is not None
    assert not adapter.grad.any()


def test_nothing_accumulated_changes_nothing_and_says_so(adapter: Adapter) -> None:
    accumulate(adapter, torch.ones_like(adapter.flat))
    adamw_step(adapter, AdamParams())
    before = [t.clone() for t in (adapter.flat, *adapter.moments())]
    metrics = adamw_step(adapter, AdamParams(weight_decay=0.5))
    assert metrics["skipped"] == 1.0
    assert adapter.step == 1
    for now, then in zip((adapter.flat, *adapter.moments()), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_fails_the_step_alone(adapter: Adapter, bad: float) -> None:
    accumulate(adapter, torch.ones_like(adapter.flat))
    adamw_step(adapter, AdamParams())
    before = [t.clone() for t in (adapter.flat, *adapter.moments())]
    grad = torch.ones_like(adapter.flat)
    grad[-1] = bad
    accumulate(adapter, grad)
    with pytest.raises(EngineError, match="not finite") as caught:
        adamw_step(adapter, AdamParams(grad_clip_norm=1.0))
    assert caught.value.category == "user"
    assert adapter.grad is None
    assert adapter.step == 1
    for now, then in zip((adapter.flat, *adapter.moments()), before, strict=True):
        assert torch.equal(now, then)
    assert adamw_step(adapter, AdamParams())["skipped"] == 1.0


def test_a_huge_but_finite_gradient_is_applied(adapter: Adapter) -> None:
    """Squares overflow in fp32 here; the numbers do not."""
    accumulate(adapter, torch.full_like(adapter.flat, 1e25))
    metrics = adamw_step(adapter, AdamParams(grad_clip_norm=1.0))
    assert metrics["grad_norm"] == pytest.approx(1e25 * adapter.flat.numel() ** 0.5, rel=1e-5)
    assert torch.isfinite(adapter.flat).all()


def test_a_gradient_whose_squares_overflow_fails_the_step_alone(adapter: Adapter) -> None:
    """An infinite second moment stays so: the parameter would never move again, and no file could hold it."""
    before = adapter.flat.clone()
    grad = torch.ones_like(adapter.flat)
    grad[3] = 1e25
    accumulate(adapter, grad)
    with pytest.raises(EngineError, match=r"too large \(global norm 1e\+25\)") as caught:
        adamw_step(adapter, AdamParams())
    assert caught.value.category == "user"
    assert torch.equal(adapter.flat, before)
    assert (adapter.step, adapter.exp_avg, adapter.exp_avg_sq) == (0, None, None)
    for _ in range(2):
        accumulate(adapter, torch.ones_like(adapter.flat))
        adamw_step(adapter, AdamParams())
    assert torch.isfinite(torch.cat(adapter.moments())).all()
    assert (adapter.flat != before).all()


def test_eps_zero_leaves_untouched_parameters_alone(adapter: Adapter) -> None:
    """B is zero at first, so A has no gradient in the first step: 0/0 must not become a NaN."""
    before = adapter.flat.clone()
    accumulate(adapter, torch.zeros_like(adapter.flat))
    adamw_step(adapter, AdamParams(eps=0.0))
    assert torch.equal(adapter.flat, before)
