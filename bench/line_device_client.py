"""The client of bench/line_device.py: the official SDK, or ours, in a process of its own.

    line_device_client.py tinker|tinkex     TINKER_BASE_URL says where the server is

Each line of stdin is `[measure, settings]`, answered by a line of JSON. Knows a base model's name, and
nothing else of the server.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from typing import Any

sdk: Any = importlib.import_module(sys.argv[1])
ADAM = sdk.AdamParams(learning_rate=1e-5)
_random = random.Random(0)


def ids(count: int, vocab: int) -> list[int]:
    return [_random.randrange(3, vocab) for _ in range(count)]


def datum(prompt: list[int], answer: Any, advantage: float) -> Any:
    """A sampled sequence as the loss reads it."""
    tokens, scored = prompt + list(answer.tokens), len(answer.tokens)
    unscored = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": unscored + list(answer.logprobs),
        "advantages": unscored + [advantage] * scored,
    }
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


class Client:
    """One run on the server, and its newest sampler."""

    def __init__(self) -> None:
        self.service = sdk.ServiceClient()
        self.run: Any = None
        self.sampler: Any = None

    def begin(self, shape: str, rank: int, **_: Any) -> dict[str, float]:
        self.run = self.service.create_lora_training_client(shape, rank=rank, seed=1)
        return {}

    def _sampled(self, g: dict[str, Any]) -> list[tuple[list[int], Any]]:
        params = sdk.SamplingParams(max_tokens=g["tokens"], temperature=1.0, stop=[])
        prompts = [ids(g["prompt_tokens"], g["vocab"]) for _ in range(g["prompts"])]
        given = [sdk.ModelInput.from_ints(prompt) for prompt in prompts]
        promises = [self.sampler.sample(prompt, g["samples"], params) for prompt in given]
        found = [
            (p, s) for p, promise in zip(prompts, promises, strict=True) for s in promise.result().sequences
        ]
        assert all(len(s.tokens) == g["tokens"] == len(s.logprobs) for _, s in found)
        return found

    def sample(self, **g: Any) -> dict[str, float]:
        began = time.perf_counter()
        self._sampled(g)
        return {"seconds": time.perf_counter() - began}

    def _train(self, data: list[Any], loss: str) -> None:
        promises = [self.run.forward_backward(data, loss), self.run.optim_step(ADAM)]
        for promise in promises:
            promise.result()

    def step(self, **g: Any) -> dict[str, float]:
        """A pass of cross_entropy over as many tokens as a round has, and its step."""
        data = []
        for _ in range(g["prompts"] * g["samples"]):
            tokens = ids(g["prompt_tokens"] + g["tokens"], g["vocab"])
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            data.append(sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        began = time.perf_counter()
        self._train(data, "cross_entropy")
        return {"seconds": time.perf_counter() - began}

    def publish(self) -> dict[str, float]:
        began = time.perf_counter()
        self.sampler = self.run.save_weights_and_get_sampling_client()
        return {"seconds": time.perf_counter() - began}

    def round(self, **g: Any) -> dict[str, float]:
        """Sample, train on it, step, publish; from the beginning to the end, and each part."""
        began = time.perf_counter()
        found = self._sampled(g)
        sampled = time.perf_counter()
        data = [datum(prompt, answer, 1.0 if i % 2 else -1.0) for i, (prompt, answer) in enumerate(found)]
        built = time.perf_counter()
        self._train(data, "importance_sampling")
        trained = time.perf_counter()
        published = self.publish()["seconds"]
        drawn, read = len(found) * g["tokens"], sum(d.model_input.length for d in data)
        return {
            "sample": drawn / (sampled - began), "train": read / (trained - built),
            "sample_s": sampled - began, "build_s": built - sampled, "train_s": trained - built,
            "publish_s": published, "round_s": time.perf_counter() - began,
        }  # fmt: skip


def main() -> None:
    client = Client()
    for line in sys.stdin:
        name, settings = json.loads(line)
        print(json.dumps(getattr(client, name)(**settings)), flush=True)
    os._exit(0)  # official clients now and then abort while the interpreter takes their threads down


if __name__ == "__main__":
    main()
