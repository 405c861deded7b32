"""Passes: checked before they are sent, split into chunks, and joined again."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.conftest import datum
from tests.stub import Stub
from tinkex import Datum, InvalidInputError, ModelInput
from tinkex.client.passes import check_pass, join, reduce_metrics, split
from tinkex.types import ForwardBackwardOutput, ImageAssetPointerChunk, ImageChunk, LossFnType, TensorData

IMAGE = ImageAssetPointerChunk(format="png", location="s3://x", expected_tokens=4)
RL: dict[str, Any] = {"logprobs": np.zeros(4, np.float32), "advantages": np.ones(4, np.float32)}


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "words"),
    [
        ([], "cross_entropy", None, "data is empty"),
        (datum(), "cross_entropy", None, r"data must be a list of Datum, got Datum; put it .*: \[datum\]"),
        ([datum()], lambda data, logprobs: 0, None, "loss_fn is a function: call forward_backward_custom"),
        ([datum(), 3], "cross_entropy", None, r"data\[1\] must be a Datum, got int"),
        ([datum()], "cross_entrpy", None, "did you mean 'cross_entropy'"),
        ([datum()], "ppo", {"clip": [1]}, r"loss_fn_config\['clip'\] must be a number or a string, got"),
        ([datum(), datum()], "ppo", None, r"data\[0\].*: ppo needs 'logprobs'; given: target_tokens"),
        (
            [datum(), Datum(ModelInput.from_ints([1]), {})],
            "cross_entropy", None, r"data\[1\].*cross_entropy needs 'target_tokens'; given: nothing",
        ),
        (
            [datum(weigths=np.ones(4, np.float32))],
            "cross_entropy", None, r"does not read 'weigths'; did you mean 'weights'",
        ),
        (
            [datum(), datum(weights=np.ones(3, np.float32))],
            "cross_entropy", None, r"data\[1\].*\['weights'\] has shape \[3\], but target_tokens has \[4\]",
        ),
        (
            [datum(weights=np.array([0, 1, math.nan, 1], np.float32))],
            "cross_entropy", None, r"data\[0\].*\['weights'\]\[2\] is nan; every value must be finite",
        ),
        (
            [datum(2, target_tokens=np.array([7, -100]))],
            "cross_entropy", None, r"\['target_tokens'\]\[1\] is -100; token ids .* set their 'weights' to 0",
        ),
        (
            [datum(3, target_tokens=np.arange(2))],
            "cross_entropy", None, r"has shape \[2\]; cross_entropy takes \[3\] or \[3, K\]",
        ),
        (
            [datum(1, target_tokens=np.array([-3]))],
            "cross_entropy", None, r"data\[0\].*\['target_tokens'\]\[0\] is -3; token ids are 0\.\.",
        ),
        (
            [datum(), datum(3, target_tokens=np.array([0, 2**31 - 1, 2**31]))],
            "cross_entropy", None, r"data\[1\].*\['target_tokens'\]\[2\] is 2147483648; token ids are 0",
        ),
        (
            [datum(weights=TensorData([0, 1, 1, 1]))],
            "cross_entropy", None, r"data\[0\].*\['weights'\] must be float32, got int64",
        ),
        (
            [datum(), Datum(ModelInput.empty(), {"target_tokens": []})],
            "cross_entropy", None, r"data\[1\]\.model_input is empty",
        ),
        ([datum()], "custom", None, r"needs loss_fn_config=\{'loss_id': …\}; .*forward_backward_custom"),
        ([datum()], "custom", {"loss": "x"}, "'custom' needs loss_fn_config"),
        (
            [datum(1, target_tokens=np.array([1.0]))],
            "cross_entropy", None, r"data\[0\].*\['target_tokens'\] must be int64 token ids, got float32",
        ),
        (
            [Datum(ModelInput([IMAGE]), datum().loss_fn_inputs)],
            "cross_entropy", None, "ImageAssetPointerChunk can be sampled from, not trained on",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_at_the_call_and_nothing_is_sent(
    stub: Stub, run: Any, data: Any, loss_fn: str, config: Any, words: str
) -> None:
    """The datum, the key, what was given and what is allowed; the client goes on working."""
    before = len(stub.requests)
    with pytest.raises(InvalidInputError, match=words):
        run.forward_backward(data, loss_fn, config)
    assert len(stub.requests) == before
    run.forward_backward([datum()], "cross_entropy").result(20)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_good_passes_are_let_through(loss_fn: str) -> None:
    check_pass([datum(**RL)], loss_fn, {"clip_low_threshold": 0.8})
    check_pass([datum(extra=np.ones(2))], "cross_entropy", None)
    check_pass([datum(mask=np.ones(4, np.float32))], "cross_entropy", None)  # a server may read it
    check_pass([datum(weights=np.array([0, 1, 1, 0]))], "cross_entropy", None)  # a mask becomes floats
    check_pass([datum(1, target_tokens=np.array([2**31 - 1]))], "cross_entropy", None)
    check_pass([datum(anything=np.ones(2))], "custom", None)
    huge = np.full(4, 3e38, np.float32)  # finite, though their sum is not
    check_pass([datum(weights=huge)], "cross_entropy", None)


@pytest.mark.parametrize("loss_fn", [*get_args(LossFnType), "kl_divergence"])
def test_every_loss_of_the_official_list_and_our_own_is_sent(stub: Stub, run: Any, loss_fn: str) -> None:
    """Whether a server has it is the server's to say; what no one has is refused with the list."""
    config = {"loss_id": "loss-0"} if loss_fn == "custom" else None
    run.forward_backward([datum(**RL)], loss_fn, config).result(20)
    assert loss_fn.encode() in stub.sent("forward_backward")[0].body
    with pytest.raises(InvalidInputError, match=rf"no loss_fn is called 'l0ss'.*There are: .*{loss_fn}"):
        run.forward_backward([datum()], "l0ss")


def test_an_image_of_unknown_length_is_not_measured() -> None:
    chunk = ImageChunk(data=b"png", format="png")
    check_pass([Datum(ModelInput([chunk]), datum(9).loss_fn_inputs)], "cross_entropy", None)


# -- chunks ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 900))
def test_chunks_keep_the_order_and_the_limits(lengths: list[int], most: int, limit: int) -> None:
    data = [datum(length) for length in lengths]
    chunks = split(data, most, limit)
    assert [id(d) for chunk in chunks for d in chunk] == list(map(id, data))
    for chunk in chunks:
        assert 1 <= len(chunk) <= most
        assert len(chunk) == 1 or sum(d.nbytes for d in chunk) <= limit
    for chunk, following in itertools.pairwise(chunks):
        full = len(chunk) == most or sum(d.nbytes for d in [*chunk, following[0]]) > limit
        assert full, "no chunk is cut short"


# -- metrics -----------------------------------------------------------------------------------------------


def test_each_reduction() -> None:
    """By the suffix, weighted by the number of outputs."""
    values, weights = [1.0, 5.0, 2.0], [1, 2, 5]
    chunks = [
        ({f"m:{how}": v for how in ("mean", "sum", "min", "max", "slack", "hash2", "unique")}, w)
        for v, w in zip(values, weights, strict=True)
    ]
    mean = float(np.average(values, weights=weights))
    assert reduce_metrics(chunks) == pytest.approx(
        {
            "m:mean": mean, "m:sum": 8, "m:min": 1, "m:max": 5, "m:slack": 5 - mean, "m:hash2": 8,
            "m:unique": 1, "m:unique_1": 5, "m:unique_2": 2,
        }
    )  # fmt: skip


def test_the_order_of_chunks_does_not_change_hash_unordered() -> None:
    """CPython's hash of the sorted integers, which is the same in every process."""
    some = [({"h:hash_unordered": float(v)}, 1) for v in (3, 1, 2)]
    assert reduce_metrics(some) == reduce_metrics(some[::-1]) == {"h:hash_unordered": 529344067295497451.0}


def test_what_no_rule_is_known_for_is_kept_chunk_by_chunk() -> None:
    """An unknown suffix, no suffix, and a metric that not every chunk has; nothing is dropped."""
    some = [({"a:odd": 1.0, "plain": 3.0, "x:sum": 1.0}, 1), ({"a:odd": 2.0}, 2), ({"x:sum": 4.0}, 1)]
    assert reduce_metrics(some) == {"a:odd": 1.0, "a:odd_1": 2.0, "plain": 3.0, "x:sum": 5.0}


def test_hash2_wraps_at_64_bits() -> None:
    some = [({"h:hash2": 2.0**63}, 1), ({"h:hash2": 2.0**63}, 1), ({"h:hash2": 4096.0}, 1)]
    assert reduce_metrics(some) == {"h:hash2": 4096.0}


@pytest.mark.parametrize("name", ["loss", "a:b:sum", "", ":", "x:unheard_of", "x:mean"])
@pytest.mark.parametrize("outputs", [0, 3])
def test_no_name_and_no_count_breaks_a_finished_pass(stub: Stub, run: Any, name: str, outputs: int) -> None:
    """The official client loses the result of a step whose gradient is already applied."""
    metrics = {name: 2.0}
    assert reduce_metrics([(metrics, outputs), (metrics, outputs)])[name] in (2.0, 4.0)
    stub.metrics = metrics
    assert run.forward_backward([datum()], "cross_entropy").result(20).metrics == metrics


@pytest.mark.slow
@given(st.lists(st.tuples(st.dictionaries(st.text(max_size=8), st.floats()), st.integers(0, 3)), max_size=4))
def test_reduction_never_raises_and_keeps_every_key(chunks: list[tuple[dict[str, float], int]]) -> None:
    assert set(reduce_metrics(chunks)) >= {key for metrics, _ in chunks for key in metrics}


def test_joined_outputs_are_in_order() -> None:
    def output(*numbers: float) -> ForwardBackwardOutput:
        records = [{"logprobs": TensorData.from_numpy(np.array([n], np.float32))} for n in numbers]
        return ForwardBackwardOutput("tensors", records, {"loss:sum": sum(numbers)})

    joined = join([output(1, 2), output(3)])
    assert [record["logprobs"].tolist() for record in joined.loss_fn_outputs] == [[1], [2], [3]]
    assert joined.metrics == {"loss:sum": 6}
