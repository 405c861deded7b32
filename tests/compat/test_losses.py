"""The official SDK with every loss: their values are those of the formulas on the base model's logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.compat import reference
from tests.compat.clients.report import SEQUENCES
from tests.compat.conftest import AT_ONCE, Served
from tests.compat.formulas import ADVANTAGES, FORMULAS, OLD

close = pytest.approx

WEIGHTS = np.array([0.0, 1.0, 0.5, -1.0, 2.0, 1.0, 0.25, 1.0])
SOFT = np.array([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])


def test_every_loss_of_the_official_client(served: Served) -> None:
    facts = served.run("tinker-0.36.0", "losses.py")
    distributions = [p.double().numpy() for p in reference.base_logprobs(served.model, SEQUENCES)]
    expected = [
        np.array(reference.scores(p, ids))
        for p, ids in zip(reference.base_logprobs(served.model, SEQUENCES), SEQUENCES, strict=True)
    ]

    def total(formula: Any) -> float:
        return sum(
            formula(lp, np.exp(lp - OLD[: len(lp)]), ADVANTAGES[: len(lp)], lp - OLD[: len(lp)])
            for lp in expected
        )

    for name, formula in FORMULAS.items():
        assert facts[name]["loss"] == close(total(formula), rel=1e-4), name
    for name in ("weighted", "unweighted", *FORMULAS, "gspo 0"):
        for given, right in zip(facts[name]["logprobs"], expected, strict=True):
            assert given == close(right, abs=1e-4), name
    weighted = -sum((lp * WEIGHTS[: len(lp)]).sum() for lp in expected)
    assert facts["weighted"]["loss"] == close(weighted, rel=1e-4)
    assert facts["unweighted"]["loss"] == close(-sum(lp.sum() for lp in expected), rel=1e-4)
    assert np.isfinite(facts["gspo 0"]["loss"])  # its rule is not published

    # several targets a position, dense and as CSR, whose empty cells count for nothing
    soft = 0.0
    for table, ids in zip(distributions, SEQUENCES, strict=True):
        for i, token in enumerate(ids[1:]):
            soft -= sum(SOFT[i % 3][k] * table[i, (token + k) % 256] for k in range(3))
    for name, wide in (("soft", 3), ("sparse", 32)):
        assert facts[name]["loss"] == close(soft, rel=1e-4)
        assert facts[name]["shapes"] == [[len(ids) - 1, wide] for ids in SEQUENCES]
    assert [facts[name]["csr"] for name in ("soft", "sparse")] == [False, True]

    refused = facts["stable_reinforce"]["error"]
    assert "no loss 'stable_reinforce'" in refused["message"]
    assert refused["seconds"] < AT_ONCE

    # a custom loss, computed by the client or uploaded, steps as the loss it spells out
    assert facts["handle"]["loss_id"]
    right = facts["stepped by cross_entropy"]["after"]
    for form in ("callable", "handle"):
        stepped = facts[f"stepped by {form}"]
        assert stepped["metrics"]["loss:sum"] == close(weighted, rel=1e-4)
        assert stepped["after"]["loss"] == close(right["loss"], rel=1e-5)
        for given, other in zip(stepped["after"]["logprobs"], right["logprobs"], strict=True):
            assert given == close(other, abs=1e-4)
    assert facts["stepped by callable"]["metrics"]["seen"] == 3
    uploaded = facts["stepped by handle"]["metrics"]
    assert uploaded["custom/weight:sum"] == close(sum(WEIGHTS[: len(lp)].sum() for lp in expected))
    assert uploaded["custom/top:mean"] == close(np.mean([lp.max() for lp in expected]), abs=1e-4)
