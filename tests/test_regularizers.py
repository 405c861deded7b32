"""Regularizers: closed-form gradients are autograd's, estimates are right on average, any loss takes them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.conftest import close, datum
from tests.stub import Stub
from tinkex import Datum, InvalidInputError, ModelInput, ServiceClient, TensorData
from tinkex import regularizers as reg
from tinkex.client.custom_loss import traced

Tensors = list[torch.Tensor]


def batch(seed: int, lengths: list[int], width: int = 0) -> tuple[list[Datum], list[np.ndarray]]:
    """Datums with weights (some zero) and reference logprobs, and logprobs for them."""
    dice = np.random.default_rng(seed)
    data, logprobs = [], []
    for length in lengths:
        shape = (length, width) if width else (length,)
        inputs = {
            "target_tokens": dice.integers(0, 9, shape),
            "weights": (dice.random(shape) * (dice.random(shape) > 0.3)).astype(np.float32),
            "ref_logprobs": -dice.random(shape).astype(np.float32) * 3,
        }
        tensors = {key: TensorData.from_numpy(value) for key, value in inputs.items()}
        data.append(Datum(ModelInput.from_ints(dice.integers(0, 9, length)), tensors))
        logprobs.append((-dice.random(shape) * 3 - 0.01).astype(np.float32))
    return data, logprobs


def of(data: list[Datum], key: str) -> Tensors:
    return [torch.tensor(d.loss_fn_inputs[key].to_numpy(), dtype=torch.float64) for d in data]


def total(data: list[Datum], terms: Tensors, mean: bool = False) -> torch.Tensor:
    """The sum over positions whose weight is not zero."""
    masks = [weights != 0 for weights in of(data, "weights")]
    value = torch.stack([(term * mask).sum() for term, mask in zip(terms, masks, strict=True)]).sum()
    return value / sum(int(mask.sum()) for mask in masks) if mean else value


def around(data: list[Datum], xs: Tensors) -> Tensors:
    return [x - r for x, r in zip(xs, of(data, "ref_logprobs"), strict=True)]


def kept(data: list[Datum], xs: Tensors) -> Tensors:
    return [x[w != 0] for x, w in zip(xs, of(data, "weights"), strict=True)]


def cos2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(x, y, dim=0) ** 2


# What each term is, in torch and in other words; d are the datums, x the logprobs.
TERMS: dict[str, tuple[reg.Term, Any]] = {
    "l1": (reg.l1(), lambda d, x: total(d, [v.abs() for v in x])),
    "l1 around": (reg.l1(around="ref_logprobs"), lambda d, x: total(d, [v.abs() for v in around(d, x)])),
    "l2": (reg.l2(mean=True), lambda d, x: total(d, [v.square() for v in x], mean=True)),
    "l2 around": (reg.l2(around="ref_logprobs"), lambda d, x: total(d, [v.square() for v in around(d, x)])),
    "l2 of all": (reg.l2(mask=None), lambda d, x: torch.stack([v.square().sum() for v in x]).sum()),
    "elastic net": (
        reg.elastic_net(0.3),
        lambda d, x: total(d, [0.3 * v.abs() + 0.7 * v.square() for v in x]),
    ),
    "entropy": (
        reg.entropy("enumerated"),
        lambda d, x: total(d, [torch.special.entr(v.exp()) for v in x]),
    ),
    "reverse": (
        reg.kl("reverse", "enumerated"),
        lambda d, x: total(d, [v.exp() * (v - r) for v, r in zip(x, of(d, "ref_logprobs"), strict=True)]),
    ),
    "forward": (
        reg.kl("forward", "enumerated"),
        lambda d, x: total(
            d,
            [
                torch.nn.functional.kl_div(v, r, log_target=True, reduction="none")
                for v, r in zip(x, of(d, "ref_logprobs"), strict=True)
            ],
        ),
    ),
    "forward sampled": (
        reg.kl("forward"),
        lambda d, x: total(d, [r - v for v, r in zip(x, of(d, "ref_logprobs"), strict=True)]),
    ),
    "consistency per sequence": (
        reg.consistency(per="sequence"),
        lambda d, x: (
            (kept(d, x)[0].mean() - kept(d, x)[1].mean()).square()
            + (kept(d, x)[2].mean() - kept(d, x)[3].mean()).square()
        ),
    ),
    "consistency": (
        reg.consistency([(0, 1), (2, 0)], mask=None),
        lambda d, x: (x[0] - x[1]).square().sum() + (x[2] - x[0]).square().sum(),
    ),
    "orthogonality": (
        reg.orthogonality(mask=None),
        lambda d, x: torch.stack(
            [cos2(x[i].flatten(), x[j].flatten()) for i in range(4) for j in range(i)]
        ).sum(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("width", [0, 3])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(3, 9))
def test_gradients_are_autograds(name: str, width: int, seed: int, length: int) -> None:
    term, formula = TERMS[name]
    data, logprobs = batch(seed, [length] * 4, width)
    if name == "consistency per sequence" and any(
        not np.any(d.loss_fn_inputs["weights"].to_numpy()) for d in data
    ):
        return  # a datum of which nothing counts is refused
    xs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in logprobs]
    right = formula(data, xs)
    right.backward()
    value, gradients = term.compute(data, logprobs)
    assert value == pytest.approx(right.item(), rel=1e-6, abs=1e-9)
    for gradient, x in zip(gradients, xs, strict=True):
        assert gradient.shape == x.shape
        expected = torch.zeros_like(x) if x.grad is None else x.grad
        np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("term", "drawn_from", "exact"),
    [
        (reg.entropy(), "model", lambda x, r: -(x.exp() * x).sum()),
        (reg.kl("reverse"), "model", lambda x, r: (x.exp() * (x - r)).sum()),
        (reg.kl("forward"), "reference", lambda x, r: (r.exp() * (r - x)).sum()),
    ],
)
def test_sampled_terms_are_right_on_average(term: Any, drawn_from: str, exact: Any) -> None:
    """Over every token of a vocabulary, each as often as it is drawn: value and gradient by the logits."""
    dice = torch.Generator().manual_seed(4)
    logits = torch.randn(6, generator=dice, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=dice, dtype=torch.float64).log_softmax(0)
    x = logits.log_softmax(0)
    right = exact(x, reference)
    (by_logits,) = torch.autograd.grad(right, logits, retain_graph=True)
    inputs = {"target_tokens": np.arange(6), "ref_logprobs": reference.float().numpy()}
    tensors = {key: TensorData.from_numpy(value) for key, value in inputs.items()}
    value, (slopes,) = term.compute(
        [Datum(ModelInput.from_ints(np.arange(6)), tensors)], [x.detach().numpy()]
    )
    share = (x if drawn_from == "model" else reference).detach().exp()
    (average,) = torch.autograd.grad(share * torch.from_numpy(slopes) @ x, logits)
    torch.testing.assert_close(average, by_logits, atol=1e-6, rtol=1e-5)
    parts = [
        term.compute([only(tensors, token)], [x.detach().numpy()[token : token + 1]])[0] for token in range(6)
    ]
    assert float(share @ torch.tensor(parts, dtype=torch.float64)) == pytest.approx(right.item(), abs=1e-6)
    assert value == pytest.approx(sum(parts))


def only(tensors: dict[str, TensorData], token: int) -> Datum:
    one = {key: TensorData.from_numpy(t.to_numpy()[token : token + 1]) for key, t in tensors.items()}
    return Datum(ModelInput.from_ints([token]), one)


def test_the_weighted_sum_and_its_metrics() -> None:
    """By hand: cross-entropy of weights 1 and 2, plus 0.5 of Σx², plus 2 of |x|."""
    x = np.array([-1.0, -2.0], np.float32)
    one = datum(2, weights=TensorData(np.array([1.0, 2.0], np.float32)))
    loss = reg.regularized("cross_entropy", [0.5 * reg.l2(), reg.l1() * 2.0])
    value, (gradient,), metrics = loss.value_and_gradients([one], [x])
    assert value == pytest.approx(5 + 0.5 * 5 + 2 * 3)
    np.testing.assert_allclose(gradient, [-1 - 1 - 2, -2 - 2 - 2])
    assert metrics == pytest.approx(
        {
            "base/value": 5, "base/grad_norm": 5**0.5,
            "reg/l2/value": 5, "reg/l2/grad_norm": 5**0.5,
            "reg/l1/value": 3, "reg/l1/grad_norm": 8**0.5,
        }
    )  # fmt: skip


def by_function(data: Any, logprobs: Any) -> Any:
    return torch.stack([(x**3).sum() for x in logprobs]).sum(), {"mine": 1.0}


def per_datum(logprobs: Any) -> Any:
    return (logprobs**3).sum(), {"custom/n:sum": logprobs.detach().sum()}


class ByHand:
    def value_and_gradients(self, data: Any, logprobs: Any) -> Any:
        return sum(float((x**3).sum()) for x in logprobs), [3 * x**2 for x in logprobs], {}


@pytest.mark.parametrize("loss", [by_function, traced(per_datum, {"logprobs": 1}), ByHand()])
def test_any_loss_can_be_regularized(loss: Any) -> None:
    data, logprobs = batch(1, [4, 6])
    cube = reg.from_torch("cube", lambda d, xs: torch.stack([x.pow(4).sum() for x in xs]).sum())
    value, gradients, _ = reg.regularized(loss, [0.1 * cube]).value_and_gradients(data, logprobs)
    assert value == pytest.approx(sum(float((x**3 + 0.1 * x**4).sum()) for x in logprobs), rel=1e-5)
    for gradient, x in zip(gradients, logprobs, strict=True):
        np.testing.assert_allclose(gradient, 3 * x**2 + 0.4 * x**3, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "wrong", "words"),
    [
        ("ppo", {"logprobs": [-1.0] * 3}, r"data\[0\].loss_fn_inputs: ppo needs 'advantages'"),
        (
            "ppo",
            {"target_tokens": np.ones((3, 2), int), "logprobs": [-1.0] * 3, "advantages": [1.0] * 3},
            r"\[3, 2\]; ppo takes \[3\] for a model_input of 3 positions",
        ),
        (
            "kl_divergence",
            {"target_tokens": np.ones((3, 2), int), "logprobs": [-1.0] * 3},
            r"\['logprobs'\] has shape \[3\], but target_tokens has \[3, 2\]",
        ),
        (
            traced(lambda logprobs, old: ((logprobs - old).sum(), {}), {"logprobs": 1, "old": 1}),
            {},
            "no 'old'",
        ),
    ],
)
def test_what_a_loss_cannot_be_computed_on_is_said_at_the_call(loss: Any, wrong: Any, words: str) -> None:
    with Stub() as stub:
        service = ServiceClient(base_url=stub.url)
        run = service.create_lora_training_client("stub/base")
        with pytest.raises(InvalidInputError, match=words):
            run.forward_backward_custom([datum(3, **wrong)], reg.regularized(loss, [reg.l2()]))
        assert stub.count("forward_backward") == 0
        run.forward_backward_custom([datum(3)], reg.regularized(None, [reg.l2()])).result(10)
        close(service)


def test_a_loss_of_the_servers_is_regularized_by_a_second_pass() -> None:
    with Stub() as stub:
        service = ServiceClient(base_url=stub.url)
        run = service.create_lora_training_client("stub/base")
        scored = datum(3, logprobs=[-1.0] * 3, advantages=[1.0] * 3)
        run.forward_backward([scored], "ppo")
        output = run.forward_backward_custom([datum(3)], reg.regularized(None, [reg.l2()])).result(10)
        run.optim_step().result(20)
        assert [op for _, _, op in stub.executed] == [
            "forward_backward", "forward", "forward_backward", "optim_step",
        ]  # fmt: skip
        assert output.metrics["loss:sum"] == output.metrics["reg/l2/value"] == pytest.approx(0.75)
        close(service)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from tests.client.conftest import datum
from tests.stub import Stub
from tinkex import ServiceClient, TensorData
from tinkex import regularizers as reg
import numpy as np
terms = [0.1 * reg.l2(), 0.1 * reg.kl(), -0.1 * reg.entropy(), reg.consistency(), reg.orthogonality()]
with Stub() as stub, ServiceClient(base_url=stub.url) as service:
    run = service.create_lora_training_client("stub/base")
    data = [datum(3, ref_logprobs=TensorData(np.full(3, -1.0, np.float32))) for _ in range(2)]
    output = run.forward_backward_custom(data, reg.regularized("cross_entropy", terms)).result(10)
    print(output.metrics["loss:sum"])
    drawn = [datum(3, logprobs=[-1.0] * 3, advantages=[2.0] * 3)]
    output = run.forward_backward_custom(drawn, reg.regularized("ppo", [0.1 * reg.l2()])).result(10)
    print(output.metrics["loss:sum"])
"""


@pytest.mark.slow
def test_no_torch_is_needed() -> None:
    """Cross-entropy 3, l2 0.15, kl 0.1·6·0.5, entropy -0.1·3, consistency 0, cos² 1; then ppo, clipped."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    crossed, clipped = map(float, done.stdout.split())
    assert crossed == pytest.approx(3 + 0.15 + 0.3 - 0.3 + 0 + 1, abs=1e-5)
    assert clipped == pytest.approx(-3 * 2 * 1.2 + 0.1 * 3 * 0.25, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: reg.regularized("stable_reinforce", []),
            r"regularized\(None, terms\): the gradients add up",
        ),
        (lambda: reg.regularized("dro", []), r"dro needs loss_fn_config\['beta'\]"),
        (lambda: reg.regularized("ppo", [], {"beta": 1.0}), "ppo takes: clip_low_threshold, clip_high"),
        (lambda: reg.regularized("dro", [], {"beta": -1.0}), "at least 0, got -1.0"),
        (lambda: reg.regularized(None, [], {"beta": 1.0}), "given by its name, not for None"),
        (lambda: reg.regularized(3, []), "a loss's name, a function.* got 3"),
        (lambda: reg.regularized(None, [reg.l2(), 2 * reg.l2()]), "different names.*Term.named"),
        (lambda: reg.regularized(None, [0.1]), "must be Term objects"),
        (lambda: reg.elastic_net(1.5), r"in \[0, 1\], got 1.5"),
        (lambda: reg.kl("backward"), "one of reverse, forward, got 'backward'"),
        (lambda: reg.entropy("all"), "one of sampled, enumerated"),
        (lambda: reg.kl().compute(*batch_without("ref_logprobs")), r"data\[0\].* has no 'ref_logprobs'"),
        (lambda: reg.consistency(mask=None).compute(*batch(0, [3, 4])), "of which 3 and 4 positions count"),
        (lambda: reg.consistency().compute(*batch(0, [3, 3, 3])), "there are 3; give pairs"),
        (lambda: reg.consistency([(0, 2)]).compute(*batch(0, [3, 3])), r"\(0, 2\) is not two of the 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        make()


def batch_without(key: str) -> Any:
    data, logprobs = batch(0, [3])
    inputs = {k: v for k, v in data[0].loss_fn_inputs.items() if k != key}
    return [Datum(data[0].model_input, inputs)], logprobs


def test_a_term_of_ones_own_is_checked() -> None:
    wrong = reg.Term("wrong", lambda data, logprobs: (1.0, [np.zeros(1) for _ in logprobs]))
    with pytest.raises(InvalidInputError, match=r"'wrong' gave gradients of shapes \[\[1\]\]"):
        reg.regularized(None, [wrong]).value_and_gradients(*batch(0, [3]))
    twice = reg.regularized(None, [reg.l2(), reg.l2().named("again")])
    assert {"reg/l2/value", "reg/again/value"} <= set(twice.value_and_gradients(*batch(0, [3]))[2])


def test_the_example_of_the_docs_works(capsys: Any) -> None:
    """Four tokens of x = -1 and r = -2: cross-entropy 4, kl 0.1·4·1, entropy -0.01·4·1."""
    page = (Path(__file__).parents[1] / "docs" / "client.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(next(block for block in blocks if "reg.regularized" in block), {})
    said = [float(word) for word in capsys.readouterr().out.split()]
    assert said == pytest.approx([4 + 0.4 - 0.04, 4.0, 0.02], abs=1e-6)
