"""Programs for OpenAI's and Anthropic's APIs, unmodified, against one `tinkex serve` with a random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from tests.compat.clients.report import MODEL
from tests.compat.conftest import EOS, Served, serving
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.server.api_fields import CHAT, COMPLETIONS, COUNT, MESSAGES, RESPONSES

CITIES, DAYS = ("Bern", "Rome"), (1, 2)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model reads long prompts: a token is a byte, and a tool takes hundreds."""
    models = tmp_path_factory.mktemp("models")
    (models / MODEL).parent.mkdir()
    shape = {"eos_token_id": EOS, "max_position_embeddings": 16_384, "vocab_size": 259}
    model = tiny_tokenizer(tiny_model(models, "qwen3", **shape).rename(models / MODEL))
    with serving({MODEL: model}, tmp_path_factory.mktemp("home")) as (url, said):
        yield Served(url, model, said)


def facts_of(served: Served, environment: str, program: str) -> dict[str, Any]:
    return served.run(environment, "programs.py", program, key="EMPTY")[program]


def is_weather(given: Any) -> bool:
    return given["city"] in CITIES and given.get("days", 1) in DAYS


# With the newest client, and with one of the year before.
@pytest.mark.parametrize("environment", ["inspect", "agents"])
def test_openai(roomy: Served, environment: str) -> None:
    facts = facts_of(roomy, environment, "openai")
    for name, arguments, reason in (facts["call"], facts["streamed"]):
        assert (name, reason) == ("weather", "tool_calls")
        assert is_weather(arguments)
    assert facts["call"] == facts["streamed"]
    assert is_weather(facts["parsed"])
    assert all(map(is_weather, facts["responses"]))
    assert facts["texts"][0] == facts["texts"][1]


@pytest.mark.parametrize("environment", ["inspect", "agents"])
def test_fields(roomy: Served, environment: str) -> None:
    """It is known what is done with every field that the SDKs can send: tests/server/test_api_fields.py."""
    names = facts_of(roomy, environment, "fields")["names"]
    tables = {
        "/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS, "/v1/responses": RESPONSES,
        "/v1/messages": MESSAGES, "/v1/messages/count_tokens": COUNT,
    }  # fmt: skip
    assert {path: sorted(set(given) - set(tables[path])) for path, given in names.items()} == {
        path: [] for path in tables
    }


def test_anthropic(roomy: Served) -> None:
    facts = facts_of(roomy, "inspect", "anthropic")
    assert facts["texts"][0] == facts["texts"][1]
    assert facts["stops"][2:] == ["tool_use", "tool_use"]
    assert facts["stops"][0] == facts["stops"][1]
    assert all(map(is_weather, facts["inputs"]))
    assert facts["counts"][0] == facts["counts"][1]
    assert (facts["later"] > 0, facts["error"]) == (True, "not_found_error")


def test_litellm(roomy: Served) -> None:
    facts = facts_of(roomy, "agents", "litellm")
    assert is_weather(facts["arguments"])
    assert len(set(facts["texts"])) == 1  # streamed, whole, and in Anthropic's format


def test_langchain(roomy: Served) -> None:
    facts = facts_of(roomy, "agents", "langchain")
    assert facts["result"] in [f"rain in {city}" for city in CITIES]
    assert is_weather(facts["structured"])
    assert facts["texts"][0] == facts["texts"][1]
    assert facts["used"] > 0


def test_instructor(roomy: Served) -> None:
    assert all(map(is_weather, facts_of(roomy, "agents", "instructor")["answers"]))


def test_inspect(roomy: Served) -> None:
    facts = facts_of(roomy, "inspect", "inspect")
    for name in ("completions", "responses"):
        status, roles, error = facts[name]
        assert (status, error) == ("success", "")
        assert roles[:3] == ["user", "assistant", "tool"]


def test_openai_agents(roomy: Served) -> None:
    facts = facts_of(roomy, "agents", "agents")
    assert facts["calls"]
    assert set(facts["calls"]) <= set(CITIES)
    assert facts["kinds"][:2] == ["tool_call_item", "tool_call_output_item"]
    assert facts["events"] > 5


def test_pydantic_ai(roomy: Served) -> None:
    assert all(map(is_weather, facts_of(roomy, "agents", "pydantic_ai")["answers"]))


def test_smolagents(roomy: Served) -> None:
    facts = facts_of(roomy, "agents", "smolagents")
    assert (facts["name"], facts["arguments"]["city"] in CITIES) == ("weather", True)


def test_lm_eval(roomy: Served, tmp_path: Path) -> None:
    """Scores of answers through /v1/completions are those of transformers in the same process."""
    facts = roomy.run("lm-eval", "harness_calls.py", str(tmp_path), str(roomy.model), key="EMPTY")["lm-eval"]
    theirs = np.array(facts["theirs"], float)
    assert theirs.shape == (3, 3, 2)
    np.testing.assert_allclose(np.array(facts["ours"], float), theirs, atol=2e-3)
    np.testing.assert_allclose(np.array(facts["tokens"], float), theirs, atol=2e-3)
    assert len(facts["spoken"]) == 3


def test_verifiers(roomy: Served) -> None:
    """Its training client rolls out, our client trains on those tokens and logprobs, and the reward rises."""
    with tinkex.ServiceClient(base_url=roomy.url, api_key="tml-verifiers") as service:
        run = service.create_lora_training_client(MODEL, rank=8)
        model, rewards = MODEL, []
        for step in range(4):
            facts = roomy.run(
                "verifiers", "verifiers_rollouts.py", model, str(roomy.model), "48", key="tml-verifiers"
            )
            rollouts = list(facts.values())
            gains = np.array([np.mean(np.array(one["tokens"]) < 128) for one in rollouts])
            rewards.append(gains.mean())
            data = [_datum(one, gain) for one, gain in zip(rollouts, gains - gains.mean(), strict=True)]
            passed = run.forward_backward(data, "importance_sampling").result()
            for one, out in zip(rollouts, passed.loss_fn_outputs, strict=True):
                scored = out["logprobs"].to_numpy()[-len(one["tokens"]) :]
                np.testing.assert_allclose(scored, one["logprobs"], atol=1e-3)  # on policy
            run.optim_step(tinkex.AdamParams(learning_rate=2e-2)).result()
            model = run.save_weights_for_sampler(f"step-{step}").result().path
    assert rewards[-1] > rewards[0] + 0.1, rewards


def _datum(rollout: dict[str, Any], advantage: float) -> tinkex.Datum:
    prompt, tokens = rollout["prompt"], rollout["tokens"]
    padding = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": prompt[1:] + tokens,
        "logprobs": padding + rollout["logprobs"],
        "advantages": padding + [advantage] * len(tokens),
    }
    given = tinkex.ModelInput.from_ints(prompt + tokens[:-1])
    return tinkex.Datum(given, {name: np.array(value) for name, value in inputs.items()})
