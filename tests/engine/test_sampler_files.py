"""Adapters written for sampling alone: what a sampler reads again is, to the last bit, what was published."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.commands import do
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import CreateAdapter, EngineConfig, EngineError, OptimStep, SaveAdapter
from tinkex.engine.torch import sampler_files
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.params import AdamParams, LoraConfig


@pytest.fixture(autouse=True)
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_files, "SHARD", 4096)


def trainer_in(dtype: torch.dtype, place: Path, family: str = "qwen3") -> TorchTrainer:
    trainer = TorchTrainer(load_decoder(tiny_model(place, family), "cpu", dtype), "base")
    do(trainer, CreateAdapter("run", LoraConfig(4, seed=1)))
    adapter = trainer.adapter("run")
    adapter.flat.normal_(generator=torch.Generator().manual_seed(2))
    adapter.changed()
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sampler_reads_what_it_computes_with(tmp_path: Path, dtype: torch.dtype) -> None:
    trainer = trainer_in(dtype, tmp_path)
    size = do(trainer, SaveAdapter("run", str(tmp_path / "copy"), sampling=True))
    files = sorted((tmp_path / "copy").glob("*.safetensors"))
    assert len(files) > 2
    assert size == sum(file.stat().st_size for file in (tmp_path / "copy").iterdir())
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    a, b = trainer.adapter("run").named()["model.layers.0.self_attn.q_proj"]
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    assert torch.equal(tensors[f"{prefix}.lora_A.weight"], a.to(dtype))
    assert torch.equal(tensors[f"{prefix}.lora_B.weight"], b.to(dtype))
    again = trainer.load(str(tmp_path / "copy"))
    assert torch.equal(again.flat_as(dtype), trainer.adapter("run").flat_as(dtype))


@pytest.mark.parametrize("sync", [True, False])
def test_checksums_are_those_of_the_files(tmp_path: Path, sync: bool) -> None:
    trainer = trainer_in(torch.bfloat16, tmp_path)
    do(trainer, SaveAdapter("run", str(tmp_path / "copy"), sampling=True, sync=sync))
    lines = (tmp_path / "copy" / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    names = {file.name for file in (tmp_path / "copy").iterdir()} - {"SHA256SUMS"}
    assert listed.keys() == names
    for name, digest in listed.items():
        assert hashlib.sha256((tmp_path / "copy" / name).read_bytes()).hexdigest() == digest


def test_a_damaged_or_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    trainer = trainer_in(torch.bfloat16, tmp_path)
    do(trainer, SaveAdapter("run", str(tmp_path / "copy"), sampling=True))
    file = sorted((tmp_path / "copy").glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(EngineError, match=f"{file.name} is damaged"):
        trainer.load(str(tmp_path / "copy"))
    file.unlink()
    with pytest.raises(EngineError, match=f"it has no {file.name}"):
        trainer.load(str(tmp_path / "copy"))


def test_an_existing_directory_is_the_users_mistake(tmp_path: Path) -> None:
    trainer = trainer_in(torch.float32, tmp_path)
    do(trainer, SaveAdapter("run", str(tmp_path / "copy"), sampling=True))
    with pytest.raises(EngineError, match="already exists") as caught:
        do(trainer, SaveAdapter("run", str(tmp_path / "copy"), sampling=True))
    assert caught.value.category == "user"
    do(trainer, SaveAdapter("run", str(tmp_path / "copy"), sampling=True, overwrite=True))


def test_the_engine_goes_on_while_a_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the adapter as it was, whatever a later step made of it."""
    going, write = threading.Event(), sampler_files.SamplerCopy.write

    def late(copy: sampler_files.SamplerCopy) -> int:
        assert going.wait(30)
        return write(copy)

    monkeypatch.setattr(sampler_files.SamplerCopy, "write", late)
    engine = TorchEngine(EngineConfig(str(tiny_model(tmp_path, "qwen3")), device="cpu", threads=1))
    try:
        engine.trainer.submit(CreateAdapter("run", LoraConfig(4, seed=1))).result()
        adapter = engine._trainer.adapter("run")
        before = adapter.flat.numpy().copy()
        writing = engine.trainer.submit(SaveAdapter("run", str(tmp_path / "copy"), sampling=True))
        adapter.open_grad()
        assert adapter.grad is not None
        adapter.grad.fill_(1.0)
        engine.trainer.submit(OptimStep("run", AdamParams(learning_rate=0.1))).result(30)
        assert not writing.done()
        assert not np.array_equal(before, adapter.flat.numpy())
        going.set()
        assert writing.result(30) > before.nbytes
        assert np.array_equal(engine._trainer.load(str(tmp_path / "copy")).flat.numpy(), before)
        with pytest.raises(EngineError, match="no adapter"):
            engine.trainer.submit(SaveAdapter("none", str(tmp_path / "other"), sampling=True)).result(30)
    finally:
        going.set()
        engine.close()
