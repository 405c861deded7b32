"""Batches of passes under way: what is left of one whose micro-batch raises."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.engine.fake.trainer import FakeTrainer
from tinkex.engine.protocol import (
    ContinuePasses,
    CreateAdapter,
    ForwardBackward,
    OptimStep,
    Pass,
    PassProgress,
)
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import AdamParams, LoraConfig


class Failing(FakeTrainer):
    computed = 0

    def _compute(self, batch: Any) -> None:
        self.computed += 1
        if self.computed == 2:
            raise RuntimeError("out of memory")
        super()._compute(batch)


def test_a_micro_batch_that_raises_leaves_no_pass_under_way():
    """Or the run's next step would be refused, and its good gradients discarded."""
    trainer = Failing("m", 64, pass_tokens=3)
    trainer.execute(CreateAdapter("r", LoraConfig(rank=1)))
    data = [Datum(ModelInput.from_ints([3, 4]), {"target_tokens": [4, 5]}) for _ in range(2)]
    progress = trainer.execute(ForwardBackward((Pass("r", data, "cross_entropy"),)))
    assert isinstance(progress, PassProgress)
    with pytest.raises(Exception, match="under way"):
        trainer.execute(OptimStep("r", AdamParams()))
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.execute(ContinuePasses(progress.ticket))
    assert trainer.execute(OptimStep("r", AdamParams()))["skipped"] == 1.0
