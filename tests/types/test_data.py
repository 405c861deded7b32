"""Tokens, tensors, datums and settings: what is kept exactly, and what is refused with its place."""

import numpy as np
import pytest
import torch

from tinkex import types as t
from tinkex.errors import InvalidInputError

# -- tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        [np.int64(1), 2, 3],
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint8),
        torch.tensor([1, 2, 3]),
    ],
)
def test_tokens_come_from_anything_whole(tokens):
    prompt = t.ModelInput.from_ints(tokens)
    assert prompt.to_ints() == [1, 2, 3]
    assert prompt.to_numpy().dtype == np.int32
    assert prompt.length == 3


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 1.7], r"position 1 is 1\.7"),
        (np.array([1.0, 2.0]), "whole numbers"),
        ([3, -1], "position 1 is -1"),
        ([2**31], f"position 0 is {2**31}"),
        ([[1, 2]], r"shape \[1, 2\]"),
        (["a"], "position 0 is 'a'"),
        (True, "list or array"),
        ([1, None], "whole numbers; position 1 is None"),
    ],
)
def test_tokens_are_never_cut_to_fit(tokens, message):
    """The official types make [1, 2] of [1.7, 2.2]."""
    with pytest.raises(InvalidInputError, match=message):
        t.ModelInput.from_ints(tokens)


def test_model_inputs_are_values():
    one = t.ModelInput.from_ints([1]).append(t.EncodedTextChunk([2])).append_int(3)
    assert one.to_ints() == [1, 2, 3]
    assert t.ModelInput.empty().to_ints() == []
    assert t.ModelInput.from_ints([1, 2]) == t.ModelInput.from_ints(np.array([1, 2]))
    assert hash(t.ModelInput.from_ints([1, 2])) == hash(t.ModelInput.from_ints([1, 2]))
    given = np.array([1, 2])
    kept = t.ModelInput.from_ints(given)
    given[0] = 9
    assert kept.to_ints() == [1, 2]


def test_pictures_have_a_length_only_if_it_is_said():
    image = t.ImageChunk(data=b"x", format="png", expected_tokens=7)
    assert t.ModelInput([image, t.EncodedTextChunk([1])]).length == 8
    with pytest.raises(InvalidInputError, match="expected_tokens"):
        t.ImageChunk(data=b"x", format="png").length
    with pytest.raises(InvalidInputError, match="'png' or 'jpeg', got 'gif'"):
        t.ImageChunk(data=b"x", format="gif")
    with pytest.raises(InvalidInputError, match="'png' or 'jpeg', got 'gif'"):
        t.ImageAssetPointerChunk(format="gif", location="a")
    with pytest.raises(InvalidInputError, match="location must be a non-empty string, got None"):
        t.ImageAssetPointerChunk(format="png", location=None)
    for wrong in (-1, 0, 1.5, "7", True):
        with pytest.raises(InvalidInputError, match="expected_tokens must be a whole number from 1 on"):
            t.ImageChunk(data=b"x", format="png", expected_tokens=wrong)
    with pytest.raises(InvalidInputError, match=r"ImageChunk\.data must be the bytes of an image, got b''"):
        t.ImageChunk(data=b"", format="png")
    with pytest.raises(InvalidInputError, match=r"DmelChunk\.dmel must be bytes, got 'x'"):
        t.DmelChunk("x")
    with pytest.raises(InvalidInputError, match="type must be 'image', got 'text'"):
        t.ImageChunk(data=b"x", format="png", type="text")
    with pytest.raises(InvalidInputError, match="also holds ImageChunk"):
        t.ModelInput([image]).to_ints()
    assert t.DmelChunk(dmel=bytes([0xFE, 1, 2, 0x80, 1, 4])).length == 128


# -- tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.float64, "float32"), (np.float32, "float32"), (np.float16, "float32"), (np.int64, "int64"),
        (np.int8, "int64"), (np.uint8, "int64"), (np.uint32, "int64"), (np.bool_, "int64"),
    ],
)  # fmt: skip
def test_dtypes_widen_or_narrow_only_without_harm(given, dtype):
    tensor = t.TensorData.from_numpy(np.array([0, 1], given))
    assert tensor.dtype == dtype
    assert tensor.tolist() == [0, 1]


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool])
def test_torch_tensors_of_any_dtype(given):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(given)
    ours = t.TensorData.from_torch(tensor)
    assert ours.shape == [2, 2]
    np.testing.assert_array_equal(ours.to_numpy(), tensor.double().numpy())
    assert torch.equal(ours.to_torch().double(), tensor.double())


def test_a_tensor_that_needs_a_gradient():
    assert t.TensorData.from_torch(torch.ones(2, requires_grad=True) * 2).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: t.TensorData.from_numpy(np.array([1e300])), "too large for float32"),
        (lambda: t.TensorData.from_numpy(np.array([2**64 - 1], np.uint64)), "too large for int64"),
        (lambda: t.TensorData([1.5], dtype="int64"), "floats given where int64 is needed"),
        (lambda: t.TensorData(["a"]), r"not a rectangular list of numbers: \[0\] is 'a'"),
        (lambda: t.TensorData([1.0, float("nan"), None]), r"\[2\] is None"),
        (lambda: t.TensorData([10**30]), r"\[0\] is 10{30}"),
        (lambda: t.TensorData([[1, 2], [3]]), r"\[1\] is 1 long, \[0\] is 2 long"),
        (lambda: t.TensorData([[1], 2]), r"\[1\] is a number, \[0\] is 1 long"),
        (lambda: t.TensorData([[[1], ["x"]]]), r"\[0\]\[1\]\[0\] is 'x'"),
        (lambda: t.TensorData(np.array([1j])), "dtype complex128 cannot be sent"),
        (lambda: t.TensorData({"a": 1}), "it is {'a': 1}"),
        (lambda: t.TensorData(dat=[1]), "TensorData has no 'dat'; did you mean 'data'"),
        (lambda: t.TensorData([1], "int64", [1], None, None, 6), "too many positional arguments"),
        (lambda: t.TensorData([1], shape=1), "shape must be a list of whole numbers from 0 on, got 1"),
        (lambda: t.TensorData([1], shape=[1.0]), r"whole numbers from 0 on, got \[1\.0\]"),
        (lambda: t.TensorData([1], shape="ab"), "got 'ab'"),
        (lambda: t.TensorData([1], dtype=np.dtype("int64")), "'float32' or 'int64', got dtype"),
        (lambda: t.TensorData.from_torch([1]), "takes a torch tensor, got list"),
        (lambda: t.TensorData([1, 2], shape=[3]), r"shape \[3\] does not hold 2 values"),
        (lambda: t.TensorData([1, 2], shape=[-1, -2]), "from 0 on"),
        (lambda: t.TensorData([], dtype="int64", shape=[2**32, 2**32]), "does not hold 0 values"),
        (lambda: t.TensorData([1], dtype="int8"), "'float32' or 'int64', got 'int8'"),
        (lambda: t.TensorData([1.0], "float32", [1, 1], [0, 1]), "must be given together"),
        (lambda: t.TensorData([1.0], "float32", [1, 1], [0, 1], [1]), "column index is outside"),
        (lambda: t.TensorData([1.0], "float32", [1, 1], [0, 2], [0]), "sparse_crow_indices must rise"),
        (lambda: t.TensorData([1.0], "float32", [1, 1], [0.0, 1.0], [0]), "whole numbers"),
        (lambda: t.TensorData([], "float32", [1, 2**40], [0, 0], []), "cells"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_kept(build, message):
    with pytest.raises(InvalidInputError, match=message):
        build()


def read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("given", [lambda a: a, read_only, lambda a: a[:], lambda a: memoryview(a)])
def test_a_tensor_does_not_change_with_what_it_was_made_of(given):
    """Least of all while it is on its way."""
    values, crow, col = np.ones(2, np.float32), np.array([0, 1, 2]), np.array([0, 1])
    dense = t.TensorData(given(values))
    sparse = t.TensorData(given(values), "float32", [2, 2], given(crow), given(col))
    values[:], crow[:], col[:] = 7, 0, 0
    assert dense.tolist() == [1, 1]
    assert sparse.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("tensor", [t.TensorData([1.0, 2.0]), t.TensorData([3.0], None, [1, 2], [0, 1], [0])])
def test_nobody_can_write_into_a_tensor(tensor):
    before = tensor.tolist()
    with pytest.raises(ValueError, match="read-only"):
        tensor.to_numpy()[:] = 9
    with pytest.raises(ValueError, match="read-only"):
        tensor.values_np[:] = 9
    tensor.to_torch()[:] = 9
    assert tensor.tolist() == before


@pytest.mark.parametrize(
    ("values", "sound"),
    [
        ([0.0, 1.0], True), ([3e38, 3e38], True), ([], True), ([0.0, np.nan], False), ([np.inf, -1.0], False),
        (np.array([0, 2**31 - 1]), True), (np.array([2**31]), False), (np.array([5, -1]), False),
        (np.array([], np.int64), True),
    ],
)  # fmt: skip
def test_values_that_make_sense(values, sound):
    """Floats that are finite, though their squares are not; whole numbers that are token ids."""
    with np.errstate(all="ignore"):
        assert t.TensorData(values).sound == sound
        assert t.TensorData(values).sound == sound  # and asked again


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("copied", [False, True])
def test_what_is_not_finite_is_found_wherever_it_is(bad, copied):
    for length in (1, 2, 15, 16, 17, 33, 64, 65, 130):
        for at in range(length):
            values = np.linspace(-3e38, 3e38, length, dtype=np.float32)
            values[at] = bad
            given = values if copied else np.frombuffer(values.tobytes(), np.float32)
            assert not t.TensorData.from_numpy(given).sound, (length, at)
            values[at] = 0
            assert t.TensorData.from_numpy(values).sound


def test_what_cannot_change_is_not_copied():
    answer = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32)
    assert np.shares_memory(t.TensorData(answer[1:3]).to_numpy(), answer)


@pytest.mark.parametrize("nonzero", [0, 1, 5, 20, 48])
def test_sparse_where_it_is_smaller(nonzero):
    """Used when (rows + 1) + 2 * values < cells; torch's own CSR is the oracle."""
    dense = torch.zeros(6, 8)
    dense.view(-1)[torch.randperm(48, generator=torch.Generator().manual_seed(1))[:nonzero]] = 2.5
    tensor = t.TensorData.from_torch_sparse(dense)
    assert tensor.is_sparse == (7 + 2 * nonzero < 48)
    np.testing.assert_array_equal(tensor.to_numpy(), dense.numpy())
    if tensor.is_sparse:
        csr = dense.to_sparse_csr()
        assert tensor.sparse_crow_indices == csr.crow_indices().tolist()
        assert tensor.sparse_col_indices == csr.col_indices().tolist()
        assert tensor.data == csr.values().tolist()


# -- datums ----------------------------------------------------------------------------------------------

PROMPT = t.ModelInput.from_ints([1, 2])


def test_lists_get_their_dtype_from_their_key():
    inputs = {"target_tokens": [1, 2], "weights": [0, 1], "advantages": [1, 2], "logprobs": [0, 0]}
    datum = t.Datum(model_input=PROMPT, loss_fn_inputs=inputs)
    assert {k: v.dtype for k, v in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64", "weights": "float32", "advantages": "float32", "logprobs": "float32",
    }  # fmt: skip


@pytest.mark.parametrize("mask", [np.array([0, 1]), np.array([False, True]), torch.tensor([0, 1])])
def test_a_mask_of_whole_numbers_is_what_its_key_calls_for(mask):
    datum = t.Datum(PROMPT, {"target_tokens": mask, "weights": mask, "other": mask})
    assert [v.dtype for v in datum.loss_fn_inputs.values()] == ["int64", "float32", "int64"]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("foo", [1], "only these keys may be: target_tokens, weights"),
        ("target_tokens", [1.5, 2], "floats given where int64"),
        ("weights", [[1.0], [1.0, 2.0]], r"rectangular.*\[1\] is 2 long, \[0\] is 1 long"),
        ("weights", [1.0, None], r"\[1\] is None"),
        ("weights", {"data": [1.0], "shap": [1]}, "no 'shap'; did you mean 'shape'"),
        ("weights", "abc", "got str"),
        ("weights", 5, "got int"),
        ("weights", ["a"], r"\[0\] is 'a'"),
    ],
)
def test_a_bad_input_is_named_by_its_key(key, value, message):
    with pytest.raises(InvalidInputError, match=message) as caught:
        t.Datum(PROMPT, {key: value})
    assert f"loss_fn_inputs[{key!r}]" in str(caught.value)


def test_provenance_comes_in_pairs():
    spans = [t.PromptProvenanceSpan(sequence_id="q", length=2)]
    assert t.Datum(PROMPT).with_provenance(spans, spans).model_input_spans == spans
    with pytest.raises(InvalidInputError, match="both"):
        t.Datum(PROMPT, {}, model_input_spans=spans)
    with pytest.raises(InvalidInputError, match="length must be a whole number from 0 on, got -1"):
        t.SampledProvenanceSpan(sequence_id="q", length=-1)
    with pytest.raises(InvalidInputError, match="needs 'length'"):
        t.SampledProvenanceSpan(sequence_id="q")
    for wrong in ("q", 5, {"sequence_id": "q"}):
        with pytest.raises(InvalidInputError, match="model_input_spans must be a list of spans, got"):
            t.Datum(PROMPT).with_provenance(wrong, spans)
    with pytest.raises(
        InvalidInputError, match=r"loss_fn_input_spans\[1\] must be a PromptProv.*, got \(0, 2\)"
    ):
        t.Datum(PROMPT).with_provenance(spans, [spans[0], (0, 2)])


# -- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: t.SamplingParams(max_tokens=0), "max_tokens must be at least 1, got 0"),
        (lambda: t.SamplingParams(temperature=-1), r"temperature must be in \[0, inf\), got -1"),
        (lambda: t.SamplingParams(temperature=float("nan")), "temperature must be a number, got nan"),
        (lambda: t.SamplingParams(top_p=1.5), r"top_p must be in \[0, 1\], got 1\.5"),
        (lambda: t.SamplingParams(top_k=-2), "top_k must be at least -1"),
        (lambda: t.SamplingParams(stop=["a", 1.5]), "strings or token ids"),
        (lambda: t.SamplingParams(stop=[""]), "empty string"),
        (lambda: t.AdamParams(learning_rate=-1e-4), r"learning_rate must be in \[0, inf\)"),
        (lambda: t.AdamParams(beta2=1.0), r"beta2 must be in \[0, 1\)"),
        (lambda: t.LoraConfig(rank=0), "rank must be positive, got 0"),
        (
            lambda: t.LoraConfig(rank=8, train_mlp=False, train_attn=False, train_unembed=False),
            "At least one",
        ),
    ],
)
def test_settings_out_of_range(build, message):
    with pytest.raises(InvalidInputError, match=message):
        build()


@pytest.mark.parametrize("stop", [None, "x", ["x", "y"], [1, 2], [], np.array([1, 2]), (1, 2)])
def test_stops_of_every_kind(stop):
    expected = stop if stop is None or isinstance(stop, str) else list(stop)
    assert t.SamplingParams(stop=stop).stop == expected


# -- results ---------------------------------------------------------------------------------------------


def test_lists_beside_arrays():
    topk = t.TopkLogprobs(
        np.array([[0, 0], [5, 0], [7, 8]], np.int32),
        np.array([[-99999, -99999], [-0.5, -99999], [-1, -2]], np.float32),
    )
    sequence = t.SampledSequence(
        "stop", "q", np.array([5, 6], np.int32), np.array([-1, -2], np.float32), topk
    )
    assert sequence.tokens == [5, 6]
    assert sequence.logprobs == [-1.0, -2.0]
    assert sequence.topk_logprobs == [None, [(5, -0.5)], [(7, -1.0), (8, -2.0)]]
    response = t.SampleResponse([sequence], np.array([np.nan, -1], np.float32), topk)
    assert response.prompt_logprobs == [None, -1.0]
    assert response.topk_prompt_logprobs == sequence.topk_logprobs
    assert t.SampleResponse([]).prompt_logprobs is None


@pytest.mark.parametrize("wrong", ["abc", None, 5, {"input_ids": [1]}, (x for x in (1, -3))])
def test_what_is_no_list_of_token_ids_is_refused(wrong):
    with pytest.raises(InvalidInputError):
        t.ModelInput.from_ints(wrong)


def test_token_ids_may_come_from_an_iterator():
    assert t.ModelInput.from_ints(x for x in (1, 3)).to_ints() == [1, 3]


def test_numpy_numbers_are_numbers():
    params = t.SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int32(1))
    assert (type(params.max_tokens), type(params.temperature), type(params.seed)) == (int, float, int)
    assert type(t.AdamParams(learning_rate=np.float64(1e-3)).learning_rate) is float
    assert t.LoraConfig(rank=np.int64(8)).rank == 8
    assert type(t.SampleRequest(t.ModelInput.from_ints([1]), num_samples=np.int64(2)).num_samples) is int


@pytest.mark.parametrize(
    "build",
    [
        lambda: t.Datum(t.ModelInput.from_ints([1]), None),
        lambda: t.Datum(t.ModelInput.from_ints([1]), [1]),
        lambda: t.Datum(t.ModelInput.from_ints([1]), {5: np.ones(1)}),
        lambda: t.ModelInput(None),
        lambda: t.LoraConfig(rank="32"),
        lambda: t.LoraConfig(rank=8, train_mlp="no"),
        lambda: t.SamplingParams(seed=2**70),
        lambda: t.SampleRequest(t.ModelInput.from_ints([1]), target_prompt_logprobs=[1, 2]),
    ],
)
def test_the_wrong_thing_is_refused_when_it_is_built(build):
    with pytest.raises(InvalidInputError):
        build()


# -- at a prompt, and in a notebook ----------------------------------------------------------------------


def test_what_a_prompt_shows_is_short_whatever_its_size() -> None:
    many = np.arange(2000, dtype=np.int32)
    sequence = t.SampledSequence("stop", "", many, many.astype(np.float32))
    record = {"logprobs": t.TensorData(many.astype(np.float32), "float32", shape=[2000])}
    for value in (
        t.ModelInput.from_ints(many),
        t.Datum(t.ModelInput.from_ints(many), {"target_tokens": many}),
        sequence,
        t.SampleResponse([sequence] * 64, prompt_logprobs_np=many.astype(np.float32)),
        t.ForwardBackwardOutput("x", [record] * 256, {"loss:sum": 1.5}),
    ):
        assert len(repr(value)) < 800


def test_what_a_prompt_shows_is_what_one_wants_to_know() -> None:
    few = t.SampledSequence("length", "", np.array([3, 4], np.int32))
    assert repr(t.SampleResponse([few])) == "SampleResponse([SampledSequence('length', tokens=[3, 4])])"
    scored = t.SampleResponse([few] * 5, prompt_logprobs_np=np.zeros(3, np.float32))
    assert repr(scored).endswith(", … 5 in all], prompt_logprobs=…)")
    output = t.ForwardBackwardOutput("x", [{}], {"loss:sum": 1.5})
    assert repr(output) == "ForwardBackwardOutput(1 datum, metrics={'loss:sum': 1.5})"
    assert repr(t.ModelInput.from_ints([1, 2])) == "ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2])])"
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, … 20 in all]" in repr(
        t.ModelInput.from_ints(list(range(20)))
    )
