"""Adapters on disk: what PEFT, transformers and we ourselves make of the files, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.commands import do
from tests.engine.oracle import PeftOracle, make_datum, older_layout, randomise
from tests.engine.tiny import reference_logits, reference_model, tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    EngineError,
    ExportAdapter,
    ForwardBackward,
    LoadAdapter,
    OptimStep,
    Pass,
    SaveAdapter,
)
from tinkex.engine.torch import adapter_files
from tinkex.engine.torch.adapter_files import CONFIG, FACTS, OPTIMIZER, WEIGHTS
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.lora import Adapter, LoraBatch
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.peft_export import export_peft
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.store import CHECKSUMS
from tinkex.types.params import AdamParams, LoraConfig

pytestmark = pytest.mark.slow

IDS = [5, 9, 200, 31, 7, 7, 120, 64, 3]
ADAM = AdamParams(learning_rate=3e-3, weight_decay=0.01)


def make_trainer(path: Path, lora: LoraConfig | None = None, run: str = "run") -> TorchTrainer:
    """A trainer with one run whose adapter does something."""
    trainer = TorchTrainer(load_decoder(path), str(path))
    do(trainer, CreateAdapter(run, lora or LoraConfig(4, seed=1)))
    randomise(trainer.adapter(run).flat, seed=1)
    return trainer


def train(trainer: TorchTrainer, steps: range, run: str = "run") -> None:
    for step in steps:
        rng = np.random.default_rng(step)
        batch = [make_datum(rng, 12, 320), make_datum(rng, 20, 320)]
        do(trainer, ForwardBackward((Pass(run, batch, "cross_entropy"),)))
        do(trainer, OptimStep(run, ADAM))


def our_logits(trainer: TorchTrainer, adapter: Adapter | None) -> torch.Tensor:
    lora = LoraBatch([adapter], [len(IDS)])
    attend = PackedAttend([len(IDS)], trainer.decoder.config.windows)
    with torch.no_grad():
        h = trainer.decoder(torch.tensor(IDS), torch.arange(len(IDS)), attend, lora)
        return trainer.decoder.logits(h, lora)


def refused(trainer: TorchTrainer, directory: Path, run: str = "new", *, optimizer: bool = False) -> str:
    with pytest.raises(EngineError) as caught:
        do(trainer, LoadAdapter(run, directory, optimizer))
    assert caught.value.category == "user"
    return caught.value.message


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[TorchTrainer, Path]:
    """A trained run, saved with its optimizer's state."""
    trainer = make_trainer(tiny_model(tmp_path, "llama3"))
    train(trainer, range(2))
    do(trainer, SaveAdapter("run", tmp_path / "adapter", optimizer=True))
    return trainer, tmp_path / "adapter"


# -- other people's loaders ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama3", {}),
        ("smollm2", {}),  # tied
        ("smollm2", {"train_unembed": False}),
        ("qwen2", {"train_mlp": False}),
        ("qwen3", {"train_attn": False}),
    ],
)
def test_peft_loads_what_we_write(tmp_path: Path, family: str, flags: dict[str, bool]) -> None:
    path = tiny_model(tmp_path, family)
    trainer = make_trainer(path, LoraConfig(4, seed=1, **flags))
    do(trainer, SaveAdapter("run", tmp_path / "adapter"))
    model = peft.PeftModel.from_pretrained(reference_model(path), str(tmp_path / "adapter"))
    with torch.no_grad():
        theirs = model(torch.tensor([IDS]), use_cache=False).logits[0]
    ours = our_logits(trainer, trainer.adapter("run"))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (ours - our_logits(trainer, None)).abs().max() > 0.05  # the adapter does something


def test_the_config_has_what_peft_and_vllm_read(saved: tuple[TorchTrainer, Path]) -> None:
    trainer, directory = saved
    config = json.loads((directory / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": trainer.base.name,
        "r": 4,
        "lora_alpha": 32,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    assert config | expected == config
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    )
    tensors = load_file(directory / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 64)
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (320, 4)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_flags_leave_no_other_keys(tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_model(tmp_path, "qwen3"), LoraConfig(2, seed=1, train_mlp=False, train_unembed=False)
    )
    do(trainer, SaveAdapter("run", tmp_path / "adapter"))
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".self_attn." in name for name in names)


def test_experts_are_written_as_three_dimensional_tensors(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model(tmp_path, "qwen3_moe"))
    do(trainer, SaveAdapter("run", tmp_path / "adapter"))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    experts = "base_model.model.model.layers.1.mlp.experts"
    shapes = {
        key: tuple(tensors[f"{experts}.{key}.weight"].shape)
        for key in ("w1.lora_A", "w1.lora_B", "w2.lora_A", "w2.lora_B", "w3.lora_A")
    }
    assert shapes == {
        "w1.lora_A": (1, 4, 64),
        "w1.lora_B": (6, 32, 4),
        "w2.lora_A": (6, 4, 32),
        "w2.lora_B": (1, 64, 4),
        "w3.lora_A": (1, 4, 64),
    }
    do(trainer, LoadAdapter("copy", tmp_path / "adapter"))
    assert torch.equal(trainer.adapter("copy").flat, trainer.adapter("run").flat)


@pytest.mark.parametrize("older", [False, True])
def test_peft_loads_an_exported_adapter_of_experts(tmp_path: Path, older: bool) -> None:
    path = tiny_model(tmp_path, "qwen3_moe")
    trainer = make_trainer(path)
    do(trainer, SaveAdapter("run", tmp_path / "adapter"))
    if older:
        older_layout(tmp_path / "adapter")
    do(trainer, LoadAdapter("run", tmp_path / "adapter"))
    export_peft(tmp_path / "adapter", tmp_path / "exported")
    model = peft.PeftModel.from_pretrained(reference_model(path), str(tmp_path / "exported"))
    with torch.no_grad():
        theirs = model(torch.tensor([IDS]), use_cache=False).logits[0]
    ours = our_logits(trainer, trainer.adapter("run"))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (ours - our_logits(trainer, None)).abs().max() > 0.05


def test_adapters_of_both_expert_layouts_resume_exactly(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model(tmp_path, "qwen3_moe"))
    do(trainer, SaveAdapter("run", tmp_path / "older"))
    older_layout(tmp_path / "older")
    do(trainer, LoadAdapter("older", tmp_path / "older"))
    for run in ("run", "older"):
        train(trainer, range(2), run)
        do(trainer, SaveAdapter(run, tmp_path / f"{run}-saved", optimizer=True))
        do(trainer, LoadAdapter(f"{run} again", tmp_path / f"{run}-saved", optimizer=True))
        for each in (run, f"{run} again"):
            train(trainer, range(2, 3), each)
        assert torch.equal(trainer.adapter(f"{run} again").flat, trainer.adapter(run).flat)
        export = do(trainer, ExportAdapter(run))
        moved = trainer.published(pickle.loads(pickle.dumps(export)))
        torch.testing.assert_close(our_logits(trainer, moved), our_logits(trainer, trainer.adapter(run)))
    assert len(trainer.adapter("older").flat) > len(trainer.adapter("run").flat)


def test_a_directory_of_peft_itself_is_loaded(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen2")
    oracle = PeftOracle(path, 3, unembed=False)
    with torch.no_grad():
        for seed, parameter in enumerate(oracle.parameters.values()):
            randomise(parameter, seed)
    oracle.model.save_pretrained(tmp_path / "theirs")
    trainer = make_trainer(path)
    assert do(trainer, LoadAdapter("new", tmp_path / "theirs")) == LoraConfig(3, train_unembed=False)
    with torch.no_grad():
        theirs = oracle.model(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(our_logits(trainer, trainer.adapter("new")), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "smollm2"])
def test_a_directory_of_peft_with_an_adapted_head_is_loaded(tmp_path: Path, family: str) -> None:
    """PEFT writes the head's own weights beside its adapter."""
    path = tiny_model(tmp_path, family)
    trainer = make_trainer(path)
    do(trainer, SaveAdapter("run", tmp_path / "ours"))
    peft.PeftModel.from_pretrained(reference_model(path), tmp_path / "ours").save_pretrained(
        tmp_path / "theirs"
    )
    weights = tmp_path / "theirs" / "adapter_model.safetensors"
    assert "base_model.model.lm_head.base_layer.weight" in load_file(weights)
    do(trainer, LoadAdapter("new", tmp_path / "theirs"))
    assert torch.equal(trainer.adapter("new").flat, trainer.adapter("run").flat)
    other = {name: t + 1 if "base_layer" in name else t for name, t in load_file(weights).items()}
    save_file(other, weights)
    assert "a whole matrix lm_head.weight" in refused(trainer, tmp_path / "theirs")


# -- save and load -------------------------------------------------------------------------------------


def test_resuming_with_the_optimizer_is_exact(saved: tuple[TorchTrainer, Path]) -> None:
    trainer, directory = saved
    do(trainer, LoadAdapter("resumed", directory, optimizer=True))
    do(trainer, LoadAdapter("weights only", directory))
    assert trainer.adapter("resumed").step == 2
    assert trainer.adapter("weights only").step == 0
    for run in ("run", "resumed", "weights only"):
        train(trainer, range(2, 4), run)
    assert torch.equal(trainer.adapter("resumed").flat, trainer.adapter("run").flat)
    assert not torch.equal(trainer.adapter("weights only").flat, trainer.adapter("run").flat)


def test_loading_replaces_the_adapter_and_clears_gradients(saved: tuple[TorchTrainer, Path]) -> None:
    trainer, directory = saved
    before = trainer.adapter("run").flat.clone()
    train(trainer, range(2, 3))
    do(
        trainer,
        ForwardBackward((Pass("run", [make_datum(np.random.default_rng(0), 9, 320)], "cross_entropy"),)),
    )
    do(trainer, LoadAdapter("run", directory, optimizer=True))
    assert torch.equal(trainer.adapter("run").flat, before)
    assert do(trainer, OptimStep("run", ADAM))["skipped"] == 1.0


def test_a_run_that_never_stepped_can_be_resumed(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model(tmp_path, "llama3"))
    do(trainer, SaveAdapter("run", tmp_path / "adapter", optimizer=True))
    do(trainer, LoadAdapter("resumed", tmp_path / "adapter", optimizer=True))
    for run in ("run", "resumed"):
        train(trainer, range(2), run)
    assert torch.equal(trainer.adapter("resumed").flat, trainer.adapter("run").flat)


def test_what_does_not_fit_the_run(saved: tuple[TorchTrainer, Path]) -> None:
    trainer, directory = saved
    for name, lora in {
        "rank": LoraConfig(8),
        "train_mlp": LoraConfig(4, train_mlp=False),
        "train_attn": LoraConfig(4, train_attn=False),
        "train_unembed": LoraConfig(4, train_unembed=False),
    }.items():
        do(trainer, CreateAdapter(name, lora))
        before = trainer.adapter(name).flat.clone()
        message = refused(trainer, directory, name)
        assert name in message
        assert str(getattr(lora, name)) in message
        assert torch.equal(trainer.adapter(name).flat, before)


def test_another_base_model(saved: tuple[TorchTrainer, Path], tmp_path: Path) -> None:
    _, directory = saved
    other = make_trainer(tiny_model(tmp_path, "llama3", seed=9))  # the same shape, other weights
    message = refused(other, directory)
    assert "llama3-0" in message
    assert "llama3-9" in message
    (directory / "tinkex.json").unlink()
    deeper = make_trainer(tiny_model(tmp_path, "qwen2", num_hidden_layers=3))
    assert "model.layers.2.self_attn.q_proj is missing" in refused(deeper, directory)


def test_a_base_model_is_known_in_any_dtype(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "smollm2")
    of = [
        adapter_files.BaseIdentity.of(load_decoder(path, dtype=dtype), "m")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert of[0] == of[1]


def test_files_that_are_missing(saved: tuple[TorchTrainer, Path]) -> None:
    trainer, directory = saved
    assert "no adapter_model.safetensors" in refused(trainer, directory.parent / "nowhere")
    (directory / "optimizer.safetensors").unlink()
    assert "without the optimizer" in refused(trainer, directory, optimizer=True)
    do(trainer, LoadAdapter("new", directory))
    do(trainer, SaveAdapter("run", directory, optimizer=True, overwrite=True))
    (directory / "tinkex.json").unlink()
    assert "tinkex.json does not say" in refused(trainer, directory, optimizer=True)
    (directory / "adapter_config.json").unlink()
    assert "no adapter_config.json" in refused(trainer, directory)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors", "tinkex.json"])
def test_files_that_are_cut_short(saved: tuple[TorchTrainer, Path], name: str) -> None:
    trainer, directory = saved
    file = directory / name
    file.write_bytes(file.read_bytes()[:-20])
    message = refused(trainer, directory, optimizer=True)
    assert name in message
    assert "damaged" in message
    (directory / CHECKSUMS).unlink()  # as older versions left it
    message = refused(trainer, directory, optimizer=True)
    assert name in message
    assert "corrupted" in message


@pytest.mark.parametrize("name", [CONFIG, FACTS, OPTIMIZER, WEIGHTS, CHECKSUMS])
def test_one_flipped_bit_is_refused(saved: tuple[TorchTrainer, Path], name: str) -> None:
    trainer, directory = saved
    content = bytearray((directory / name).read_bytes())
    content[len(content) * 2 // 3] ^= 4
    (directory / name).write_bytes(content)
    message = refused(trainer, directory, optimizer=True)
    assert "damaged" in message
    assert CHECKSUMS in message if name == CHECKSUMS else f"adapter/{name}" in message


def test_a_damaged_adapter_is_not_merged(saved: tuple[TorchTrainer, Path], tmp_path: Path) -> None:
    _, directory = saved
    content = bytearray((directory / WEIGHTS).read_bytes())
    content[-5] ^= 1
    (directory / WEIGHTS).write_bytes(content)
    base = tiny_model(tmp_path, "qwen2")
    with pytest.raises(EngineError, match=rf"{WEIGHTS} is damaged"):
        merge_adapter(base, directory, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_tensors_that_do_not_belong(saved: tuple[TorchTrainer, Path]) -> None:
    trainer, directory = saved
    path = directory / "adapter_model.safetensors"
    (directory / CHECKSUMS).unlink()
    tensors = load_file(path)
    name = "base_model.model.lm_head.lora_A.weight"

    save_file(tensors | {name: tensors[name][:2].clone()}, path)
    assert all(word in refused(trainer, directory) for word in (name, "[2, 64]", "[4, 64]"))
    save_file(tensors | {"extra": torch.zeros(1)}, path)
    assert "'extra'" in refused(trainer, directory)
    save_file(tensors | {name: torch.full((4, 64), float("nan"))}, path)
    assert "not finite" in refused(trainer, directory)
    del tensors[name]
    save_file(tensors, path)
    assert name in refused(trainer, directory)


def test_an_existing_directory_is_kept_unless_asked(saved: tuple[TorchTrainer, Path]) -> None:
    trainer, directory = saved
    before = (directory / "adapter_model.safetensors").read_bytes()
    train(trainer, range(2, 3))
    with pytest.raises(EngineError, match="already exists"):
        do(trainer, SaveAdapter("run", directory))
    assert (directory / "adapter_model.safetensors").read_bytes() == before
    do(trainer, SaveAdapter("run", directory, overwrite=True))
    assert (directory / "adapter_model.safetensors").read_bytes() != before
    assert not (directory / "optimizer.safetensors").exists()


@pytest.mark.parametrize("sync", [True, False])
def test_a_save_waits_for_the_disk_unless_told_not_to(
    saved: tuple[TorchTrainer, Path], monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    trainer, directory = saved
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    do(trainer, SaveAdapter("run", directory.with_name("another"), optimizer=True, sync=sync))
    assert bool(synced) is sync
    names = [
        sorted(path.name for path in place.iterdir()) for place in (directory, directory.with_name("another"))
    ]
    assert names[0] == [*([] if sync else [CHECKSUMS]), *names[1]]  # else who syncs it adds them


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "adapter"

    def fail() -> None:
        with adapter_files.new_directory(target) as temporary:
            (temporary / "half").write_text("written")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list(target.parent.iterdir()) == []


# -- merging -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama3", {}),
        ("llama2", {}),  # several shards
        ("smollm2", {}),  # tied: the merge unties
        ("smollm2", {"train_unembed": False}),  # tied: and stays so
        ("qwen3_moe", {}),
    ],
)
def test_transformers_reads_a_merged_directory(tmp_path: Path, family: str, flags: dict[str, bool]) -> None:
    path = tiny_model(tmp_path, family)
    (path / "chat_template.jinja").write_text("{}")
    trainer = make_trainer(path, LoraConfig(4, seed=1, **flags))
    do(trainer, SaveAdapter("run", tmp_path / "adapter"))
    merge_adapter(path, tmp_path / "adapter", tmp_path / "merged")
    ours = our_logits(trainer, trainer.adapter("run"))
    (theirs,) = reference_logits(tmp_path / "merged", [IDS])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] == (family == "smollm2" and not flags.get("train_unembed", True))
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "{}"
    reread = TorchTrainer(load_decoder(tmp_path / "merged"), "merged")
    torch.testing.assert_close(our_logits(reread, None), ours, atol=1e-4, rtol=1e-4)


def test_a_merge_unties_a_head_of_which_the_file_holds_a_copy(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "smollm2")
    weights = load_file(path / "model.safetensors")
    copy = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights | copy, path / "model.safetensors", {"format": "pt"})
    trainer = make_trainer(path)
    do(trainer, SaveAdapter("run", tmp_path / "adapter"))
    merge_adapter(path, tmp_path / "adapter", tmp_path / "merged")
    ours = our_logits(trainer, trainer.adapter("run"))
    (theirs,) = reference_logits(tmp_path / "merged", [IDS])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    reread = TorchTrainer(load_decoder(tmp_path / "merged"), "merged")
    torch.testing.assert_close(our_logits(reread, None), ours, atol=1e-4, rtol=1e-4)


def test_a_merge_keeps_the_dtype_of_the_base(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    weights = path / "model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(weights).items()}, weights, {"format": "pt"})
    trainer = make_trainer(path)
    do(trainer, SaveAdapter("run", tmp_path / "adapter"))
    merge_adapter(path, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


def test_merges_that_cannot_be(saved: tuple[TorchTrainer, Path], tmp_path: Path) -> None:
    trainer, directory = saved
    base, out = Path(trainer.base.name), tmp_path / "merged"
    with pytest.raises(EngineError, match="Hugging Face directory"):
        merge_adapter(tmp_path / "nowhere", directory, out)
    shallow = tiny_model(
        tmp_path, "smollm2", num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2
    )
    with pytest.raises(EngineError, match=r"adapts model\.layers\.1\..* does not have"):
        merge_adapter(shallow, directory, out)
    assert not out.exists()
    merge_adapter(base, directory, out)
    with pytest.raises(EngineError, match="already exists"):
        merge_adapter(base, directory, out)
    shutil.rmtree(out)
