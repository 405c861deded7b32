"""Grammars: which tokens may come next, so that an answer matches a JSON schema, a regex or a Lark grammar.

A grammar is compiled in a worker thread before its request is queued. The mask of the next token is computed
in a worker thread while the engine computes the step that needs it, so no other sequence waits for it. The
parser is llguidance (extra `grammar`), which reads the engine's own table of token bytes.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.engine.protocol import EngineConfig, SampleWork
from tinkex.engine.request import user_error
from tinkex.engine.token_bytes import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MASK_THREADS = 4
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"  # between the parts of JSON


class GrammarState:
    """Where one sequence is in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, workers: ThreadPoolExecutor, vocab: int) -> None:
        self._matcher, self._workers, self._vocab = matcher, workers, vocab
        self._over = False
        self._upcoming: Future[bytes] | None = None
        self._prepare()

    def _prepare(self) -> None:
        self._upcoming = self._workers.submit(self._matcher.compute_bitmask)

    def fork(self) -> GrammarState:
        """A copy of the state for another sample; only before the first token."""
        assert self._upcoming is not None
        self._upcoming.result()
        return GrammarState(self._matcher.deep_copy(), self._workers, self._vocab)

    def mask(self) -> np.ndarray:
        """uint8 [vocab / 8, rounded up]: bit i, lowest first, is 1 if token i may be drawn next."""
        if self._upcoming is None:
            return np.full(-(-self._vocab // 8), 255, np.uint8)
        raw = np.frombuffer(self._upcoming.result(), np.uint8)
        return raw[: -(-self._vocab // 8)]

    def consume(self, token: int) -> None:
        """Note the token that was drawn; EngineError if the grammar cannot go on with it."""
        if self._upcoming is None:  # the answer is complete, and the request continues past its end
            return
        self._upcoming.result()
        matcher = self._matcher
        if matcher.is_stopped() and not matcher.is_error():
            self._upcoming = None
            return
        matcher.consume_token(token)
        if matcher.is_error():
            raise user_error(f"the grammar cannot be followed: {matcher.get_error()[:300]}")
        self._prepare()


class Grammars:
    """One engine's compiler of grammars. Its tokenizer is built when a grammar first comes."""

    def __init__(self, config: EngineConfig, table: TokenTable, vocab: int, eos_ids: tuple[int, ...]) -> None:
        self._directory, self._table, self._vocab, self._eos_ids = config.tokenizer, table, vocab, eos_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._workers: ThreadPoolExecutor | None = None

    async def of(self, work: SampleWork) -> GrammarState | None:
        """The first state of the request's grammar; EngineError if it is wrong."""
        if work.params.grammar is None:
            return None
        ((kind, text),) = work.params.grammar.items()
        return await asyncio.to_thread(self._compile, kind, text)

    def _compile(self, kind: str, text: Any) -> GrammarState:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise user_error(
                "grammars and JSON schemas need llguidance on the server: pip install 'tinkex[grammar]'"
            ) from None
        match kind:
            case "json_schema":
                # A weak model would fill its answer with spaces, if it may.
                grammar = LLMatcher.grammar_from_json_schema(
                    json.dumps(text), {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
                )
            case "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            case _:
                grammar = LLMatcher.grammar_from_lark(text)
        tokenizer, workers = self._built()
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise user_error(f"the grammar ({kind}) is wrong: {matcher.get_error()[:300]}")
        return GrammarState(matcher, workers, self._vocab)

    def _built(self) -> tuple[LLTokenizer, ThreadPoolExecutor]:
        table = self._table.whole()
        if not self._eos_ids:
            raise user_error("this model has no end-of-sequence token, so no grammar can end its answer")
        with self._lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(_MASK_THREADS, "grammar")
            if self._tokenizer is None:
                assert self._directory is not None  # else there is no table
                self._tokenizer = _tokenizer(Path(self._directory), table, self._vocab, self._eos_ids)
        return self._tokenizer, self._workers

    def close(self) -> None:
        if self._workers is not None:
            self._workers.shutdown(wait=False)


class _TokenizerFacts:
    """What `llguidance.TokenizerWrapper` reads of a tokenizer.

    A call spells text in tokens. Where the tokenizer would add to the text (a space in front), the longest
    tokens that fit are taken.
    """

    def __init__(self, directory: Path, tokens: Sequence[bytes], eos_id: int) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        special = self._tokenizer.get_added_tokens_decoder().items()
        self.special_token_ids = [index for index, token in special if token.special and index < len(tokens)]
        self.tokens, self.eos_token_id, self.bos_token_id = tokens, eos_id, None
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        raw, ids = text.encode(), self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if b"".join(self.tokens[i] for i in ids) == raw else self._greedy(raw)

    def _greedy(self, raw: bytes) -> list[int]:
        spelled: list[int] = []
        while raw:
            sizes = range(min(self._longest, len(raw)), 0, -1)
            size = next((size for size in sizes if raw[:size] in self._ids), 0)
            if not size:
                break
            spelled.append(self._ids[raw[:size]])
            raw = raw[size:]
        return spelled


def _tokenizer(directory: Path, table: list[bytes], vocab: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [*table[:vocab], *[b""] * (vocab - len(table))]
    facts = _TokenizerFacts(directory, tokens, eos_ids[0])
    return LLTokenizer(TokenizerWrapper(facts), n_vocab=vocab, eos_token=list(eos_ids))
