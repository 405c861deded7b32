"""Every loss against its formula in plain numpy (float64), gradients by finite differences of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.engine.protocol import EngineError, Pass
from tinkex.engine.torch.loss_graph import LossClock
from tinkex.engine.torch.losses import TORCH_LOSSES, gradient, per_datum
from tinkex.engine.torch.trainer import TrainingPass, flat_inputs, read_training_pass
from tinkex.types.chunks import DmelChunk, ImageChunk
from tinkex.types.data import Datum, ModelInput
from tinkex.types.tensor import TensorData

VOCAB, CONTEXT = 100, 64
CPU = torch.device("cpu")
Formula = Callable[[np.ndarray, dict[str, np.ndarray], dict[str, float]], float]


# -- the formulas, one datum at a time -----------------------------------------------------------------


def clipped(
    r: np.ndarray | float, x: dict[str, np.ndarray], c: dict[str, float], lo: float, hi: float
) -> float:
    low = x.get("clip_low_threshold", np.full(1, c.get("clip_low_threshold", lo)))
    high = x.get("clip_high_threshold", np.full(1, c.get("clip_high_threshold", hi)))
    a = x["advantages"]
    return float(-np.minimum(r * a, np.clip(r, low, high) * a).sum())


def ratio(lp: np.ndarray, x: dict[str, np.ndarray]) -> np.ndarray:
    return np.exp(lp - x["logprobs"])


def np_cross_entropy(lp, x, c):
    return float(-(lp * x.get("weights", np.ones_like(lp))).sum())


def np_importance_sampling(lp, x, c):
    return float(-(ratio(lp, x) * x["advantages"]).sum())


def np_ppo(lp, x, c):
    return clipped(ratio(lp, x), x, c, 0.8, 1.2)


def np_dro(lp, x, c):
    inside = lp * x["advantages"] - 0.5 * c["beta"] * (lp - x["logprobs"]) ** 2
    return float(-inside[x["advantages"] != 0].sum())


def np_gspo(lp, x, c):
    mask = x.get("sequence_ratio_mask", x["advantages"] != 0).astype(bool)
    s = np.exp((lp - x["logprobs"])[mask].mean()) if mask.any() else 1.0
    return clipped(s, x, c, 0.8, 1.2)


def np_kl_divergence(lp, x, c):
    q = np.exp(x["logprobs"])
    return float((x.get("weights", np.ones_like(lp)) * q * (x["logprobs"] - lp)).sum())


FORMULAS: dict[str, Formula] = {
    "cross_entropy": np_cross_entropy,
    "importance_sampling": np_importance_sampling,
    "ppo": np_ppo,
    "dro": np_dro,
    "gspo": np_gspo,
    "kl_divergence": np_kl_divergence,
}  # cispo has a stop-gradient and so a test of its own


def rl_inputs(rng: np.random.Generator, n: int, **more: Any) -> dict[str, Any]:
    inputs = {
        "target_tokens": rng.integers(0, 100, n),
        "logprobs": (-2 + 0.4 * rng.normal(size=n)).astype(np.float32),
        "advantages": rng.normal(size=n).astype(np.float32),
    }
    inputs["advantages"][: n // 3] = 0.0
    inputs["logprobs"][: n // 3] = 0.0
    return inputs | more


def datum(inputs: dict[str, Any]) -> Datum:
    n = len(inputs["target_tokens"]) if "target_tokens" in inputs else 4
    return Datum(ModelInput.from_ints(list(range(n))), inputs)


def read(data: list[Datum], name: str, config: dict[str, Any]) -> TrainingPass:
    """A pass, read to its end in one go."""
    reading = read_training_pass(Pass("run", data, name, config), VOCAB, CONTEXT, LossClock, lambda: None)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


def compute(name: str, data: list[Datum], lp: list[np.ndarray], config: dict[str, float]):
    """Our loss, per datum, our gradient, and our metrics."""
    work = read(data, name, config)
    assert work.loss is not None
    inputs = flat_inputs(work.examples, CPU)
    flat = torch.from_numpy(np.concatenate([x.reshape(-1) for x in lp]).astype(np.float32))
    losses = per_datum(work.loss.terms(flat, inputs, work.settings), inputs["datum"], len(data))
    grad = gradient(work.loss, flat, inputs, work.settings)
    return losses.numpy(), grad.numpy(), work.loss.metrics(flat, inputs)


def expect(name: str, data: list[Datum], lp: list[np.ndarray], config: dict[str, float]) -> None:
    losses, grad, _ = compute(name, data, lp, config)
    formula, at = FORMULAS[name], 0
    for i, (one, lp_i) in enumerate(zip(data, lp, strict=True)):
        x = {k: v.to_numpy().astype(np.float64) for k, v in one.loss_fn_inputs.items()}
        lp_i = lp_i.astype(np.float32).astype(np.float64)
        assert losses[i] == pytest.approx(formula(lp_i, x, config), rel=1e-5, abs=1e-5)
        for cell in range(lp_i.size):
            step = np.zeros(lp_i.size)
            step[cell] = 1e-6
            step = step.reshape(lp_i.shape)
            slope = (formula(lp_i + step, x, config) - formula(lp_i - step, x, config)) / 2e-6
            assert grad[at + cell] == pytest.approx(slope, rel=1e-3, abs=1e-3), (i, cell)
        at += lp_i.size


RL_CASES = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}),
    ("dro", {"beta": 0.05}),
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}),
]


@pytest.mark.parametrize(("name", "config"), RL_CASES)
def test_rl_losses(name: str, config: dict[str, float]) -> None:
    rng = np.random.default_rng(0)
    data = [datum(rl_inputs(rng, n)) for n in (5, 12, 3)]
    lp = [-2 + 0.4 * rng.normal(size=n) for n in (5, 12, 3)]
    expect(name, data, lp, config)


@pytest.mark.parametrize("shape", [(6,), (6, 4)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", ["cross_entropy", "kl_divergence"])
def test_losses_over_candidates(name: str, weighted: bool, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)

    def one() -> Datum:
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, 100, shape)}
        if name == "kl_divergence":
            inputs["logprobs"] = np.log(rng.dirichlet(np.ones(9), shape)[..., 0]).astype(np.float32)
        if weighted:
            inputs["weights"] = rng.normal(size=shape).astype(np.float32)  # negative ones too
        return datum(inputs)

    expect(name, [one(), one()], [-3 + rng.normal(size=shape) for _ in range(2)], {})


def test_sparse_targets_and_weights_are_read_as_dense_ones() -> None:
    dense_ids, dense_w = (
        np.array([[5, 0, 0], [7, 9, 0]]),
        np.array([[1.0, 0, 0], [0.25, 0.75, 0]], np.float32),
    )
    crow, col = [0, 1, 3], [0, 0, 1]
    sparse = datum(
        {
            "target_tokens": TensorData([5, 7, 9], "int64", [2, 3], crow, col),
            "weights": TensorData([1.0, 0.25, 0.75], "float32", [2, 3], crow, col),
        }
    )
    lp = [np.random.default_rng(0).normal(size=(2, 3))]
    a = compute("cross_entropy", [sparse], lp, {})
    b = compute("cross_entropy", [datum({"target_tokens": dense_ids, "weights": dense_w})], lp, {})
    assert a[0] == pytest.approx(b[0])
    np.testing.assert_array_equal(a[1], b[1])


def test_cispo_weighs_the_logprob_by_a_ratio_without_gradient() -> None:
    rng = np.random.default_rng(2)
    x, lp = rl_inputs(rng, 40), -2 + 2 * rng.normal(size=40)
    for config, lo, hi in (
        ({}, 0.0, 4.0),
        ({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, 0.8, 1.2),
    ):
        losses, grad, metrics = compute("cispo", [datum(x)], [lp], config)
        r = np.exp(lp - x["logprobs"])
        weight = np.clip(r, lo, hi) * x["advantages"]
        assert losses[0] == pytest.approx(-(weight * lp).sum(), rel=1e-5)
        np.testing.assert_allclose(grad, -weight, rtol=1e-4, atol=1e-6)
        active = x["advantages"] != 0
        assert metrics["clip_fraction:mean"] == pytest.approx(((r < lo) | (r > hi))[active].mean())


def test_thresholds_may_come_with_each_position() -> None:
    rng = np.random.default_rng(3)
    n = 30
    own = {
        "clip_low_threshold": rng.uniform(0.3, 0.9, n).astype(np.float32),
        "clip_high_threshold": rng.uniform(1.1, 2.0, n).astype(np.float32),
    }
    lp = [-2 + 0.8 * rng.normal(size=n) for _ in range(2)]
    # one datum with thresholds of its own, one with the config's
    expect(
        "ppo", [datum(rl_inputs(rng, n, **own)), datum(rl_inputs(rng, n))], lp, {"clip_high_threshold": 1.5}
    )


def test_gspo_has_one_ratio_over_its_mask() -> None:
    rng = np.random.default_rng(4)
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0], np.float32)
    x = rl_inputs(rng, 9, sequence_ratio_mask=mask)
    expect("gspo", [datum(x)], [-2 + 0.1 * rng.normal(size=9)], {})


@pytest.mark.parametrize(("name", "config"), [*RL_CASES, ("cispo", {})])
def test_positions_without_an_advantage_contribute_exactly_nothing(
    name: str, config: dict[str, float]
) -> None:
    """A prompt's ratio may be infinite (logprobs padded with 0), and 0·inf must not become a NaN."""
    rng = np.random.default_rng(5)
    x, lp = rl_inputs(rng, 12), -2 + 0.1 * rng.normal(size=12)
    x["logprobs"][:4] = [-500.0, 500.0, 0.0, -1e30]
    losses, grad, metrics = compute(name, [datum(x)], [lp], config)
    assert np.isfinite(losses).all()
    assert not grad[:4].any()
    assert np.isfinite(list(metrics.values())).all()
    tail = {key: value[4:] for key, value in x.items()}
    assert losses[0] == pytest.approx(compute(name, [datum(tail)], [lp[4:]], config)[0][0], rel=1e-6)


@pytest.mark.parametrize("name", ["cross_entropy", "kl_divergence"])
def test_cells_without_a_weight_contribute_exactly_nothing(name: str) -> None:
    weights = np.array([[0.0, 1.0], [0.0, 0.0]], np.float32)
    x: dict[str, Any] = {"target_tokens": np.ones((2, 2), np.int64), "weights": weights}
    if name == "kl_divergence":
        x["logprobs"] = np.array([[3e38, -1.0], [-3e38, 0.0]], np.float32)
    losses, grad, _ = compute(name, [datum(x)], [np.full((2, 2), -3.0)], {})
    assert np.isfinite(losses).all()
    assert (grad != 0).tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_a_clipped_ratio_that_overflows_has_a_finite_gradient(name: str) -> None:
    x = {
        "target_tokens": np.array([1, 2]),
        "logprobs": np.array([-300.0, -300.0], np.float32),
        "advantages": np.array([1.0, 1.0], np.float32),
    }
    losses, grad, _ = compute(name, [datum(x)], [np.array([-1.0, -2.0])], {})
    assert np.isfinite(losses).all()
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_a_prompt_before_a_ratio_that_overflows_contributes_exactly_nothing(name: str) -> None:
    x = {
        "target_tokens": np.array([1, 2, 3]),
        "logprobs": np.array([0.0, -300.0, -300.0], np.float32),
        "advantages": np.array([0.0, 1.0, 1.0], np.float32),
    }
    prompted = compute(name, [datum(x)], [np.array([-1.0, -1.0, -2.0])], {})
    alone = compute(name, [datum({key: v[1:] for key, v in x.items()})], [np.array([-1.0, -2.0])], {})
    np.testing.assert_array_equal(prompted[0], alone[0])
    np.testing.assert_array_equal(prompted[1], [0.0, *alone[1]])


def test_metrics_say_what_the_ratios_were() -> None:
    x = {
        "target_tokens": np.arange(4),
        "logprobs": np.array([0.0, -1.0, -1.0, -1.0], np.float32),
        "advantages": np.array([0.0, 1.0, -1.0, 1.0], np.float32),
    }
    lp = np.array([-9.0, -1.0, -2.0, -0.5])
    _, _, metrics = compute("ppo", [datum(x)], [lp], {})
    r = np.exp(np.array([0.0, -1.0, 0.5]))
    assert metrics["active:sum"] == 3
    assert metrics["ratio:mean"] == pytest.approx(r.mean(), rel=1e-5)
    assert metrics["ratio:max"] == pytest.approx(r.max(), rel=1e-5)
    assert metrics["ratio:min"] == pytest.approx(r.min(), rel=1e-5)
    assert metrics["clip_fraction:mean"] == pytest.approx(2 / 3)  # e^-1 with A < 0, e^0.5 with A > 0
    assert metrics["kl_sample_train_v1:mean"] == pytest.approx((0 + 1 - 0.5) / 3, rel=1e-5)


def test_metric_names_are_a_name_and_a_reduction() -> None:
    rng = np.random.default_rng(6)
    for name in TORCH_LOSSES:
        config = {"beta": 0.1} if name == "dro" else {}
        for advantages in (True, False):  # the same names with nothing active
            x = rl_inputs(rng, 6)
            if not advantages:
                x["advantages"][:] = 0
                x["weights"] = np.zeros(6, np.float32)
            _, _, metrics = compute(name, [datum(x)], [-rng.random(6)], config)
            for key in metrics:
                stem, reduction = key.split(":")
                assert stem
                assert reduction in ("sum", "mean", "min", "max")


# -- what is refused -----------------------------------------------------------------------------------


def refused(data: list[Datum], name: str = "cross_entropy", config: dict[str, Any] | None = None) -> str:
    with pytest.raises(EngineError) as caught:
        read(data, name, config or {})
    assert caught.value.category == "user"
    return caught.value.message


GOOD = {"target_tokens": np.array([1, 2, 3, 4])}
RL = rl_inputs(np.random.default_rng(0), 4)


def test_unknown_losses() -> None:
    assert "cross_entropy, importance_sampling" in refused([datum(GOOD)], "crossentropy")
    assert "stable_reinforce" in refused([datum(GOOD)], "stable_reinforce")
    assert "at least one datum" in refused([])


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("cross_entropy", {"beta": 1.0}, ["'beta'", "nothing"]),
        ("ppo", {"clip_low": 0.1}, ["'clip_low'", "clip_low_threshold, clip_high_threshold"]),
        ("ppo", {"clip_low_threshold": "0.1"}, ["finite number", "'0.1'"]),
        ("ppo", {"clip_low_threshold": float("nan")}, ["finite number"]),
        ("ppo", {"clip_high_threshold": 1e39}, ["finite number", "1e+39"]),
        ("dro", {"beta": 10**400}, ["finite number"]),
        ("ppo", {"clip_low_threshold": -1.0}, ["at least 0", "-1.0"]),
        ("ppo", {"clip_low_threshold": 2.0}, ["above clip_high_threshold"]),
        ("dro", {}, ["needs", "'beta'"]),
    ],
)
def test_settings(name: str, config: dict[str, Any], words: list[str]) -> None:
    message = refused([datum(RL)], name, config)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "inputs", "words"),
    [
        ("cross_entropy", {}, ["'target_tokens'"]),
        ("cross_entropy", {"target_tokens": np.ones(4, np.float32)}, ["'target_tokens'", "int64", "float32"]),
        ("cross_entropy", {"target_tokens": np.arange(3)}, ["[3]", "[4] or [4, K]"]),
        ("cross_entropy", {"target_tokens": np.ones((4, 2, 2), np.int64)}, ["[4, 2, 2]"]),
        ("ppo", RL | {"target_tokens": np.ones((4, 2), np.int64)}, ["[4, 2]", "ppo takes [4]"]),
        ("cross_entropy", {"target_tokens": np.array([1, 2, 100, 4])}, ["[2] is 100", "0..99"]),
        ("cross_entropy", {"target_tokens": np.array([1, -1, 3, 4])}, ["[1] is -1", "0..99"]),
        ("cross_entropy", {"target_tokens": np.array([1, 2, 3, -100])}, ["[3] is -100", "'weights' to 0"]),
        ("ppo", RL | {"target_tokens": np.array([-100, 2, 3, 4])}, ["[0] is -100", "'advantages' to 0"]),
        ("cross_entropy", GOOD | {"weights": TensorData([1] * 4)}, ["'weights'", "float32", "int64"]),
        ("cross_entropy", GOOD | {"weights": np.ones((4, 2), np.float32)}, ["'weights'", "[4, 2]", "[4]"]),
        ("cross_entropy", GOOD | {"weights": [1.0, np.inf, 1.0, 1.0]}, ["'weights'", "inf", "finite"]),
        (
            "cross_entropy",
            GOOD | {"mask": np.ones(4, np.float32)},
            ["'mask'", "set their 'weights' to 0", "target_tokens, weights"],
        ),
        ("cross_entropy", GOOD | {"weight": np.ones(4, np.float32)}, ["did you mean 'weights'"]),
        ("ppo", {k: v for k, v in RL.items() if k != "advantages"}, ["'advantages'", "ppo needs"]),
        ("ppo", RL | {"logprobs": [0.0, float("nan"), 0.0, 0.0]}, ["'logprobs'", "nan", "[1]"]),
        ("gspo", RL | {"sequence_ratio_mask": [0.0, 0.5, 1.0, 1.0]}, ["zeros and ones"]),
        ("gspo", RL | {"sequence_ratio_mask": [0.0] * 4}, ["zero everywhere"]),
    ],
)
def test_inputs(name: str, inputs: dict[str, Any], words: list[str]) -> None:
    model_input = ModelInput.from_ints([1, 2, 3, 4])
    good = datum(RL | {"weights": [1.0] * 4} if name == "gspo" else RL)
    message = refused([good, Datum(model_input, inputs)], name)
    assert message.startswith("datum 1: "), message
    assert all(word in message for word in words), message


def test_model_inputs() -> None:
    long = datum({"target_tokens": np.zeros(65, np.int64)})
    assert "65 tokens" in refused([long])
    assert "64" in refused([long])
    outside = Datum(ModelInput.from_ints([1, 100]), {"target_tokens": [1, 1]})
    assert "model_input[1] is 100; token ids are 0..99" in refused([outside])
    assert "empty" in refused([Datum(ModelInput.empty(), {"target_tokens": np.zeros(0, np.int64)})])
    for chunk in (ImageChunk(b"x", "png", expected_tokens=2), DmelChunk(b"\x00\x01\x02")):
        image = Datum(ModelInput([chunk]), {"target_tokens": [0, 0]})
        assert type(chunk).__name__ in refused([image])


def test_sparse_inputs_that_stand_for_too_much_are_refused() -> None:
    """Written out, a few bytes would take all the memory there is."""
    wide = TensorData([5, 6], "int64", [4, 2**23], [0, 1, 2, 2, 2], [0, 1])
    data = [Datum(ModelInput.from_ints([1, 2, 3, 4]), {"target_tokens": wide}) for _ in range(3)]
    assert f"{3 * 2**25} numbers" in refused(data)
    assert f"{3 * 2**25} numbers" in refused(data, "custom")


def test_inputs_of_another_loss_are_left_alone() -> None:
    """One datum may go through forward with cross_entropy and then through ppo."""
    rng = np.random.default_rng(7)
    x, lp = rl_inputs(rng, 6), -rng.random(6)
    losses, _, _ = compute("cross_entropy", [datum(x)], [lp], {})
    assert losses[0] == pytest.approx(-lp.sum(), rel=1e-6)
