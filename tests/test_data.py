"""tinkex.data: masks against transformers' own, templates that rewrite history, an order that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import tinkex
from tests.engine.tiny import tiny_tokenizer
from tinkex.data import (
    Batches,
    chat_data,
    chat_datum,
    completion_datum,
    held_out,
    learnt_tokens,
    mean_loss,
    text_datum,
    weighted_datum,
)

pytestmark = pytest.mark.slow  # transformers

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "No."},
]
# ChatML with the markers from which transformers makes its assistant mask.
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning is kept in the last turn alone, as Qwen3's and DeepSeek's templates do.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>easy</think>2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>hm</think>4"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place: Path = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return transformers.AutoTokenizer.from_pretrained(place)


def learnt(tokenizer: Any, datum: tinkex.Datum) -> str:
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    return tokenizer.decode(targets[datum.loss_fn_inputs["weights"].to_numpy() > 0])


def test_the_mask_is_that_of_transformers(tokenizer: Any) -> None:
    datum = chat_datum(tokenizer, TALK, chat_template=MARKED)
    oracle = tokenizer.apply_chat_template(
        TALK, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    assert datum.model_input.to_ints() == oracle["input_ids"][:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == oracle["input_ids"][1:]
    assert datum.loss_fn_inputs["weights"].tolist() == oracle["assistant_masks"][1:]
    assert learnt(tokenizer, datum) == "Yes.<|im_end|>\nNo.<|im_end|>\n"


def test_what_is_learnt_can_be_chosen(tokenizer: Any) -> None:
    assert learnt(tokenizer, chat_datum(tokenizer, TALK, "last")) == "No.<|im_end|>\n"
    every = chat_datum(tokenizer, TALK, "all")
    assert every.loss_fn_inputs["weights"].tolist() == [1.0] * every.model_input.length
    without = [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]]
    assert learnt(tokenizer, chat_datum(tokenizer, without)) == "No.<|im_end|>\n"


def test_a_template_that_rewrites_its_history_is_refused_or_split(tokenizer: Any) -> None:
    with pytest.raises(tinkex.InvalidInputError, match=r"message 1 differently .*chat_data"):
        chat_datum(tokenizer, THOUGHTS, chat_template=FORGETFUL)
    first, second = chat_data(tokenizer, THOUGHTS, chat_template=FORGETFUL)
    assert learnt(tokenizer, first) == "<think>easy</think>2<|im_end|>\n"
    assert learnt(tokenizer, second) == "<think>hm</think>4<|im_end|>\n"
    seen = tokenizer.decode(second.model_input.to_ints())
    assert "easy" not in seen, "the second turn is learnt after the history that the model will see"
    assert len(chat_data(tokenizer, TALK)) == 1


def test_a_token_merged_across_the_generation_prompt_is_learnt(tokenizer: Any) -> None:
    """As Qwen's "\\n" + "\\n": the prompt's last token and the answer's first are one token together."""

    class Merging:
        chat_template = "there is one"
        eos_token_id = None

        def apply_chat_template(self, messages: list[dict[str, str]], **more: Any) -> list[int]:
            return [1, 2, 10] if more["add_generation_prompt"] else [1, 2, 20, 5]

        def decode(self, tokens: list[int]) -> str:
            return "".join({1: "a", 2: "b", 10: "\n", 20: "\n\n", 5: "x"}[token] for token in tokens)

    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": "\nx"}]
    assert chat_datum(Merging(), messages).loss_fn_inputs["weights"].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "user", "content": "x"}], "no message of the role 'assistant'"),
        ([{"role": "assistant", "content": "x"}], "first message is the assistant's"),
        ([], "at least one message"),
        (["hello"], "message 0 must be a mapping"),
    ],
)
def test_bad_conversations_are_refused(tokenizer: Any, messages: Any, told: str) -> None:
    with pytest.raises(tinkex.InvalidInputError, match=told):
        chat_data(tokenizer, messages)
    with pytest.raises(tinkex.InvalidInputError, match="train_on must be one of"):
        chat_datum(tokenizer, TALK, "user")  # type: ignore[arg-type]


def test_a_conversation_is_cut_but_never_to_nothing(tokenizer: Any) -> None:
    whole = chat_datum(tokenizer, TALK)
    cut = chat_datum(tokenizer, TALK, max_length=70)
    assert cut.model_input.to_ints() == whole.model_input.to_ints()[:69]
    with pytest.raises(tinkex.InvalidInputError, match=r"nothing to learn from.*max_length is 20"):
        chat_datum(tokenizer, TALK, max_length=20)


def test_texts_and_completions_end(tokenizer: Any) -> None:
    assert learnt(tokenizer, text_datum(tokenizer, "abc")) == "bc<|im_end|>"
    assert learnt(tokenizer, completion_datum(tokenizer, "2+2=", "4")) == "4<|im_end|>"
    with pytest.raises(tinkex.InvalidInputError, match="completion must be a non-empty string"):
        completion_datum(tokenizer, "a", "")
    with pytest.raises(tinkex.InvalidInputError, match="at least 2 tokens"):
        weighted_datum([1])


def test_batches_are_a_function_of_the_step() -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 97).tolist()
    for options in ({"size": 8}, {"max_tokens": 100}):
        batches = Batches(lengths, seed=3, **options)
        steps = batches.steps(epochs=3)
        seen = [batches[step] for step in range(steps)]
        assert [Batches(lengths, seed=3, **options)[step] for step in (steps - 1, 5)] == [seen[-1], seen[5]]
        assert sorted(index for batch in seen for index in batch) == sorted(list(range(97)) * 3)
        first = batches.epoch(0)
        assert sorted(index for batch in first for index in batch) == list(range(97)), "each once an epoch"
        assert batches.epoch(1) != first
        assert Batches(lengths, seed=4, **options)[0] != first[0]
        if "max_tokens" in options:
            assert max(sum(lengths[index] for index in batch) for batch in seen) <= 100
    assert Batches([1] * 10, size=2).steps(0.5) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [({}, "size or max_tokens"), ({"size": 0}, "size or max_tokens"), ({"max_tokens": 5}, "has 9 tokens")],
)
def test_batches_that_cannot_be_made_are_refused(options: dict[str, int], told: str) -> None:
    with pytest.raises(tinkex.InvalidInputError, match=told):
        Batches([1, 9], **options)


def test_examples_are_held_out_once() -> None:
    train, test = held_out(50, 5, seed=1)
    assert (train, test) == held_out(50, 5, seed=1) != held_out(50, 5, seed=2)
    assert sorted(train + test) == list(range(50))
    with pytest.raises(tinkex.InvalidInputError, match="left to train on"):
        held_out(5, 5)


def test_a_mean_loss_has_weights_that_sum_to_one() -> None:
    batch = [weighted_datum([1, 2, 3], [0, 1, 1]), weighted_datum([1, 2, 3], [0, 0, 2])]
    scaled = mean_loss(batch)
    assert learnt_tokens(batch) == 4
    assert [d.loss_fn_inputs["weights"].tolist() for d in scaled] == [[0.25, 0.25], [0.0, 0.5]]
    with pytest.raises(tinkex.InvalidInputError, match="sum to 0"):
        mean_loss([weighted_datum([1, 2], [1, 0])])
