"""Official SDK: a burst of passes and samples from one key, more than one user may have at once."""

from __future__ import annotations

import sys
import time
from typing import Any

import tinker
from report import ADAM, PROMPT, done, say

RUNS, PASSES, DATUMS, LENGTH, SAMPLES = 3, 4, 10, 200, 40
STOPS = [f"never said, number {i}" for i in range(1000)]  # a body of 28 kB that costs no computing


def main(model: str) -> None:
    begun = time.monotonic()
    service = tinker.ServiceClient()
    runs = [service.create_lora_training_client(model, rank=4, seed=1) for _ in range(RUNS)]
    tokens = [7 + i % 200 for i in range(LENGTH + 1)]
    inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * LENGTH}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    # all at once: nothing is waited for before everything is sent
    passes: list[list[Any]] = [[] for _ in runs]
    for _ in range(PASSES):
        for run, futures in zip(runs, passes, strict=True):
            futures.append(run.forward_backward([datum] * DATUMS, "cross_entropy"))
            run.optim_step(tinker.AdamParams(**ADAM))
    sampler = service.create_sampling_client(base_model=model)
    params = tinker.SamplingParams(max_tokens=4, seed=1, stop=STOPS)
    prompt = tinker.ModelInput.from_ints(PROMPT)
    samples = [sampler.sample(prompt, 1, params) for _ in range(SAMPLES)]
    losses = [[future.result().metrics["loss:sum"] for future in futures] for futures in passes]
    say("passes", losses=losses)
    answers = [future.result().sequences[0].tokens for future in samples]
    say("samples", answers=answers, seconds=time.monotonic() - begun)


main(sys.argv[1])
done()
