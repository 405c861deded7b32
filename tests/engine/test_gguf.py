"""GGUF files against transformers' own reading of them: a real one, and tiny ones of each architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.forward import hidden, sequences
from tests.engine.gguf_files import TEXTS, byte_bpe_metadata, gguf_tensors, write_gguf
from tests.engine.tiny import reference_logits, tiny_model
from tinkex.engine.torch.gguf import GgufModel, convert_gguf
from tinkex.engine.torch.gguf_tokenizer import write_tokenizer
from tinkex.engine.torch.load import load_decoder
from tinkex.errors import InvalidInputError

pytestmark = pytest.mark.slow


# -- the real model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(smollm2_gguf, tmp_path_factory.mktemp("models") / "smollm2")


def test_smollm2_weights_and_logits_equal_transformers(smollm2_gguf: Path, converted: Path) -> None:
    where = {"pretrained_model_name_or_path": smollm2_gguf.parent, "gguf_file": smollm2_gguf.name}
    reference = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    theirs = reference.state_dict()
    decoder, directory = load_decoder(smollm2_gguf), load_decoder(converted)
    assert decoder.config == directory.config
    assert theirs.keys() - decoder.weights().keys() == {"lm_head.weight"}  # tied
    for name, weight in decoder.weights().items():
        assert torch.equal(weight, theirs[name]), name
        assert torch.equal(weight, directory.weights()[name]), name

    data = sequences((64, 20), vocab=49152)
    with torch.no_grad():
        ours = decoder.logits(hidden(decoder, data)).log_softmax(-1)
        expected = torch.cat([reference(torch.tensor([ids])).logits[0] for ids in data]).log_softmax(-1)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)


def test_smollm2_tokenizer_equals_transformers(smollm2_gguf: Path, converted: Path) -> None:
    ours = AutoTokenizer.from_pretrained(converted)
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == text
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    chat = [{"role": "user", "content": "Hi 12"}, {"role": "assistant", "content": "Yes?"}]
    for prompt in (False, True):
        options = {"tokenize": False, "add_generation_prompt": prompt}
        assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)


def test_smollm2_digits_stand_alone(converted: Path) -> None:
    """What the file's `pre` asks for and transformers misses: blanks before a digit stay together."""
    tokenizer = AutoTokenizer.from_pretrained(converted)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("x  12").input_ids)
    assert pieces == ["x", "ĠĠ", "1", "2"]


def test_smollm2_answers(converted: Path) -> None:
    tokenizer, decoder = AutoTokenizer.from_pretrained(converted), load_decoder(converted)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(decoder.logits(hidden(decoder, [ids])[-1:]).argmax()))
    assert "Paris" in tokenizer.decode(ids[-12:])
    assert decoder.config.eos_ids == (2,)
    assert (decoder.config.vocab_size, decoder.config.max_context) == (49152, 8192)


# -- tiny files of every architecture ------------------------------------------------------------------


ARCHITECTURES = {
    "llama": "smollm2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3",
    "qwen3vl": "qwen3_vl",
    "qwen3vlmoe": "qwen3_vl_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "gpt-oss": "gpt_oss",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_equal_the_model_it_was_made_of(tmp_path: Path, arch: str) -> None:
    # A GGUF does not say gemma3's scale of attention: it is that of its heads.
    own = {"query_pre_attn_scalar": 16} if arch == "gemma3" else {}
    model = tiny_model(tmp_path, ARCHITECTURES[arch], **own)
    decoder, data = load_decoder(write_gguf(tmp_path / "tiny.gguf", arch, model)), sequences(vocab=256)
    ours = decoder.logits(hidden(decoder, data))
    torch.testing.assert_close(ours, torch.cat(reference_logits(model, data)), atol=1e-4, rtol=0)


def test_gpt_oss_with_mxfp4_experts_equals_the_directory_of_these_values(tmp_path: Path) -> None:
    model, kind = tiny_model(tmp_path, "gpt_oss"), gguf.GGMLQuantizationType.MXFP4
    fields = json.loads((model / "config.json").read_text())
    tensors = gguf_tensors(model, "gpt-oss", fields)
    packed = {name: quantize(tensors[name], kind) for name in tensors if name.endswith("_exps.weight")}
    file = write_gguf(
        tmp_path / "tiny.gguf", "gpt-oss", model, {name: (array, kind) for name, array in packed.items()}
    )
    weights = load_file(model / "model.safetensors")
    for layer in range(4):
        down, gate, up = (
            torch.from_numpy(dequantize(packed[f"blk.{layer}.ffn_{part}_exps.weight"], kind)).mT
            for part in ("down", "gate", "up")
        )
        experts = f"model.layers.{layer}.mlp.experts"
        weights[f"{experts}.down_proj"] = down.contiguous()
        weights[f"{experts}.gate_up_proj"] = torch.stack([gate, up], -1).flatten(-2)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    decoder, same, data = load_decoder(file), load_decoder(model), sequences(vocab=256)
    ours = decoder.logits(hidden(decoder, data))
    assert torch.equal(ours, same.logits(hidden(same, data)))
    torch.testing.assert_close(ours, torch.cat(reference_logits(model, data)), atol=1e-4, rtol=0)


def test_blocks_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "glm4_moe")
    extra = {"blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    count = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    decoder = load_decoder(write_gguf(tmp_path / "tiny.gguf", "glm4moe", model, **extra, **count))
    assert decoder.config.layers == 3


BLOCKS = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S "
    "IQ1_S IQ1_M IQ4_NL IQ4_XS BF16 F16"
)


@pytest.mark.parametrize("kind", BLOCKS.split())
def test_every_type_of_block(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tmp_path, "qwen2", hidden_size=256, intermediate_size=512)
    type_ = gguf.GGMLQuantizationType[kind]
    size, length = gguf.GGML_QUANT_SIZES[type_]
    generator = np.random.default_rng(0)
    array = generator.integers(0, 60, (256, 512 // size * length), dtype=np.uint8)  # scales are small numbers
    values = dequantize(array, type_).astype(np.float32)
    file = write_gguf(tmp_path / "a.gguf", "qwen2", model, {"blk.1.ffn_down.weight": (array, type_)})
    weight = load_decoder(file).weights()["model.layers.1.mlp.down_proj.weight"]
    assert np.isfinite(values).all()
    assert values.std() > 0
    assert np.array_equal(weight.numpy(), values)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    metadata: dict[str, Any] = {"qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
        metadata["qwen2.rope.scaling.original_context_length"] = 64
    model = tiny_model(tmp_path, "qwen2", rope_parameters=rope)
    decoder = load_decoder(write_gguf(tmp_path / "tiny.gguf", "qwen2", model, **metadata))
    assert decoder.config.rope == load_decoder(model).config.rope


def llama3_divisors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """The divisors of the rotary frequencies that Llama 3 files carry, from their published definition."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_frequencies(tmp_path: Path) -> None:
    theta = 500000.0
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model(tmp_path, "llama2", rope_parameters=rope)
    divisors = llama3_divisors(32.0, theta, 16)
    decoder = load_decoder(write_gguf(tmp_path / "a.gguf", "llama", model, **{"rope_freqs.weight": divisors}))
    assert decoder.config.rope.inv_freq == pytest.approx(load_decoder(model).config.rope.inv_freq)
    divisors[2] = 7.0
    odd = write_gguf(tmp_path / "b.gguf", "llama", model, **{"rope_freqs.weight": divisors})
    with pytest.raises(InvalidInputError, match=r"rope_freqs\.weight"):
        load_decoder(odd)


def test_padding_ids_are_not_counted(tmp_path: Path) -> None:
    types = {"tokenizer.ggml.token_type": [1] * 300 + [5] * 20, "tokenizer.ggml.eot_token_id": 5}
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", tiny_model(tmp_path, "qwen2"), **types)
    config = load_decoder(file).config
    assert (config.vocab_size, config.padded_vocab, config.eos_ids) == (300, 320, (2, 5))


# -- tokenizers ----------------------------------------------------------------------------------------


def sentencepiece_metadata() -> dict[str, Any]:
    """A small SentencePiece-like vocabulary: marks, bytes, then pieces with falling scores."""
    words = [
        "▁t",
        "he",
        "▁the",
        "in",
        "er",
        "▁a",
        "▁in",
        "an",
        "▁an",
        "and",
        "▁and",
        "ing",
        "▁wor",
        "ld",
        "▁w",
    ]
    words += [
        "or",
        "▁world",
        "▁▁",
        "▁▁▁▁",
        "ll",
        "▁he",
        "llo",
        "▁hello",
        "!!",
        "12",
        "123",
        "é",
        "▁é",
        "日本",
    ]
    marks, byte = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    letters = sorted(
        {char for word in words for char in word} | set("abcdefghijklmnopqrstuvwxyz .,!?0123456789本")
    )
    tokens = [*marks, *byte, *words, *(char for char in letters if char != " ")]
    ranks = [-float(i) for i in range(len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + ranks,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(ranks),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "llama.context_length": 128,
    }


def test_sentencepiece_tokenizer_equals_transformers(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    model = tiny_model(tmp_path, "llama2", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    file = write_gguf(tmp_path / "tiny.gguf", "llama", model, **metadata)
    ours = AutoTokenizer.from_pretrained(convert_gguf(file, tmp_path / "converted"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in [*TEXTS[2:], "hello world", "the   and    an", "123 12 日本語 \n\t"]:
        begin, *ids = ours(text).input_ids
        assert begin == 1  # these files mean it unless they say otherwise; transformers wants it said
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids)
    # a blank is put before every text, also before one that begins with blanks, as Llama 2 was trained
    assert ours.convert_ids_to_tokens(ours("  the").input_ids) == ["<s>", "▁▁", "▁the"]


def tokens_of(tmp_path: Path, pre: str, text: str) -> list[str]:
    model = GgufModel(write_gguf(tmp_path / f"{pre}.gguf", "qwen2", None, **byte_bpe_metadata(pre, "qwen2")))
    directory = tmp_path / pre
    directory.mkdir()
    write_tokenizer(model, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


def test_each_way_of_cutting_text(tmp_path: Path) -> None:
    """One vocabulary cuts numbers and blanks as `tokenizer.ggml.pre` says; Llama 3 begins with its mark."""
    text = "the  1234"
    assert tokens_of(tmp_path, "gpt-2", text) == ["t", "he", "Ġ", "Ġ", "123", "4"]
    assert tokens_of(tmp_path, "smollm", text) == ["t", "he", "ĠĠ", "1", "2", "3", "4"]
    assert tokens_of(tmp_path, "qwen2", text) == ["t", "he", "Ġ", "Ġ", "1", "2", "3", "4"]
    assert tokens_of(tmp_path, "llama-bpe", text) == ["<|begin|>", "t", "he", "Ġ", "Ġ", "123", "4"]


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "gpt-4o"])
def test_byte_tokenizers_equal_transformers(tmp_path: Path, pre: str) -> None:
    metadata = byte_bpe_metadata(pre, "qwen2")
    model = tiny_model(tmp_path, "qwen2", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", model, **metadata)
    ours = Tokenizer.from_file(str(convert_gguf(file, tmp_path / "converted") / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf").backend_tokenizer
    for text in [*TEXTS[:6], "the 123  in\n\n\nit's THE'S", "inTheIN 1234/\n/ कि"]:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
    if pre.startswith("qwen"):  # normalised, as Qwen's own tokenizer is
        assert ours.encode("e\u0301").ids == ours.encode("é").ids


# -- conversion and refusals ---------------------------------------------------------------------------


def test_conversion_in_shards_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.engine.torch.gguf._SHARD_BYTES", 50_000)
    metadata = byte_bpe_metadata("qwen2", "qwen3")
    model = tiny_model(tmp_path, "qwen3", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    file = write_gguf(tmp_path / "tiny.gguf", "qwen3", model, **metadata)
    directory = convert_gguf(file, tmp_path / "converted")
    assert len(list(directory.glob("*.safetensors"))) > 2
    data = sequences((9, 4), vocab=200)
    theirs = torch.cat(reference_logits(directory, data))
    torch.testing.assert_close(theirs, torch.cat(reference_logits(model, data)), atol=1e-5, rtol=0)
    with pytest.raises(InvalidInputError, match="exists already"):
        convert_gguf(file, directory)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    metadata = byte_bpe_metadata("smollm", "qwen2") | {"tokenizer.ggml.pre": "unheard-of"}
    model = tiny_model(tmp_path, "qwen2", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", model, **metadata)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        InvalidInputError, match=r"pre 'unheard-of'.*gpt-2, smollm, llama-bpe, qwen2, qwen35, gpt-4o, glm4"
    ):
        convert_gguf(file, tmp_path / "converted")
    assert sorted(tmp_path.iterdir()) == before


def test_refusals(tmp_path: Path) -> None:
    unknown = write_gguf(tmp_path / "a.gguf", "bert", None, **{"bert.block_count": 1})
    with pytest.raises(InvalidInputError, match=r"'bert'.*llama, qwen2, qwen3, qwen3moe"):
        load_decoder(unknown)
    bare = write_gguf(tmp_path / "b.gguf", "llama", None, **{"llama.block_count": 1})
    with pytest.raises(InvalidInputError, match=r"has no llama\.attention\.head_count"):
        load_decoder(bare)
    (tmp_path / "c.gguf").write_bytes(b"not a model at all, but long enough to look at")
    with pytest.raises(InvalidInputError, match=r"c\.gguf cannot be read as GGUF"):
        load_decoder(tmp_path / "c.gguf")
    model = tiny_model(tmp_path, "llama2")
    mixtral = write_gguf(tmp_path / "d.gguf", "llama", model, **{"llama.expert_count": 8})
    with pytest.raises(InvalidInputError, match="Mixtral"):
        load_decoder(mixtral)
    partial = write_gguf(tmp_path / "e.gguf", "llama", model, **{"llama.rope.dimension_count": 8})
    with pytest.raises(InvalidInputError, match="8 rotated dimensions of 16"):
        load_decoder(partial)
    other = byte_bpe_metadata("smollm", "qwen2") | {"tokenizer.ggml.model": "bert"}
    with pytest.raises(InvalidInputError, match=r"tokenizer 'bert'.*gpt2, llama"):
        write_tokenizer(GgufModel(write_gguf(tmp_path / "f.gguf", "qwen2", None, **other)), tmp_path)
