"""Exports: merged weights that transformers reads, written in little memory, resumed after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.commands import do
from tests.engine.llama_cpp import merging_tokenizer
from tests.engine.oracle import randomise
from tests.engine.tiny import reference_model, tiny_model
from tinkex.engine.protocol import CreateAdapter, EngineError, SaveAdapter
from tinkex.engine.torch import tensor_stream
from tinkex.engine.torch.export_formats import stored_fingerprint, write_export
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.tensor_stream import stored_tensors
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.store import CHECKSUMS, verify
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow


def adapter_for(path: Path, out: Path, rank: int = 4) -> Path:
    trainer = TorchTrainer(load_decoder(path), str(path))
    do(trainer, CreateAdapter("run", LoraConfig(rank, seed=1)))
    randomise(trainer.adapter("run").flat, seed=1)
    do(trainer, SaveAdapter("run", str(out)))
    return out


def everything(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("family", ["llama2", "smollm2", "qwen3_moe", "qwen3_5_moe"])
def test_merged_weights_are_base_and_adapter_in_fp32(tmp_path: Path, family: str) -> None:
    """Against a plain sum in fp64, tensor by tensor; and nothing else changes."""
    path = tiny_model(tmp_path, family)
    adapter = adapter_for(path, tmp_path / "adapter")
    merge_adapter(path, adapter, tmp_path / "merged")
    base, merged, pairs = (
        everything(path),
        everything(tmp_path / "merged"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    changed = 0
    for name, weight in merged.items():
        before = (
            base["model.embed_tokens.weight"] if name == "lm_head.weight" and name not in base else base[name]
        )
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in pairs:
            a, b = pairs[f"{key}A.weight"].double(), pairs[f"{key}B.weight"].double()
            expected = before.double() + (32 / 4) * b @ a
            assert (weight.double() - expected).abs().max() <= 1e-5
            changed += 1
        elif ".experts." not in name and ".in_proj_qkv." not in name:
            assert torch.equal(weight, before)
    assert changed > 6
    verify(tmp_path / "merged")
    assert (tmp_path / "merged" / CHECKSUMS).exists()


def test_another_dtype_is_rounded_once(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen2")
    adapter = adapter_for(path, tmp_path / "adapter")
    merge_adapter(path, adapter, tmp_path / "exact")
    merge_adapter(path, adapter, tmp_path / "half", dtype="bfloat16")
    exact, half = everything(tmp_path / "exact"), everything(tmp_path / "half")
    assert all(torch.equal(half[name], exact[name].bfloat16()) for name in exact)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert next(reference_model(tmp_path / "half").parameters()).isfinite().all()


CHILD = """
import os, sys
from pathlib import Path
from tinkex.engine.torch import tensor_stream
from tinkex.engine.torch.merge import merge_adapter
tensor_stream._MARK_BYTES = 1
base, adapter, out, last = sys.argv[1:]
def progress(done, total):
    if done >= int(last):
        os._exit(9)
merge_adapter(Path(base), Path(adapter), Path(out), progress=progress)
"""


def test_a_killed_merge_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model(tmp_path, "llama2")
    adapter = adapter_for(path, tmp_path / "adapter")
    merge_adapter(path, adapter, tmp_path / "whole")
    total = sum(s.nbytes for f in path.glob("*.safetensors") for s in stored_tensors(f).values())
    arguments = [str(path), str(adapter), str(tmp_path / "out"), str(total // 2)]
    killed = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert killed.returncode == 9
    assert not (tmp_path / "out").exists()
    read: list[int] = []
    plain = tensor_stream.Stored.read
    monkeypatch.setattr(tensor_stream.Stored, "read", lambda s: (read.append(s.nbytes), plain(s))[1])
    merge_adapter(path, adapter, tmp_path / "out")
    assert sum(read) < 0.75 * total  # with the adapter's own
    names = {file.name for file in (tmp_path / "whole").iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list(tmp_path.glob(".out*"))


def test_what_was_begun_with_another_adapter_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama2")
    first, second = adapter_for(path, tmp_path / "a"), adapter_for(path, tmp_path / "b", rank=2)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(path, first, tmp_path / "out", progress=stop)
    merge_adapter(path, second, tmp_path / "out")
    merge_adapter(path, second, tmp_path / "whole")
    merged, whole = everything(tmp_path / "out"), everything(tmp_path / "whole")
    assert all(torch.equal(merged[name], whole[name]) for name in whole)
    with pytest.raises(EngineError, match="already exists"):
        merge_adapter(path, second, tmp_path / "out")


def test_two_at_once_do_not_write_one_directory(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama2")
    adapter = adapter_for(path, tmp_path / "adapter")
    told = []

    def meanwhile(done: int, total: int) -> None:
        if not told:
            with pytest.raises(EngineError, match="another process") as caught:
                merge_adapter(path, adapter, tmp_path / "out")
            told.append(str(caught.value))

    merge_adapter(path, adapter, tmp_path / "out", progress=meanwhile)
    assert told


PEAK = """
import resource, sys
from pathlib import Path
import torch
from tinkex.engine.torch.export_formats import write_export
from tinkex.engine.torch import gguf_export
import gguf
torch.set_num_threads(1)
adapter, base, out, format, quantize = sys.argv[1:]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_export(Path(adapter), Path(base), Path(out), format=format, quantize=quantize or None)
print(before * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of 500 MB whose largest tensor has 32 MB, and an adapter of it."""
    place = tmp_path_factory.mktemp("large")
    path = tiny_model(
        place, "smollm2", hidden_size=512, intermediate_size=8192, num_hidden_layers=9, vocab_size=16384,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    return merging_tokenizer(path), adapter_for(path, place / "adapter")


@pytest.mark.parametrize(("format", "quantize"), [("merged", ""), ("gguf", "q4_k_m"), ("mlx", "q4")])
def test_peak_memory_is_two_tensors(
    large: tuple[Path, Path], tmp_path: Path, format: str, quantize: str
) -> None:
    """Far less than the model is in memory, its fingerprint included."""
    path, adapter = large
    sizes = [stored.nbytes for file in path.glob("*.safetensors") for stored in stored_tensors(file).values()]
    assert sum(sizes) > 400e6
    arguments = [str(adapter), str(path), str(tmp_path / "out"), format, quantize]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert after - before < 2 * max(sizes) + 128e6, f"{(after - before) / 1e6:.0f} MB"


def test_another_base_model_is_refused_by_its_fingerprint(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "smollm2")
    adapter = adapter_for(path, tmp_path / "adapter")
    other = tiny_model(tmp_path / "other", "smollm2")
    tensors = everything(other)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] + 0.1}, other / "model.safetensors", {"format": "pt"})
    assert stored_fingerprint(other) != stored_fingerprint(path)
    with pytest.raises(EngineError, match="another"):
        write_export(adapter, other, tmp_path / "out", format="merged")
    write_export(adapter, other, tmp_path / "out", format="merged", trusted=True)
    write_export(adapter, path, tmp_path / "right", format="merged")


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "smollm2")
    adapter = adapter_for(path, tmp_path / "adapter")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], b"\xff" * 100, whole[:8] + b"[1]" + whole[11:]):
        file.write_bytes(damaged)
        with pytest.raises(EngineError, match=r"model\.safetensors"):
            merge_adapter(path, adapter, tmp_path / "out")
