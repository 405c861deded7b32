"""GGUF files of base and adapter: llama.cpp draws what transformers draws, and we read them back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.commands import do
from tests.engine.gguf_files import TEXTS
from tests.engine.llama_cpp import complete, drawn, merging_tokenizer
from tests.engine.oracle import randomise
from tests.engine.tiny import reference_model, tiny_model
from tinkex.engine.protocol import CreateAdapter, EngineError, SaveAdapter
from tinkex.engine.torch import tensor_stream
from tinkex.engine.torch.export_formats import write_export
from tinkex.engine.torch.gguf import convert_gguf
from tinkex.engine.torch.gguf_export import MIXTURES, export_gguf
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow
IDS = [5, 9, 200, 31, 7, 7, 120, 64, 3]
ROUTED = re.compile("moe|mixtral|gpt_oss")
# What llama.cpp takes for granted of an architecture, where our tiny models have something else.
FITTING: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3": {},
    "smollm2": {},
    "mistral": {"sliding_window": None},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_vl": {},
    "qwen3_moe": {},
    "qwen3_5": {"linear_value_head_dim": 8, "linear_key_head_dim": 8},
    "qwen3_5_moe": {"linear_value_head_dim": 8, "linear_key_head_dim": 8},
    "gpt_oss": {},
    "glm4": {},
    "glm4_moe": {},
    "gemma3": {"query_pre_attn_scalar": 16, "vocab_size": 320},
    "granite3": {},
    "phi4": {},
    "smollm3": {"no_rope_layer_interval": 4},
    "olmoe": {"num_key_value_heads": 4},
    # Two experts of two: in halves, a router that must choose may choose others.
    "qwen3_next": {
        "linear_value_head_dim": 16, "mlp_only_layers": [], "num_experts": 2, "num_experts_per_tok": 2,
    },
    "deepseek_v3": {},
    "kimi_k25": {},
    "glm4_moe_lite": {},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "gemma4": {},
    "gemma4 E": {},
    "gemma4 with experts": {},
    "granite4": {"mamba_n_groups": 1, "num_local_experts": 2},
    "granite4 dense": {"mamba_proj_bias": False, "position_embedding_type": "nope"},
    "nemotron3": {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"]},
    "olmo3": {},
    "ministral3": {"sliding_window": None},
}  # fmt: skip


def adapter_for(path: Path, out: Path, rank: int = 4) -> Path:
    trainer = TorchTrainer(load_decoder(path), str(path))
    do(trainer, CreateAdapter("run", LoraConfig(rank, seed=1)))
    randomise(trainer.adapter("run").flat, seed=1)
    do(trainer, SaveAdapter("run", str(out)))
    return out


def greedy(model: Any, count: int, prompt: list[int] = IDS) -> tuple[list[int], list[float]]:
    """Tokens and their logprobs, up to where the best two are too near for halves to tell them apart."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1).topk(2)
        if best.values[0] - best.values[1] < 0.02:
            break
        ids.append(int(best.indices[0]))
        logprobs.append(float(best.values[0]))
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("family", FITTING)
def test_llama_cpp_draws_what_transformers_draws(tmp_path: Path, family: str) -> None:
    """The adapter merged in: transformers computes with the merged directory, llama.cpp with the file."""
    path = merging_tokenizer(tiny_model(tmp_path, family, **FITTING[family]))
    adapter = adapter_for(path, tmp_path / "adapter")
    write_export(adapter, path, tmp_path / "model.gguf", format="gguf", dtype="float32")
    write_export(adapter, path, tmp_path / "merged", format="merged")
    prompts, model, compared = [IDS, IDS[::-1], [5], [200], [31, 7]], reference_model(tmp_path / "merged"), 0
    most = 1 if ROUTED.search(family) else 4  # in halves, another expert may be chosen sooner or later
    answers = complete(tmp_path / "model.gguf", *prompts, count=most)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logprobs = drawn(answer)  # up to the end of the text
        expected, theirs = greedy(model, most, prompt)
        count = min(len(tokens), len(expected))
        assert tokens[:count] == expected[:count]
        # llama.cpp computes in halves, and the norms of our tiny Qwen3.5 amplify rounding
        np.testing.assert_allclose(logprobs[:count], theirs[:count], atol=0.5 if "qwen3_5" in family else 0.1)
        compared += count
    assert compared >= 3


@pytest.mark.parametrize(
    "family", ["llama2", "smollm2", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "glm4_moe", "gemma3"]
)
def test_our_own_reader_finds_the_merged_weights(tmp_path: Path, family: str) -> None:
    path = merging_tokenizer(tiny_model(tmp_path, family, **FITTING[family]))
    adapter = adapter_for(path, tmp_path / "adapter")
    export_gguf(path, adapter, tmp_path / "model.gguf")
    write_export(adapter, path, tmp_path / "merged", format="merged")
    ours = load_decoder(tmp_path / "model.gguf").weights()
    theirs = load_decoder(tmp_path / "merged").weights()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("quantize", MIXTURES)
def test_every_mixture_is_written_and_read(tmp_path: Path, quantize: str) -> None:
    """llama.cpp's logprobs of a wide enough model, near those of the exact weights."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = merging_tokenizer(tiny_model(tmp_path, "llama2", **shape))
    export_gguf(path, None, tmp_path / "model.gguf", quantize=quantize)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    most, important, _ = MIXTURES[quantize]
    assert {kinds["blk.0.ffn_up.weight"], kinds["output.weight"]} == {most, important}
    assert kinds["output_norm.weight"] == "F32"
    if quantize not in ("q8_0", "q5_k_m", "q4_k_m"):  # the other types are the gguf package's, or in these
        return
    (answer,) = complete(tmp_path / "model.gguf", IDS, count=1)
    tokens, logprobs = drawn(answer)
    with torch.no_grad():
        logits = reference_model(path)(torch.tensor([IDS]), use_cache=False).logits[0, -1].log_softmax(-1)
    assert abs(logprobs[0] - float(logits[tokens[0]])) < (0.15 if quantize == "q8_0" else 1.0)


def test_rows_that_no_block_divides_get_a_simpler_type(tmp_path: Path) -> None:
    path = merging_tokenizer(tiny_model(tmp_path, "llama2", hidden_size=96, intermediate_size=80))
    export_gguf(path, None, tmp_path / "model.gguf", quantize="q4_k_m")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert (kinds["blk.0.attn_q.weight"], kinds["output.weight"]) == ("Q5_0", "Q8_0")
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert complete(tmp_path / "model.gguf", IDS, count=1)


def test_texts_have_the_same_tokens_in_llama_cpp(tmp_path: Path) -> None:
    """How many tokens llama.cpp counts in texts, and what we read of the file again."""
    path = merging_tokenizer(tiny_model(tmp_path, "qwen2"))
    export_gguf(path, None, tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "back")
    from transformers import AutoTokenizer

    theirs, ours = (AutoTokenizer.from_pretrained(place) for place in (path, tmp_path / "back"))
    texts = [text for text in TEXTS if text.isascii() and text.strip()]
    for text, answer in zip(texts, complete(tmp_path / "model.gguf", *texts, count=1), strict=True):
        assert ours(text).input_ids == theirs(text).input_ids
        assert answer["usage"]["prompt_tokens"] == len(theirs(text).input_ids)
    chat = [{"role": "user", "content": "hello there"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert ours.eos_token == theirs.eos_token == "<|im_end|>"


def test_a_stopped_export_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "_MARK_BYTES", 1)
    path = merging_tokenizer(tiny_model(tmp_path, "llama3"))
    adapter = adapter_for(path, tmp_path / "adapter")
    export_gguf(path, adapter, tmp_path / "whole.gguf", quantize="q8_0")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_gguf(path, adapter, tmp_path / "out.gguf", quantize="q8_0", progress=stop)
    assert not (tmp_path / "out.gguf").exists()
    seen: list[int] = []
    plain = tensor_stream.Stored.read
    monkeypatch.setattr(tensor_stream.Stored, "read", lambda s: (seen.append(1), plain(s))[1])
    export_gguf(path, adapter, tmp_path / "out.gguf", quantize="q8_0")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert len(seen) < 40  # of about fifty tensors and the adapter's
    assert not list(tmp_path.glob(".out*"))


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    def told(family: str, **overrides: Any) -> str:
        path = merging_tokenizer(tiny_model(tmp_path / family, family, **overrides))
        with pytest.raises(EngineError) as caught:
            export_gguf(path, None, tmp_path / "out.gguf")
        assert caught.value.category == "user"
        return caught.value.message

    assert "sliding window" in told("mistral")
    assert "indexer" in told("glm_moe_dsa")
    assert "for 8192, and this model has 12" in told("llama4")
    assert "in every layer that has an MLP" in told("nemotron3")
    assert "each group of a Mamba layer" in told("granite4")
    assert "each fourth" in told("smollm3")
    path = tiny_model(tmp_path / "bare", "qwen2")
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        export_gguf(path, None, tmp_path / "out.gguf")
    with pytest.raises(EngineError, match="q4_k_m"):
        export_gguf(path, None, tmp_path / "out.gguf", quantize="q3")


def test_peft_and_llama_cpp_agree(tmp_path: Path) -> None:
    path = merging_tokenizer(tiny_model(tmp_path, "qwen3"))
    adapter = adapter_for(path, tmp_path / "adapter")
    write_export(adapter, None, tmp_path / "peft", format="peft")
    write_export(adapter, path, tmp_path / "model.gguf", format="gguf")
    model = peft.PeftModel.from_pretrained(reference_model(path), str(tmp_path / "peft"))
    (answer,) = complete(tmp_path / "model.gguf", IDS, count=6)
    expected = greedy(model, 6)[0]
    assert len(expected) > 1
    assert drawn(answer)[0][: len(expected)] == expected


def test_a_real_model_answers_in_llama_cpp(tmp_path: Path, smollm2_gguf: Path) -> None:
    """SmolLM2 with an adapter, and alone in 8 and in mixed 4 bits: the greedy tokens of transformers."""
    from transformers import AutoTokenizer

    path = convert_gguf(smollm2_gguf, tmp_path / "base")
    adapter = adapter_for(path, tmp_path / "adapter", rank=1)
    weights = adapter / "adapter_model.safetensors"
    save_file({name: 0.02 * tensor for name, tensor in load_file(weights).items()}, weights)
    (adapter / "SHA256SUMS").unlink()
    write_export(adapter, path, tmp_path / "merged", format="merged")
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for quantize, place, file in (
        (None, tmp_path / "merged", tmp_path / "adapted.gguf"),
        ("q8_0", path, tmp_path / "eight.gguf"),
        ("q4_k_m", path, tmp_path / "four.gguf"),
    ):
        export_gguf(path, adapter if place != path else None, file, quantize=quantize)
        with torch.no_grad():
            made = reference_model(place).generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        made = made[0][len(ids) :].tolist()
        (answer,) = complete(file, text, count=8)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        tokens = drawn(answer)[0]
        assert tokens[:6] == made[:6], (quantize, tokenizer.decode(tokens), tokenizer.decode(made))
