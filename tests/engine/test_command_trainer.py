"""Batches of passes under way: what is left of one whose micro-batch raises, or whose run is cleared."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.engine.fake.trainer import FakeTrainer
from tinkex.engine.protocol import (
    ClearGradients,
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


class Marking(FakeTrainer):
    """The second micro-batch fails the pass that it is of, as a loss that is not finite does."""

    computed = 0

    def _compute(self, batch: Any) -> None:
        self.computed += 1
        if self.computed == 2:
            batch[0].training.fail("user", "not finite")
        else:
            super()._compute(batch)


def passes(*runs: str) -> ForwardBackward:
    data = [Datum(ModelInput.from_ints([3, 4]), {"target_tokens": [4, 5]}) for _ in range(3)]
    return ForwardBackward(tuple(Pass(run, data, "cross_entropy") for run in runs))


def to_the_end(trainer: FakeTrainer, outcome: Any) -> Any:
    while isinstance(outcome, PassProgress):
        outcome = trainer.execute(ContinuePasses(outcome.ticket))
    return outcome


def test_a_failed_pass_is_reported_although_another_run_is_cleared():
    trainer = Marking("m", 64, pass_tokens=3)
    for run in ("a", "b"):
        trainer.execute(CreateAdapter(run, LoraConfig(rank=1)))
    progress = trainer.execute(passes("a", "b"))
    progress = trainer.execute(ContinuePasses(progress.ticket))  # from now on a's pass has failed
    trainer.execute(ClearGradients("b"))
    failed, abandoned = to_the_end(trainer, progress)
    assert failed.message == "not finite"
    assert "abandoned" in abandoned.message


def test_the_end_of_an_abandoned_pass_does_not_clear_what_a_later_one_left():
    trainer = FakeTrainer("m", 64, pass_tokens=3)
    for run in ("a", "b"):
        trainer.execute(CreateAdapter(run, LoraConfig(rank=1)))
    progress = trainer.execute(passes("a", "b"))
    trainer.execute(ClearGradients("a"))
    to_the_end(trainer, trainer.execute(passes("a")))
    to_the_end(trainer, progress)
    assert trainer.execute(OptimStep("a", AdamParams()))["skipped"] == 0.0
