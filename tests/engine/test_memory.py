"""The estimate of what a forward keeps, against what it does keep; and what is decided by it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from tests.engine.oracle import randomise
from tests.engine.tiny import tiny_model
from tinkex.engine.torch import memory
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def kept_bytes(path: Path, tokens: int, *, recompute: bool) -> tuple[int, int]:
    """Bytes that a training forward keeps for its backward, weights aside, and their estimate."""
    decoder = load_decoder(path)
    adapter = Adapter.fresh(LoraConfig(1, seed=0), decoder.sites())
    randomise(adapter.flat, 0)
    weights = {weight.untyped_storage().data_ptr() for weight in decoder.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    lora, attend = LoraBatch([adapter], [tokens], train=True), PackedAttend([tokens], decoder.config.windows)
    states, ids = decoder.backend.packed_states(decoder.config, [tokens], CPU), torch.arange(tokens) % 300
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        h = decoder(ids, torch.arange(tokens), attend, lora, states=states, checkpoint=recompute)
    assert h.requires_grad
    kept = sum(storage.nbytes() for address, storage in storages.items() if address not in weights)
    return kept, tokens * memory.activation_bytes(decoder.config, 4, recompute=recompute)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3_moe", "granite4 dense"])
def test_the_estimate_is_near_what_a_forward_keeps(tmp_path: Path, family: str) -> None:
    layers = {} if family == "granite4 dense" else {"num_hidden_layers": 6}
    kept, estimate = kept_bytes(tiny_model(tmp_path, family, **layers), 128, recompute=False)
    assert 0.75 * kept < estimate < 2 * kept


def test_recomputing_keeps_little(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3", num_hidden_layers=6)
    kept, estimate = kept_bytes(path, 128, recompute=True)
    assert kept <= estimate  # the estimate has the one layer that is recomputed at a time in it
    assert kept < kept_bytes(path, 128, recompute=False)[0] / 5


def test_decisions_follow_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_decoder(tiny_model(tmp_path, "llama3")).config
    whole = 1000 * memory.activation_bytes(config, 4, recompute=False)
    for free, expected in ((3 * whole, False), (whole, True)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        assert memory.must_recompute(config, 4, CPU, 1000) is expected
    assert 256 <= memory.pass_tokens(config, 4, CPU) <= memory.PASS_TOKENS["cpu"]
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    assert memory.pass_tokens(config, 4, CPU) == 256


def test_models_whose_activations_are_large_get_smaller_passes_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 40)
    small = load_decoder(tiny_model(tmp_path / "small", "llama3")).config
    wide = {"num_hidden_layers": 12, "intermediate_size": 4096}
    large = load_decoder(tiny_model(tmp_path / "large", "llama3", **wide)).config
    assert memory.pass_tokens(small, 4, CPU) == 1024
    assert memory.pass_tokens(large, 4, CPU) == 768


def test_files_that_the_kernel_keeps_in_a_container_s_memory_are_free(tmp_path: Path) -> None:
    """A model that was just read fills it with pages that are given up as soon as they are needed."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("990\n")
    (tmp_path / "memory.stat").write_text(
        "anon 190\nfile 800\ninactive_file 500\nactive_file 290\nshmem 10\n"
    )
    assert memory.container_free(tmp_path) == 800
    (tmp_path / "memory.stat").unlink()
    assert memory.container_free(tmp_path) == 10
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.container_free(tmp_path) == float("inf")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep pages")
def test_malloc_takes_the_settings_that_keep_a_small_pass_s_pages(tmp_path: Path) -> None:
    assert memory.keep_pages(load_decoder(tiny_model(tmp_path, "llama3")).config, 4, 256, CPU)


def test_a_large_pass_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_decoder(tiny_model(tmp_path, "llama3")).config
    each = memory.activation_bytes(config, 4, recompute=False)
    assert not memory.keep_pages(config, 4, (1 << 30) // each + 1, CPU)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 7 * 256 * each)
    assert not memory.keep_pages(config, 4, 256, CPU)
