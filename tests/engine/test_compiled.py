"""The compiled decoding step against transformers, the plain adapters and the plain drawing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.engine.plain_lora import PlainLora
from tests.engine.tiny import FAMILIES, tiny_model
from tinkex.engine.native.build import build, library
from tinkex.engine.native.step import CompiledStep
from tinkex.engine.rng import stream_keys
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.kv import PAGE, KVCache, PagedAttend, TokenSpan
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.next_tokens import Choice, draw, scaled_logprobs
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C compiler")


def cache_for(decoder: Decoder) -> KVCache:
    shape = decoder.config
    return KVCache(shape.kv_shapes, 64, CPU, torch.float32)


def step_of(decoder: Decoder, cache: KVCache) -> CompiledStep:
    make = decoder.backend.compiled_step(decoder, room=float("inf"))
    assert make is not None
    return make(cache)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_moe"])
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, threads: int) -> None:
    """Sequences of many lengths side by side, token by token: through pages, windows and rotations."""
    path = tiny_model(tmp_path, family)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    decoder = load_decoder(path)
    step = step_of(decoder, cache_for(decoder))
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 7, 15, 16, 17, 31, 33, 40, 41, 42]
    sequences = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]
    pages = [list(range(4 * i + 3, 4 * i - 1, -1)) for i in range(len(lengths))]
    with torch.no_grad():
        expected = [model(torch.tensor([tokens])).logits[0] for tokens in sequences]
    step.threads = lambda rows: threads  # so small a model would never be shared
    for at in range(max(lengths)):
        running = [i for i, length in enumerate(lengths) if at < length]
        logits = step([(sequences[i][at], at, pages[i], None) for i in running])
        want = torch.stack([expected[i][at] for i in running])
        torch.testing.assert_close(logits, want, atol=2e-5, rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize("family", ["llama3", "qwen2", "smollm2"])
def test_each_row_has_its_own_adapter(tmp_path: Path, family: str) -> None:
    decoder = load_decoder(tiny_model(tmp_path, family))
    configs = [LoraConfig(rank=4, seed=1), LoraConfig(rank=9, seed=2, train_mlp=False, train_unembed=False)]
    adapters = [Adapter.fresh(config, decoder.sites()) for config in configs]
    for adapter in adapters:
        adapter.flat += 0.05 * torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(3))
    mixed = [adapters[0], None, adapters[1], adapters[1], adapters[0]]
    tokens, pages = [5, 6, 7, 8, 9], [[4], [3], [2], [1], [0]]
    got = step_of(decoder, cache_for(decoder))(
        [(t, 0, p, a) for t, p, a in zip(tokens, pages, mixed, strict=True)]
    )
    lora = PlainLora(mixed, [1] * 5)
    attend = PagedAttend(cache_for(decoder), [TokenSpan(p, 0, 1) for p in pages], decoder.config.windows, CPU)
    with torch.no_grad():
        hidden = decoder(torch.tensor(tokens), torch.zeros(5, dtype=torch.int64), attend, lora)
        want = decoder.logits(hidden, lora)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@needs_compiler
def test_a_row_is_the_same_to_the_bit_alone_and_among_strangers(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "llama2"))
    adapter = Adapter.fresh(LoraConfig(rank=3, seed=1), decoder.sites())
    adapter.flat.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    alone, together = (step_of(decoder, cache_for(decoder)) for _ in range(2))
    for at in range(2 * PAGE + 3):
        one = alone([(7 + at, at, [0, 1, 2], adapter)])
        strangers = [(40 + i, at, [3 * i, 3 * i + 1, 3 * i + 2], None) for i in range(1, 12)]
        many = together([*strangers, (7 + at, at, [0, 1, 2], adapter)])
        assert torch.equal(many[-1], one[0])


@needs_compiler
@pytest.mark.parametrize(("vocab", "padded"), [(320, 320), (300, 320), (1000, 1030), (512, 768)])
def test_drawing_is_that_of_sample(tmp_path: Path, vocab: int, padded: int) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "llama2", vocab_size=padded))
    decoder.config = replace(decoder.config, vocab_size=vocab)
    step = step_of(decoder, cache_for(decoder))
    rows = 64
    logits = 3 * torch.randn(rows, padded, generator=torch.Generator().manual_seed(0))
    temperature = np.resize(np.array([0.0, 1.0, 0.5, 2.0, 1e-7], np.float32), rows)
    logits[:, vocab:] += 20  # of padding, which nothing reads
    keys = stream_keys(np.full(rows, 11, np.uint64), np.arange(rows), np.arange(rows))
    tokens, logprobs = step.draw(logits, temperature, keys)
    choice = Choice(temperature, np.zeros(rows, np.int64), np.ones(rows, np.float32), keys)
    plain = scaled_logprobs(logits, torch.from_numpy(temperature), vocab)
    assert tokens == draw(plain, choice).tolist()
    want = plain[torch.arange(rows), torch.tensor(tokens)]
    torch.testing.assert_close(torch.tensor(logprobs), want, atol=1e-4, rtol=1e-5)


@needs_compiler
def test_logits_that_are_not_finite_show_in_the_logprob(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "llama2"))
    step = step_of(decoder, cache_for(decoder))
    logits = torch.zeros(3, 320)
    logits[0, 5], logits[1, 319], logits[2, 0] = float("nan"), float("inf"), float("nan")
    tokens, logprobs = step.draw(logits, np.array([1.0, 1.0, 0.0], np.float32), np.zeros(3, np.uint64))
    assert all(0 <= token < 320 for token in tokens)
    assert not np.isfinite(logprobs).any()


def test_neither_a_missing_compiler_nor_a_failing_one_is_an_error() -> None:
    assert build(None) is None
    assert build("/bin/false") is None


def test_models_of_other_kinds_are_left_to_the_decoder(tmp_path: Path) -> None:
    def has_step(decoder: Decoder, room: float = float("inf")) -> bool:
        return decoder.backend.compiled_step(decoder, room) is not None

    assert not has_step(load_decoder(tiny_model(tmp_path, "qwen3_moe")))
    dense = tiny_model(tmp_path, "llama2")
    assert not has_step(load_decoder(dense, CPU, torch.bfloat16))
    assert not has_step(load_decoder(dense), room=1000.0)
