"""`tinkex plan` computes with what engines really take, and says what does not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.engine.tiny import tiny_model
from tinkex.cli.plan import GPUS, Gpu, estimate, plan
from tinkex.engine.facts import ModelFacts
from tinkex.engine.protocol import CreateAdapter, EngineConfig, OptimStep, Pass, build_engine, run_passes
from tinkex.engine.torch.kv import PAGE
from tinkex.engine.torch.sizing import ModelSizes, model_sizes
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import AdamParams, LoraConfig

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "qwen3_5"])
def test_memory_is_estimated_within_a_tenth_of_what_an_engine_takes(family: str, tmp_path: Path):
    path = tiny_model(tmp_path, family, max_position_embeddings=256)
    config = EngineConfig(str(path), device="cpu", dtype="float32", threads=1, kv_bytes=1 << 20)
    sizes = model_sizes(path, config, rank=8)
    engine = build_engine(config)
    try:
        engine.trainer.submit(CreateAdapter("run", LoraConfig(rank=8, seed=1))).result()
        data = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
        run_passes(engine.trainer, [Pass("run", data, "cross_entropy")])
        engine.trainer.submit(OptimStep("run", AdamParams())).result()
        decoder, beat = engine._trainer.decoder, engine.heartbeat()  # type: ignore[attr-defined]
        assert sizes.facts.weight_bytes == pytest.approx(decoder.weight_bytes, rel=0.1)
        assert sizes.run == pytest.approx(beat.stats["adapter_bytes"], rel=0.1)
        pages = beat.memory["kv"] / beat.stats["kv_pages_total"]
        assert sizes.kv_token * PAGE == pytest.approx(pages, rel=0.1)
    finally:
        engine.close()


def test_memory_is_estimated_within_a_tenth_of_what_a_process_takes():
    """Resident memory, of a model of 25 M parameters, eight runs of rank 32 and 32,768 tokens of KV."""
    command = [sys.executable, str(ROOT / "bench" / "plan_device.py"), "--shapes", "small"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| small")]
    ratios = {name.split(" of ")[0]: float(ratio) for _, name, _, _, ratio in rows}
    for name in ("weights", "8 runs", "KV", "together"):
        assert ratios[name] == pytest.approx(1.0, abs=0.1), done.stdout


def eight_billions(**changes: int) -> ModelSizes:
    """About Qwen3-8B with rank 32."""
    given = {"weights": 16_400_000_000, "kv": 40_960 * 147_456, "active": 8_190_000_000} | changes
    facts = ModelFacts(
        "qwen3", 8_190_000_000, given["active"], 36, 40_960, "", {}, given["weights"], given["kv"], 0, True
    )
    return ModelSizes(facts, 4 * 87_293_952, 16 * 87_293_952, 147_456.0, 0, 400_000)


def test_speeds_are_those_that_the_shares_were_taken_from():
    """The 8B shape on an H200 trained 17,699 tokens/s and decoded 24,548."""
    found = estimate(eight_billions(), GPUS["h200"], 2)
    assert (found.tensor, found.trainers, found.samplers) == (1, 1, 1)
    assert found.trained == pytest.approx(17_699, rel=0.05)
    assert found.decoded == pytest.approx(24_548, rel=0.05)


def test_gpus_are_split_and_engines_get_as_many_as_the_weights_need():
    eight = estimate(eight_billions(), GPUS["h100"], 8)
    assert eight.trainers + eight.samplers == 8
    assert 0.6 < eight.trained / eight.decoded < 1.6, "both are busy alike"
    large = estimate(eight_billions(weights=140_000_000_000, active=70_000_000_000), GPUS["h100"], 8)
    assert (large.tensor, large.trainers + large.samplers) == (2, 4)
    with pytest.raises(InvalidInputError, match=r"the model needs .*4 GPUs have .*--quantize"):
        estimate(eight_billions(weights=10**12), Gpu(80e9, 1e12, 1e14), 4)


def test_the_command_says_what_to_start(tmp_path: Path):
    path = tiny_model(tmp_path, "llama3")
    shown = CliRunner().invoke(plan, ["--model", str(path), "--gpus", "8", "--gpu", "a10g", "--runs", "4"])
    assert shown.exit_code == 0, shown.output
    assert "trainers=" in shown.output
    assert "4: all fit" in shown.output
    wrong = CliRunner().invoke(plan, ["--model", str(path), "--gpu", "tpu"])
    assert "give one of h200, h100" in wrong.output
