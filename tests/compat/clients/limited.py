"""Official SDK: a loop on a server that answers each kind of call with 429 and Retry-After first."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import tinker
from report import ADAM, PROMPT, done, say


def timed(step: str, call: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    value = call()
    say(step, seconds=time.monotonic() - begun)
    return value


def main(model: str) -> None:
    service = tinker.ServiceClient()
    run = timed("create_model", lambda: service.create_lora_training_client(model, rank=8))
    tokens = tinker.ModelInput.from_ints(PROMPT[:-1])
    inputs: Any = {"target_tokens": PROMPT[1:], "weights": [1.0] * len(PROMPT[1:])}
    data = [tinker.Datum(model_input=tokens, loss_fn_inputs=inputs)]
    timed("forward_backward", lambda: run.forward_backward(data, "cross_entropy").result())
    timed("optim_step", lambda: run.optim_step(tinker.AdamParams(**ADAM)).result())
    sampler = service.create_sampling_client(base_model=model)
    params = tinker.SamplingParams(max_tokens=2)
    timed("asample", lambda: sampler.sample(tokens, 1, params).result())
    rest = service.create_rest_client()
    timed("sessions", lambda: rest.list_sessions().result())


main(sys.argv[1])
done()
