"""Families with recurrent layers against transformers: gradients, sampling, prefixes, files, merging."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.commands import do
from tests.engine.forward import hidden, sequences
from tests.engine.oracle import randomise
from tests.engine.stepping import finish
from tests.engine.tiny import HYBRIDS, reference_logits, reference_model, tiny_model
from tinkex.engine.protocol import CreateAdapter, EngineError, ForwardBackward, Pass, SampleWork
from tinkex.engine.torch.adapter_files import BaseIdentity, load_adapter, save_adapter
from tinkex.engine.torch.adapters import ALPHA, Adapter
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.kv import KVCache
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.families import model_config
from tinkex.engine.torch.peft_export import export_peft
from tinkex.engine.torch.sequences import PublishedAdapter
from tinkex.engine.torch.states import StatePool
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import LoraConfig, SamplingParams

pytestmark = pytest.mark.slow

LENGTHS = (5, 70, 1, 150)
RANK = 3
CPU = torch.device("cpu")
DELTA, KEY_HEADS = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"), 2  # of Qwen3-Next


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("family"), request.param)


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return load_decoder(model)


@pytest.fixture
def adapter(decoder: Decoder) -> Adapter:
    adapter = Adapter.fresh(LoraConfig(rank=RANK, seed=1), decoder.sites())
    randomise(adapter.flat, 2)
    adapter.flat.mul_(0.5)
    return adapter


def effective(base: torch.nn.Module, named: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """transformers' weights with an adapter's A and B in them, differentiable by both."""
    weights = dict(base.named_parameters(remove_duplicate=False))
    changed: dict[str, Tensor] = {}
    for name, (a, b) in named.items():
        delta, (stem, _, part) = ALPHA / RANK * (b @ a), name.rpartition(".")
        if part in DELTA and (target := f"{stem}.in_proj_qkvz.weight") in weights:
            sizes = {one: len(named[f"{stem}.{one}"][1]) for one in DELTA}
            each = [delta if one == part else torch.zeros(sizes[one], a.shape[1]) for one in DELTA]
            delta = torch.cat([rows.unflatten(0, (KEY_HEADS, -1)) for rows in each], 1).flatten(0, 1)
        elif part in ("in_proj_q", "in_proj_k", "in_proj_v"):
            at = weights[target := f"{stem}.in_proj_qkv.weight"]
            keys = named[f"{stem}.in_proj_q"][1].shape[0]
            first = ("in_proj_q", "in_proj_k", "in_proj_v").index(part) * keys
            delta = torch.nn.functional.pad(delta, (0, 0, first, at.shape[0] - first - delta.shape[0]))
        elif f"{stem}.x_proj" in named and part != "out_proj":
            at, first = weights[target := f"{stem}.in_proj.weight"], len(delta) * (part == "x_proj")
            delta = torch.nn.functional.pad(delta, (0, 0, first, len(at) - first - len(delta)))
        elif stem.endswith(".experts"):
            first = "gate_up_proj" if f"{stem}.w3" in named else "up_proj"
            at = weights[target := f"{stem}.{'down_proj' if part == 'w2' else first}"]
            pad = (0, at.shape[1] - delta.shape[1]) if part == "w1" else (at.shape[1] - delta.shape[1], 0)
            delta = torch.nn.functional.pad(delta, (0, 0, *pad))
        else:
            target = f"{name}.weight"
        changed[target] = changed.get(target, weights.get(target)) + delta
    return changed


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def test_logits_and_gradients_of_every_site_equal_transformers(model: Path, adapter: Adapter) -> None:
    decoder, reference = load_decoder(model), reference_model(model)
    named = adapter.named()
    leaves = {name: (leaf(a), leaf(b)) for name, (a, b) in named.items()}
    changed = effective(reference, leaves)
    data = sequences(LENGTHS)
    with torch.enable_grad():
        lora = LoraBatch([adapter] * len(data), LENGTHS, train=True)
        h_TD = hidden(decoder, data, lora)
        logits = decoder.logits(h_TD, lora)
        call, options = torch.func.functional_call, {"use_cache": False}
        given = [(torch.tensor([ids]),) for ids in data]
        ones = [call(reference, changed, ids, options, tie_weights=False).logits[0] for ids in given]
    want = torch.cat(ones)
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)
    to = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    logits.backward(to)
    want.backward(to)
    assert adapter.grad is not None
    got = adapter.named(adapter.grad)
    assert got.keys() == leaves.keys()
    for name, pair in got.items():
        for mine, other in zip(pair, leaves[name], strict=True):
            assert other.grad is not None, name
            assert (scale := other.grad.norm()) > 0, name
            assert (mine - other.grad).norm() <= 1e-3 * scale, name


@pytest.mark.parametrize("family", HYBRIDS)
def test_we_round_no_more_than_transformers_with_the_epsilon_of_released_models(
    family: str, tmp_path: Path
) -> None:
    """It makes much of rounding: there, both of us are compared with transformers in double precision."""
    path, data = tiny_model(tmp_path, family, rms_norm_eps=1e-6, layer_norm_epsilon=1e-6), sequences(LENGTHS)
    theirs, decoder = torch.cat(reference_logits(path, data)), load_decoder(path)
    exact = reference_model(path).double()
    exact.set_experts_implementation("eager")  # the grouped product takes no double precision
    with torch.no_grad():
        ours = decoder.logits(hidden(decoder, data))
        want = torch.cat([exact(torch.tensor([ids]), use_cache=False).logits[0] for ids in data])
    our_rms, their_rms = ((one - want).square().mean().sqrt() for one in (ours, theirs))
    assert our_rms <= 3 * their_rms < 1e-2
    assert (ours - want).abs().max() <= 6 * (theirs - want).abs().max()  # a single one, as the CPU rounds


def test_recomputed_layers_give_the_same_gradients(decoder: Decoder, adapter: Adapter) -> None:
    data, grads = sequences(LENGTHS), []
    for checkpoint in (False, True):
        lora = LoraBatch([adapter] * len(data), LENGTHS, train=True)
        hidden(decoder, data, lora, checkpoint=checkpoint).sum().backward()
        grad = adapter.take_grad()
        assert grad is not None
        grads.append(grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-3)


# -- sampling ------------------------------------------------------------------------------------------


def new_batch(decoder: Decoder, **limits: int) -> ContinuousBatch:
    c = decoder.config
    cache = KVCache(c.kv_shapes, 100, CPU, torch.float32)
    states = StatePool(c.state_shapes, 12, CPU) if c.state_shapes else None
    bounds = StepLimits(**{"context": c.max_context, "sequences": 8, **limits})
    return ContinuousBatch(decoder, cache, bounds, states=states)


def sample(
    batch: ContinuousBatch, ids: np.ndarray, adapter: Adapter | None, samples: int = 1, **params: Any
) -> SampleResponse:
    asked = SamplingParams(**{"max_tokens": 20, "stop": [], "seed": 7, **params})
    work, future = SampleWork(ids, asked, num_samples=samples), Future()
    published = PublishedAdapter("one", adapter, b"one") if adapter is not None else None
    batch.submit(work, batch.check_work(work), published, future)
    finish(batch)
    return future.result(timeout=0)


def trained_logprobs(decoder: Decoder, adapter: Adapter, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
    trainer = TorchTrainer(decoder, "tiny")
    do(trainer, CreateAdapter("run", adapter.lora))
    trainer.adapters["run"].flat.copy_(adapter.flat)
    text = np.concatenate([prompt, np.array(tokens, np.int32)])
    datum = Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": text[1:].astype(np.int64)})
    (out,) = do(trainer, ForwardBackward((Pass("run", [datum], "cross_entropy", backward=False),)))
    return out.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]


@pytest.mark.parametrize("length", [1, 16, 83, 150])
def test_sampled_logprobs_equal_trained_ones(decoder: Decoder, adapter: Adapter, length: int) -> None:
    prompt = np.random.default_rng(length).integers(4, 320, length).astype(np.int32)
    batch = new_batch(decoder, prefill_alone=64)
    response = sample(batch, prompt, adapter, 3)
    assert len({tuple(sequence.tokens) for sequence in response.sequences}) == 3
    for sequence in response.sequences:
        wanted = trained_logprobs(decoder, adapter, prompt, sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs_np, wanted, atol=1e-4)
    again = sample(batch, prompt, adapter, 3)  # from the prefix cache
    assert again.prompt_cache_hit_tokens == (length - 1) // 16 * 16
    for one, other in zip(response.sequences, again.sequences, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs_np, other.logprobs_np, atol=1e-5)


def test_greedy_equals_transformers(model: Path, decoder: Decoder) -> None:
    prompt = np.random.default_rng(0).integers(4, 320, 37).astype(np.int32)
    (sequence,) = sample(new_batch(decoder), prompt, None, temperature=0.0).sequences
    given = torch.tensor(prompt[None].astype(np.int64))
    out = reference_model(model).generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert sequence.tokens == out[0, 37:].tolist()


# -- files ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(decoder: Decoder, adapter: Adapter, tmp_path: Path) -> Path:
    save_adapter(adapter, tmp_path / "adapter", BaseIdentity.of(decoder, "tiny"), optimizer=True)
    return tmp_path / "adapter"


def adapted_logits(decoder: Decoder, adapter: Adapter) -> list[Tensor]:
    data = sequences(LENGTHS)
    with torch.no_grad():
        lora = LoraBatch([adapter] * len(data), LENGTHS)
        return list(decoder.logits(hidden(decoder, data, lora), lora).split(LENGTHS))


def test_adapters_are_saved_and_loaded_exactly(decoder: Decoder, adapter: Adapter, saved: Path) -> None:
    base = BaseIdentity.of(decoder, "tiny")
    loaded = load_adapter(saved, decoder, base, optimizer=True)
    assert torch.equal(loaded.flat, adapter.flat)
    (saved / "tinkex.json").unlink()
    (saved / "SHA256SUMS").unlink()
    assert torch.equal(load_adapter(saved, decoder, base).flat, adapter.flat)


def test_peft_loads_the_export(
    model: Path, decoder: Decoder, adapter: Adapter, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It refuses any adapter of Nemotron's out_proj; what it makes of one is right.
    monkeypatch.setattr("peft.tuners.tuners_utils._check_lora_target_modules_mamba", lambda *args: None)
    export_peft(saved, saved.parent / "peft", base_dir=model)
    with_peft = peft.PeftModel.from_pretrained(reference_model(model), saved.parent / "peft")
    for ids, mine in zip(sequences(LENGTHS), adapted_logits(decoder, adapter), strict=True):
        with torch.no_grad():
            want = with_peft(torch.tensor([ids]), use_cache=False).logits[0]
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("flags", [{}, {"train_attn": False}, {"train_mlp": False}])
def test_peft_loads_every_kind_of_module_of_qwen3_5_moe(
    tmp_path: Path, flags: dict[str, bool], sees: bool
) -> None:
    """Attention, delta nets, experts and shared experts: all in the model, none in the tower beside it."""
    path = tiny_model(tmp_path, "qwen3_5_moe that sees" if sees else "qwen3_5_moe")
    decoder = load_decoder(path)
    adapter = Adapter.fresh(LoraConfig(rank=RANK, seed=1, **flags), decoder.sites())
    randomise(adapter.flat, 2)
    save_adapter(adapter, tmp_path / "adapter", BaseIdentity.of(decoder, "tiny"))
    export_peft(tmp_path / "adapter", tmp_path / "peft", nested=sees)
    model: Any = peft.PeftModel.from_pretrained(reference_model(path), tmp_path / "peft")
    wrapped = [name.replace(".default", "") for name, _ in model.named_parameters() if ".lora_" in name]
    assert set(wrapped) == load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
    found = {
        part
        for name in wrapped
        for part in ("q_proj", "in_proj_qkv", ".experts.", "shared_expert.")
        if part in name
    }
    assert len(found) == 2 + 2 * (not flags)
    (ids,) = sequences((70,))
    lora = LoraBatch([adapter], [70])
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0]
        mine = decoder.logits(hidden(decoder, [ids], lora), lora)
    torch.testing.assert_close(mine, want, rtol=0, atol=1e-4)


def test_merged_equals_adapted(model: Path, decoder: Decoder, adapter: Adapter, saved: Path) -> None:
    merge_adapter(model, saved, saved.parent / "merged")
    merged = reference_logits(saved.parent / "merged", sequences(LENGTHS))
    for mine, want in zip(adapted_logits(decoder, adapter), merged, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["granite4", "qwen3_next"])
def test_peft_export_of_parts_of_a_matrix_asks_for_the_base_model(tmp_path: Path, family: str) -> None:
    decoder = load_decoder(tiny_model(tmp_path, family))
    adapter = Adapter.fresh(LoraConfig(rank=RANK, seed=1), decoder.sites())
    save_adapter(adapter, tmp_path / "adapter", BaseIdentity.of(decoder, "tiny"))
    with pytest.raises(EngineError, match="base_dir"):
        export_peft(tmp_path / "adapter", tmp_path / "peft")


def test_granite_4_is_read_by_the_names_of_released_files(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "granite4")
    fields = json.loads((path / "config.json").read_text())
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    types = [older[kind] for kind in fields["layer_types"]]
    written = fields | {"layer_types": types, "position_embedding_type": "nope", "mamba_d_head": "auto"}
    written["time_step_limit"] = [0.0, float("inf")]
    assert model_config(json.loads(json.dumps(written))) == model_config(fields)
    assert any(".block_sparse_moe.input_linear." in name for name in load_file(path / "model.safetensors"))


def test_nemotron_3_is_read_by_the_names_of_released_files(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "nemotron3")
    names = load_file(path / "model.safetensors").keys()
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight"} <= names
    assert "backbone.layers.1.mixer.experts.0.up_proj.weight" in names
    fields = json.loads((path / "config.json").read_text())
    want = model_config(fields)
    released = fields | {"hybrid_override_pattern": "ME*-ME", "time_step_limit": [0.0, float("inf")]}
    del released["layers_block_type"]
    assert model_config(released) == want
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    types = [older.get(kind, kind) for kind in fields["layers_block_type"]]
    assert model_config(fields | {"layers_block_type": types}) == want
    for wrong in ({"hybrid_override_pattern": "MX"}, {"mlp_hidden_act": "silu"}):
        with pytest.raises(InvalidInputError, match=r"X|mlp_hidden_act"):
            model_config(released | wrong)


def test_stacked_experts_without_a_gate_are_read(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "nemotron3 latent")
    weights, data = load_file(path / "model.safetensors"), sequences((5, 40))
    with torch.no_grad():
        want = (decoder := load_decoder(path)).logits(hidden(decoder, data))
    for stem in {name.split(".experts.")[0] for name in weights if ".experts." in name}:
        for part in ("up_proj", "down_proj"):
            each = [weights.pop(f"{stem}.experts.{i}.{part}.weight") for i in range(6)]
            weights[f"{stem}.experts.{part}"] = torch.stack(each)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        got = (decoder := load_decoder(path)).logits(hidden(decoder, data))
    assert torch.equal(got, want)


def test_archives_with_an_empty_w3_are_read_exported_and_merged(tmp_path: Path) -> None:
    """As hosted Tinker writes them: experts without a gate, and none of our own facts."""
    path = tiny_model(tmp_path, "nemotron3")
    decoder = load_decoder(path)
    adapter = Adapter.fresh(LoraConfig(rank=RANK, seed=1), decoder.sites())
    randomise(adapter.flat, 2)
    base, saved = BaseIdentity.of(decoder, "tiny"), tmp_path / "adapter"
    save_adapter(adapter, saved, base)
    merge_adapter(path, saved, tmp_path / "merged")
    export_peft(saved, tmp_path / "peft", base_dir=path)
    tensors = load_file(saved / "adapter_model.safetensors")
    for name in [name for name in tensors if ".experts.w1." in name]:
        tensors[name.replace(".w1.", ".w3.")] = torch.zeros(0)
    save_file(tensors, saved / "adapter_model.safetensors")
    for ours in ("tinkex.json", "SHA256SUMS"):
        (saved / ours).unlink()
    loaded = load_adapter(saved, decoder, base)
    assert torch.equal(loaded.flat, adapter.flat)
    merge_adapter(path, saved, tmp_path / "merged again")
    export_peft(saved, tmp_path / "peft again", base_dir=path)
    for one, file in (("merged", "model.safetensors"), ("peft", "adapter_model.safetensors")):
        first, again = (load_file(tmp_path / name / file) for name in (one, f"{one} again"))
        assert first.keys() == again.keys()
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("flag", ["train_attn", "train_mlp"])
def test_what_an_archive_trains_is_told_by_its_names(tmp_path: Path, flag: str) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "nemotron3"))
    flags = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False) | {flag: True}
    adapter, base = (
        Adapter.fresh(LoraConfig(RANK, seed=1, **flags), decoder.sites()),
        BaseIdentity.of(decoder, "t"),
    )
    save_adapter(adapter, tmp_path / "adapter", base)
    for ours in ("tinkex.json", "SHA256SUMS"):
        (tmp_path / "adapter" / ours).unlink()
    loaded = load_adapter(tmp_path / "adapter", decoder, base)
    assert torch.equal(loaded.flat, adapter.flat)


def test_qwen3_5_loads_from_a_model_that_also_sees(tmp_path: Path) -> None:
    """Nested fields, names under `model.language_model.`, a tower and extra heads beside them."""
    path = tiny_model(tmp_path, "qwen3_5")
    data, want = sequences(LENGTHS), reference_logits(path, sequences(LENGTHS))
    weights = load_file(path / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): t for name, t in weights.items()}
    nested |= {"model.visual.blocks.0.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file(nested, path / "model.safetensors", {"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "vision_config": {"depth": 1}, "tie_word_embeddings": False}
    outer |= {"architectures": ["Qwen3_5ForConditionalGeneration"], "eos_token_id": 2}
    (path / "config.json").write_text(json.dumps({**outer, "text_config": fields}))
    decoder = load_decoder(path)
    with torch.no_grad():
        got = decoder.logits(hidden(decoder, data)).split(LENGTHS)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
