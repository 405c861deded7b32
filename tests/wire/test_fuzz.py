"""Nonsense of any kind is refused as InvalidInputError, and as nothing else."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import values
from tests.golden.recorded import VERSIONS, recorded, stored_replies
from tinkex.errors import InvalidInputError
from tinkex.wire import codec, ops

pytestmark = pytest.mark.slow

fuzz = settings(deadline=None, max_examples=150)
every_op = st.sampled_from(list(ops.OPS.values()))
content_types = st.sampled_from(["", codec.JSON, codec.PROTO])
RECORDED = [r for version in VERSIONS for r in recorded(version)]
PASSES = [r for r in RECORDED if r.headers.get("content-type") == codec.PROTO]
JSONS = [r for r in RECORDED if r.body.startswith(b"{")]

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def check_request(op, body, path_params=None, query=None, **headers):
    """Decodes, or refuses in the one permitted way."""
    headers = {k.replace("_", "-"): v for k, v in headers.items()}
    try:
        return codec.decode_request(op, path_params=path_params, query=query, headers=headers, body=body)
    except InvalidInputError:
        return None


@given(every_op, st.binary(max_size=200), content_types, st.sampled_from(["", "zstd", "gzip"]))
@fuzz
def test_random_bytes(op, body, kind, encoding):
    check_request(op, body, content_type=kind, content_encoding=encoding)


@given(every_op, st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
@fuzz
def test_random_queries(op, query):
    check_request(op, b"", query=query, path_params=query)


@st.composite
def broken(draw, bodies):
    """A recorded body with some bytes changed, dropped or doubled."""
    row = draw(st.sampled_from(bodies))
    body = bytearray(row.body)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(body) - 1, 0)))
        match draw(st.sampled_from(["change", "drop", "double", "cut"])):
            case "change" if body:
                body[at] = draw(st.integers(0, 255))
            case "drop":
                del body[at : at + draw(st.integers(1, 9))]
            case "double":
                body[at:at] = body[at : at + 9]
            case "cut":
                del body[at:]
    return row, bytes(body)


@given(broken(PASSES))
@settings(deadline=None, max_examples=600)
def test_broken_passes(case):
    row, body = case
    check_request(row.op, body, **{k.replace("-", "_"): v for k, v in row.headers.items()})


@st.composite
def twisted(draw):
    """A recorded JSON body with something else in one place."""
    row = draw(st.sampled_from(JSONS))
    value = json.loads(row.body)
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return row, value
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and draw(st.booleans()):
            place = place[key]
            continue
        place[key] = draw(anything)
        return row, value


@given(twisted())
@settings(deadline=None, max_examples=600)
def test_twisted_json(case):
    row, value = case
    check_request(row.op, json.dumps(value).encode(), row.path_params, row.query, content_type=codec.JSON)


@given(anything, every_op)
@fuzz
def test_any_json(value, op):
    check_request(op, orjson.dumps(value) if not has_big(value) else json.dumps(value).encode())


def has_big(value):
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False


RESULT_OPS = [op for op in ops.OPS.values() if op.has_future]


def check_result(op, body, kind):
    try:
        codec.decode_result(op, 200, {"content-type": kind}, body)
    except InvalidInputError:
        return


@given(st.sampled_from(RESULT_OPS), st.binary(max_size=200), content_types)
@fuzz
def test_random_results(op, body, kind):
    check_result(op, body, kind)


class Row:
    def __init__(self, row):
        self.body, self.kind = row["body"], row["content_type"]
        self.op = ops.SAMPLE if row["type"] == "SampleResponse" else ops.FORWARD_BACKWARD


ROWS = [Row(row) for row in stored_replies() if row["name"] in {**values.OUTPUTS, **values.SAMPLES}]


@given(broken(ROWS))
@settings(deadline=None, max_examples=600)
def test_broken_results(case):
    row, body = case
    check_result(row.op, body, row.kind)


@given(every_op, st.binary(max_size=100))
@fuzz
def test_random_replies(op, body):
    if op is ops.RETRIEVE_FUTURE:
        return  # read by decode_result
    try:
        codec.decode_reply(op, 200, {}, body)
    except InvalidInputError:
        return


@given(st.integers(0, 999), st.binary(max_size=100) | anything.map(lambda v: json.dumps(v).encode()))
@fuzz
def test_an_error_always_has_words(status, body):
    text, _ = codec.decode_error(status, {}, body)
    assert text
    assert len(text) <= codec.MAX_ERROR_TEXT + 1


@pytest.mark.parametrize("depth", [500, 5000])
def test_deep_nesting_is_no_way_to_crash(depth):
    deep = b"[" * depth + b"]" * depth
    node = b'{"op":"output","name":"n","target":"t","args":' + deep + b"}"
    head = b'{"session_id":"s","custom_loss_seq_id":0,"name":"n","inputs":[],'
    check_request(ops.CREATE_CUSTOM_LOSS, head + b'"graph":{"nodes":[' + node + b"]}}")
    check_request(ops.CREATE_SESSION, b'{"user_metadata":{"a":' + deep + b"}}")
