"""`tinkex checkpoint import` and `tinkex export`, from the command line to files that others load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import tinkex
from tests.cli.hub import Hub
from tests.engine.llama_cpp import complete, merging_tokenizer
from tests.engine.oracle import randomise
from tests.engine.tiny import reference_model, tiny_model
from tinkex.cli import main
from tinkex.cli.hub import model_card
from tinkex.client.future import completed
from tinkex.exports import export_checkpoint
from tinkex.models import DEFAULT
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

pytestmark = pytest.mark.slow
IDS = [5, 9, 200, 31, 7]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    return merging_tokenizer(tiny_model(tmp_path, "smollm2", intermediate_size=128))


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(main, ["-f", "json", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def fails(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 1, done.output
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def path(base: Path, tmp_path: Path) -> str:
    """An adapter of PEFT's, imported."""
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    model: Any = peft.get_peft_model(reference_model(base), settings)
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name:
                randomise(parameter, seed)
    model.save_pretrained(tmp_path / "theirs")
    imported = run("checkpoint", "import", str(tmp_path / "theirs"), "--base", str(base), "--name", "first")
    assert imported["tinker_path"].endswith("/weights/first")
    return imported["tinker_path"]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


def test_what_came_from_peft_goes_everywhere(path: str, base: Path, tmp_path: Path) -> None:
    expected = logits(peft.PeftModel.from_pretrained(reference_model(base), str(tmp_path / "theirs")))
    run("export", path, str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(reference_model(base), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(again), expected, atol=1e-4, rtol=1e-4)
    said = run("export", path, str(tmp_path / "merged"), "--format", "merged")
    assert said["bytes"] > 100_000
    torch.testing.assert_close(logits(reference_model(tmp_path / "merged")), expected, atol=1e-4, rtol=1e-4)
    run("export", path, str(tmp_path / "m.gguf"), "--format", "gguf", "--quantize", "q8_0")
    assert complete(tmp_path / "m.gguf", IDS, count=2)
    sampler = tinkex.ServiceClient().create_sampling_client(path)
    ours = sampler.compute_logprobs(tinkex.ModelInput.from_ints(IDS)).result(60)
    theirs = expected.log_softmax(-1)[torch.arange(4), torch.tensor(IDS[1:])]
    torch.testing.assert_close(torch.tensor(ours[1:]), theirs, atol=1e-4, rtol=1e-4)
    copied = run("checkpoint", "import", path, "--name", "copy")
    assert copied["tinker_path"].endswith("/weights/copy")
    assert copied["tinker_path"] != path
    export_checkpoint(path, tmp_path / "half", format="merged", dtype="bfloat16")
    assert (tmp_path / "half" / "model.safetensors").exists()


def test_what_cannot_be_is_said(path: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert "--force" in fails("export", path, str(tmp_path / "there"))
    assert "quantize goes with" in fails("export", path, str(tmp_path / "x"), "--quantize", "q8_0")
    assert "q4_k_m" in fails("export", path, str(tmp_path / "x"), "--format", "gguf", "--quantize", "q9")
    assert "not both" in fails(
        "export", path, str(tmp_path / "x"), "--format", "gguf", "--quantize", "q8_0", "--dtype", "float32"
    )
    assert "not a checkpoint path" in fails("export", "nowhere", str(tmp_path / "x"))
    other = tiny_model(tmp_path / "other", "qwen3")
    assert "another base model" in fails(
        "export", path, str(tmp_path / "x"), "--format", "merged", "--base", str(other)
    )
    assert "there is no" in fails("checkpoint", "import", str(tmp_path / "nowhere"))
    assert not (tmp_path / "x").exists()


def test_mlx_reads_what_is_written_for_it(path: str, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    run("export", path, str(tmp_path / "mlx"), "--format", "mlx", "--dtype", "bfloat16")
    run("export", path, str(tmp_path / "merged"), "--format", "merged")
    theirs, about = mx.load(str(tmp_path / "mlx" / "model.safetensors"), return_metadata=True)
    assert about == {"format": "mlx"}
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert theirs[name].dtype == mx.bfloat16
        assert torch.equal(torch.tensor(theirs[name].astype(mx.float32).tolist()), tensor.bfloat16().float())
    run("export", path, str(tmp_path / "q8"), "--format", "mlx", "--quantize", "q8")
    packed = mx.load(str(tmp_path / "q8" / "model.safetensors"))
    assert packed["model.layers.0.mlp.down_proj.weight"].dtype == mx.uint32
    assert packed["model.embed_tokens.weight"].dtype == mx.float32  # rows of 48: no group of 64 fits
    assert "q4, q8" in fails("export", path, str(tmp_path / "x"), "--format", "mlx", "--quantize", "q4_k_m")


def test_an_export_is_pushed_with_a_model_card(path: str, base: Path, tmp_path: Path) -> None:
    hub = Hub("hf_secret")
    env = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret"}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "tinkex.cli", "-f", "json", "export", path, str(tmp_path / "m.gguf")]
    command += ["--format", "gguf", "--push", "hf://ann/tuned", "--data-note", "200 chats about birds."]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    hub.close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["url"] == f"{hub.url}/ann/tuned"
    assert hub.files["m.gguf"] == (tmp_path / "m.gguf").read_bytes()
    card = hub.files["README.md"].decode()
    assert "library_name: gguf" in card
    assert "| LoRA rank | 4 |" in card
    assert "200 chats about birds." in card
    assert path in card
    assert not hub.strange
    assert "hf://OWNER/NAME" in fails("export", path, str(tmp_path / "y"), "--push", "ann/tuned")


def test_a_card_names_the_default_model_as_the_hub_does() -> None:
    info = SimpleNamespace(lora_rank=8, train_attn=True, train_mlp=True, train_unembed=False)
    client: Any = SimpleNamespace(
        get_weights_info_by_tinker_path=lambda path: completed(info, "info"),
        get_run_metrics=lambda run: completed([], "metrics"),
    )
    saved = ParsedCheckpointTinkerPath.from_tinker_path("tinker://s:train:0/weights/last")
    card = model_card(client, saved, "ann/birds", "peft", DEFAULT, None)
    assert "\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\nlicense: apache-2.0\n" in card
