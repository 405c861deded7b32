"""A deterministic engine: bitwise the same alone, in any batch, from the cache, and in the trainer.

`test_every_stage…` follows one sequence through the decoder by every path there is, and names the first stage
that differs; the others compare what users see. In bf16 on a GPU; where there is none, the paths run in
fp32 by Triton's interpreter, which shows that they compute the same, but for rounding.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.commands import do
from tests.engine.stepping import finish
from tests.engine.tiny import tiny_model
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.protocol import (
    CreateAdapter,
    EngineConfig,
    ExportAdapter,
    ForwardBackward,
    Pass,
    SampleWork,
)
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.kv import PAGE, KVCache, TokenSpan, page_bytes
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.projection import Projection
from tinkex.engine.torch.sequences import PublishedAdapter
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput, SampleResponse
from tinkex.types.params import LoraConfig, SamplingParams

CUDA, INTERPRETED = torch.cuda.is_available(), bool(os.environ.get("TRITON_INTERPRET"))
if importlib.util.find_spec("triton") is None or not (CUDA or INTERPRETED):
    pytest.skip("needs Triton", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton"),
    pytest.mark.timeout(600),  # the interpreter takes seconds for what a GPU does in microseconds
]
on_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")

# wide enough that a library would cut sums into parts, by the number of rows
WIDE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 1000, "max_position_embeddings": 512, "num_hidden_layers": 3,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {},
    "mistral": {"sliding_window": 70},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
}
LORAS = {
    "zero": LoraConfig(rank=4, seed=9),  # its B stays zero: the base model
    "a": LoraConfig(rank=8, seed=1),
    "b": LoraConfig(rank=32, seed=2, train_mlp=False),
    "c": LoraConfig(rank=64, seed=3),
    "d": LoraConfig(rank=4, seed=4, train_unembed=False),
}
LENGTH = 150 if CUDA else 21


@pytest.fixture(scope="module", params=FAMILIES if CUDA else ["mistral", "qwen2"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    shape = WIDE | FAMILIES[request.param] if CUDA else {"intermediate_size": 128}
    path = tiny_model(tmp_path_factory.mktemp("model"), request.param, **shape)
    decoder = load_decoder(path, "cuda", torch.bfloat16) if CUDA else load_decoder(path)
    weight = decoder.unembed_weight
    return decoder.with_backend(CudaBackend(weight.device, weight.dtype, invariant=True))


@pytest.fixture(autouse=True)
def by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # there is no device to pin it for


def some_ids(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 320, length).astype(np.int32)


def fill(adapter: Adapter) -> Adapter:
    """Random numbers for all but `zero`, which stays as it began."""
    if adapter.lora != LORAS["zero"]:
        generator = torch.Generator().manual_seed(adapter.lora.seed or 0)
        adapter.flat.copy_(0.02 * torch.randn(adapter.flat.shape, generator=generator))
        adapter.changed()
    return adapter


def adapter(decoder: Decoder, name: str) -> Adapter:
    return fill(Adapter.fresh(LORAS[name], decoder.sites(), decoder.unembed_weight.device))


# -- stage by stage ----------------------------------------------------------------------------------------

Part = tuple[np.ndarray, Adapter | None]  # a sequence and whose it is
TAIL = 3  # the last positions of a sequence, by which paths are compared


@contextmanager
def recorded(decoder: Decoder) -> Iterator[dict[str, list[Tensor]]]:
    """What went into and came out of every projection, in the order of the stages."""
    found: dict[str, list[Tensor]] = defaultdict(list)

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, given: tuple[Tensor, Any], made: Tensor) -> None:
            found[f"into {name}"].append(given[0].detach().clone())
            found[f"out of {name}"].append(made.detach().clone())

        return hook

    projections = [(n, m) for n, m in decoder.named_modules() if isinstance(m, Projection)]
    handles = [module.register_forward_hook(keep(name)) for name, module in projections]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def step(decoder: Decoder, parts: Sequence[Part], starts: Sequence[int], attend: Any, train: bool = False):
    device = decoder.unembed_weight.device
    tokens = torch.from_numpy(np.concatenate([ids for ids, _ in parts]).astype(np.int64)).to(device)
    ranges = [np.arange(at, at + len(ids)) for at, (ids, _) in zip(starts, parts, strict=True)]
    whose, lengths = [a for _, a in parts], [len(ids) for ids, _ in parts]
    lora = decoder.backend.lora(whose, lengths, train=train)
    h_TD = decoder(tokens, torch.from_numpy(np.concatenate(ranges)).to(device), attend, lora)
    return decoder.logits(h_TD.detach(), decoder.backend.lora(whose, lengths))


def packed(decoder: Decoder, parts: Sequence[Part], train: bool = False) -> Tensor:
    lengths = [len(ids) for ids, _ in parts]
    attend = decoder.backend.packed_attend(lengths, decoder.config.windows)
    return step(decoder, parts, [0] * len(parts), attend, train)


def paged(decoder: Decoder, parts: Sequence[Part], cuts: Sequence[int]) -> Tensor:
    """All sequences in one cache, computed up to each of `cuts` and then to the end."""
    c, weight, longest = decoder.config, decoder.unembed_weight, max(len(ids) for ids, _ in parts)
    each = -(-longest // PAGE)
    cache = KVCache(c.kv_shapes, each * len(parts), weight.device, weight.dtype)
    shuffled = np.random.default_rng(0).permutation(each * len(parts)).reshape(len(parts), each).tolist()
    logits = []
    for start, stop in zip([0, *cuts], [*cuts, longest], strict=True):
        going = [(pages, part) for pages, part in zip(shuffled, parts, strict=True) if len(part[0]) > start]
        pieces = [TokenSpan(pages, start, min(stop, len(ids)) - start) for pages, (ids, _) in going]
        attend = decoder.backend.paged_attend(cache, pieces, c.windows)
        now = [(ids[start:stop], a) for _, (ids, a) in going]
        logits.append(step(decoder, now, [start] * len(now), attend))
    return torch.cat(logits)


def paths(decoder: Decoder, one: Part) -> dict[str, tuple[Callable[[], Tensor], slice]]:
    """Ways to compute `one`, and where its last positions are among all rows that were computed."""
    n, others = len(one[0]), [(some_ids(5, 20), adapter(decoder, "c")), (some_ids(6, 9), None)]
    last, around, first = slice(n - TAIL, n), slice(20 + n - TAIL, 20 + n), slice(n - TAIL, n)
    tokens = range(n - TAIL, n)
    return {
        "packed, with gradients": (lambda: packed(decoder, [one], train=True), last),
        "packed, among others": (lambda: packed(decoder, [others[0], one, others[1]]), around),
        "paged at once": (lambda: paged(decoder, [one], []), last),
        "paged at once, among others": (lambda: paged(decoder, [one, *others], []), first),
        "paged in chunks": (lambda: paged(decoder, [one], [7, n // 2, n - 5]), last),
        "paged, the last tokens one by one": (lambda: paged(decoder, [one], list(tokens)), last),
    }


@pytest.mark.parametrize("name", ["zero", "a", "b"] if CUDA else ["b"])
def test_every_stage_of_every_path_is_the_same(decoder: Decoder, name: str):
    one = some_ids(1, LENGTH), adapter(decoder, name)
    with torch.no_grad(), recorded(decoder) as found:
        logits = packed(decoder, [one])[-TAIL:]
    wanted = {stage: torch.cat(rows)[-TAIL:] for stage, rows in found.items()} | {"the logits": logits}
    for path, (compute, rows) in paths(decoder, one).items():
        with torch.set_grad_enabled("gradients" in path), recorded(decoder) as found:
            logits = compute()[rows]
        got = {stage: torch.cat(kept)[rows] for stage, kept in found.items()} | {"the logits": logits}
        assert set(got) == set(wanted)
        for stage, want in wanted.items():
            assert_same(got[stage], want, f"{path}: {stage} of {name}")


def assert_same(got: Tensor, want: Tensor, where: str) -> None:
    if not CUDA:
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4, msg=where)
        return
    differ = (got != want).nonzero()
    assert not len(differ), f"{where}: {len(differ)} of {got.numel()} differ, first at {differ[0].tolist()}"


# -- what users see ----------------------------------------------------------------------------------------


def new_engine(decoder: Decoder, pages: int = 4000) -> TorchEngine:
    """With every adapter published under its own name."""
    c = decoder.config
    room = pages * page_bytes(c.kv_shapes, torch.bfloat16)
    engine = TorchEngine(EngineConfig("tiny", device="cuda", kv_bytes=room, deterministic=True), decoder)
    for name, lora in LORAS.items():
        do(engine.trainer, CreateAdapter(name, lora))
        fill(engine._trainer.adapter(name))
        asyncio.run(engine.sampler.publish(name, engine.trainer.submit(ExportAdapter(name)).result()))
    return engine


def ask(
    seed: int, length: int, adapter: str | None = None, /, *, work: dict[str, Any] | None = None, **params
):
    asked = SamplingParams(**{"max_tokens": 40, "stop": [], "seed": seed, **params})
    return SampleWork(some_ids(seed, length), asked, adapter=adapter, **(work or {}))


WATCHED = {
    "base": ask(1, 30),
    "adapter": ask(2, 100, "a", work={"prompt_logprobs": True}),
    "warm": ask(3, 17, "b", temperature=1.4),
    "cold": ask(4, 200, "a", temperature=0.3),
    "greedy": ask(5, 64, "b", temperature=0.0, work={"prompt_logprobs": True}),
    "top-k": ask(6, 40, "a", top_k=5),
    "top-p": ask(7, 33, None, top_p=0.8),
    "listed": ask(8, 90, "d", work={"topk_sample_logprobs": 3, "topk_prompt_logprobs": 2}),
    "samples": ask(9, 50, "c", work={"num_samples": 3}),
    "alternatives": ask(10, 25, "a", work={"prompt_alt_tokens_k": 2}),
}  # fmt: skip


def strangers(count: int) -> list[SampleWork]:
    """Requests of every kind, at other positions and of other lengths."""
    cut = ({}, {"top_k": 9}, {"top_p": 0.7}, {"temperature": 0.0})
    names = (None, "a", "b", "c", "d")
    return [
        ask(1000 + i, 1 + (37 * i) % 230, names[i % 5], max_tokens=5 + i % 50, **cut[(i // 5) % 4])
        for i in range(count)
    ]


def answers(engine: TorchEngine, works: Sequence[SampleWork]) -> list[SampleResponse]:
    async def everything() -> list[SampleResponse]:
        return await asyncio.gather(*(engine.sampler.sample(work) for work in works))

    return asyncio.run(everything())


def told(answer: SampleResponse) -> dict[str, list[Any]]:
    """All that an answer says, as numbers that compare by their bits."""
    said: dict[str, list[Any]] = {}
    for i, sequence in enumerate(answer.sequences):
        said[f"tokens of sample {i}"] = sequence.tokens_np.tolist()
        said[f"logprobs of sample {i}"] = bits(sequence.logprobs_np)
        if (top := sequence.topk_logprobs_np) is not None:
            said[f"likely tokens of sample {i}"] = [top.token_ids.tolist(), bits(top.logprobs)]
    if answer.prompt_logprobs_np is not None:
        said["the prompt's logprobs"] = bits(answer.prompt_logprobs_np)
    if (top := answer.topk_prompt_logprobs_np) is not None:
        said["the prompt's likely tokens"] = [top.token_ids.tolist(), bits(top.logprobs)]
    if (alts := answer.prompt_alt_tokens) is not None:
        said["the prompt's alternatives"] = [alts.tokens.to_numpy().tolist(), bits(alts.logprobs.to_numpy())]
    return said


def bits(numbers: np.ndarray) -> list[Any]:
    return np.ascontiguousarray(numbers, np.float32).view(np.int32).tolist()


def assert_told_the_same(got: Sequence[SampleResponse], alone: dict[str, dict[str, list[Any]]]) -> None:
    for (name, wanted), answer in zip(alone.items(), got, strict=True):
        for what, want in wanted.items():
            assert told(answer)[what] == want, f"{what} of {name}"


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> dict[str, dict[str, list[Any]]]:
    """What every watched request is told if it is the only one."""
    engine = new_engine(decoder)
    try:
        return {name: told(answers(engine, [work])[0]) for name, work in WATCHED.items()}
    finally:
        engine.close()


@on_cuda
@pytest.mark.parametrize("size", [3, 40, 130])
def test_a_request_is_the_same_in_any_batch(decoder: Decoder, alone: dict, size: int):
    """And once more by those whose prompts are in the cache."""
    engine, names = new_engine(decoder), list(WATCHED)
    try:
        at_once = size - 2 if size == 3 else len(names)
        for start in range(0, len(names), at_once):
            some = names[start : start + at_once]
            others = strangers(size - len(some))
            half = len(others) // 2
            works = [*others[:half], *(WATCHED[name] for name in some), *others[half:]]
            got = answers(engine, works)[half : half + len(some)]
            assert_told_the_same(got, {name: alone[name] for name in some})
        again = answers(engine, list(WATCHED.values()))
        assert_told_the_same(again, alone)
        assert any(answer.prompt_cache_hit_tokens for answer in again)
    finally:
        engine.close()


@on_cuda
def test_a_request_is_the_same_after_preemption(decoder: Decoder, alone: dict):
    engine = new_engine(decoder, pages=45)
    try:
        got = answers(engine, [*WATCHED.values(), *strangers(20)])[: len(WATCHED)]
        assert engine.heartbeat().stats["preemptions"] > 0
        assert_told_the_same(got, alone)
    finally:
        engine.close()


# -- the trainer -------------------------------------------------------------------------------------------

Scored = list[tuple[str, np.ndarray]]  # runs and their sequences


def trained(trainer: TorchTrainer, scored: Scored, *, backward: bool) -> list[np.ndarray]:
    """The logprobs of each sequence's tokens but the first."""
    for name in {run for run, _ in scored}:
        do(trainer, CreateAdapter(name, LORAS[name]))
        fill(trainer.adapter(name))
    passes = []
    for run, ids in scored:
        targets = {"target_tokens": ids[1:].astype(np.int64)}
        passes.append(
            Pass(run, [Datum(ModelInput.from_ints(ids[:-1]), targets)], "cross_entropy", backward=backward)
        )
    outputs = do(trainer, ForwardBackward(tuple(passes)))
    for output in outputs:
        assert isinstance(output, ForwardBackwardOutput), output
    return [output.loss_fn_outputs[0]["logprobs"].to_numpy() for output in outputs]  # type: ignore[union-attr]


@on_cuda
def test_a_forward_is_the_same_in_any_company(decoder: Decoder):
    """Among other runs, with a backward, with recomputed layers, and in smaller micro-batches."""
    ids = some_ids(1, 200)
    others: Scored = [
        (name, some_ids(20 + i, 11 + 60 * i)) for i, name in enumerate(("b", "c", "d", "a", "zero"))
    ]
    (want,) = trained(TorchTrainer(decoder, "tiny"), [("a", ids)], backward=False)
    ways = {
        "among others": ({}, False),
        "with a backward": ({}, True),
        "in small parts": ({"max_pass_tokens": 210}, False),
        "with recomputed layers": ({"recompute": True}, True),
    }
    for way, (settings, backward) in ways.items():
        scored = [*others[:2], ("a", ids), *others[2:]]
        got = trained(TorchTrainer(decoder, "tiny", **settings), scored, backward=backward)[2]
        assert bits(got) == bits(want), way


@on_cuda
def test_a_pass_repeats_to_the_bit(decoder: Decoder):
    """Its gradients too, if a run's data lie together."""
    scored: Scored = [("b", some_ids(1, 400)), ("b", some_ids(2, 300)), ("a", some_ids(3, 350))]
    seen = []
    for _ in range(3):
        trainer = TorchTrainer(decoder, "tiny")
        trained(trainer, scored, backward=True)
        seen.append({name: trainer.adapter(name).grad for name in ("a", "b")})
    for again in seen[1:]:
        for name, grad in seen[0].items():
            assert grad is not None
            assert grad.any()
            assert torch.equal(again[name], grad), name


@on_cuda
@pytest.mark.parametrize("backward", [False, True])
def test_a_samplers_logprobs_are_the_trainers(decoder: Decoder, backward: bool):
    """Of drawn tokens at a temperature of 1 or 0, cut or not, and of prompts."""
    works = {name: w for name, w in WATCHED.items() if w.params.temperature in (0.0, 1.0)}
    engine = new_engine(decoder)
    try:
        got = answers(engine, [*works.values(), *strangers(30)])[: len(works)]
    finally:
        engine.close()
    scored = [
        (work.adapter or "zero", np.append(work.prompt, answer.sequences[0].tokens_np).astype(np.int32))
        for work, answer in zip(works.values(), got, strict=True)
    ]
    lps = trained(TorchTrainer(decoder, "tiny"), scored, backward=backward)
    for (name, work), answer, lp in zip(works.items(), got, lps, strict=True):
        split = len(work.prompt) - 1
        assert bits(answer.sequences[0].logprobs_np) == bits(lp[split:]), f"drawn tokens of {name}"
        if answer.prompt_logprobs_np is not None:
            assert bits(answer.prompt_logprobs_np[1:]) == bits(lp[:split]), f"the prompt of {name}"


def test_a_sampler_and_a_trainer_agree_but_for_rounding(decoder: Decoder):
    """The same without captured steps, so that the interpreter can show it."""
    c, weight = decoder.config, decoder.unembed_weight
    cache = KVCache(c.kv_shapes, 60, weight.device, weight.dtype)
    batch = ContinuousBatch(decoder, cache, StepLimits(c.max_context, 8))
    name, ids = "b", some_ids(1, 9)
    published = PublishedAdapter(name, adapter(decoder, name), b"root")
    works = [
        SampleWork(ids, SamplingParams(max_tokens=3, stop=[], seed=i, **how), prompt_logprobs=True, **more)
        for i, (how, more) in enumerate([({}, {}), ({"top_k": 4}, {}), ({}, {"topk_sample_logprobs": 2})])
    ]
    futures: list[Future[SampleResponse]] = [Future() for _ in works]
    for work, future in zip(works, futures, strict=True):
        batch.submit(work, batch.check_work(work), published, future)
    finish(batch)
    answers = [future.result(timeout=0) for future in futures]
    whole = [np.append(ids, answer.sequences[0].tokens_np).astype(np.int32) for answer in answers]
    lps = trained(TorchTrainer(decoder, "tiny"), [(name, one) for one in whole], backward=False)
    for answer, lp in zip(answers, lps, strict=True):
        assert answer.prompt_logprobs_np is not None
        np.testing.assert_allclose(answer.sequences[0].logprobs_np, lp[len(ids) - 1 :], atol=1e-4)
        np.testing.assert_allclose(answer.prompt_logprobs_np[1:], lp[: len(ids) - 1], atol=1e-4)
