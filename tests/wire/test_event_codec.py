"""Events of a sample, written and read back; and whatever else is sent in their place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import InvalidInputError, RequestErrorCategory
from tinkex.types.futures import PendingFuture, RequestFailedResponse
from tinkex.types.outputs import NewTokens, SampledSequence, SampleResponse
from tinkex.wire.event_codec import read_event, write_event


def there_and_back(event: Any) -> Any:
    name, fields = write_event(event)
    return read_event(name, orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY).decode())


floats = st.floats(-(2.0**100), 0, width=32)
drawn = st.lists(st.tuples(st.integers(0, 2**31 - 1), floats), min_size=1, max_size=20)


@given(st.integers(0, 100), drawn)
def test_tokens_and_logprobs_come_back_bit_for_bit(sequence: int, pairs: list[tuple[int, float]]) -> None:
    tokens, logprobs = (np.array(column) for column in zip(*pairs, strict=True))
    new = there_and_back(NewTokens(sequence, tokens.astype(np.int32), logprobs.astype(np.float32)))
    assert new.sequence == sequence
    assert new.tokens_np.tolist() == tokens.tolist()
    assert new.logprobs_np.dtype == np.float32
    assert new.logprobs_np.tobytes() == logprobs.astype(np.float32).tobytes()


@given(st.lists(drawn, min_size=1, max_size=4))
def test_the_response_comes_back_with_its_ids(sequences: list[list[tuple[int, float]]]) -> None:
    response = SampleResponse(
        [
            SampledSequence(
                "length", f"id-{n}", np.array([t for t, _ in pairs], np.int32),
                np.array([p for _, p in pairs], np.float32),
            )
            for n, pairs in enumerate(sequences)
        ],
        prompt_logprobs_np=np.array([np.nan, -0.5], np.float32),
        prompt_cache_hit_tokens=3,
    )  # fmt: skip
    back = there_and_back(response)
    assert [(s.sequence_id, s.tokens, s.logprobs) for s in back.sequences] == [
        (s.sequence_id, s.tokens, s.logprobs) for s in response.sequences
    ]
    assert (back.prompt_logprobs, back.prompt_cache_hit_tokens) == ([None, -0.5], 3)


def test_failures_and_queue_states() -> None:
    failed = RequestFailedResponse(error="because", category=RequestErrorCategory.User)
    assert there_and_back(failed) == failed
    assert there_and_back(PendingFuture("id", "paused_capacity", "full")) == PendingFuture(
        "", "paused_capacity", "full"
    )
    assert there_and_back(PendingFuture()) == PendingFuture()


def test_events_of_other_names_are_for_others() -> None:
    assert read_event("message", "anything at all") is None
    assert read_event("", "") is None


@given(
    st.sampled_from(["tokens", "queue", "done", "error"]),
    st.text(max_size=30)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["sequence", "tokens", "logprobs", "sequences", "error", "category", "stop_reason",
                     "sample_sequence_ids", "queue_state"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=10,
    ).map(json.dumps),
)  # fmt: skip
def test_whatever_comes_is_an_event_or_a_refusal(name: str, data: str) -> None:
    try:
        read_event(name, data)
    except InvalidInputError:
        pass


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokens", "[]"),
        ("tokens", "{}"),
        ("done", "{}"),
        ("done", "nonsense"),
        ("error", "{}"),
        ("queue", "3"),
    ],
)
def test_what_is_not_what_it_says_is_refused(name: str, data: str) -> None:
    with pytest.raises(InvalidInputError):
        read_event(name, data)
