"""The engine alone for bench/line_device.py: the same rounds as its client's, through the engine's contract.

    line_device_child.py MODEL DEVICE

Each line of stdin is `[measure, settings]`, answered by a line of JSON. No server, no HTTP, no client.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

from tinkex.engine import protocol as p
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput, SampleResponse
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams
from tinkex.types.tensor import TensorData

ADAM = AdamParams(learning_rate=1e-5)


class EngineAlone:
    """One run on an engine."""

    def __init__(self, model: str, device: str) -> None:
        self.engine = p.build_engine(p.EngineConfig(model, device=device, warm_up=True))
        self.turn = 0
        self.draw = np.random.default_rng(0)

    def begin(self, rank: int, **_: Any) -> dict[str, float]:
        self.engine.trainer.submit(p.CreateAdapter("run", LoraConfig(rank=rank, seed=1))).result()
        self._publish()
        return {}

    def _publish(self) -> None:
        async def publish() -> None:
            exported = self.engine.trainer.submit(p.ExportAdapter("run")).result()
            await self.engine.sampler.publish(f"turn-{self.turn}", exported)
            if self.turn:
                await self.engine.sampler.retire(f"turn-{self.turn - 1}")

        self.turn += 1
        asyncio.run(publish())

    def round(self, **g: Any) -> dict[str, float]:
        length = g["prompt_tokens"]
        prompts = [self.draw.integers(3, g["vocab"], length).astype(np.int32) for _ in range(g["prompts"])]
        params = SamplingParams(max_tokens=g["tokens"], temperature=1.0, stop=[])

        async def sample() -> list[SampleResponse]:
            name = f"turn-{self.turn}"
            works = [p.SampleWork(ids, params, name, num_samples=g["samples"]) for ids in prompts]
            return await asyncio.gather(*(self.engine.sampler.sample(work) for work in works))

        began = time.perf_counter()
        responses = asyncio.run(sample())
        sampled = time.perf_counter()
        data = []
        for prompt, response in zip(prompts, responses, strict=True):
            for answer in response.sequences:
                assert answer.tokens_np is not None
                assert answer.logprobs_np is not None
                tokens = np.append(prompt, answer.tokens_np)
                scored = np.concatenate([np.zeros(length - 1, np.float32), answer.logprobs_np])
                advantages = np.ones_like(scored) * (1.0 if len(data) % 2 else -1.0)
                advantages[: length - 1] = 0.0
                inputs = {
                    "target_tokens": tokens[1:].astype(np.int64),
                    "logprobs": scored,
                    "advantages": advantages,
                }
                tensors = {key: TensorData.from_numpy(value) for key, value in inputs.items()}
                data.append(Datum(ModelInput.from_ints(tokens[:-1]), tensors))
        built = time.perf_counter()
        (output,) = p.run_passes(self.engine.trainer, [p.Pass("run", data, "importance_sampling")])
        assert isinstance(output, ForwardBackwardOutput), output
        self.engine.trainer.submit(p.OptimStep("run", ADAM)).result()
        trained = time.perf_counter()
        self._publish()
        published = time.perf_counter()
        drawn, read = len(data) * g["tokens"], len(data) * (length + g["tokens"] - 1)
        return {
            "sample": drawn / (sampled - began), "train": read / (trained - built),
            "sample_s": sampled - began, "train_s": trained - built, "publish_s": published - trained,
        }  # fmt: skip


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    alone = EngineAlone(*sys.argv[1:3])
    for line in sys.stdin:
        name, settings = json.loads(line)
        print(json.dumps(getattr(alone, name)(**settings)), file=out, flush=True)


if __name__ == "__main__":
    main()
