"""`tinkex model info`: what a model is and whether it fits, without its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny import tiny_model
from tests.processes import in_terminal
from tinkex.engine.protocol import EngineConfig
from tinkex.engine.torch import memory
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.sizing import model_facts


@pytest.mark.parametrize("quantize", ["none", "nf4", "int8"])
@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_the_facts_are_those_of_the_loaded_model(tmp_path: Path, family: str, quantize: str) -> None:
    path = tiny_model(tmp_path, family, hidden_size=128, intermediate_size=256)
    facts = model_facts(path, EngineConfig("", device="cpu", quantize=quantize))  # type: ignore[arg-type]
    decoder = load_decoder(path, quantize=quantize)
    assert facts.parameters == decoder.parameter_count
    assert facts.weight_bytes == pytest.approx(decoder.weight_bytes, rel=0.03)
    assert facts.fits


def test_active_parameters_leave_out_idle_experts(tmp_path: Path) -> None:
    facts = model_facts(tiny_model(tmp_path, "qwen3_moe"), EngineConfig("", device="cpu"))
    layers, experts, used, one = 2, 6, 2, 3 * 64 * 32
    assert facts.parameters - facts.active_parameters == layers * (experts - used) * one


def test_a_model_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000.0)
    assert not model_facts(tiny_model(tmp_path, "llama3"), EngineConfig("", device="cpu")).fits


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TINKE", "HF_"))} | {
        "HOME": str(tmp_path)
    }

    def tinkex(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tinkex.cli", "model", "info", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, env=clean)

    facts = json.loads(tinkex(str(path), "-f", "json").stdout)
    assert (facts["family"], facts["context"], facts["quantisation"]) == ("llama", 256, "")
    assert facts["lora_per_rank"] == {"attn": 896, "mlp": 1056, "unembed": 384}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    broken = tinkex(str(path))
    assert broken.returncode == 1
    assert "is quantised (hqq, by its config.json), which is not read; what loads: " in broken.stderr
    assert "Traceback" not in broken.stderr


@pytest.mark.slow
def test_clients_and_the_list_are_told(tmp_path: Path) -> None:
    """Through the embedded service, which loads nothing for it; a broken model is listed without facts."""
    models = tmp_path / "home" / "models"
    path = tiny_model(models, "qwen3_moe").rename(models / "small")
    (models / "broken").mkdir()
    (models / "broken" / "config.json").write_text('{"model_type": "qwen3"}')
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TINKE", "HF_", "COLUMNS"))}
    env = clean | {"TINKEX_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tinkex.cli", "model", "list"]

    def run(*words: str) -> str:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=100, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    broken, small = json.loads(run("-f", "json"))["models"]
    facts = model_facts(path, EngineConfig("", device="cpu"))
    assert "family" not in broken
    assert (small["family"], small["parameters"]) == ("qwen3_moe", facts.parameters)
    assert small["active_parameters"] == facts.active_parameters < facts.parameters
    assert (small["quantisation"], small["fits"], small["max_context_length"]) == ("none", True, 256)
    assert small["memory_bytes"] == facts.weight_bytes + facts.kv_bytes
    _, names, _, row = run().splitlines()
    expected = ["Model", "Context", "Family", "Parameters", "Active", "Quantisation", "Memory", "Fits"]
    assert names.split()[:8] == expected
    assert row.split()[:4] == ["small", "256", "qwen3_moe", f"{facts.parameters / 1e3:.1f}"]
    narrow = in_terminal(command, env)
    assert all(len(line) <= 80 for line in narrow.splitlines() if str(tmp_path) not in line)
    assert "family qwen3_moe · parameters" in narrow
