"""The official SDK samples with every option; the numbers are transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compat import reference
from tests.compat.clients.report import MODEL, PROMPT
from tests.compat.conftest import EOS, Served

close = pytest.approx
KNOWN = 259  # ids that the tokenizer knows; the rest of the vocabulary is padding


@pytest.fixture(scope="module")
def facts(served: Served) -> dict[str, dict[str, Any]]:
    return served.run("tinker-0.36.0", "sampling.py")


def _right(served: Served, sequence: dict[str, Any], temperature: float = 1.0) -> tuple[list[float], Any]:
    """The logprobs that a sequence should have, and its distributions."""
    ids = PROMPT + sequence["tokens"]
    (table,) = reference.base_logprobs(served.model, [ids], temperature)
    return reference.scores(table, ids)[len(PROMPT) - 1 :], table[len(PROMPT) - 1 : -1]


def _tokens(sequences: list[dict[str, Any]]) -> list[list[int]]:
    return [sequence["tokens"] for sequence in sequences]


def test_seeds_and_logprobs(served: Served, facts: dict[str, dict[str, Any]]) -> None:
    assert facts["base"]["model"] == MODEL
    seeded = facts["seeded"]
    assert seeded["first"] == seeded["again"]
    drawn = _tokens(seeded["first"]) + _tokens(seeded["other"])
    assert len({tuple(tokens) for tokens in drawn}) == 8
    assert facts["unseeded"]["first"] != facts["unseeded"]["again"]
    assert max(max(tokens) for tokens in drawn) < KNOWN
    for sequence in seeded["first"]:
        assert sequence["logprobs"] == close(_right(served, sequence)[0], abs=1e-4)
        assert (len(sequence["tokens"]), sequence["stop"]) == (24, "length")
    for sequence in facts["warm"]["sequences"]:
        assert sequence["logprobs"] == close(_right(served, sequence, 0.7)[0], abs=1e-4)
    (last,) = facts["to the end"]["sequences"]
    assert (len(last["tokens"]), last["stop"]) == (6, "length")  # a context of 256, a prompt of 250


def test_greedy_top_k_and_top_p(served: Served, facts: dict[str, dict[str, Any]]) -> None:
    (greedy,) = facts["greedy"]["sequences"]
    right, table = _right(served, greedy)
    assert greedy["tokens"] == table[:, :KNOWN].argmax(-1).tolist()
    assert greedy["logprobs"] == close(right, abs=1e-4)
    best = torch.topk(table[:, :KNOWN], 4)
    for row, values, ids in zip(greedy["top"], best.values.tolist(), best.indices.tolist(), strict=True):
        assert [token for token, _ in row] == ids
        assert [logprob for _, logprob in row] == close(values, abs=1e-4)
    for name in ("top_k 1", "top_p 0"):
        assert _tokens(facts[name]["sequences"]) == [greedy["tokens"]]
    for sequence in facts["top_k 5"]["sequences"]:
        for token, row in zip(sequence["tokens"], sequence["top"], strict=True):
            assert token in [candidate for candidate, _ in row]
        assert sequence["logprobs"] == close(_right(served, sequence)[0], abs=1e-4)


def test_stops(facts: dict[str, dict[str, Any]]) -> None:
    free = facts["never stopped"]["sequences"]
    assert all((len(s["tokens"]), s["stop"]) == (200, "length") for s in free)
    stopped = 0
    for sequence, whole in zip(facts["stopped at eos"]["sequences"], _tokens(free), strict=True):
        end = whole.index(EOS) + 1 if EOS in whole else 200
        assert sequence["tokens"] == whole[:end]
        assert sequence["stop"] == ("stop" if EOS in whole else "length")
        stopped += EOS in whole
    assert 0 < stopped < 6  # this seed shows both

    whole = free[0]["tokens"]
    (at_id,) = facts["stopped at an id"]["sequences"]
    assert at_id["tokens"] == whole[: whole.index(facts["stopped at an id"]["stop"]) + 1]
    assert at_id["stop"] == "stop"
    (at_text,) = facts["stopped at a string"]["sequences"]
    assert at_text["tokens"] == whole[: facts["stopped at a string"]["end"] + 1]
    assert (at_text["stop"], len(at_text["logprobs"])) == ("stop", len(at_text["tokens"]))
    assert facts["stopped at one of several"]["sequences"] == [at_text]


def test_scoring_the_prompt(served: Served, facts: dict[str, dict[str, Any]]) -> None:
    (table,) = reference.base_logprobs(served.model, [PROMPT])
    right = reference.scores(table, PROMPT)
    prompt = facts["prompt"]
    for logprobs in (prompt["logprobs"], facts["scored"]["logprobs"]):
        assert logprobs[0] is None
        assert logprobs[1:] == close(right, abs=1e-4)
    last = facts["scored at the end"]["logprobs"]
    assert last[:5] == [None] * 5
    assert last[5:] == close(right[-3:], abs=1e-4)

    assert prompt["top"][0] is None
    best = torch.topk(table[:-1, :KNOWN], 3)
    for row, values, ids in zip(prompt["top"][1:], best.values.tolist(), best.indices.tolist(), strict=True):
        assert [token for token, _ in row] == ids
        assert [logprob for _, logprob in row] == close(values, abs=1e-4)

    assert prompt["alt_shape"] == [len(PROMPT) - 1, 2]
    drawn = torch.tensor(prompt["alt_tokens"]).reshape(-1, 2)
    expected = table[:-1].gather(1, drawn).flatten().tolist()
    assert torch.tensor(prompt["alt_logprobs"]).flatten().tolist() == close(expected, abs=1e-4)


def test_scoring_given_targets(served: Served, facts: dict[str, dict[str, Any]]) -> None:
    (table,) = reference.base_logprobs(served.model, [PROMPT])
    targets = torch.tensor([[7, 8], [9, -1], [-1, -1], [1, 2], [3, 4], [-1, 5], [6, -1]])
    expected = torch.where(targets < 0, 0.0, table[:-1].gather(1, targets.clamp(min=0)))
    for name, width, csr in (("dense", 2, False), ("sparse", 16, True)):
        given = facts[f"targets {name}"]
        assert (given["shape"], given["csr"]) == ([7, width], csr)
        values = torch.tensor(given["values"])
        assert torch.allclose(values[:, :2], expected, atol=1e-4)
        assert not values[:, 2:].any()


def test_cancelled_samples_end_on_the_server(facts: dict[str, dict[str, Any]]) -> None:
    cancelled = facts["cancelled"]
    assert sum(cancelled["cancelled"]) >= 8
    assert len(cancelled["after"][0]["tokens"]) == 2
    assert cancelled["told"] >= 8
