"""The table of losses: every engine implements it, and its defaults are filled in."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from tinkex import Datum, InvalidInputError, ModelInput
from tinkex.engine.torch.losses import TORCH_LOSSES
from tinkex.types import LossFnType
from tinkex.types.data import LIST_DTYPES
from tinkex.types.losses import FORMULAS, LOSSES, filled_inputs, loss_settings

SCORED: dict[str, Any] = {"target_tokens": [1, 2], "logprobs": [-1.0, -1.0], "advantages": [0.0, 2.0]}


def test_engines_have_every_loss_of_the_table() -> None:
    assert set(TORCH_LOSSES) == set(FORMULAS) == set(LOSSES) - {"custom"}
    assert set(get_args(LossFnType)) == {*LOSSES, "stable_reinforce"}
    assert {key for spec in LOSSES.values() for key in spec.inputs} == set(LIST_DTYPES)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "custom"])
def test_numpy_and_torch_formulas_agree(name: str) -> None:
    torch = pytest.importorskip("torch")
    dice = np.random.default_rng(1)
    given = Datum(
        ModelInput.from_ints(range(9)),
        {
            "target_tokens": dice.integers(0, 9, 9),
            "weights": dice.random(9).astype(np.float32),
            "logprobs": -dice.random(9).astype(np.float32),
            "advantages": (dice.normal(size=9) * (dice.random(9) > 0.3)).astype(np.float32),
            "clip_low_threshold": np.full(9, 0.7, np.float32),
        },
    ).loss_fn_inputs
    settings = loss_settings(name, {"beta": 0.3} if name == "dro" else {})
    inputs = {k: v.astype(np.float64) for k, v in filled_inputs(name, given, settings).items()}
    lp = -dice.random(9)
    terms, slopes = FORMULAS[name](lp, inputs, settings)
    leaf = torch.tensor(lp, requires_grad=True)
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    right = TORCH_LOSSES[name].terms(leaf, tensors | {"datum": torch.zeros(9, dtype=torch.long)}, settings)
    np.testing.assert_allclose(terms, right.detach().numpy(), rtol=1e-9)
    (gradient,) = torch.autograd.grad(right.sum(), leaf)
    np.testing.assert_allclose(slopes, gradient.numpy(), rtol=1e-9, atol=1e-12)


def test_defaults_are_filled_in() -> None:
    given = Datum(ModelInput.from_ints([1, 2]), SCORED).loss_fn_inputs
    inputs = filled_inputs("gspo", given, loss_settings("gspo", {"clip_high_threshold": 2}))
    assert {key: value.tolist() for key, value in inputs.items()} == {
        "logprobs": [-1, -1],
        "advantages": [0, 2],
        "sequence_ratio_mask": [0, 1],
        "clip_low_threshold": pytest.approx([0.8, 0.8]),
        "clip_high_threshold": [2, 2],
    }
    weights = filled_inputs("cross_entropy", given, {})["weights"]
    assert weights.tolist() == [1, 1]


def test_a_list_of_mask_is_told_what_to_use() -> None:
    with pytest.raises(InvalidInputError, match=r"loss_fn_inputs\['mask'\]: .*set their 'weights' to 0"):
        Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2], "mask": [0, 1]})
