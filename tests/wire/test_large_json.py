"""JSON in pieces: what any parser reads of it, with no piece that holds the interpreter for long."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.errors import InvalidInputError
from tinkex.wire import codec, large_json, ops

pytestmark = pytest.mark.slow

MIB = 1 << 20
TEXT = st.text(st.sampled_from('a"\\[]{},: 1\n'), max_size=8)
NUMBER = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(
    NUMBER | TEXT | st.none() | st.booleans() | st.lists(st.integers(0, 9), min_size=30, max_size=60),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "PIECE_BYTES", 40)
    monkeypatch.setattr(large_json, "LONG", 8)


@pytest.mark.slow
def test_it_reads_what_any_parser_reads(small_pieces: None):
    @settings(max_examples=300, deadline=None)
    @given(VALUE, st.sampled_from([None, 1]))
    def check(value: Any, indent: int | None) -> None:
        for body in (
            json.dumps(value, indent=indent).encode(),
            json.dumps(value, ensure_ascii=False).encode(),
        ):
            assert large_json.loads(body) == orjson.loads(body)

    check()


def test_it_refuses_what_any_parser_refuses(small_pieces: None):
    good = json.dumps({"a": [1, 22, 333, 4444, 55555], "b": [{"c": "[1,2,3,4,5,6,7]"}]})

    @settings(max_examples=500, deadline=None)
    @given(st.integers(0, len(good)), st.integers(0, 3), st.text('",[]{}1 \\-.e', max_size=2))
    def check(at: int, cut: int, put: str) -> None:
        body = (good[:at] + put + good[at + cut :]).encode()
        try:
            whole = orjson.loads(body)
        except ValueError:
            with pytest.raises(ValueError):
                large_json.loads(body)
        else:
            assert large_json.loads(memoryview(body)) == whole

    check()


def test_only_long_arrays_of_numbers_are_arrays():
    many = list(range(100_000))
    body = json.dumps({"many": many, "floats": [*many, 0.5], "few": many[:4096], "text": "x" * 500_000})
    found = large_json.loads(body.encode(), arrays=True)
    assert (found["many"].dtype, found["floats"].dtype) == (np.int64, np.float64)
    assert (found["many"].tolist(), found["few"]) == (many, many[:4096])
    assert large_json.loads(body.encode()) == json.loads(body)
    with pytest.raises(InvalidInputError, match="must have numbers alone"):
        large_json.loads(json.dumps([*many, None]).encode(), arrays=True)


def test_a_pass_of_an_old_client_is_read():
    """1,024 datums, and 5 MB of numbers by its estimate."""
    ids = list(range(100_000, 100_300))
    tensors = {"target_tokens": {"data": ids, "dtype": "int64"}, "weights": {"data": [0.125] * 300}}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": ids}]}, "loss_fn_inputs": tensors}
    long = json.loads(json.dumps(datum).replace(json.dumps(ids), json.dumps(ids * 100)))
    long["loss_fn_inputs"]["weights"]["data"] *= 100
    work = {"data": [datum] * 1023 + [long], "loss_fn": "cross_entropy"}
    body = json.dumps({"forward_backward_input": work, "model_id": "r", "seq_id": 3}).encode()
    data = codec.decode_request(ops.FORWARD_BACKWARD, body=body).forward_backward_input.data
    assert len(data) == 1024
    assert data[0].model_input.to_ints() == data[1023].model_input.to_ints()[:300] == ids
    assert data[1023].loss_fn_inputs["target_tokens"].tolist() == ids * 100
    assert data[1023].loss_fn_inputs["weights"].tolist() == [0.125] * 30_000
    assert codec.peek_turn(ops.FORWARD_BACKWARD, headers={}, body=body) == ("r", 3)


def holding(work: Callable[[], None]) -> float:
    """The most CPU time that a thread took before another one had a turn, in seconds."""
    longest, worker = 0.0, threading.Thread(target=work)
    worker.start()
    assert worker.ident is not None
    clock, last = time.pthread_getcpuclockid(worker.ident), 0.0
    while worker.is_alive():
        with contextlib.suppress(OSError):  # it has ended
            longest, last = max(longest, (now := time.clock_gettime(clock)) - last), now
        time.sleep(0.0002)
    return longest


WORST = {
    "digits": b"1," * (16 * MIB - 20) + b"1",
    "floats": b"0.123456789," * (32 * MIB // 12 - 4) + b"1",
    "objects": b"{}," * (32 * MIB // 3 - 20) + b"{}",
    "arrays": b"[1],[]," * (32 * MIB // 7 - 20) + b"[]",
    "strings": b'"",' * (32 * MIB // 3 - 20) + b'""',
    "nulls": b"null," * (32 * MIB // 5 - 20) + b"null",
    "short arrays": b"[1,2,3,4,5,6,7,8],[" * (32 * MIB // 19 - 20) + b"]",
    "quotes": b'"' + b'\\"' * (16 * MIB - 40) + b'"',
    "spaces": b" " * (32 * MIB - 60),
    "mostly digits": b"1," * (15 * MIB) + b'"a"',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORST)
def test_the_worst_bodies_do_not_hold_the_interpreter(kind: str):
    body = b'{"model_id":"r","seq_id":1,"forward_backward_input":{"loss_fn":"ppo","data":[%b]}}' % WORST[kind]
    field = b'{"prompt":{"chunks":[{"tokens":[%b]}]},"sampling_session_id":"s"}' % WORST[kind]

    def decode() -> None:
        for op, content in ((ops.FORWARD_BACKWARD, body), (ops.SAMPLE, field)):
            try:
                codec.decode_request(op, body=memoryview(content))  # type: ignore[arg-type]
            except InvalidInputError:
                codec.peek_turn(op, headers={}, body=content)

    took = min(holding(decode) for _ in range(3))
    assert took < 0.02, f"{took * 1000:.0f} ms"
