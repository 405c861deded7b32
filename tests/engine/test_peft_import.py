"""Adapters that PEFT wrote, in the layouts of the trainers that people use: same logits, same training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.commands import do
from tests.engine.forward import hidden
from tests.engine.oracle import ATTN, MLP, make_datum, randomise
from tests.engine.tiny import reference_model, tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    EngineError,
    ForwardBackward,
    LoadAdapter,
    OptimStep,
    Pass,
    SaveAdapter,
)
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.peft_export import export_peft
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.params import AdamParams, LoraConfig

pytestmark = pytest.mark.slow

IDS = [5, 9, 200, 31, 7, 7, 120, 64, 3]


def write_peft(path: Path, out: Path, **settings: Any) -> Any:
    """An adapter of PEFT's with random matrices, saved; the model that computes with it."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 16, "lora_dropout": 0.1, **settings})
    model: Any = peft.get_peft_model(reference_model(path), config).eval()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name:
                randomise(parameter, seed)
    model.save_pretrained(out)
    return model


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


def our_logits(trainer: TorchTrainer, run: str = "new") -> torch.Tensor:
    lora = LoraBatch([trainer.adapter(run)], [len(IDS)])
    with torch.no_grad():
        return trainer.decoder.logits(hidden(trainer.decoder, [IDS], lora), lora)


def trainer_of(path: Path) -> TorchTrainer:
    return TorchTrainer(load_decoder(path), str(path))


def refused(path: Path, directory: Path) -> str:
    with pytest.raises(EngineError) as caught:
        do(trainer_of(path), LoadAdapter("new", str(directory)))
    assert caught.value.category == "user"
    return caught.value.message


SETTINGS: dict[str, dict[str, Any]] = {
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "one matrix": {"target_modules": ["down_proj"], "r": 3},
    "all, another alpha": {"target_modules": [*ATTN, *MLP], "lora_alpha": 7},
    "rslora": {"target_modules": [*ATTN, *MLP], "use_rslora": True},
    "patterns": {
        "target_modules": [*ATTN, *MLP],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
        "alpha_pattern": {"k_proj": 64, "^model.layers.0.mlp.up_proj": 3},
    },
    "some layers": {"target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
    "with the head": {"target_modules": ["q_proj", "lm_head"]},
    "all linear": {"target_modules": "all-linear"},
    "a head that was only saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_adapter_of_any_settings_computes_what_peft_computes(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = tiny_model(tmp_path, "qwen2")
    model = write_peft(path, tmp_path / "theirs", **settings)
    trainer = trainer_of(path)
    do(trainer, LoadAdapter("new", str(tmp_path / "theirs")))
    expected = their_logits(model)
    torch.testing.assert_close(our_logits(trainer), expected, atol=1e-4, rtol=1e-4)
    do(trainer, SaveAdapter("new", str(tmp_path / "ours")))
    again = peft.PeftModel.from_pretrained(reference_model(path), str(tmp_path / "ours"))
    torch.testing.assert_close(their_logits(again), expected, atol=1e-4, rtol=1e-4)
    merge_adapter(path, tmp_path / "ours", tmp_path / "merged")
    torch.testing.assert_close(
        their_logits(reference_model(tmp_path / "merged")), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], [*ATTN, *MLP]], ids=["q and v", "all"])
def test_training_goes_on_as_peft_would(tmp_path: Path, targets: list[str]) -> None:
    """Three steps of AdamW on the same data: the same logits, and no module that PEFT left alone moves."""
    path = tiny_model(tmp_path, "smollm2")
    model = write_peft(path, tmp_path / "theirs", target_modules=targets, lora_alpha=32, lora_dropout=0.0)
    trainer = trainer_of(path)
    do(trainer, LoadAdapter("new", str(tmp_path / "theirs")))
    parameters = [p for name, p in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for step in range(3):
        datum = make_datum(np.random.default_rng(step), 16, 320)
        ids = torch.from_numpy(datum.model_input.to_numpy().astype(np.int64))[None]
        logprobs = model(ids, use_cache=False).logits[0].log_softmax(-1)
        targets_T = datum.loss_fn_inputs["target_tokens"].to_torch()
        taken = logprobs.gather(1, targets_T[:, None])[:, 0]
        (-(taken * datum.loss_fn_inputs["weights"].to_torch()).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        do(trainer, ForwardBackward((Pass("new", [datum], "cross_entropy"),)))
        do(trainer, OptimStep("new", AdamParams(3e-3, 0.9, 0.95, 1e-8, 0.01)))
    torch.testing.assert_close(our_logits(trainer), their_logits(model), atol=2e-4, rtol=1e-3)
    moved = {name.rpartition(".")[2] for name, (a, _) in trainer.adapter("new").named().items() if a.any()}
    assert moved == set(targets)


# -- experts and fused matrices --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "llama4"])
def test_stacked_experts(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    experts = "feed_forward.experts" if family == "llama4" else "mlp.experts"
    targets = {"target_parameters": [f"{experts}.gate_up_proj", f"{experts}.down_proj"]}
    model = write_peft(path, tmp_path / "theirs", target_modules=["q_proj"], lora_dropout=0.0, **targets)
    trainer = trainer_of(path)
    do(trainer, LoadAdapter("new", str(tmp_path / "theirs")))
    torch.testing.assert_close(our_logits(trainer), their_logits(model), atol=2e-4, rtol=1e-3)


def test_experts_that_were_modules(tmp_path: Path) -> None:
    """As trainers wrote them before transformers stacked experts: one A and B for each expert."""
    path, rank = tiny_model(tmp_path, "qwen3_moe"), 2
    weights, merged = load_all(path), {}
    tensors: dict[str, torch.Tensor] = {}
    for name in weights:
        if ".experts." in name and "layers.1" in name:
            module, weight = name.removesuffix(".weight"), weights[name]
            a, b = torch.zeros(rank, weight.shape[1]), torch.zeros(weight.shape[0], rank)
            randomise(a, len(tensors))
            randomise(b, len(tensors) + 1)
            tensors |= {f"base_model.model.{module}.lora_{s}.weight": t for s, t in (("A", a), ("B", b))}
            merged[name] = weight + (16 / rank) * b @ a
    assert merged
    write_adapter(tmp_path / "theirs", tensors, r=rank, lora_alpha=16)
    shutil.copytree(path, tmp_path / "merged")
    save_merged(tmp_path / "merged", weights | merged)
    trainer = trainer_of(path)
    do(trainer, LoadAdapter("new", str(tmp_path / "theirs")))
    expected = their_logits(reference_model(tmp_path / "merged"))
    torch.testing.assert_close(our_logits(trainer), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "granite4", "phi4", "qwen3_moe"])
def test_what_we_export_for_peft_comes_back(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    trainer = trainer_of(path)
    do(trainer, CreateAdapter("run", LoraConfig(2, seed=1)))
    randomise(trainer.adapter("run").flat, seed=1)
    do(trainer, SaveAdapter("run", str(tmp_path / "ours")))
    export_peft(tmp_path / "ours", tmp_path / "theirs", base_dir=path)
    do(trainer, LoadAdapter("new", str(tmp_path / "theirs")))
    torch.testing.assert_close(our_logits(trainer), our_logits(trainer, "run"), atol=2e-4, rtol=1e-3)


def load_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def save_merged(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for file in [*path.glob("*.safetensors"), *path.glob("*.index.json")]:
        file.unlink()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def write_adapter(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "target_modules": ["q_proj"], **config}
    (directory / "adapter_config.json").write_text(json.dumps(settings))


# -- how other trainers write files ----------------------------------------------------------------------


def renamed(directory: Path, old: str, new: str) -> None:
    file = directory / "adapter_model.safetensors"
    save_file({name.replace(old, new): t for name, t in load_file(file).items()}, file)


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def unsloth(directory: Path) -> None:
    """A regular expression for targets, bf16, its own names of bases, tokenizer files beside the adapter."""
    modules = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    edit(
        directory, base_model_name_or_path="unsloth/qwen2-0.5b-unsloth-bnb-4bit", lora_dropout=0,
        target_modules=rf"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:{modules}).*?)|(?:\bmodel\.layers.*)",
        use_qalora=False, qalora_group_size=16, corda_config=None, eva_config=None, inference_mode=True,
    )  # fmt: skip
    (directory / "tokenizer_config.json").write_text("{}")


def trl(directory: Path) -> None:
    """training_args.bin is a pickle, and checkpoints have the optimizer's: neither is read."""
    (directory / "training_args.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/executed'\ntR.")
    (directory / "optimizer.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/executed'\ntR.")
    (directory / "trainer_state.json").write_text('{"global_step": 3}')


def llama_factory(directory: Path) -> None:
    (directory / "all_results.json").write_text("{}")
    (directory / "trainer_log.jsonl").write_text("{}\n")
    edit(directory, base_model_name_or_path="/data/models/qwen2", task_type="CAUSAL_LM", megatron_config=None)


def axolotl(directory: Path) -> None:
    """With FSDP and torch.compile the names keep the wrappers; an adapter's name may be in them too."""
    renamed(directory, "base_model.model.", "base_model.model._orig_mod.")
    renamed(directory, ".mlp.", "._fsdp_wrapped_module.mlp.")
    renamed(directory, ".lora_A.weight", ".lora_A.default.weight")
    (directory / "config.json").write_text('{"model_type": "qwen2"}')


@pytest.mark.parametrize("layout", [unsloth, trl, llama_factory, axolotl])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layouts_of_trainers(tmp_path: Path, layout: Any, dtype: torch.dtype) -> None:
    path = tiny_model(tmp_path, "qwen2")
    model = write_peft(path, tmp_path / "theirs", target_modules=[*ATTN, *MLP], r=8, lora_alpha=16)
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    save_file({name: t.to(dtype) for name, t in load_file(file).items()}, file)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.to(dtype).float())
    layout(tmp_path / "theirs")
    trainer = trainer_of(path)
    do(trainer, LoadAdapter("new", str(tmp_path / "theirs")))
    torch.testing.assert_close(our_logits(trainer), their_logits(model), atol=1e-4, rtol=1e-4)
    assert not Path("/tmp/executed").exists()


def test_a_model_that_sees_names_its_text_model(tmp_path: Path) -> None:
    """Adapters of the whole model have one more prefix; those of the tower are refused by name."""
    path = tiny_model(tmp_path, "qwen3_vl")
    tensors = {}
    for i, side in enumerate("AB"):
        shape = (2, 64) if side == "A" else (4 * 24, 2)
        tensor = torch.zeros(shape)
        randomise(tensor, i)
        tensors[f"base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_{side}.weight"] = (
            tensor
        )
    write_adapter(tmp_path / "theirs", tensors, r=2, lora_alpha=32, layers_to_transform=[0])
    trainer = trainer_of(path)
    do(trainer, LoadAdapter("new", str(tmp_path / "theirs")))
    a, _ = trainer.adapter("new").named()["model.layers.0.self_attn.q_proj"]
    assert torch.equal(a, tensors[next(iter(tensors))])
    tower = {name.replace("language_model.layers", "visual.blocks"): t.clone() for name, t in tensors.items()}
    write_adapter(tmp_path / "tower", tensors | tower, r=2, lora_alpha=32, layers_to_transform=[0])
    assert "model.visual.blocks.0.self_attn.q_proj" in refused(path, tmp_path / "tower")


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True, "bias": "none"}, "lora_bias"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_adapter_of_ours_can_hold_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    path = tiny_model(tmp_path, "llama3")
    write_peft(path, tmp_path / "theirs", **{"target_modules": ["q_proj"], **settings})
    assert said in refused(path, tmp_path / "theirs")


def test_a_changed_module_to_save_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen2")
    write_peft(path, tmp_path / "theirs", target_modules=["q_proj"], modules_to_save=["lm_head"])
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    save_file({name: t + 0.5 if "lm_head" in name else t for name, t in load_file(file).items()}, file)
    told = refused(path, tmp_path / "theirs")
    assert "lm_head.weight" in told
    assert "merge it" in told


def test_another_base_model_is_noticed(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    wide = tiny_model(tmp_path / "wide", "llama3", intermediate_size=160)
    write_peft(wide, tmp_path / "theirs", target_modules=["down_proj"])
    told = refused(path, tmp_path / "theirs")
    assert "another base model" in told
    assert "model.layers.0.mlp.down_proj" in told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "rank"),
        ({"r": None}, "rank"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"r": 3}, "rank 3"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"rank_pattern": {"(": 2}}, "adapter_config.json"),
    ],
)
def test_a_config_that_cannot_be(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tiny_model(tmp_path, "llama3")
    write_peft(path, tmp_path / "theirs", target_modules=["q_proj"])
    edit(tmp_path / "theirs", **change)
    assert said in refused(path, tmp_path / "theirs")


def test_files_that_cannot_be(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    write_peft(path, tmp_path / "theirs", target_modules=["q_proj"])
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(name for name in tensors if "lora_A" in name)
    save_file({name: t for name, t in tensors.items() if name != first}, file)
    assert "without the other side" in refused(path, tmp_path / "theirs")
    save_file(tensors | {first: torch.empty(0)}, file)
    assert "empty" in refused(path, tmp_path / "theirs")
    save_file(tensors | {first.replace(".weight", ".other.weight"): tensors[first].clone()}, file)
    assert "several adapters" in refused(path, tmp_path / "theirs")
    file.write_bytes(file.read_bytes()[:200])
    assert "corrupted" in refused(path, tmp_path / "theirs")
