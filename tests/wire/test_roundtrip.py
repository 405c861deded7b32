"""Whatever is written is read back as it was: every request and result, in every form that it can take."""

import math
from urllib.parse import parse_qsl

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.golden.recorded import route, view
from tinkex import types as t
from tinkex.types.base import WireModel
from tinkex.wire import codec, ops
from tinkex.wire import tinkex_pb2 as pb

pytestmark = pytest.mark.slow

many = settings(deadline=None, max_examples=60)
few = settings(deadline=None, max_examples=10)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
name = st.text("abcxyz_.-:", min_size=1, max_size=8)
number = st.floats(width=32, allow_nan=False, allow_infinity=False)
count = st.integers(0, 2**31 - 1)


@st.composite
def tensors(draw, finite=True):
    kind = draw(st.sampled_from(["float32", "int64"]))
    shape = draw(npst.array_shapes(max_dims=3, min_side=0, max_side=4))
    ints = st.integers(-(2**63), 2**63 - 1)
    elements = (
        ints if kind == "int64" else st.floats(width=32, allow_nan=not finite, allow_infinity=not finite)
    )
    tensor = t.TensorData.from_numpy(draw(npst.arrays(kind, shape, elements=elements)))
    return tensor.compressed() if draw(st.booleans()) else tensor


tokens = st.lists(count, max_size=6).map(t.EncodedTextChunk)
positions = st.none() | st.integers(1, 2**31 - 1)
images = st.builds(
    t.ImageChunk, st.binary(min_size=1, max_size=9), st.sampled_from(["png", "jpeg"]), positions
)
dmels = st.builds(t.DmelChunk, st.binary(max_size=9))
pointers = st.builds(t.ImageAssetPointerChunk, st.sampled_from(["png", "jpeg"]), text.filter(bool), positions)
spans = st.lists(
    st.builds(t.PromptProvenanceSpan, text, count, length=count)
    | st.builds(t.SampledProvenanceSpan, text, count, length=count),
    min_size=1,
    max_size=3,
)


@st.composite
def datums(draw):
    prompt = t.ModelInput(draw(st.lists(tokens | images | dmels, max_size=3)))
    datum = t.Datum(prompt, draw(st.dictionaries(name, tensors(), max_size=3)))
    return datum.with_provenance(draw(spans), draw(spans)) if draw(st.booleans()) else datum


passes = st.builds(
    t.ForwardBackwardRequest,
    st.builds(
        t.ForwardBackwardInput,
        st.lists(datums(), max_size=3),
        name,
        st.none() | st.dictionaries(name, number | text, min_size=1, max_size=3),
    ),
    name,
    count,
    st.booleans(),
)
params = st.builds(
    t.SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.none() | text.filter(bool) | st.lists(text.filter(bool)) | st.lists(count),
    temperature=st.floats(0, 10),
    top_k=st.integers(-1, 100),
    top_p=st.floats(0, 1),
)
samples = st.builds(
    t.SampleRequest,
    prompt=st.lists(tokens | images | dmels | pointers, max_size=3).map(t.ModelInput),
    sampling_params=params,
    num_samples=st.integers(1, 64),
    sampling_session_id=st.none() | name,
    seq_id=st.none() | st.integers(0, 2**63 - 1),
    base_model=st.none() | text,
    model_path=st.none() | text,
    prompt_logprobs=st.booleans(),
    topk_prompt_logprobs=st.integers(0, 9),
    topk_sample_logprobs=st.integers(0, 9),
    target_prompt_logprobs=st.none() | tensors(),
    prompt_alt_tokens_k=st.integers(0, 9),
    prompt_logprobs_last_n=st.none() | st.integers(1, 99),
    record_stability_info=st.booleans(),
)


def there_and_back(op, request, **options):
    """As a client encodes it and a server, having routed it, decodes it."""
    sent = codec.encode_request(op, request, **options)
    routed, path_params = route(op.method, sent.path)
    query = dict(parse_qsl(sent.query, keep_blank_values=True))
    return codec.decode_request(
        routed, path_params=path_params, query=query, headers=sent.headers, body=sent.body or b""
    )


@given(passes, st.booleans())
@many
def test_passes_as_protobuf(request, compress):
    assert there_and_back(ops.FORWARD_BACKWARD, request, compress=compress) == request


@given(passes)
@many
def test_passes_as_json(request):
    assert there_and_back(ops.FORWARD_BACKWARD, request, proto=False) == request


@given(passes)
@many
def test_passes_are_what_the_generated_classes_read(request):
    """The hand-written writer leaves out what proto3 leaves out, so both write the same size."""
    body = codec.encode_request(ops.FORWARD_BACKWARD, request).body
    message = pb.ForwardBackwardRequest.FromString(body)
    assert message.ByteSize() == len(body)
    assert len(message.data) == len(request.forward_backward_input.data)


@given(st.builds(t.FutureRetrieveRequest, request_id=text, allow_metadata_only=st.booleans()))
@many
def test_retrievals(request):
    assert there_and_back(ops.RETRIEVE_FUTURE, request) == request


@given(samples)
@many
def test_sample_requests(request):
    assert there_and_back(ops.SAMPLE, request) == request


# -- the small ones --------------------------------------------------------------------------------------


def models():
    """One strategy for each op's request, from its own fields."""
    small = [op for op in ops.OPS.values() if issubclass(op.request, WireModel)]
    assert len(small) > 40
    return small


SPECIAL = {
    "training_run_id": name, "session_id": name, "sampler_id": name, "file": name, "upload_id": name,
    "model_name": st.builds("{}/{}".format, name, name),
    "checkpoint_id": st.builds("{}/{}".format, st.sampled_from(["weights", "sampler_weights"]), name),
}  # fmt: skip
OPTIMIZERS = st.sampled_from(
    [t.AdamOptimizerConfig(), t.DimuonOptimizerConfig(), t.OtherOptimizerConfig(type="new", x=1)]  # type: ignore[call-arg]
)
STEPS = (
    st.builds(t.AdamParams, learning_rate=st.floats(0, 1))
    | st.builds(t.DimuonParams, learning_rate=st.floats(0, 1))
    | st.just(t.OtherOptimParams(type="new", x=[1]))  # type: ignore[call-arg]
)
METADATA = st.dictionaries(text, text, max_size=2)


@st.composite
def requests(draw, op):
    cls = op.request
    fields = {k: draw(SPECIAL[k].filter(lambda s: s not in (".", ".."))) for k in op.placeholders}
    if cls is t.OptimStepRequest:
        fields["optim_params"] = draw(STEPS)
    for field, info in cls.model_fields.items():
        if field in fields or field == "type" or (not info.is_required() and draw(st.booleans())):
            continue
        kind = str(info.annotation)
        if "OptimizerConfig" in kind:
            fields[field] = draw(OPTIMIZERS)
        elif "LoraConfig" in kind:
            fields[field] = draw(st.builds(t.LoraConfig, st.integers(1, 512), st.none() | st.integers(0, 9)))
        elif "metadata" in field:
            fields[field] = draw(METADATA)
        elif field == "metrics":
            fields[field] = draw(st.dictionaries(text.filter(bool), st.floats(-1e9, 1e9), max_size=3))
        elif info.annotation is str or kind.startswith("str |"):
            fields[field] = draw(text.filter(bool))
        elif info.annotation is bytes:
            fields[field] = draw(st.binary())
        elif info.annotation is bool:
            fields[field] = draw(st.booleans())
        elif info.annotation is int or kind.startswith(("int |", "typing.Annotated[int")):
            fields[field] = draw(st.integers(1, 200))
        elif kind.startswith("list[str]"):
            fields[field] = draw(st.lists(text, max_size=3))
        elif info.is_required():
            fields[field] = draw(REQUIRED[field])
    return cls(**fields)


NODES = st.builds(
    t.CustomLossNode,
    op=st.sampled_from(["placeholder", "call_function", "output"]),
    name=name,
    target=name,
    args=st.lists(st.none() | st.booleans() | number | text | st.just({"ref": "x"}), max_size=3),
    kwargs=st.dictionaries(name, st.none() | number, max_size=2),
)
EVENTS = st.builds(
    t.GenericEvent, event_id=text, event_session_index=count, severity=st.just("INFO"),
    timestamp=st.datetimes(), event_name=text, event_data=METADATA,
)  # fmt: skip
REQUIRED = {
    "reason": st.sampled_from([t.ClientSessionFinishSuccess(), t.ClientSessionFinishErrored()]),
    "target": st.builds(t.SamplingSessionFuturesTarget, sampling_session_id=name, cloned_sampler_id=count),
    "inputs": st.lists(st.builds(t.CustomLossInput, name=name, rank=st.sampled_from([0, 1, 2])), max_size=3),
    "graph": st.builds(t.CustomLossGraph, nodes=st.lists(NODES, max_size=3)),
    "events": st.lists(EVENTS, max_size=2),
    "starting_on": st.datetimes(),
    "ending_before": st.datetimes(),
    "ttl_seconds": st.none() | count,
}


@pytest.mark.parametrize("op", models(), ids=lambda op: op.name)
@given(data=st.data())
@few
def test_small_requests(op, data):
    request = data.draw(requests(op))
    assert there_and_back(op, request) == request


@pytest.mark.parametrize("op", [op for op in models() if op.method == "POST"], ids=lambda op: op.name)
@given(data=st.data())
@few
def test_null_and_nothing_are_the_same_in_every_request(op, data):
    """Nones do not travel, but for fields where absence means something else; null is read alike."""
    request = data.draw(requests(op))
    body = request.to_wire()
    said = {field for field, value in body.items() if value is None}
    assert said == {field for field in request.sent_as_null if getattr(request, field) is None}
    known = type(request).model_fields.items()
    nulls = {field: None for field, info in known if field not in body and not info.is_required()}
    path = {field: body[field] for field in op.placeholders}
    read = codec.decode_request(op, path_params=path, body=orjson.dumps({**body, **nulls}))
    assert read == codec.decode_request(op, path_params=path, body=orjson.dumps(body)) == request


# -- results ---------------------------------------------------------------------------------------------


def floats(size, **kind):
    return npst.arrays("float32", size, elements=st.floats(width=32, allow_infinity=False, **kind))


@st.composite
def outputs(draw):
    fields = draw(st.lists(name, min_size=1, max_size=2, unique=True))
    records = []
    for _ in range(draw(st.integers(0, 4))):
        trailing = draw(st.sampled_from([(), (2,), (2, 3)]))
        rows = draw(st.integers(0, 3))
        records.append({f: t.TensorData.from_numpy(draw(floats((rows, *trailing)))) for f in fields})
    kind = draw(st.text("abc", min_size=1, max_size=5))
    metrics = st.dictionaries(name, st.floats(allow_nan=False, allow_infinity=False), max_size=3)
    return t.ForwardBackwardOutput(kind, records, draw(metrics))


@st.composite
def topks(draw, length):
    k = draw(st.integers(1, 3))
    ids = draw(npst.arrays("int32", (length, k), elements=count))
    logprobs = draw(npst.arrays("float32", (length, k), elements=st.floats(-50, 0, width=32)))
    return t.TopkLogprobs(ids, logprobs)


@st.composite
def sampled(draw):
    length = draw(st.integers(1, 5))
    return t.SampledSequence(
        draw(st.sampled_from(["stop", "length"])),
        tokens_np=draw(npst.arrays("int32", length, elements=count)),
        logprobs_np=draw(st.none() | floats(length)),
        topk_logprobs_np=draw(st.none() | topks(length)),
        stop_detail=draw(st.sampled_from([None, "eos", "stop_sequence", "max_tokens", "context"])),
        stop_match=draw(st.none() | count | st.text("aé\n", min_size=1)),
    )


responses = st.builds(
    t.SampleResponse,
    st.lists(sampled(), max_size=3),
    prompt_logprobs_np=st.none() | floats(4),
    topk_prompt_logprobs_np=st.none() | topks(4),
    target_prompt_logprobs=st.none() | tensors(),
    prompt_cache_hit_tokens=count,
    prompt_alt_tokens=st.none() | st.builds(t.PromptAltTokens, tensors(), tensors()),
)


@given(outputs() | responses, st.sampled_from([codec.PROTO, codec.JSON]))
@many
def test_results(result, accept):
    op = ops.SAMPLE if isinstance(result, t.SampleResponse) else ops.FORWARD_BACKWARD
    kind, body = codec.encode_result(result, accept)
    assert kind == accept
    read = codec.decode_result(op, 200, {"content-type": kind}, body)
    assert view(read) == view(result)
    assert ends(read) == ends(result)


def ends(result):
    """What the official views do not have."""
    return [(s.stop_detail, s.stop_match) for s in getattr(result, "sequences", ())]


@given(st.dictionaries(name, st.floats(), max_size=4))
@many
def test_metrics_that_json_cannot_say_are_left_out_of_json_alone(metrics):
    output = t.ForwardBackwardOutput("x", [], metrics)
    for accept in (codec.PROTO, codec.JSON):
        kind, body = codec.encode_result(output, accept)
        read = codec.decode_result(ops.FORWARD_BACKWARD, 200, {"content-type": kind}, body).metrics
        kept = {k: v for k, v in metrics.items() if accept == codec.PROTO or math.isfinite(v)}
        assert {k: repr(v) for k, v in read.items()} == {k: repr(v) for k, v in kept.items()}


@given(tensors(finite=False))
@many
def test_tensors_hold_any_float_as_protobuf(tensor):
    datum = t.Datum(t.ModelInput.empty(), {"x": tensor})
    request = t.ForwardBackwardRequest(t.ForwardBackwardInput([datum], "l"), "m", 1)
    (read,) = there_and_back(ops.FORWARD_BACKWARD, request).forward_backward_input.data
    assert read.loss_fn_inputs["x"].dtype == tensor.dtype
    np.testing.assert_array_equal(read.loss_fn_inputs["x"].values_np, tensor.values_np)
