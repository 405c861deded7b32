"""The client's side of bench/line.py: the official SDK, in an environment that has nothing of ours.

Reads the server's URL from stdin, then names of measures, and answers each with a line of JSON. One such
process is the client of most measures; four more are one tenant each (`warm`, then `small`). It knows the
base model's name and nothing else of the server.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tinker

MODEL, RANK, VOCAB = "m/line", 8, 4096
BATCH, LENGTH = 8, 128
SMALL_BATCH, SMALL_LENGTH = 2, 16
ADAM = tinker.AdamParams(learning_rate=1e-4)
_random = random.Random(0)


def ids(count: int) -> list[int]:
    return [_random.randrange(3, VOCAB) for _ in range(count)]


def batch(count: int, length: int) -> list[tinker.Datum]:
    """Sequences of `length` input tokens, each with a target."""
    made = []
    for _ in range(count):
        tokens = ids(length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        made.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return made


def step(run: Any, data: list[tinker.Datum]) -> list[Any]:
    """A pass and a step, as loops submit them: both at once."""
    return [run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)]


def wait(promises: list[Any]) -> None:
    for promise in promises:
        promise.result()


def timed(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


class Client:
    """A run of its own on the server, and the measures."""

    def __init__(self) -> None:
        self.service = tinker.ServiceClient()
        self.run: Any = None
        self.sampler: Any = None

    def first(self) -> dict[str, float]:
        """From nothing to the end of the first step."""
        self.run = self.service.create_lora_training_client(MODEL, rank=RANK, seed=1)
        wait(step(self.run, batch(BATCH, LENGTH)))
        return {"at": time.time()}

    def train(self, steps: int = 4) -> dict[str, float]:
        work = [batch(BATCH, LENGTH) for _ in range(steps)]
        tokens = steps * BATCH * LENGTH
        in_turn = timed(lambda: [wait(step(self.run, data)) for data in work])
        ahead = timed(lambda: [wait(p) for p in [step(self.run, data) for data in work]])
        return {"in_turn": tokens / in_turn, "ahead": tokens / ahead}

    def optim_step(self, rounds: int = 10) -> dict[str, float]:
        """A step after its pass is done, and a call that does nothing on the server."""
        data, steps, nothing = batch(1, 16), [], []
        for _ in range(rounds):
            self.run.forward_backward(data, "cross_entropy").result()
            steps.append(timed(lambda: self.run.optim_step(ADAM).result()))
            nothing.append(timed(self.run.get_info))
        return {"ms": statistics.median(steps) * 1e3, "nothing_ms": statistics.median(nothing) * 1e3}

    def _sampler(self) -> Any:
        if self.sampler is None:
            self.sampler = self.run.save_weights_and_get_sampling_client()
        return self.sampler

    def one_token(self, rounds: int = 20) -> dict[str, float]:
        sampler, one = self._sampler(), tinker.SamplingParams(max_tokens=1, temperature=1.0)
        prompts = [tinker.ModelInput.from_ints(ids(16)) for _ in range(rounds)]
        took = [timed(lambda p=p: sampler.sample(p, 1, one).result()) for p in prompts]
        return {"ms": statistics.median(took) * 1e3}

    def sample(self) -> dict[str, float]:
        """64 tokens for each of 8 prompts, asked for at once: the middle of five, since one is short."""
        sampler = self._sampler()
        params = tinker.SamplingParams(max_tokens=64, temperature=1.0, stop=[])
        drawn: list[int] = []

        def all_of_them() -> None:
            prompts = [tinker.ModelInput.from_ints(ids(64)) for _ in range(8)]
            promises = [sampler.sample(prompt, 1, params) for prompt in prompts]
            drawn.extend(len(p.result().sequences[0].tokens) for p in promises)

        seconds = statistics.median(timed(all_of_them) for _ in range(5))
        assert drawn == [64] * 40, drawn
        return {"rate": 512 / seconds}

    def warm(self) -> dict[str, float]:
        """A run of its own for a tenant, some steps old."""
        self.run = self.service.create_lora_training_client(MODEL, rank=RANK, seed=1)
        self.small(4)
        return {}

    def small(self, steps: int = 24) -> dict[str, float]:
        """Steps of small batches, each awaited: how many tokens and requests, from when until when."""
        data = batch(SMALL_BATCH, SMALL_LENGTH)
        began = time.time()
        for _ in range(steps):
            wait(step(self.run, data))
        tokens = steps * SMALL_BATCH * SMALL_LENGTH
        return {"tokens": tokens, "requests": 2 * steps, "began": began, "ended": time.time()}


def main() -> None:
    print(json.dumps({"imported": True}), flush=True)
    os.environ |= {"TINKER_BASE_URL": sys.stdin.readline().strip(), "TINKER_API_KEY": "tml-bench"}
    client = Client()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(client, line.strip())()), flush=True)
    os._exit(0)  # official clients now and then abort while the interpreter takes their threads down


if __name__ == "__main__":
    main()
