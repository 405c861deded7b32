"""Two ranks against transformers and peft on the whole weights, in fp32.

peft cannot adapt parts of fused matrices, so where a model has them the steps are those of other adapters:
gradients still go through every block. What all adapters add is compared after the steps, by an export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.oracle import PeftOracle
from tests.engine.thread_ranks import threaded
from tests.engine.tiny import reference_model, tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    OptimStep,
    Pass,
    SaveAdapter,
    run_passes,
)
from tinkex.engine.torch.peft_export import export_peft
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig

pytestmark = pytest.mark.slow

STEPS, RANK, NEAR = 20, 4, 1e-5
STEP = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
ADAPTED: dict[str, dict[str, bool]] = {
    "llama3": {},
    "qwen3_moe": {"mlp": False},  # stacked experts
    "qwen3_5": {"attn": False},  # q, k, v and z of delta nets are one matrix
}


@pytest.fixture(params=ADAPTED)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def path(family: str, tmp_path: Path) -> Path:
    return tiny_model(tmp_path, family)


@pytest.fixture
def ranks(path: Path) -> Any:
    config = EngineConfig(
        str(path), device="cpu", dtype="float32", kv_bytes=1 << 20, threads=1, name="m", tensor=2
    )
    engine = threaded(config)
    yield engine
    engine.close()


def do(engine: Engine, command: Any) -> Any:
    return engine.trainer.submit(command).result(120)


def batch(step: int) -> list[Datum]:
    random = np.random.default_rng(step)
    ids = [random.integers(4, 320, n) for n in (9, 17)]
    return [Datum(ModelInput.from_ints(i[:-1]), {"target_tokens": i[1:].astype(np.int64)}) for i in ids]


def logprobs(engine: Engine, run: str, data: list[Datum]) -> np.ndarray:
    (out,) = run_passes(engine.trainer, [Pass(run, data, "cross_entropy")])
    assert isinstance(out, ForwardBackwardOutput), out
    return np.concatenate([one["logprobs"].to_numpy() for one in out.loss_fn_outputs])


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))).max())


def test_steps_are_those_of_transformers_peft_and_torch(
    family: str, path: Path, ranks: Engine, tmp_path: Path
) -> None:
    flags = ADAPTED[family]
    do(
        ranks,
        CreateAdapter(
            "a", LoraConfig(rank=RANK, seed=1, **{f"train_{name}": value for name, value in flags.items()})
        ),
    )
    do(ranks, SaveAdapter("a", str(tmp_path / "first")))
    oracle = PeftOracle(path, RANK, **flags)
    with torch.no_grad():
        for name, tensor in load_file(tmp_path / "first" / "adapter_model.safetensors").items():
            oracle.parameters[name.removeprefix("base_model.model.").removesuffix(".weight")].copy_(tensor)
    rates = {"lr": STEP.learning_rate, "betas": (STEP.beta1, STEP.beta2), "eps": STEP.eps}
    optimizer = torch.optim.AdamW(oracle.parameters.values(), weight_decay=STEP.weight_decay, **rates)
    furthest = [0.0, 0.0]
    for step in range(STEPS):
        theirs = torch.cat([oracle.logprobs(one) for one in batch(step)])
        optimizer.zero_grad()
        (-theirs.sum()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(oracle.parameters.values(), STEP.grad_clip_norm))
        optimizer.step()
        ours = logprobs(ranks, "a", batch(step))
        metrics = do(ranks, OptimStep("a", STEP))
        assert metrics["grad_clipped"] == 1.0
        furthest[0] = max(furthest[0], distance(ours, theirs.detach().numpy()))
        furthest[1] = max(furthest[1], abs(metrics["grad_norm"] / norm - 1))
    print(f"{family}: logprobs {furthest[0]:.1e}, norms of gradients {furthest[1]:.1e}")
    assert max(furthest) <= NEAR
    do(ranks, SaveAdapter("a", str(tmp_path / "last")))
    last = load_file(tmp_path / "last" / "adapter_model.safetensors")
    named = {f"base_model.model.{name}.weight": p.detach() for name, p in oracle.parameters.items()}
    assert last.keys() == named.keys()
    far, all_of = (torch.cat([x.flatten() for x in some]).norm() for some in (
        [last[name] - named[name] for name in named], named.values()
    ))  # fmt: skip
    assert float(far / all_of) <= NEAR


def test_every_adapter_of_ranks_is_pefts(family: str, path: Path, ranks: Engine, tmp_path: Path) -> None:
    do(ranks, CreateAdapter("all", LoraConfig(rank=RANK, seed=2)))
    for step in range(3):
        before = logprobs(ranks, "all", batch(step))
        do(ranks, OptimStep("all", AdamParams(learning_rate=2e-2)))
    do(ranks, SaveAdapter("all", str(tmp_path / "saved")))
    export_peft(tmp_path / "saved", tmp_path / "peft", base_dir=path)
    model: Any = peft.PeftModel.from_pretrained(reference_model(path), str(tmp_path / "peft"))
    theirs = []
    with torch.no_grad():
        for one in batch(2):
            ids = torch.from_numpy(one.model_input.to_numpy().astype(np.int64))[None]
            logits = model(ids, use_cache=False).logits[0]
            targets = one.loss_fn_inputs["target_tokens"].to_torch()
            theirs.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy())
    ours = logprobs(ranks, "all", batch(2))
    print(f"{family}: {distance(ours, np.concatenate(theirs)):.1e}")
    assert distance(ours, np.concatenate(theirs)) <= NEAR
    assert distance(ours, before) > 0.01  # the last step changed something
