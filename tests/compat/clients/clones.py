"""Official SDK: a sampler, pickled or named by its handle, works in other processes at the same time."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import tinker
from report import MODEL, PROMPT, done, say


def draw(sampler: Any) -> list[list[int]]:
    params = tinker.SamplingParams(max_tokens=12, seed=3, stop=[])
    futures = [sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, params) for _ in range(4)]
    return [future.result().sequences[0].tokens for future in futures]


def pickled(data: bytes) -> list[list[int]]:
    return draw(pickle.loads(data))


def handled(handle: str) -> list[list[int]]:
    return draw(tinker.SamplingClient.from_sampler_handle(handle))


def main() -> None:
    service = tinker.ServiceClient()
    run = service.create_lora_training_client(MODEL, rank=2, seed=1)
    target = [5, 6, 7, 8]
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(PROMPT[:4]), loss_fn_inputs={"target_tokens": target}
    )
    run.forward_backward([datum], "cross_entropy").result()
    run.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    sampler = run.save_weights_and_get_sampling_client()
    say("base", tokens=draw(service.create_sampling_client(base_model=MODEL)))
    say("here", tokens=draw(sampler))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        data, handle = pickle.dumps(sampler), sampler.get_sampler_handle()
        others = [pool.submit(pickled, data), pool.submit(handled, handle), pool.submit(pickled, data)]
        say("elsewhere", tokens=[other.result() for other in others])
    say("here again", tokens=draw(sampler))


if __name__ == "__main__":
    main()
    done()
