"""An uploaded loss that takes long: computed in slices, ended by the clock, by closing, and between nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.commands import do
from tests.engine.tiny import tiny_model
from tinkex.engine import command_trainer
from tinkex.engine.protocol import (
    ClearGradients,
    ContinuePasses,
    CreateAdapter,
    CustomLoss,
    EngineConfig,
    EngineError,
    EngineLost,
    Failure,
    ForwardBackward,
    OptimStep,
    Pass,
    PassProgress,
    build_engine,
)
from tinkex.engine.torch import loss_graph
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.loss_graph import LossClock
from tinkex.engine.torch.loss_graph_reader import read_loss_graph
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig

pytestmark = pytest.mark.slow


def heavy_loss(sines: int = 8) -> CustomLoss:
    """A tenth of a second or so for each datum, whatever its length: sines of a large matrix."""

    def node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    matrix = [
        node("call_method", "first", "sum", {"ref": "logprobs"}),
        node("call_method", "n0", "expand", {"ref": "first"}, 1024, 2048),
    ]
    chain = [node("call_function", f"n{i + 1}", "torch.sin", {"ref": f"n{i}"}) for i in range(sines)]
    total = node("call_method", "loss", "mean", {"ref": f"n{sines}"})
    output = node("output", "output", "output", {"tuple": [{"ref": "loss"}, {"dict": {}}]})
    head = node("placeholder", "logprobs", "logprobs")
    return CustomLoss(("logprobs",), (head, *matrix, *chain, total, output))


def data(*lengths: int) -> list[Datum]:
    ids = [np.random.default_rng(n).integers(4, 300, n + 1) for n in lengths]
    return [Datum(ModelInput.from_ints(one[:-1].tolist()), {"target_tokens": one[1:]}) for one in ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama3")


def heavy(count: int, run: str = "heavy") -> Pass:
    return Pass(run, data(*[5] * count), "custom", {"loss_id": "x"}, custom_loss=heavy_loss())


def make_trainer(model: Path, **options: Any) -> TorchTrainer:
    trainer = TorchTrainer(load_decoder(model), "tiny", **options)
    for run in ("heavy", "plain"):
        do(trainer, CreateAdapter(run, LoraConfig(2, seed=1)))
    return trainer


def test_a_costly_loss_is_computed_in_slices(model: Path) -> None:
    """So that other commands and decoding have their turn after each datum of it."""
    trainer = make_trainer(model)
    light = trainer.execute(ForwardBackward((Pass("plain", data(*[5] * 6), "cross_entropy"),)))
    assert isinstance(light, list)  # one micro-batch
    begun = trainer.execute(ForwardBackward((heavy(6),)))
    assert isinstance(begun, PassProgress)
    assert begun.total == 6
    (outcome,) = do(trainer, ContinuePasses(begun.ticket))
    assert isinstance(outcome, ForwardBackwardOutput)


def test_a_pass_whose_loss_takes_too_long_fails_alone(model: Path) -> None:
    trainer = make_trainer(model, loss_seconds=0.2)
    started = time.monotonic()
    failure, plain = do(trainer, ForwardBackward((heavy(60), Pass("plain", data(4, 9), "cross_entropy"))))
    assert time.monotonic() - started < 10
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert "took more than 0.2 s" in failure.message
    assert isinstance(plain, ForwardBackwardOutput)
    assert trainer.adapter("heavy").grad is None
    assert trainer.adapter("plain").grad is not None


def test_the_clock_is_looked_at_between_nodes_of_the_backward_too() -> None:
    graph, looks = read_loss_graph(heavy_loss(30)), []
    graph.gradient(torch.zeros(3), {}, lambda: looks.append(1))
    assert len(looks) > 60  # 30 sines forward, 30 backward

    class Ended(Exception):
        pass

    def end_in_the_backward() -> None:
        looks.append(1)
        if len(looks) == 40:
            raise Ended

    looks.clear()
    with pytest.raises(Ended):
        graph.gradient(torch.zeros(3), {}, end_in_the_backward)
    assert len(looks) == 40


def test_stopping_ends_a_loss_at_the_next_node(model: Path) -> None:
    looks: list[int] = []

    def stopping() -> str:
        looks.append(1)
        return "the engine was closed" if len(looks) >= 30 else ""

    trainer = make_trainer(model, stopping=stopping)
    with pytest.raises(EngineLost, match="closed"):
        do(trainer, ForwardBackward((heavy(6),)))
    assert len(looks) == 30


def test_closing_an_engine_ends_the_losses_under_way(model: Path) -> None:
    engine = build_engine(EngineConfig(str(model), device="cpu", threads=1))
    assert isinstance(engine, TorchEngine)
    do(engine.trainer, CreateAdapter("heavy", LoraConfig(2)))
    assert not engine._trainer._stopping()
    slices = [engine.trainer.submit(ForwardBackward((heavy(1),))) for _ in range(50)]
    slices[0].result(60)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert engine._trainer._stopping()
    assert isinstance(slices[-1].exception(1), EngineLost)


def test_a_pass_that_was_finished_before_has_the_same_gradients_without_limits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = make_trainer(model), make_trainer(model, loss_seconds=0.0)
    (one,) = do(first, ForwardBackward((heavy(3),)))
    monkeypatch.setattr(loss_graph, "DATUM_COST", 1)
    monkeypatch.setattr(loss_graph, "PASS_COST", 1)
    monkeypatch.setattr(loss_graph, "MAX_TOTAL", 1)
    (refused,) = do(again, ForwardBackward((heavy(3),)))
    assert isinstance(refused, Failure)
    (two,) = do(again, ForwardBackward((replace(heavy(3), finished=True),)))
    assert one.metrics == two.metrics
    assert torch.equal(first.adapter("heavy").grad, again.adapter("heavy").grad)


def test_others_are_served_between_the_checks_of_a_pass(model: Path) -> None:
    rests: list[int] = []
    trainer = make_trainer(model, rest=lambda: rests.append(1))
    work = Pass("heavy", data(3, 4, 5, 5, 5), "custom", custom_loss=heavy_loss(1))
    trainer.execute(ForwardBackward((work,)))
    assert len(rests) == 3  # one for each shape


def different(count: int) -> Pass:
    return Pass("heavy", data(*range(3, 3 + count)), "custom", custom_loss=heavy_loss(1))


def test_the_checks_of_a_pass_are_cut_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length is checked by itself: thousands of nodes and lengths take as long as a computation."""
    whole, trainer = make_trainer(model), make_trainer(model)
    (expected,) = do(whole, ForwardBackward((different(4),)))
    monkeypatch.setattr(command_trainer, "CHECK_SECONDS", 0.0)
    progress = trainer.execute(ForwardBackward((different(4),)))
    parts: list[float] = []
    while isinstance(progress, PassProgress):
        parts.append(progress.done / progress.total)
        (between,) = do(trainer, ForwardBackward((Pass("plain", data(4), "cross_entropy"),)))
        assert isinstance(between, ForwardBackwardOutput)
        with pytest.raises(EngineError, match="has a pass under way"):
            trainer.execute(OptimStep("heavy", AdamParams()))
        progress = trainer.execute(ContinuePasses(progress.ticket))
    assert parts[:4] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert parts == sorted(parts)
    assert progress[0].metrics == expected.metrics
    assert torch.equal(trainer.adapter("heavy").grad, whole.adapter("heavy").grad)


def test_a_pass_is_abandoned_while_it_is_checked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_trainer, "CHECK_SECONDS", 0.0)
    trainer = make_trainer(model)
    alone = trainer.execute(ForwardBackward((different(4),)))
    plain = Pass("plain", data(4), "cross_entropy")
    beside = trainer.execute(ForwardBackward((different(4), plain)))
    assert isinstance(alone, PassProgress)
    assert isinstance(beside, PassProgress)
    trainer.execute(ClearGradients("heavy"))
    with pytest.raises(EngineError, match="no passes with the ticket"):
        trainer.execute(ContinuePasses(alone.ticket))
    gone, done = do(trainer, ContinuePasses(beside.ticket))
    assert isinstance(gone, Failure)
    assert "abandoned" in gone.message
    assert isinstance(done, ForwardBackwardOutput)
    assert trainer.adapter("heavy").grad is None


def test_time_between_two_datums_does_not_count() -> None:
    clock = LossClock(0.2)
    for _ in range(3):
        with clock:
            clock.check()
        time.sleep(0.1)
    with clock:
        clock.check()
        time.sleep(0.25)
        with pytest.raises(Exception, match=r"more than 0\.2 s"):
            clock.check()
