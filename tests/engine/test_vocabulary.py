"""One vocabulary: ids that the tokenizer does not have are never normalised over, drawn, listed or trained.

The oracle is transformers with their logits masked (tests/engine/tiny.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.commands import do
from tests.engine.oracle import PeftOracle, make_datum, randomise
from tests.engine.tiny import reference_logits, reference_model, tiny_model, tiny_tokenizer
from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    EngineError,
    ExportAdapter,
    Failure,
    ForwardBackward,
    OptimStep,
    Pass,
    SampleWork,
    SaveAdapter,
    build_engine,
)
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput, SampleResponse
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams
from tinkex.types.tensor import TensorData

pytestmark = pytest.mark.slow

VOCAB, PADDED = 259, 320  # ids of the tokenizer, rows of the embedding
LORA = LoraConfig(4, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_model(tmp_path_factory.mktemp("padded"), "qwen3", intermediate_size=128))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = build_engine(
        EngineConfig(str(model), device="cpu", dtype="float32", kv_bytes=4 << 20, threads=1)
    )
    yield engine
    engine.close()


CUDA: dict[str, bool] = {"captured": False, "deterministic": True}


@pytest.fixture(scope="module", params=["cpu", *(pytest.param(kind, marks=pytest.mark.gpu) for kind in CUDA)])
def any_engine(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Engine, float]]:
    """An engine, and by how much its sampler's logprobs may differ from its trainer's."""
    if request.param == "cpu":
        yield request.getfixturevalue("engine"), 1e-3
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    exact = CUDA[request.param]
    config = EngineConfig(str(model), device="cuda", kv_bytes=4 << 20, deterministic=exact)
    engine = build_engine(config)
    yield engine, 0.0 if exact else 0.5
    engine.close()


def sample(engine: Engine, prompt: list[int], work: dict[str, Any], **params: Any) -> SampleResponse:
    asked = SamplingParams(**{"max_tokens": 8, "stop": [], "seed": 1, **params})
    request = SampleWork(np.array(prompt, np.int32), asked, **work)
    return asyncio.run(engine.sampler.sample(request))


def trained(engine: Engine, work: Pass) -> ForwardBackwardOutput:
    (output,) = do(engine.trainer, ForwardBackward((work,)))
    assert isinstance(output, ForwardBackwardOutput), output
    return output


# -- the trainer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])  # the second is tied
def test_logprobs_and_gradients_are_the_masked_oracles(tmp_path: Path, family: str) -> None:
    path = tiny_tokenizer(tiny_model(tmp_path, family))
    trainer, oracle = TorchTrainer(load_decoder(path), "m"), PeftOracle(path, 4)
    do(trainer, CreateAdapter("run", LORA))
    adapter = trainer.adapter("run")
    randomise(adapter.flat, 1)
    oracle.copy_from(adapter.named())
    rng = np.random.default_rng(0)
    data = [make_datum(rng, length, VOCAB) for length in (17, 30, 9)]
    (output,) = do(trainer, ForwardBackward((Pass("run", data, "cross_entropy"),)))
    loss = torch.zeros(())
    for datum, record in zip(data, output.loss_fn_outputs, strict=True):
        theirs = oracle.logprobs(datum)
        loss = loss - (theirs * datum.loss_fn_inputs["weights"].to_torch()).sum()
        torch.testing.assert_close(record["logprobs"].to_torch(), theirs.detach(), atol=1e-5, rtol=1e-5)
    loss.backward()
    assert adapter.grad is not None
    for name, (a, b) in adapter.named(adapter.grad).items():
        for side, ours in (("A", a), ("B", b)):
            theirs = oracle.gradients()[f"{name}.lora_{side}"]
            scale = float(theirs.abs().max()) + 1e-6
            torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-5, rtol=0)
    of_head = adapter.named(adapter.grad)["lm_head"][1]
    assert of_head.shape == (PADDED, 4)
    assert not of_head[VOCAB:].any()


@pytest.mark.parametrize("bad", [VOCAB, PADDED - 1, PADDED])
def test_a_target_that_is_padding_is_refused_by_name(engine: Engine, bad: int) -> None:
    run = f"refused-{bad}"
    do(engine.trainer, CreateAdapter(run, LORA))
    targets = [1, 2, bad], np.array([[1, 2], [3, bad], [5, 6]])
    for target, place in zip(targets, ("[2]", "[1, 1]"), strict=True):
        datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": np.array(target)})
        (failure,) = do(engine.trainer, ForwardBackward((Pass(run, [datum], "cross_entropy"),)))
        named = f"datum 0: loss_fn_inputs['target_tokens']{place} is {bad}; token ids are 0..{VOCAB - 1}"
        assert failure == Failure("user", named)


def test_files_keep_every_row(engine: Engine, model: Path, tmp_path: Path) -> None:
    do(engine.trainer, CreateAdapter("saved", LORA))
    trained(engine, Pass("saved", [make_datum(np.random.default_rng(0), 9, VOCAB)], "cross_entropy"))
    do(engine.trainer, OptimStep("saved", AdamParams(learning_rate=0.1)))
    do(engine.trainer, SaveAdapter("saved", str(tmp_path / "adapter")))
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    head = weights["base_model.model.lm_head.lora_B.weight"]
    assert head.shape == (PADDED, 4)
    assert head[:VOCAB].any()
    assert not head[VOCAB:].any()
    merge_adapter(model, tmp_path / "adapter", tmp_path / "merged")
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "merged"))
    assert after["lm_head.weight"].shape == before["lm_head.weight"].shape
    assert torch.equal(after["lm_head.weight"][VOCAB:], before["lm_head.weight"][VOCAB:])


# -- the sampler ---------------------------------------------------------------------------------------


def test_a_prompt_may_hold_padding_which_scores_none(engine: Engine, model: Path) -> None:
    prompt = [5, VOCAB, 7, 8, PADDED - 1, 9]
    work = {"prompt_logprobs": True, "topk_prompt_logprobs": PADDED, "prompt_alt_tokens_k": 3}
    response = sample(engine, prompt, work)
    expected = reference_logits(model, [prompt])[0].log_softmax(-1)
    assert response.prompt_logprobs is not None
    for at, (token, got) in enumerate(zip(prompt, response.prompt_logprobs, strict=True)):
        if at == 0 or token >= VOCAB:
            assert got is None
        else:
            assert got == pytest.approx(float(expected[at - 1, token]), abs=2e-5)
    assert response.topk_prompt_logprobs is not None
    for row in response.topk_prompt_logprobs[1:]:
        assert row is not None
        assert sorted(token for token, _ in row) == list(range(VOCAB))
        assert np.exp([logprob for _, logprob in row]).sum() == pytest.approx(1.0, abs=1e-5)
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.to_numpy().max() < VOCAB
    assert np.isfinite(response.prompt_alt_tokens.logprobs.to_numpy()).all()


@pytest.mark.parametrize("work", [{}, {"target_prompt_logprobs": np.array([[VOCAB]])}])
def test_ids_beyond_are_refused(engine: Engine, work: dict) -> None:
    work = {key: TensorData.from_numpy(value) for key, value in work.items()}
    prompt, named = (
        ([5, 6], f"target_prompt_logprobs has token {VOCAB}") if work else ([5, PADDED], "token 1")
    )
    with pytest.raises(EngineError, match=named):
        sample(engine, prompt, work)


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_k": PADDED}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_draws_are_of_the_masked_distribution(
    engine: Engine, model: Path, cut: dict, temperature: float
) -> None:
    prompt = [3, 1, 4, 1, 5]
    response = sample(engine, prompt, {"num_samples": 4}, temperature=temperature, **cut)
    for sequence in response.sequences:
        logits = reference_logits(model, [prompt + sequence.tokens])[0][len(prompt) - 1 : -1]
        expected = (logits / (temperature or 1.0)).log_softmax(-1)
        assert sequence.logprobs is not None
        right = expected.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), right, atol=2e-5, rtol=0)


def test_reinforce_cannot_push_mass_to_where_nothing_is_drawn(any_engine: tuple[Engine, float]) -> None:
    """Advantages that are all negative lower what was drawn; what rises must be drawable."""
    engine, tolerance = any_engine
    do(engine.trainer, CreateAdapter("rl", LORA))
    prompt = [3, 1, 4, 1, 5]
    for step in range(8):
        asyncio.run(engine.sampler.publish(f"rl-{step}", do(engine.trainer, ExportAdapter("rl"))))
        work = {"num_samples": 16, "adapter": f"rl-{step}", "topk_sample_logprobs": VOCAB}
        drawn = sample(engine, prompt, work, seed=step).sequences
        for sequence in drawn:
            assert sequence.topk_logprobs_np is not None
            mass = np.exp(sequence.topk_logprobs_np.logprobs.astype(float)).sum(1)
            np.testing.assert_allclose(mass, 1.0, atol=1e-4)
        data = [rollout(prompt, sequence.tokens, sequence.logprobs or []) for sequence in drawn]
        trained(engine, Pass("rl", data, "importance_sampling"))
        do(engine.trainer, OptimStep("rl", AdamParams(learning_rate=0.05)))
    asyncio.run(engine.sampler.publish("rl", do(engine.trainer, ExportAdapter("rl"))))
    for sequence in sample(engine, prompt, {"num_samples": 3, "adapter": "rl"}).sequences:
        ids = prompt + sequence.tokens
        cells = np.broadcast_to(np.arange(VOCAB), (len(ids), VOCAB)).copy()
        datum = Datum(ModelInput.from_ints(ids), {"target_tokens": cells})
        output = trained(engine, Pass("rl", [datum], "cross_entropy", backward=False))
        table = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_allclose(np.exp(table.astype(float)).sum(1), 1.0, atol=1e-4)
        theirs = table[np.arange(len(prompt) - 1, len(ids) - 1), sequence.tokens]
        assert sequence.logprobs is not None
        np.testing.assert_allclose(sequence.logprobs, theirs, rtol=0, atol=tolerance)


def rollout(prompt: list[int], tokens: list[int], logprobs: list[float]) -> Datum:
    ids, before = prompt + tokens, len(prompt) - 1
    inputs = {
        "target_tokens": np.array(ids[1:]),
        "logprobs": np.array([0.0] * before + logprobs, np.float32),
        "advantages": np.array([0.0] * before + [-1.0] * len(tokens), np.float32),
    }
    return Datum(ModelInput.from_ints(ids[:-1]), inputs)


def test_without_a_tokenizer_the_whole_embedding_is_the_vocabulary(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen3")
    trainer = TorchTrainer(load_decoder(path), "m")
    do(trainer, CreateAdapter("run", LORA))
    datum = Datum(ModelInput.from_ints([1, PADDED - 1]), {"target_tokens": np.array([PADDED - 1, VOCAB])})
    (output,) = do(trainer, ForwardBackward((Pass("run", [datum], "cross_entropy"),)))
    logits = reference_model(path)(torch.tensor([[1, PADDED - 1]])).logits[0]
    right = logits.log_softmax(-1)[[0, 1], [PADDED - 1, VOCAB]]
    torch.testing.assert_close(output.loss_fn_outputs[0]["logprobs"].to_torch(), right, atol=1e-5, rtol=0)
