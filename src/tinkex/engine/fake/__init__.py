"""A whole engine over a bigram model: deterministic, fast, needs only numpy.

It keeps every promise of the contract, so a service can be tested on it in milliseconds: steps change
logprobs, gradients accumulate and clear, saves restore exactly, the sampler's logprobs are the trainer's.
Its text is nonsense, and it has no uploaded losses.
"""

from __future__ import annotations

from tinkex.engine.fake.bigram import BASE, CONTEXT, EOS, VOCAB
from tinkex.engine.fake.sampler import FakeSampler
from tinkex.engine.fake.trainer import FakeTrainer
from tinkex.engine.grammar import Grammars
from tinkex.engine.protocol import EngineConfig, Heartbeat, ModelInfo
from tinkex.engine.token_bytes import TokenTable
from tinkex.types.losses import FORMULAS

_PAGE = 16


class FakeEngine:
    """Any model name works."""

    def __init__(self, config: EngineConfig) -> None:
        context = config.max_context or CONTEXT
        self.info = ModelInfo("fake", VOCAB, context, (EOS,), BASE.size, 1, tuple(FORMULAS), config.model)
        self.trainer = FakeTrainer(config.name or config.model, context, config.max_pass_tokens)
        self._slots = config.max_batch
        table = TokenTable(config)
        self._grammars = Grammars(config, table, VOCAB, (EOS,))
        self.sampler = FakeSampler(self.trainer, table, self._grammars)

    def heartbeat(self) -> Heartbeat:
        running = self.sampler.running()
        used = sum(-(-len(s.tokens) // _PAGE) or 1 for s in running)
        total = self.info.max_context * 16 // _PAGE
        stats = {
            "adapters_live": len(self.trainer.adapters),
            "adapters_published": len(self.sampler.published),
            "kv_pages_total": total,
            "kv_pages_used": used,
            "kv_pages_free": total - used,
            "batch_slots": self._slots,
            "sequences_running": len(running),
            "sequences_waiting": 0,
            "preemptions": 0,
        }
        closed = self.trainer.closed
        return Heartbeat(not closed, "the engine was closed" if closed else "", stats, {})

    def close(self) -> None:
        self.trainer.close()
        self._grammars.close()
