"""Training data for loops: conversations and texts as datums, batches by a pure function of the step.

A conversation is rendered by the tokenizer's own chat template, exactly as the model saw it in training; a
loss mask says which tokens are learnt. A template that renders a turn differently once more turns follow is
detected, never masked wrongly. Needs only numpy; knows no files, no clients and no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from tinkex.errors import InvalidInputError
from tinkex.tokenizers import render_chat
from tinkex.types.chunks import as_tokens
from tinkex.types.data import Datum, ModelInput

Message = Mapping[str, Any]
# Which tokens have weight 1: those of every assistant turn, of the last one, or all.
TrainOn = Literal["assistant", "last", "all"]
TRAIN_ON: tuple[str, ...] = TrainOn.__args__  # type: ignore[attr-defined]

_MERGED = 2  # tokens that may differ where two texts meet: a tokenizer merges across the seam


# -- datums ----------------------------------------------------------------------------------------------


def weighted_datum(
    tokens: Sequence[int] | np.ndarray, weights: Sequence[float] | np.ndarray | None = None
) -> Datum:
    """A datum for "cross_entropy" from whole tokens and a weight for each of them (default: 1).

    The first token is only read, never predicted: its weight is not used.

    >>> datum = weighted_datum([5, 6, 7], [0, 0, 1])
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["weights"].tolist()
    ([5, 6], [0.0, 1.0])
    """
    ids = as_tokens(tokens)
    given = np.ones(len(ids), np.float32) if weights is None else np.asarray(weights, np.float32)
    if len(ids) < 2:
        raise InvalidInputError(f"a datum needs at least 2 tokens, one to read and one to predict, got {ids}")
    if given.shape != ids.shape:
        raise InvalidInputError(f"weights must be one for each of the {len(ids)} tokens, got {given.shape}")
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": given[1:]})


def text_datum(tokenizer: Any, text: str, *, max_length: int | None = None) -> Datum:
    """Plain text, every token of it learnt, with the end-of-sequence token after it.

    >>> text_datum(tokenizer, "Once upon a time")  # doctest: +SKIP
    """
    if not isinstance(text, str) or not text:
        raise InvalidInputError(f"text must be a non-empty string, got {text!r:.80}")
    tokens = [*tokenizer.encode(text), *_end(tokenizer)]
    return weighted_datum(tokens[:max_length])


def completion_datum(tokenizer: Any, prompt: str, completion: str, *, max_length: int | None = None) -> Datum:
    """A prompt that is read and a completion that is learnt, without a chat template.

    >>> completion_datum(tokenizer, "2 + 2 =", " 4")  # doctest: +SKIP
    """
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str) or not value:
            raise InvalidInputError(f"{name} must be a non-empty string, got {value!r:.80}")
    read = tokenizer.encode(prompt)
    learnt = [*tokenizer.encode(completion, add_special_tokens=False), *_end(tokenizer)]
    weights = np.r_[np.zeros(len(read), np.float32), np.ones(len(learnt), np.float32)]
    return _cut([*read, *learnt], weights, max_length)


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


# -- conversations ---------------------------------------------------------------------------------------


def chat_datum(
    tokenizer: Any,
    messages: Sequence[Message],
    train_on: TrainOn = "assistant",
    *,
    max_length: int | None = None,
    **template: Any,
) -> Datum:
    """One conversation as one datum, with weight 1 on what `train_on` says and 0 elsewhere.

    An assistant turn is everything the template writes after the generation prompt, up to the next message.
    A message's own `"weight": 0` leaves it out. `template` goes to the chat template: `tools=…`.
    Raises if the template is not prefix-stable: `chat_data` then makes a datum of each turn.

    >>> chat_datum(tokenizer, [{"role": "user", "content": "Hi"},  # doctest: +SKIP
    ...                        {"role": "assistant", "content": "Hello!"}])
    """
    tokens = render_chat(tokenizer, messages, add_generation_prompt=False, **template)
    weights = np.zeros(len(tokens), np.float32)
    if train_on == "all":
        weights[:] = 1.0
    for turn in _trained_turns(messages, train_on):
        span = _span(tokenizer, messages, turn, tokens, template)
        if span is None:
            raise InvalidInputError(
                f"the chat template is not prefix-stable: it writes message {turn} differently once others "
                "follow (templates that drop earlier reasoning do). tinkex.data.chat_data makes one datum of "
                "each assistant turn; train_on='last' learns the last one alone"
            )
        weights[slice(*span)] = 1.0
    return _cut(tokens, weights, max_length)


def chat_data(
    tokenizer: Any,
    messages: Sequence[Message],
    train_on: TrainOn = "assistant",
    *,
    max_length: int | None = None,
    **template: Any,
) -> list[Datum]:
    """One conversation as few datums as the template allows: one, or one for each turn that is learnt.

    >>> chat_data(tokenizer, messages)  # doctest: +SKIP
    """
    tokens = render_chat(tokenizer, messages, add_generation_prompt=False, **template)
    turns = _trained_turns(messages, train_on)
    if all(_span(tokenizer, messages, turn, tokens, template) is not None for turn in turns):
        return [chat_datum(tokenizer, messages, train_on, max_length=max_length, **template)]
    alone = ([*messages[:turn], {**messages[turn], "weight": 1}] for turn in turns)
    return [chat_datum(tokenizer, until, "last", max_length=max_length, **template) for until in alone]


def _trained_turns(messages: Sequence[Message], train_on: str) -> list[int]:
    """The indices of the assistant's messages that are learnt one by one."""
    if train_on not in TRAIN_ON:
        raise InvalidInputError(f"train_on must be one of {', '.join(TRAIN_ON)}, got {train_on!r}")
    if train_on == "all":
        return []
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    turns = [turn for turn, role in enumerate(roles) if role == "assistant"]
    turns = [turn for turn in turns if messages[turn].get("weight", 1)][-1 if train_on == "last" else 0 :]
    if not turns:
        raise InvalidInputError(
            f"no message of the role 'assistant' to learn from: the roles are {roles}; "
            "train_on='all' learns every token"
        )
    if turns[0] == 0:
        raise InvalidInputError("the first message is the assistant's: a conversation starts with another's")
    return turns


def _span(
    tokenizer: Any, messages: Sequence[Message], turn: int, tokens: list[int], template: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Where the turn lies in the whole conversation's tokens; None if the template moved it."""
    before = render_chat(tokenizer, messages[:turn], add_generation_prompt=True, **template)
    upto = tokens
    if turn + 1 < len(messages):
        upto = render_chat(tokenizer, messages[: turn + 1], add_generation_prompt=False, **template)
    start, end = _common(tokenizer, before, tokens), _common(tokenizer, upto, tokens)
    return None if start is None or end is None else (start, end)


def _common(tokenizer: Any, first: Sequence[int], whole: Sequence[int]) -> int | None:
    """How many tokens at the start of `whole` encode `first`; None if its text does not begin with `first`'s.

    Equal texts may have different tokens: two adjacent "\\n" can be one token.
    """
    count = len(first)
    if list(whole[:count]) == list(first):
        return count
    same = next(
        (i for i, (a, b) in enumerate(zip(first, whole, strict=False)) if a != b), min(count, len(whole))
    )
    if count - same > _MERGED:
        return None
    text, all_of_it = tokenizer.decode(list(first)), tokenizer.decode(list(whole))
    return same if all_of_it.startswith(text) else None


def _cut(tokens: Sequence[int], weights: np.ndarray, max_length: int | None) -> Datum:
    """The first `max_length` tokens; refused if nothing that is learnt is among them."""
    kept = weights[:max_length]
    if not kept[1:].any():
        begins = int(np.argmax(weights > 0)) if weights.any() else len(tokens)
        raise InvalidInputError(
            f"nothing to learn from: of {len(tokens)} tokens, those with a weight begin at {begins}, and "
            f"max_length is {max_length}"
        )
    return weighted_datum(tokens[:max_length], kept)


# -- batches ---------------------------------------------------------------------------------------------


class Batches:
    """The batches of a run over a dataset: `batches[step]` depends only on the step and the seed.

    So a loop that resumes at step 70 sees the same batches. Every epoch is a new permutation. A batch
    has `size` examples, or as many as fit into `max_tokens`; the last of an epoch may be smaller.

    >>> batches = Batches([3, 1, 2, 5], max_tokens=6, shuffle=False)
    >>> [batches[step] for step in range(3)], batches.steps(epochs=2)
    ([[0, 1, 2], [3], [0, 1, 2]], 4)
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        size: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not len(lengths):
            raise InvalidInputError("there are no examples to make batches of")
        if (size is None) == (max_tokens is None) or (size or max_tokens or 0) < 1:
            raise InvalidInputError(f"give size or max_tokens, from 1 on; got {size=}, {max_tokens=}")
        if max_tokens is not None and max(lengths) > max_tokens:
            longest = int(np.argmax(lengths))
            raise InvalidInputError(
                f"example {longest} has {lengths[longest]} tokens; a batch has max_tokens={max_tokens}"
            )
        self._lengths, self._size, self._max_tokens = list(lengths), size, max_tokens
        self._seed, self._shuffle = seed, shuffle
        self.epoch = lru_cache(maxsize=4)(self._epoch)

    def _epoch(self, number: int) -> list[list[int]]:
        """The batches of an epoch, as indices of examples."""
        count = len(self._lengths)
        order = np.arange(count)
        if self._shuffle:
            order = np.random.default_rng([self._seed, number]).permutation(count)
        if self._size is not None:
            return [order[start : start + self._size].tolist() for start in range(0, count, self._size)]
        return list(self._by_tokens(order.tolist()))

    def _by_tokens(self, order: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        total = 0
        for index in order:
            if batch and total + self._lengths[index] > (self._max_tokens or 0):
                yield batch
                batch, total = [], 0
            batch.append(index)
            total += self._lengths[index]
        yield batch

    def __getitem__(self, step: int) -> list[int]:
        if step < 0:
            raise IndexError(f"steps count from 0, got {step}")
        if self._size is not None:
            epoch, step = divmod(step, len(self.epoch(0)))
            return self.epoch(epoch)[step]
        epoch = 0
        while step >= (count := len(self.epoch(epoch))):
            step, epoch = step - count, epoch + 1
        return self.epoch(epoch)[step]

    def steps(self, epochs: float) -> int:
        """Steps of a number of epochs; part of an epoch counts by its batches."""
        whole = int(epochs)
        count = sum(len(self.epoch(number)) for number in range(whole))
        return max(1, count + round((epochs - whole) * len(self.epoch(whole))))


def held_out(count: int, size: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Split examples 0..count-1 at random: those to train on, and `size` to evaluate on.

    >>> train, test = held_out(10, 2)
    >>> len(train), len(test), sorted([*train, *test]) == list(range(10))
    (8, 2, True)
    """
    if not 0 <= size < count:
        raise InvalidInputError(
            f"of {count} examples at least 1 must be left to train on, got {size} to keep"
        )
    order = np.random.default_rng([seed, count]).permutation(count)
    return sorted(order[size:].tolist()), sorted(order[:size].tolist())


# -- normalisation ---------------------------------------------------------------------------------------


def learnt_tokens(batch: Sequence[Datum]) -> float:
    """The sum of all weights of a batch: the loss divided by it is the mean loss of a token.

    >>> learnt_tokens([weighted_datum([5, 6, 7], [0, 0, 1])])
    1.0
    """
    return float(sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in batch))


def mean_loss(batch: Sequence[Datum]) -> list[Datum]:
    """The same batch with weights that sum to 1: the loss and its gradient are means over tokens.

    Losses are sums. Where the gradient's norm matters (`grad_clip_norm`), it should not depend on how many
    tokens a batch has.

    >>> scaled = mean_loss([weighted_datum([5, 6, 7])])
    >>> scaled[0].loss_fn_inputs["weights"].tolist()
    [0.5, 0.5]
    """
    total = learnt_tokens(batch)
    if not total > 0:
        raise InvalidInputError("the weights of this batch sum to 0: there is nothing to learn from")
    return [replaced(datum, "weights", datum.loss_fn_inputs["weights"].to_numpy() / total) for datum in batch]


def replaced(datum: Datum, key: str, values: np.ndarray) -> Datum:
    """The datum with other values of one input of the loss."""
    return Datum(datum.model_input, {**datum.loss_fn_inputs, key: values.astype(np.float32)})
