"""Families with experts against transformers, on tiny random models in fp32.

Logits, the gradients of every adapted matrix, sampled logprobs against the trainer's, save and load, what
PEFT makes of an export, and what transformers makes of a merged model.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.commands import do
from tests.engine.forward import hidden
from tests.engine.oracle import make_datum, randomise
from tests.engine.tiny import EXPERTS, reference_model, tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    EngineConfig,
    ExportAdapter,
    ForwardBackward,
    LoadAdapter,
    Pass,
    SampleWork,
    SaveAdapter,
)
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.peft_export import export_peft
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LoraConfig, SamplingParams

pytestmark = pytest.mark.slow

every_family = pytest.mark.parametrize("family", EXPERTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = tiny_model(tmp_path_factory.mktemp("models"), family)
        return made[family]

    return model


def make_trainer(path: Path) -> TorchTrainer:
    trainer = TorchTrainer(load_decoder(path), str(path))
    do(trainer, CreateAdapter("run", LoraConfig(3, seed=1)))
    randomise(trainer.adapter("run").flat, seed=1)
    return trainer


IDS = torch.randint(3, 256, (70,), generator=torch.Generator().manual_seed(5)).tolist()


def our_logits(trainer: TorchTrainer, run: str | None) -> Tensor:
    adapter = trainer.adapter(run) if run else None
    lora, decoder = LoraBatch([adapter, adapter], [70, 9]), trainer.decoder
    with torch.no_grad():
        logits = decoder.logits(hidden(decoder, [IDS, IDS[:9]], lora), lora)
    torch.testing.assert_close(logits[70:], logits[:9], atol=1e-4, rtol=1e-4)  # packed sequences do not leak
    return logits[:70]


def their_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


@every_family
def test_logits_equal_transformers(models: Any, family: str) -> None:
    trainer, reference = make_trainer(models(family)), reference_model(models(family))
    torch.testing.assert_close(our_logits(trainer, None), their_logits(reference), atol=1e-4, rtol=0)


def with_deltas(reference: Any, deltas: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' parameters with ours added to them, in the layout that its experts have in memory."""
    weights, modules = dict(reference.named_parameters()), dict(reference.named_modules())
    for experts in sorted({name.rsplit(".", 1)[0] for name in deltas if ".experts." in name}):
        w1, w2, w3 = (deltas.pop(f"{experts}.w{i}") for i in (1, 2, 3))
        gate_up = torch.cat((w1, w3), dim=1)
        if getattr(modules[experts], "is_concatenated", True) is False:
            gate_up = torch.stack((w1, w3), dim=2).flatten(1, 2)
        for part, delta in (("gate_up_proj", gate_up), ("down_proj", w2)):
            kind = modules[experts]
            transposed = getattr(kind, "is_transposed", type(kind).__name__ == "Llama4TextExperts")
            turned = delta.transpose(1, 2) if transposed else delta
            weights[f"{experts}.{part}"] = weights[f"{experts}.{part}"] + turned
    return weights | {f"{name}.weight": weights[f"{name}.weight"] + delta for name, delta in deltas.items()}


@every_family
def test_gradients_equal_autograd_through_transformers(models: Any, family: str) -> None:
    trainer, reference = make_trainer(models(family)), reference_model(models(family))
    adapter, datum = trainer.adapter("run"), make_datum(np.random.default_rng(0), 40, 256)
    leaves = {
        name: tuple(side.clone().requires_grad_() for side in pair) for name, pair in adapter.named().items()
    }
    weights = with_deltas(reference, {name: 32 / 3 * b @ a for name, (a, b) in leaves.items()})
    ids = torch.from_numpy(datum.model_input.to_numpy().astype(np.int64))[None]
    logits = torch.func.functional_call(reference, weights, (ids,), {"use_cache": False}).logits[0]
    theirs = logits.log_softmax(-1).gather(1, datum.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0]
    (-(theirs * datum.loss_fn_inputs["weights"].to_torch()).sum()).backward()
    (output,) = do(trainer, ForwardBackward((Pass("run", [datum], "cross_entropy"),)))
    assert isinstance(output, ForwardBackwardOutput), output
    ours = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-4)
    assert adapter.grad is not None
    for name, pair in adapter.named(adapter.grad).items():
        for grad, leaf in zip(pair, leaves[name], strict=True):
            assert leaf.grad is not None
            scale = float(leaf.grad.abs().max())
            assert scale > 0, name
            torch.testing.assert_close(grad / scale, leaf.grad / scale, atol=1e-3, rtol=0, msg=name)


@every_family
def test_sampled_logprobs_are_the_trainers(models: Any, family: str) -> None:
    engine = TorchEngine(EngineConfig(str(models(family)), device="cpu", threads=1, kv_bytes=1 << 20))
    try:
        engine.trainer.submit(CreateAdapter("run", LoraConfig(3, seed=1))).result()
        randomise(engine._trainer.adapter("run").flat, seed=1)
        export = engine.trainer.submit(ExportAdapter("run")).result()

        async def sample() -> Any:
            await engine.sampler.publish("one", export)
            params = SamplingParams(max_tokens=30, stop=[], seed=1)
            works = [
                SampleWork(np.array(IDS[:length], np.int32), params, adapter="one", num_samples=2)
                for length in (3, 17, 40)
            ]
            return await asyncio.gather(*(engine.sampler.sample(work) for work in works))

        for length, response in zip((3, 17, 40), asyncio.run(sample()), strict=True):
            for sequence in response.sequences:
                text = np.array([*IDS[:length], *sequence.tokens], np.int64)
                datum = Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": text[1:]})
                work = ForwardBackward((Pass("run", [datum], "cross_entropy", backward=False),))
                (output,) = engine.trainer.submit(work).result()
                assert isinstance(output, ForwardBackwardOutput), output
                trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()[length - 1 :]
                np.testing.assert_allclose(sequence.logprobs_np, trained, atol=1e-4)
    finally:
        engine.close()


@every_family
def test_files_are_read_by_us_by_peft_and_by_transformers(models: Any, family: str, tmp_path: Path) -> None:
    path, adapter, exported = models(family), tmp_path / "adapter", tmp_path / "exported"
    trainer = make_trainer(path)
    do(trainer, SaveAdapter("run", str(adapter)))
    do(trainer, LoadAdapter("copy", str(adapter)))
    assert torch.equal(trainer.adapter("copy").flat, trainer.adapter("run").flat)
    ours = our_logits(trainer, "run")
    assert (ours - our_logits(trainer, None)).abs().max() > 0.05
    export_peft(adapter, exported)
    model = peft.PeftModel.from_pretrained(reference_model(path), str(exported))
    torch.testing.assert_close(their_logits(model), ours, atol=1e-4, rtol=0)
    merge_adapter(path, adapter, tmp_path / "merged")
    torch.testing.assert_close(their_logits(reference_model(tmp_path / "merged")), ours, atol=1e-4, rtol=0)
    reread = make_trainer(tmp_path / "merged")
    torch.testing.assert_close(our_logits(reread, None), ours, atol=1e-4, rtol=0)


def test_llama_4_inside_the_model_that_sees(tmp_path: Path) -> None:
    """Released files hold it so: it is read, merged into them, and exported for the whole model."""
    path, adapter, exported = (
        tiny_model(tmp_path, "llama4 that sees"),
        tmp_path / "adapter",
        tmp_path / "exported",
    )
    trainer = make_trainer(path)
    torch.testing.assert_close(
        our_logits(trainer, None), their_logits(reference_model(path)), atol=1e-4, rtol=0
    )
    do(trainer, SaveAdapter("run", str(adapter)))
    ours = our_logits(trainer, "run")
    merge_adapter(path, adapter, tmp_path / "merged")
    torch.testing.assert_close(their_logits(reference_model(tmp_path / "merged")), ours, atol=1e-4, rtol=0)
    export_peft(adapter, exported, nested=True)
    model = peft.PeftModel.from_pretrained(reference_model(path), str(exported))
    assert not any(".lora_" in name and "vision" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(their_logits(model), ours, atol=1e-4, rtol=0)


def test_gpt_oss_is_read_from_mxfp4_files(models: Any, tmp_path: Path) -> None:
    """Blocks of 32 numbers of four bits with a power of two each, as its hub files hold the experts."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for directory in (packed, plain):
        shutil.copytree(models("gpt_oss"), directory)
    tensors = load_file(plain / "model.safetensors")
    expanded, generator = dict(tensors), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, width, out = tensors.pop(name).shape
        codes = torch.randint(0, 16, (count, out, width // 32, 32), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, codes.shape[:3], generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = scales
        numbers = values[codes.long()] * 2.0 ** (scales.float() - 127)[..., None]
        expanded[name] = numbers.flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(expanded, plain / "model.safetensors", {"format": "pt"})
    fields = json.loads((packed / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(fields))
    theirs = their_logits(reference_model(plain))
    torch.testing.assert_close(our_logits(make_trainer(packed), None), theirs, atol=1e-4, rtol=0)


def test_hosted_names_of_gpt_oss_are_read(models: Any, tmp_path: Path) -> None:
    trainer, adapter = make_trainer(models("gpt_oss")), tmp_path / "adapter"
    do(trainer, SaveAdapter("run", str(adapter)))
    tensors = {
        name.replace(".self_attn.", ".attn.").replace("model.lm_head", "model.model.unembed_tokens"): tensor
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }
    assert any(".attn." in name for name in tensors)
    (adapter / "SHA256SUMS").unlink()
    save_file(tensors, adapter / "adapter_model.safetensors")
    do(trainer, LoadAdapter("hosted", str(adapter)))
    assert torch.equal(trainer.adapter("hosted").flat, trainer.adapter("run").flat)


def test_contexts_beyond_sparse_attention_are_refused(models: Any) -> None:
    """GLM-5 attends to the best `index_topk` positions: as many as there are, up to that context."""
    assert load_decoder(models("glm_moe_dsa")).config.max_context == 128
