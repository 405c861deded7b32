"""The trainer against peft + torch.optim, alone and among tenants, and what it refuses."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.commands import do
from tests.engine.oracle import PeftOracle, make_datum, older_layout, randomise
from tests.engine.tiny import reference_model, tiny_model
from tinkex.engine.protocol import (
    ClearGradients,
    ContinuePasses,
    CreateAdapter,
    CustomLoss,
    DropAdapter,
    EngineError,
    Failure,
    ForwardBackward,
    LoadAdapter,
    OptimStep,
    Pass,
    PassProgress,
    SaveAdapter,
)
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.chunks import ImageChunk
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig

pytestmark = pytest.mark.slow

VOCAB = 320
# A large eps: with a small one, a gradient that is all rounding error makes a step of full size.
ADAM = AdamParams(learning_rate=2e-3, weight_decay=0.01, eps=0.05)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny_model(root, family) for family in ("llama3", "qwen2", "qwen3", "smollm2", "mistral")}


def make_trainer(path: Path, **options) -> TorchTrainer:
    return TorchTrainer(load_decoder(path), path.name, **options)


def create(trainer: TorchTrainer, run: str, lora: LoraConfig, *, random_b: bool = True) -> None:
    do(trainer, CreateAdapter(run, lora))
    if random_b:
        randomise(trainer.adapter(run).flat, seed=lora.seed or 0)


def data(seed: int, *lengths: int, loss_fn: str = "cross_entropy") -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [make_datum(rng, length, VOCAB, loss_fn) for length in lengths]


def forward_backward(trainer: TorchTrainer, *passes: Pass) -> list[ForwardBackwardOutput]:
    outputs = do(trainer, ForwardBackward(passes))
    assert all(isinstance(output, ForwardBackwardOutput) for output in outputs), outputs
    return outputs  # type: ignore[return-value]


def logprobs(output: ForwardBackwardOutput) -> list[np.ndarray]:
    return [record["logprobs"].to_numpy() for record in output.loss_fn_outputs]


def gradient(trainer: TorchTrainer, run: str) -> torch.Tensor:
    grad = trainer.adapter(run).grad
    assert grad is not None
    return grad.clone()


# -- against peft --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rank", "flags"),
    [
        ("llama3", 4, {}),
        ("qwen2", 8, {"mlp": False}),
        ("qwen3", 3, {"unembed": False}),
        ("smollm2", 4, {}),  # tied: the unembedding's adapter acts on the output side only
        ("mistral", 16, {"attn": False}),
        ("qwen3", 2, {"attn": False, "mlp": False}),
    ],
)
def test_three_steps_equal_peft_and_torch_optim(models, family: str, rank: int, flags: dict) -> None:
    trainer, oracle = make_trainer(models[family]), PeftOracle(models[family], rank, **flags)
    create(
        trainer, "run", LoraConfig(rank, seed=1, **{f"train_{key}": value for key, value in flags.items()})
    )
    adapter = trainer.adapter("run")
    oracle.copy_from(adapter.named())
    optimizer = torch.optim.AdamW(
        oracle.parameters.values(),
        lr=ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    for step in range(3):
        batch = data(step, 17, 30, 9)
        (output,) = forward_backward(trainer, Pass("run", batch, "cross_entropy"))
        optimizer.zero_grad()
        loss = torch.zeros(())
        for datum, ours in zip(batch, logprobs(output), strict=True):
            theirs = oracle.logprobs(datum)
            loss = loss - (theirs * datum.loss_fn_inputs["weights"].to_torch()).sum()
            torch.testing.assert_close(torch.from_numpy(ours), theirs.detach(), atol=1e-5, rtol=1e-5)
        loss.backward()
        assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), abs=1e-3)
        grads = adapter.named(gradient(trainer, "run"))
        for name, (a, b) in grads.items():
            for side, ours in (("A", a), ("B", b)):
                theirs = oracle.gradients()[f"{name}.lora_{side}"]
                scale = float(theirs.abs().max()) + 1e-6
                torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-5, rtol=0)
        metrics = do(trainer, OptimStep("run", ADAM))
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in oracle.parameters.values() if p.grad is not None]
        )
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
    for name, (a, b) in adapter.named().items():
        torch.testing.assert_close(a, oracle.parameters[f"{name}.lora_A"].detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(b, oracle.parameters[f"{name}.lora_B"].detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_experts_equal_autograd_through_merged_weights(tmp_path: Path, shared: bool) -> None:
    """peft has no adapters per expert: here transformers runs with W + s·B·A, and autograd goes through."""
    path = tiny_model(tmp_path, "qwen3_moe")
    trainer, reference = make_trainer(path), reference_model(path)
    create(trainer, "run", LoraConfig(4, seed=3))
    if not shared:
        do(trainer, SaveAdapter("run", str(tmp_path / "adapter")))
        older_layout(tmp_path / "adapter")
        do(trainer, LoadAdapter("run", str(tmp_path / "adapter")))
        assert not trainer.adapter("run").shared
    adapter, (datum,) = trainer.adapter("run"), data(0, 24)
    leaves = {
        k: (a.clone().requires_grad_(), b.clone().requires_grad_()) for k, (a, b) in adapter.named().items()
    }
    deltas = {name: 8.0 * b @ a for name, (a, b) in leaves.items()}
    weights = dict(reference.named_parameters())
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        w1, w2, w3 = (deltas.pop(f"{experts}.w{i}") for i in (1, 2, 3))
        weights[f"{experts}.gate_up_proj"] = weights[f"{experts}.gate_up_proj"] + torch.cat([w1, w3], dim=1)
        weights[f"{experts}.down_proj"] = weights[f"{experts}.down_proj"] + w2
    for name, delta in deltas.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + delta
    ids = torch.from_numpy(datum.model_input.to_numpy().astype(np.int64))[None]
    logits = torch.func.functional_call(reference, weights, (ids,), {"use_cache": False}).logits[0]
    theirs = logits.log_softmax(-1).gather(1, datum.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0]
    (-(theirs * datum.loss_fn_inputs["weights"].to_torch()).sum()).backward()

    (output,) = forward_backward(trainer, Pass("run", [datum], "cross_entropy"))
    torch.testing.assert_close(torch.from_numpy(logprobs(output)[0]), theirs.detach(), atol=1e-5, rtol=1e-5)
    for name, (a, b) in adapter.named(gradient(trainer, "run")).items():
        for ours, leaf in zip((a, b), leaves[name], strict=True):
            assert leaf.grad is not None
            scale = float(leaf.grad.abs().max()) + 1e-6
            torch.testing.assert_close(ours / scale, leaf.grad / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["importance_sampling", "gspo"])
def test_rl_gradients_equal_peft(models, name: str) -> None:
    trainer, oracle = make_trainer(models["qwen2"], max_pass_tokens=40), PeftOracle(models["qwen2"], 4)
    create(trainer, "run", LoraConfig(4, seed=1))
    adapter, batch = trainer.adapter("run"), data(5, 20, 31, 12, loss_fn=name)
    oracle.copy_from(adapter.named())
    forward_backward(
        trainer, Pass("run", batch, name, {"clip_high_threshold": 100.0} if name == "gspo" else {})
    )
    loss = torch.zeros(())
    for datum in batch:
        inputs = {key: value.to_torch() for key, value in datum.loss_fn_inputs.items()}
        advantages, active = inputs["advantages"], inputs["advantages"] != 0
        difference = oracle.logprobs(datum) - inputs["logprobs"]
        if name == "gspo":
            ratio = difference[active].mean().exp()
            loss = loss - torch.minimum(ratio * advantages, ratio.clamp(0.8, 100.0) * advantages).sum()
        else:
            loss = loss - (difference[active].exp() * advantages[active]).sum()
    loss.backward()
    for module, (a, b) in adapter.named(gradient(trainer, "run")).items():
        for side, ours in (("A", a), ("B", b)):
            theirs = oracle.gradients()[f"{module}.lora_{side}"]
            scale = float(theirs.abs().max()) + 1e-6
            torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-5, rtol=0)


# -- batches -------------------------------------------------------------------------------------------


def tenants(trainer: TorchTrainer) -> list[Pass]:
    """Eight runs of different ranks, flags, losses and sizes."""
    losses = ["cross_entropy", "ppo", "cispo", "importance_sampling", "gspo", "dro", "cross_entropy", "ppo"]
    passes = []
    for i, loss in enumerate(losses):
        flags = {"train_unembed": i != 2, "train_mlp": i != 3, "train_attn": i != 4}
        create(trainer, f"run{i}", LoraConfig(1 + 2 * i, seed=i, **flags))
        config = {"beta": 0.1} if loss == "dro" else {}
        passes.append(Pass(f"run{i}", data(i, 5 + 3 * i, 11, 26 - i, loss_fn=loss), loss, config))
    return passes


@pytest.mark.parametrize("options", [{}, {"max_pass_tokens": 60}, {"recompute": True}])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_run_gets_the_same_alone_and_beside_seven_tenants(models, family: str, options: dict) -> None:
    together, alone = make_trainer(models[family], **options), make_trainer(models[family])
    passes = tenants(together)
    tenants(alone)
    outputs = forward_backward(together, *passes)
    for i, one in enumerate(passes):
        (expected,) = forward_backward(alone, one)
        for ours, theirs in zip(logprobs(outputs[i]), logprobs(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert outputs[i].metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-4)
        mine, theirs = gradient(together, f"run{i}"), gradient(alone, f"run{i}")
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine / scale, theirs / scale, atol=1e-5, rtol=0)
        for trainer in (together, alone):
            do(trainer, OptimStep(f"run{i}", ADAM))
        ours, expected_flat = together.adapter(f"run{i}").flat, alone.adapter(f"run{i}").flat
        torch.testing.assert_close(ours, expected_flat, atol=1e-5, rtol=0)


def test_two_passes_then_a_step_equal_one_pass_on_the_union(models) -> None:
    split, union = make_trainer(models["llama3"]), make_trainer(models["llama3"])
    first, second = data(1, 12, 7), data(2, 9, 20)
    for trainer in (split, union):
        create(trainer, "run", LoraConfig(4, seed=1))
    a, b = (forward_backward(split, Pass("run", d, "cross_entropy"))[0] for d in (first, second))
    (both,) = forward_backward(union, Pass("run", first + second, "cross_entropy"))
    assert both.metrics["loss:sum"] == pytest.approx(a.metrics["loss:sum"] + b.metrics["loss:sum"], rel=1e-5)
    mine, theirs = gradient(split, "run"), gradient(union, "run")
    scale = float(theirs.abs().max())
    torch.testing.assert_close(mine / scale, theirs / scale, atol=1e-5, rtol=0)
    for trainer in (split, union):
        do(trainer, OptimStep("run", ADAM))
    torch.testing.assert_close(split.adapter("run").flat, union.adapter("run").flat, atol=1e-5, rtol=0)


def test_results_come_back_in_the_order_given(models) -> None:
    """Long datums are packed first; what is returned is as it was given."""
    trainer = make_trainer(models["smollm2"], max_pass_tokens=25)
    create(trainer, "run", LoraConfig(4, seed=1))
    batch = data(3, 4, 19, 4, 30, 7)
    (together,) = forward_backward(trainer, Pass("run", batch, "cross_entropy", backward=False))
    for datum, ours in zip(batch, logprobs(together), strict=True):
        (alone,) = forward_backward(trainer, Pass("run", [datum], "cross_entropy", backward=False))
        np.testing.assert_allclose(ours, logprobs(alone)[0], atol=1e-5)


def test_outputs_have_the_shape_of_the_targets(models) -> None:
    trainer = make_trainer(models["smollm2"])
    create(trainer, "run", LoraConfig(4, seed=1))
    rng = np.random.default_rng(0)
    targets = rng.integers(0, VOCAB, (6, 3))
    wide = Datum(ModelInput.from_ints([1, 2, 3, 4, 5, 6]), {"target_tokens": targets})
    narrow = Datum(ModelInput.from_ints([1, 2, 3, 4, 5, 6]), {"target_tokens": targets[:, 1].copy()})
    output, single = forward_backward(
        trainer, Pass("run", [wide, narrow], "cross_entropy"), Pass("run", [narrow], "cross_entropy")
    )
    assert output.loss_fn_output_type == "TorchLossReturn"
    a, b = logprobs(output)
    assert (a.shape, b.shape, a.dtype) == ((6, 3), (6,), np.float32)
    np.testing.assert_allclose(a[:, 1], b, atol=1e-5)
    assert output.metrics["tokens:sum"] == 12
    assert output.metrics["datums:sum"] == 2
    assert output.metrics["loss:sum"] == pytest.approx(-a.sum() - b.sum(), rel=1e-5)
    assert single.metrics["loss:sum"] == pytest.approx(-b.sum(), rel=1e-5)


def test_a_forward_leaves_no_gradient(models) -> None:
    trainer = make_trainer(models["llama3"])
    create(trainer, "run", LoraConfig(4, seed=1))
    batch = data(0, 9, 14)
    forward, backward = forward_backward(
        trainer, Pass("run", batch, "cross_entropy", backward=False), Pass("run", batch, "cross_entropy")
    )
    assert forward.metrics == pytest.approx(backward.metrics, rel=1e-5)
    do(trainer, ClearGradients("run"))
    forward_backward(trainer, Pass("run", batch, "cross_entropy", backward=False))
    assert do(trainer, OptimStep("run", ADAM))["skipped"] == 1.0


def test_a_pass_with_zero_weights_counts_as_accumulated(models) -> None:
    trainer = make_trainer(models["llama3"])
    create(trainer, "run", LoraConfig(4, seed=1, train_attn=False, train_mlp=False))
    ids = [1, 2, 3]
    zero = Datum(ModelInput.from_ints(ids), {"target_tokens": ids, "weights": [0.0] * 3})
    forward_backward(trainer, Pass("run", [zero], "cross_entropy"))
    metrics = do(trainer, OptimStep("run", ADAM))
    assert (metrics["skipped"], metrics["grad_norm"], metrics["optimizer_step"]) == (0.0, 0.0, 1.0)


# -- custom losses -------------------------------------------------------------------------------------


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def custom_cross_entropy() -> CustomLoss:
    def node(op, name, target, *args):
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    metrics = {"dict": {"custom/weight:sum": ref("weight"), "custom/lp:mean": ref("lp")}}
    nodes = (
        node("placeholder", "logprobs", "logprobs"),
        node("placeholder", "weights", "weights"),
        node("call_function", "product", "operator.mul", ref("logprobs"), ref("weights")),
        node("call_method", "total", "sum", ref("product")),
        node("call_function", "loss", "operator.neg", ref("total")),
        node("call_method", "weight", "sum", ref("weights")),
        node("call_method", "lp", "mean", ref("logprobs")),
        node("output", "output", "output", {"tuple": [ref("loss"), metrics]}),
    )
    return CustomLoss(("logprobs", "weights"), nodes)


def test_an_uploaded_loss_trains_as_its_built_in_twin(models) -> None:
    trainer = make_trainer(models["qwen2"], max_pass_tokens=30)
    batch = data(4, 9, 17, 25)
    for run in ("custom", "plain"):
        create(trainer, run, LoraConfig(4, seed=1))
    custom, plain = forward_backward(
        trainer,
        Pass("custom", batch, "custom", {"loss_id": "x"}, custom_loss=custom_cross_entropy()),
        Pass("plain", batch, "cross_entropy"),
    )
    assert custom.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    weights = [datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in batch]
    means = [lp.mean() for lp in logprobs(custom)]
    assert custom.metrics["custom/weight:sum"] == pytest.approx(sum(weights), rel=1e-4)
    assert custom.metrics["custom/lp:mean"] == pytest.approx(np.mean(means), rel=1e-5)
    mine, theirs = gradient(trainer, "custom"), gradient(trainer, "plain")
    scale = float(theirs.abs().max())
    torch.testing.assert_close(mine / scale, theirs / scale, atol=1e-5, rtol=0)


def failure_beside_a_good_pass(path: Path, batch: list[Datum], loss: CustomLoss) -> str:
    """What an uploaded loss fails with, beside a pass that must not notice."""
    trainer = make_trainer(path)
    for run in ("custom", "plain"):
        create(trainer, run, LoraConfig(4, seed=1))
    custom, plain = (
        Pass("custom", batch, "custom", custom_loss=loss),
        Pass("plain", data(4, 9), "cross_entropy"),
    )
    failure, output = do(trainer, ForwardBackward((custom, plain)))
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert isinstance(output, ForwardBackwardOutput)
    assert trainer.adapter("custom").grad is None
    assert trainer.adapter("plain").grad is not None
    return failure.message


def test_an_uploaded_loss_that_cannot_run_fails_its_pass_alone(models) -> None:
    good, odd = data(4, 9, 17)
    inputs = dict(odd.loss_fn_inputs) | {"weights": np.ones(5, np.float32)}
    batch = [good, Datum(odd.model_input, inputs)]
    message = failure_beside_a_good_pass(models["qwen2"], batch, custom_cross_entropy())
    assert message.startswith("datum 1: custom loss node 'product' (operator.mul)")


def test_an_uploaded_loss_without_a_derivative_fails_its_pass_alone(models) -> None:
    loss = custom_cross_entropy()
    nodes = [dict(node) for node in loss.nodes]
    nodes[2]["target"] = "operator.floordiv"
    message = failure_beside_a_good_pass(models["qwen2"], data(4, 9), CustomLoss(loss.inputs, tuple(nodes)))
    assert message.startswith("datum 0: the custom loss has no gradient: derivative for")


# -- failures and commands -----------------------------------------------------------------------------


def test_a_wrong_pass_fails_alone_and_adds_nothing(models) -> None:
    trainer = make_trainer(models["llama3"])
    for run in ("good", "bad"):
        create(trainer, run, LoraConfig(4, seed=1))
    forward_backward(trainer, Pass("bad", data(0, 8), "cross_entropy"))
    before = gradient(trainer, "bad")
    image = Datum(ModelInput([ImageChunk(b"x", "png", expected_tokens=2)]), {"target_tokens": [1, 2]})
    outcomes = do(
        trainer,
        ForwardBackward(
            (
                Pass("bad", [*data(0, 8), image], "cross_entropy"),
                Pass("good", data(0, 8), "cross_entropy"),
                Pass("bad", data(0, 8), "nonsense"),
                Pass("nobody", data(0, 8), "cross_entropy"),
            )
        ),
    )
    assert [type(outcome) for outcome in outcomes] == [Failure, ForwardBackwardOutput, Failure, Failure]
    first, _, third, fourth = outcomes
    assert isinstance(first, Failure)
    assert isinstance(third, Failure)
    assert isinstance(fourth, Failure)
    assert (first.category, first.message) == (
        "user",
        "datum 1: model_input holds ImageChunk; this base model reads text only",
    )
    assert "nonsense" in third.message
    assert "nobody" in fourth.message
    assert torch.equal(gradient(trainer, "bad"), before)


def test_a_gradient_that_is_not_finite_fails_that_step_alone(models) -> None:
    trainer = make_trainer(models["llama3"])
    create(trainer, "run", LoraConfig(4, seed=1))
    before = trainer.adapter("run").flat.clone()
    ids = [1, 2, 3]
    huge = Datum(ModelInput.from_ints(ids), {"target_tokens": ids, "weights": [3e38] * 3})
    forward_backward(trainer, Pass("run", [huge], "cross_entropy"))
    with pytest.raises(EngineError, match="not finite"):
        do(trainer, OptimStep("run", ADAM))
    assert torch.equal(trainer.adapter("run").flat, before)
    forward_backward(trainer, Pass("run", data(0, 8), "cross_entropy"))
    assert do(trainer, OptimStep("run", ADAM))["optimizer_step"] == 1.0
    assert not torch.equal(trainer.adapter("run").flat, before)


@pytest.mark.parametrize(("rate", "named"), [(1e10, r"as large as 1e\+10"), (1e38, "not finite")])
def test_after_a_huge_learning_rate_steps_fail_with_the_true_cause(models, rate: float, named: str) -> None:
    trainer = make_trainer(models["llama3"])
    create(trainer, "run", LoraConfig(4, seed=1))
    for learning_rate in (1e-3, rate, rate, rate):
        forward_backward(trainer, Pass("run", data(0, 8), "cross_entropy"))
        try:
            trainer.execute(OptimStep("run", AdamParams(learning_rate=learning_rate)))
        except EngineError as error:
            refusal = error
            break
    assert refusal.category == "user"
    assert re.search(
        rf"weights are {named}.* after step \d.*learning rate was likely too large", str(refusal)
    )


def test_a_step_waits_for_no_half_of_a_pass(models) -> None:
    trainer = make_trainer(models["llama3"], max_pass_tokens=10)
    create(trainer, "run", LoraConfig(4, seed=1))
    begun = trainer.execute(ForwardBackward((Pass("run", data(0, 8, 8), "cross_entropy"),)))
    assert isinstance(begun, PassProgress)
    with pytest.raises(EngineError, match="under way"):
        trainer.execute(OptimStep("run", ADAM))
    trainer.execute(ContinuePasses(begun.ticket))
    assert trainer.execute(OptimStep("run", ADAM))["skipped"] == 0.0


def test_an_adapter_comes_back_from_eviction_as_it_was(models, tmp_path: Path) -> None:
    kept, evicted = make_trainer(models["qwen3"]), make_trainer(models["qwen3"])
    for trainer in (kept, evicted):
        create(trainer, "run", LoraConfig(4, seed=1))
    for step in range(4):
        for trainer in (kept, evicted):
            forward_backward(trainer, Pass("run", data(step, 14, 9), "cross_entropy"))
            do(trainer, OptimStep("run", ADAM))
        path = tmp_path / str(step)
        assert do(evicted, SaveAdapter("run", path, optimizer=True)) > 0
        do(evicted, DropAdapter("run"))
        assert not evicted.adapters
        assert do(evicted, LoadAdapter("run", path, optimizer=True)) == LoraConfig(4, seed=1)
    assert torch.equal(kept.adapter("run").flat, evicted.adapter("run").flat)
    for mine, theirs in zip(kept.adapter("run").moments(), evicted.adapter("run").moments(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_adapters_hold_may_be_asked_while_more_come(models) -> None:
    """Metrics are read on another thread than the engine's."""
    trainer, done = make_trainer(models["llama3"]), threading.Event()
    problems: list[Exception] = []

    def ask() -> None:
        while not done.is_set():
            try:
                assert trainer.adapter_bytes >= 0
            except Exception as error:
                problems.append(error)

    asking, interval = threading.Thread(target=ask), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # they take turns often, and nobody waits for the other's 5 ms
    try:
        asking.start()
        for i in range(500):
            do(trainer, CreateAdapter(f"run {i}", LoraConfig(1, seed=0)))
    finally:
        done.set()
        asking.join()
        sys.setswitchinterval(interval)
    assert problems == []


def test_commands_about_adapters(models, tmp_path: Path) -> None:
    trainer = make_trainer(models["llama3"])
    do(trainer, CreateAdapter("run", LoraConfig(4, seed=1)))
    size = trainer.adapter("run").flat.nbytes
    assert trainer.adapter_bytes == size
    forward_backward(trainer, Pass("run", data(0, 8), "cross_entropy"))
    do(trainer, OptimStep("run", ADAM))
    assert trainer.adapter_bytes == 4 * size
    with pytest.raises(EngineError, match="already"):
        do(trainer, CreateAdapter("run", LoraConfig(4)))
    with pytest.raises(EngineError, match="GiB") as caught:
        do(trainer, CreateAdapter("big", LoraConfig(10**9)))
    assert caught.value.category == "user"
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EngineError, match="SaveAdapter failed") as caught:
        do(trainer, SaveAdapter("run", blocked / "adapter"))
    assert caught.value.category == "server"
    do(trainer, DropAdapter("run"))
    do(trainer, DropAdapter("run"))
    for command in (OptimStep("run", ADAM), ClearGradients("run"), SaveAdapter("run", Path("nowhere"))):
        with pytest.raises(EngineError, match="'run'"):
            do(trainer, command)


# -- memory ------------------------------------------------------------------------------------------------


def limit_memory(trainer: TorchTrainer, tokens: int) -> list[int]:
    """Let the decoder run out of memory beyond so many tokens; returns the sizes that were tried."""
    forward, tried = trainer.decoder.forward, []

    def limited(tokens_T: torch.Tensor, *args, **options) -> torch.Tensor:
        tried.append(len(tokens_T))
        if len(tokens_T) > tokens:
            raise torch.OutOfMemoryError("out of memory")
        return forward(tokens_T, *args, **options)

    trainer.decoder.forward = limited
    return tried


def test_a_pass_that_does_not_fit_is_split(models: dict[str, Path]):
    work = [Pass("a", data(1, 20, 12, 7), "cross_entropy"), Pass("b", data(2, 16, 9), "cross_entropy")]
    found = []
    for tokens in (1000, 25):
        trainer = make_trainer(models["llama3"])
        for run in ("a", "b"):
            create(trainer, run, LoraConfig(rank=4, seed=3))
        tried = limit_memory(trainer, tokens)
        outputs = forward_backward(trainer, *work)
        found.append((outputs, [gradient(trainer, run) for run in ("a", "b")], tried))
    (whole, whole_grads, _), (split, split_grads, tried) = found
    assert tried[0] == 64
    assert sum(size for size in tried if size <= 25) == 64  # everything was computed, and once
    for one, other in zip(whole, split, strict=True):
        for a, b in zip(logprobs(one), logprobs(other), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    for a, b in zip(whole_grads, split_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_datum_that_does_not_fit_fails_its_pass_alone(models: dict[str, Path]):
    trainer = make_trainer(models["llama3"])
    for run in ("a", "b"):
        create(trainer, run, LoraConfig(rank=4, seed=3))
    limit_memory(trainer, 25)
    passes = (Pass("a", data(1, 40), "cross_entropy"), Pass("b", data(2, 16), "cross_entropy"))
    failed, fine = do(trainer, ForwardBackward(passes))
    assert isinstance(failed, Failure)
    assert "out of memory" in failed.message
    assert isinstance(fine, ForwardBackwardOutput)
    assert trainer.adapter("a").grad is None
