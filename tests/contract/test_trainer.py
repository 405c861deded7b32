"""What every trainer promises."""

from __future__ import annotations

import json
import pickle
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.contract.conftest import (
    LORA,
    NEAR,
    SECONDS,
    datum,
    do,
    every_family,
    files,
    forward_backward,
    logprobs,
    new_run,
    tokens,
    train,
)
from tinkex.engine.protocol import (
    CheckLoss,
    ClearGradients,
    ContinuePasses,
    CreateAdapter,
    CustomLoss,
    DropAdapter,
    Engine,
    EngineConfig,
    EngineError,
    EngineLost,
    ExportAdapter,
    Failure,
    ForwardBackward,
    LoadAdapter,
    OptimStep,
    Pass,
    PassProgress,
    SaveAdapter,
    build_engine,
    run_passes,
)
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig

STEP = AdamParams(learning_rate=1e-2)


# -- passes ----------------------------------------------------------------------------------------------


@every_family
def test_every_datum_gets_its_logprobs_in_order(engine: Engine, run: str):
    sequences = [tokens(engine, seed, length) for seed, length in enumerate((9, 3, 30, 2))]
    out = forward_backward(engine, run, [datum(ids) for ids in sequences])
    assert len(out.loss_fn_outputs) == 4
    for ids, output in zip(sequences, out.loss_fn_outputs, strict=True):
        lp = output["logprobs"]
        assert lp.dtype == "float32"
        assert lp.dense_shape == (len(ids) - 1,)
        assert (lp.to_numpy() < 0).all()
        np.testing.assert_allclose(lp.to_numpy(), logprobs(engine, run, ids), atol=NEAR)


def _expected_loss(name: str, lp: np.ndarray, lq: np.ndarray, adv: np.ndarray) -> float:
    ratio = np.exp(lp - lq)
    match name:
        case "cross_entropy":
            return -(adv * lp).sum()
        case "importance_sampling":
            return -(ratio * adv).sum()
        case "ppo":
            return -np.minimum(ratio * adv, np.clip(ratio, 0.8, 1.2) * adv).sum()
        case "cispo":
            return -(np.clip(ratio, 0.0, 4.0) * lp * adv).sum()
        case "dro":
            return -(lp * adv - 0.5 * 0.05 * (lp - lq) ** 2).sum()
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_losses_are_sums_by_the_wires_formulas(engine: Engine, run: str, name: str):
    assert name in engine.info.losses
    rng = np.random.default_rng(3)
    data, expected = [], 0.0
    for length in (7, 12):
        ids = tokens(engine, length, length)
        lp = logprobs(engine, run, ids).astype(np.float64)
        adv = rng.normal(size=length - 1).astype(np.float32)
        lq = (lp + rng.normal(size=length - 1) * 0.4).astype(np.float32)
        expected += _expected_loss(name, lp, lq.astype(np.float64), adv.astype(np.float64))
        inputs = {"weights": adv} if name == "cross_entropy" else {"logprobs": lq, "advantages": adv}
        data.append(datum(ids, **inputs))
    settings = {"loss_fn_config": {"beta": 0.05}} if name == "dro" else {}
    out = forward_backward(engine, run, data, name, **settings)
    assert out.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_missing_weights_are_ones(engine: Engine, run: str):
    ids = tokens(engine, 1, 10)
    out = forward_backward(engine, run, [datum(ids)])
    assert out.metrics["loss:sum"] == pytest.approx(-logprobs(engine, run, ids).sum(), rel=1e-5)


def test_wide_targets_have_wide_logprobs(engine: Engine, run: str):
    ids = tokens(engine, 2, 6)
    targets = np.stack([ids[1:], ids[:-1], ids[1:]], axis=1).astype(np.int64)
    weights = np.random.default_rng(0).normal(size=targets.shape).astype(np.float32)
    inputs = {"target_tokens": targets, "weights": weights}
    out = forward_backward(engine, run, [Datum(ModelInput.from_ints(ids[:-1]), inputs)])
    lp = out.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert lp.shape == (5, 3)
    np.testing.assert_allclose(lp[:, 0], logprobs(engine, run, ids), atol=1e-5)
    np.testing.assert_allclose(lp[:, 0], lp[:, 2], atol=1e-6)
    assert out.metrics["loss:sum"] == pytest.approx(-(lp * weights).sum(), rel=1e-4, abs=1e-4)


def test_metric_names_have_one_reduction_each(engine: Engine, run: str):
    out = forward_backward(engine, run, [datum(tokens(engine, 1, 5))])
    assert "loss:sum" in out.metrics
    for name in out.metrics:
        assert name.count(":") == 1
        assert name.rsplit(":")[1] in ("sum", "mean", "min", "max", "slack", "hash2", "unique")


# -- micro-batches -----------------------------------------------------------------------------------------


def ten_tokens(engine: Engine, run: str, count: int, **more) -> Pass:
    """A pass that takes `count` micro-batches on `engine_of_small_batches`."""
    return Pass(run, [datum(tokens(engine, seed, 11)) for seed in range(2 * count)], "cross_entropy", **more)


def test_a_command_computes_one_micro_batch(engine_of_small_batches: Engine):
    engine = engine_of_small_batches
    run = new_run(engine)
    outcome = do(engine, ForwardBackward((ten_tokens(engine, run, 4),)))
    seen = []
    while isinstance(outcome, PassProgress):
        seen.append((outcome.done, outcome.total))
        outcome = do(engine, ContinuePasses(outcome.ticket))
    assert seen == [(1, 4), (2, 4), (3, 4)]
    (output,) = outcome
    assert isinstance(output, ForwardBackwardOutput)
    assert len(output.loss_fn_outputs) == 8
    assert do(engine, OptimStep(run, STEP))["skipped"] == 0.0


@every_family
def test_a_pass_in_many_micro_batches_is_the_same_pass(engine: Engine, engine_of_small_batches: Engine):
    results = []
    for one in (engine, engine_of_small_batches):
        run = new_run(one)
        (output,) = run_passes(one.trainer, [ten_tokens(one, run, 4)])
        assert isinstance(output, ForwardBackwardOutput)
        do(one, OptimStep(run, STEP))
        results.append((output.metrics["loss:sum"], logprobs(one, run, tokens(one, 0, 11))))
    (loss, after), (loss_in_parts, after_in_parts) = results
    assert loss_in_parts == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(after_in_parts, after, atol=1e-4)


def test_commands_of_other_runs_may_come_between_micro_batches(engine_of_small_batches: Engine):
    engine = engine_of_small_batches
    alone, among, other = new_run(engine), new_run(engine), new_run(engine, LoraConfig(rank=2))
    run_passes(engine.trainer, [ten_tokens(engine, alone, 3)])
    outcome = do(engine, ForwardBackward((ten_tokens(engine, among, 3),)))
    while isinstance(outcome, PassProgress):
        train(engine, other, tokens(engine, 5, 11))
        outcome = do(engine, ContinuePasses(outcome.ticket))
    for run in (alone, among):
        do(engine, OptimStep(run, STEP))
    ids = tokens(engine, 0, 11)
    np.testing.assert_array_equal(logprobs(engine, among, ids), logprobs(engine, alone, ids))


def test_an_unknown_ticket_is_refused(engine_of_small_batches: Engine):
    engine = engine_of_small_batches
    run = new_run(engine)
    begun = do(engine, ForwardBackward((ten_tokens(engine, run, 2),)))
    assert isinstance(begun, PassProgress)
    assert isinstance(do(engine, ContinuePasses(begun.ticket)), list)
    for ticket in (begun.ticket, "nothing"):
        with pytest.raises(EngineError, match="ticket"):
            do(engine, ContinuePasses(ticket))


@pytest.mark.parametrize("end", [ClearGradients, DropAdapter])
def test_passes_of_a_run_that_is_cleared_are_abandoned(engine_of_small_batches: Engine, end: type):
    """And those of the runs beside it are not."""
    engine = engine_of_small_batches
    runs = [new_run(engine), new_run(engine)]
    alone = do(engine, ForwardBackward((ten_tokens(engine, runs[0], 2),)))
    both = do(engine, ForwardBackward(tuple(ten_tokens(engine, run, 2) for run in runs)))
    assert isinstance(alone, PassProgress)
    assert isinstance(both, PassProgress)
    do(engine, end(runs[0]))
    with pytest.raises(EngineError, match="ticket"):
        do(engine, ContinuePasses(alone.ticket))
    outcome: object = both
    while isinstance(outcome, PassProgress):
        outcome = do(engine, ContinuePasses(outcome.ticket))
    assert isinstance(outcome, list)
    abandoned, whole = outcome
    assert isinstance(abandoned, Failure)
    assert isinstance(whole, ForwardBackwardOutput)
    assert do(engine, OptimStep(runs[1], STEP))["skipped"] == 0.0
    if end is ClearGradients:
        assert do(engine, OptimStep(runs[0], STEP))["skipped"] == 1.0


def test_a_command_that_was_cancelled_in_time_is_not_executed(engine: Engine, run: str):
    behind = [engine.trainer.submit(CreateAdapter(f"cancelled-{i}", LORA)) for i in range(200)]
    cancelled = [i for i, future in reversed(list(enumerate(behind))) if future.cancel()]
    for i in range(200):
        if i in cancelled:
            assert do(engine, CreateAdapter(f"cancelled-{i}", LORA)) is None
        assert do(engine, DropAdapter(f"cancelled-{i}")) is None


# -- what is refused ---------------------------------------------------------------------------------------


def _bad(engine: Engine, what: str) -> tuple[list[Datum], dict]:
    ids = tokens(engine, 5, 8)
    good, nothing = datum(ids), {}
    wide = np.zeros((7, 2), np.int64)
    huge = np.full(7, engine.info.vocab_size, np.int64)
    cases: dict[str, tuple[list[Datum], dict]] = {
        "no datum": ([], nothing),
        "no tokens": ([Datum(ModelInput.empty(), {"target_tokens": np.empty(0, np.int64)})], nothing),
        "no target_tokens": ([good, Datum(ModelInput.from_ints(ids), {})], nothing),
        "a token outside": ([good, Datum(ModelInput.from_ints(huge), {"target_tokens": huge * 0})], nothing),
        "a target outside": ([good, Datum(ModelInput.from_ints(ids[1:]), {"target_tokens": huge})], nothing),
        "a negative target": ([good, Datum(ModelInput.from_ints(ids[1:]), {"target_tokens": -huge})], {}),
        "too few targets": ([good, Datum(ModelInput.from_ints(ids), {"target_tokens": huge * 0})], nothing),
        "float targets": ([Datum(ModelInput.from_ints(ids[1:]), {"target_tokens": np.zeros(7)})], nothing),
        "weights of another length": ([good, datum(ids, weights=np.ones(3))], nothing),
        "weights not finite": ([good, datum(ids, weights=np.full(7, np.nan))], nothing),
        "a key nobody knows": ([good, datum(ids, wieghts=np.ones(7))], nothing),
        "too long": ([good, datum(tokens(engine, 1, engine.info.max_context + 2))], nothing),
        "a loss nobody knows": ([good], {"loss_fn": "cross_entropi"}),
        "a loss without its inputs": ([good], {"loss_fn": "ppo"}),
        "a setting nobody knows": ([good], {"loss_fn_config": {"gamma": 1.0}}),
        "dro without beta": ([datum(ids, logprobs=np.zeros(7), advantages=np.ones(7))], {"loss_fn": "dro"}),
        "wide targets where not": (
            [Datum(ModelInput.from_ints(ids[1:]), {"target_tokens": wide, "logprobs": wide * 0.0,
                                                   "advantages": wide * 0.0})],
            {"loss_fn": "importance_sampling"},
        ),
    }  # fmt: skip
    return cases[what]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("no datum", "datum"),
        ("no tokens", "datum 0"),
        ("no target_tokens", "datum 1.*target_tokens"),
        ("a token outside", "datum 1.*model_input"),
        ("a target outside", "datum 1.*target_tokens"),
        ("a negative target", "datum 1.*target_tokens"),
        ("too few targets", "datum 1.*target_tokens"),
        ("float targets", "datum 0.*target_tokens"),
        ("weights of another length", "datum 1.*weights"),
        ("weights not finite", "datum 1.*weights"),
        ("a key nobody knows", "datum 1.*wieghts"),
        ("too long", "datum 1.*model_input"),
        ("a loss nobody knows", "cross_entropi"),
        ("a loss without its inputs", "datum 0.*logprobs"),
        ("a setting nobody knows", "gamma"),
        ("dro without beta", "beta"),
        ("wide targets where not", "datum 0.*target_tokens"),
    ],
)
def test_wrong_content_fails_its_pass_alone_and_adds_nothing(engine: Engine, run: str, what: str, named: str):
    data, settings = _bad(engine, what)
    settings = {"loss_fn": "cross_entropy", **settings}
    good = Pass(run, [datum(tokens(engine, 1, 6))], "cross_entropy", backward=False)
    bad = Pass(run, data, **settings)
    first, failure, last = run_passes(engine.trainer, (good, bad, good))
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert re.search(named, failure.message), failure.message
    for out in (first, last):
        assert isinstance(out, ForwardBackwardOutput)
    assert do(engine, OptimStep(run, STEP))["skipped"] == 1.0


def test_a_run_that_is_not_there(engine: Engine):
    (failure,) = run_passes(engine.trainer, (Pass("nobody", [datum(tokens(engine, 1, 4))], "cross_entropy"),))
    assert isinstance(failure, Failure)
    assert "nobody" in failure.message
    for command in (OptimStep("nobody", STEP), ClearGradients("nobody"), SaveAdapter("nobody", "x")):
        with pytest.raises(EngineError, match="nobody"):
            do(engine, command)
    do(engine, DropAdapter("nobody"))


def test_a_run_cannot_be_created_twice(engine: Engine, run: str):
    with pytest.raises(EngineError, match=run) as caught:
        do(engine, CreateAdapter(run, LORA))
    assert caught.value.category == "user"


# -- steps -------------------------------------------------------------------------------------------------


def test_steps_lower_the_loss(engine: Engine, run: str):
    ids = tokens(engine, 4, 20)
    before = logprobs(engine, run, ids).sum()
    train(engine, run, ids, steps=10)
    assert logprobs(engine, run, ids).sum() > before + 1.0


def test_a_step_without_gradients_changes_nothing_and_says_so(engine: Engine, run: str):
    ids = tokens(engine, 4, 10)
    train(engine, run, ids)
    before = logprobs(engine, run, ids)  # a forward alone leaves no gradients
    assert do(engine, OptimStep(run, AdamParams(learning_rate=1.0)))["skipped"] == 1.0
    np.testing.assert_array_equal(logprobs(engine, run, ids), before)


def test_cleared_gradients_are_gone(engine: Engine, run: str):
    forward_backward(engine, run, [datum(tokens(engine, 4, 10))])
    do(engine, ClearGradients(run))
    assert do(engine, OptimStep(run, STEP))["skipped"] == 1.0


def test_a_step_reports_its_norm_and_rate(engine: Engine, run: str):
    forward_backward(engine, run, [datum(tokens(engine, 4, 10))])
    metrics = do(engine, OptimStep(run, STEP))
    assert metrics["grad_norm"] > 0
    assert metrics["learning_rate"] == 1e-2
    assert metrics["skipped"] == 0.0


def test_two_passes_then_a_step_equal_one_pass_on_the_union(engine: Engine):
    data = [datum(tokens(engine, seed, 12)) for seed in range(4)]
    apart, together = new_run(engine), new_run(engine)
    forward_backward(engine, apart, data[:1])
    forward_backward(engine, apart, data[1:])
    forward_backward(engine, together, data)
    for run in (apart, together):
        do(engine, OptimStep(run, STEP))
    ids = tokens(engine, 0, 12)
    np.testing.assert_allclose(logprobs(engine, apart, ids), logprobs(engine, together, ids), atol=1e-4)


@every_family
def test_runs_do_not_touch_each_other(engine: Engine):
    """Of several ranks in one pass. The step's eps is so large that it makes nothing of rounding."""
    ids, step = tokens(engine, 0, 12), AdamParams(learning_rate=1e-2, eps=0.1)
    alone = new_run(engine)
    for _ in range(2):
        forward_backward(engine, alone, [datum(ids)])
        do(engine, OptimStep(alone, step))
    crowd = [new_run(engine, LoraConfig(rank=r, seed=7)) for r in (4, 1, 8, 3)]
    bystander = new_run(engine)
    untouched = logprobs(engine, bystander, ids)
    for turn in range(2):
        others = tuple(
            Pass(r, [datum(tokens(engine, 10 * turn + i, 15))], "cross_entropy")
            for i, r in enumerate(crowd[1:])
        )
        run_passes(engine.trainer, (Pass(crowd[0], [datum(ids)], "cross_entropy"), *others))
        for run in crowd:
            do(engine, OptimStep(run, step))
    np.testing.assert_allclose(logprobs(engine, crowd[0], ids), logprobs(engine, alone, ids), atol=NEAR)
    assert np.abs(logprobs(engine, alone, ids) - untouched).max() > 100 * NEAR
    np.testing.assert_array_equal(logprobs(engine, bystander, ids), untouched)


def test_a_gradient_that_is_not_finite_fails_its_step_alone(engine: Engine, run: str):
    ids = tokens(engine, 0, 12)
    train(engine, run, ids)
    before = logprobs(engine, run, ids)
    forward_backward(engine, run, [datum(ids, weights=np.full(11, 3e38, np.float32))] * 4)
    with pytest.raises(EngineError, match="not finite") as caught:
        do(engine, OptimStep(run, STEP))
    assert caught.value.category == "user"
    np.testing.assert_array_equal(logprobs(engine, run, ids), before)
    assert do(engine, OptimStep(run, STEP))["skipped"] == 1.0


def test_clipping_bounds_the_step_by_the_global_norm(engine: Engine, run: str):
    forward_backward(engine, run, [datum(tokens(engine, 4, 10))])
    metrics = do(engine, OptimStep(run, AdamParams(learning_rate=0.0, grad_clip_norm=1e-6)))
    assert metrics["grad_norm"] > 1e-6  # as it was before


# -- saving ------------------------------------------------------------------------------------------------


@every_family
def test_the_optimizer_resumes_exactly(engine: Engine, run: str, tmp_path: Path):
    ids = tokens(engine, 0, 12)
    train(engine, run, ids, steps=2)
    written = do(engine, SaveAdapter(run, str(tmp_path / "state"), optimizer=True))
    assert written == sum(path.stat().st_size for path in (tmp_path / "state").iterdir())
    train(engine, run, ids, steps=2)
    for optimizer in (True, False):
        resumed = f"resumed-{optimizer}-{run}"
        lora = do(engine, LoadAdapter(resumed, str(tmp_path / "state"), optimizer=optimizer))
        assert (lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed) == (4, True, True, True)
        train(engine, resumed, ids, steps=2)
        same = np.array_equal(logprobs(engine, resumed, ids), logprobs(engine, run, ids))
        assert same == optimizer
        do(engine, DropAdapter(resumed))


def test_loading_replaces_the_adapter_and_clears_the_gradients(engine: Engine, run: str, tmp_path: Path):
    ids = tokens(engine, 0, 12)
    train(engine, run, ids)
    do(engine, SaveAdapter(run, str(tmp_path / "one")))
    saved = logprobs(engine, run, ids)
    train(engine, run, ids, steps=2)
    forward_backward(engine, run, [datum(ids)])
    do(engine, LoadAdapter(run, str(tmp_path / "one")))
    np.testing.assert_array_equal(logprobs(engine, run, ids), saved)
    assert do(engine, OptimStep(run, STEP))["skipped"] == 1.0


def test_saving_is_whole_and_never_over_something(
    config: EngineConfig, engine: Engine, run: str, tmp_path: Path
):
    do(engine, SaveAdapter(run, str(tmp_path / "a")))
    peft = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert peft["base_model_name_or_path"] == config.name != config.model
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files(tmp_path / "a")
    assert files(tmp_path) == {"a"}  # nothing temporary is left
    with pytest.raises(EngineError, match="exist") as caught:
        do(engine, SaveAdapter(run, str(tmp_path / "a")))
    assert caught.value.category == "user"
    ids = tokens(engine, 0, 12)
    train(engine, run, ids)
    do(engine, SaveAdapter(run, str(tmp_path / "a"), overwrite=True))
    assert files(tmp_path) == {"a"}
    do(engine, LoadAdapter("over", str(tmp_path / "a")))
    np.testing.assert_array_equal(logprobs(engine, "over", ids), logprobs(engine, run, ids))
    do(engine, DropAdapter("over"))


def test_what_does_not_fit_is_refused_by_name(engine: Engine, run: str, tmp_path: Path):
    other = new_run(engine, LoraConfig(rank=8))
    do(engine, SaveAdapter(other, str(tmp_path / "rank8")))
    before = logprobs(engine, run, tokens(engine, 0, 12))
    for command, named in (
        (LoadAdapter(run, str(tmp_path / "rank8")), "rank"),
        (LoadAdapter(run, str(tmp_path / "nothing")), "nothing"),
        (LoadAdapter(other, str(tmp_path / "rank8"), optimizer=True), "optimizer"),
    ):
        with pytest.raises(EngineError, match=named) as caught:
            do(engine, command)
        assert caught.value.category == "user"
    np.testing.assert_array_equal(logprobs(engine, run, tokens(engine, 0, 12)), before)


# -- adapters ----------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_adapter(engine: Engine):
    ids = tokens(engine, 0, 12)
    results = []
    for seed in (1, 1, 2):
        run = new_run(engine, LoraConfig(rank=4, seed=seed))
        train(engine, run, ids)
        results.append(logprobs(engine, run, ids))
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_a_dropped_run_is_gone_and_its_name_free(engine: Engine):
    run = new_run(engine)
    live = engine.heartbeat().stats["adapters_live"]
    do(engine, DropAdapter(run))
    do(engine, DropAdapter(run))
    assert engine.heartbeat().stats["adapters_live"] == live - 1
    do(engine, CreateAdapter(run, LoraConfig(rank=2)))
    do(engine, DropAdapter(run))


@pytest.mark.slow
def test_any_thread_may_call(engine: Engine):
    ids = tokens(engine, 0, 12)

    def work(_: int) -> np.ndarray:
        run = new_run(engine)
        train(engine, run, ids, steps=2)
        return logprobs(engine, run, ids)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(12)))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_uploaded_losses_can_be_checked(engine: Engine):
    if "custom" not in engine.info.losses:
        pytest.skip("this engine runs none")
    node = {"name": "logprobs", "op": "placeholder", "target": "logprobs", "args": [], "kwargs": {}}
    with pytest.raises(EngineError) as caught:
        do(engine, CheckLoss(CustomLoss(("logprobs",), (node, {**node, "op": "call_function"}))))
    assert caught.value.category == "user"


# -- across processes --------------------------------------------------------------------------------------


def test_commands_and_results_can_be_pickled(engine: Engine, run: str, tmp_path: Path):
    """A copy that crossed a process says the same, and a trainer does the same with it."""
    ids, place = tokens(engine, 0, 12), str(tmp_path / "saved")
    other = f"other-{run}"
    for command in (
        CreateAdapter(other, LORA),
        ForwardBackward((Pass(run, [datum(ids)], "cross_entropy"), Pass("nobody", [], "ppo"))),
        OptimStep(run, STEP),
        ClearGradients(run),
        SaveAdapter(run, place, optimizer=True),
        LoadAdapter(run, place, optimizer=True),
        ExportAdapter(run),
        DropAdapter(other),
    ):
        copied = pickle.loads(pickle.dumps(command))
        assert repr(copied) == repr(command)
        result = do(engine, copied)
        again = pickle.loads(pickle.dumps(result))
        if not isinstance(command, ExportAdapter):
            assert repr(again) == repr(result)
    for value in (
        ContinuePasses("ticket"),
        PassProgress("ticket", 1, 2),
        CheckLoss(CustomLoss(("logprobs",), ({"op": "output"},))),
        Failure("user", "wrong"),
        engine.info,
        engine.heartbeat(),
    ):
        assert repr(pickle.loads(pickle.dumps(value))) == repr(value)
    for error in (EngineError("wrong", "user"), EngineLost("gone")):
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error)
        assert (copied.message, copied.category) == (error.message, error.category)


# -- the heartbeat -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reading_the_heartbeat_never_blocks(engine: Engine, run: str):
    data = [datum(tokens(engine, seed, 200)) for seed in range(40)]
    futures = [engine.trainer.submit(ForwardBackward((Pass(run, data, "cross_entropy"),))) for _ in range(3)]
    begun = time.monotonic()
    beats = [engine.heartbeat() for _ in range(100)]
    assert not futures[-1].done(), "so the engine is busy all the time"
    assert time.monotonic() - begun < 1.0
    assert all(beat.alive and not beat.trouble for beat in beats)
    assert {"adapters_live", "kv_pages_used", "kv_pages_free", "sequences_running"} <= beats[0].stats.keys()
    for future in futures:
        outcome = future.result(SECONDS)
        while isinstance(outcome, PassProgress):
            outcome = do(engine, ContinuePasses(outcome.ticket))


def test_the_heartbeat_follows_the_commands(engine: Engine):
    live = engine.heartbeat().stats["adapters_live"]
    run = new_run(engine)
    assert engine.heartbeat().stats["adapters_live"] == live + 1
    do(engine, DropAdapter(run))
    assert engine.heartbeat().stats["adapters_live"] == live


# -- the end -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lost_engine_fails_what_is_pending_and_what_comes_after(config: EngineConfig):
    engine = build_engine(replace(config, max_pass_tokens=12))
    run = new_run(engine)
    pending = [engine.trainer.submit(ForwardBackward((ten_tokens(engine, run, 9),))) for _ in range(200)]
    engine.close()
    errors = [error for future in pending if (error := future.exception(SECONDS)) is not None]
    assert errors, "closing does not wait for what is queued"
    assert all(isinstance(error, EngineLost) and error.category == "server" for error in errors)
    with pytest.raises(EngineLost, match="closed"):
        engine.trainer.submit(DropAdapter(run))
    beat = engine.heartbeat()
    assert not beat.alive
    assert "closed" in beat.trouble
    engine.close()  # twice is not an error
