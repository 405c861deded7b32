"""Official SDK: train, save, load, resume, and score with a sampler. Argument: a directory for downloads."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from pathlib import Path
from typing import Any

import tinker
from report import ADAM, MODEL, RANK, SEQUENCES, done, error_of, outputs, say

DATA = [
    tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )
    for ids in SEQUENCES
]
STEP = tinker.AdamParams(**ADAM, weight_decay=0.1, grad_clip_norm=0.5)


def submit(client: Any) -> list[Any]:
    """A step of two passes, none of them waited for."""
    return [
        client.forward_backward(DATA[:2], "cross_entropy"),
        client.forward_backward(DATA[2:], "cross_entropy"),
        client.optim_step(STEP),
    ]


def losses(steps: list[list[Any]]) -> list[float]:
    return [sum(p.result().metrics["loss:sum"] for p in passes) for *passes, _ in steps]


def download(service: Any, path: str, directory: Path) -> list[str]:
    urls = service.create_rest_client().get_external_weights_urls(path).result().urls
    directory.mkdir()
    for name, url in urls.items():
        (directory / name).write_bytes(urllib.request.urlopen(url).read())
    return sorted(urls)


async def in_a_coroutine(service: Any, path: str) -> dict[str, Any]:
    run = await service.create_training_client_from_state_with_optimizer_async(path)
    first = await run.forward_backward_async(DATA, "cross_entropy")
    step = await run.optim_step_async(STEP)
    second = await run.forward_async(DATA, "cross_entropy")
    sampler = await run.save_weights_and_get_sampling_client_async()
    scores = await asyncio.gather(
        *(sampler.compute_logprobs_async(tinker.ModelInput.from_ints(ids)) for ids in SEQUENCES)
    )
    await step.result_async()
    return {"first": outputs(await first), "second": outputs(await second), "scores": scores}


def main(out: Path) -> None:
    service = tinker.ServiceClient(user_metadata={"why": "compat"})
    known = service.get_server_capabilities().supported_models
    say("capabilities", models=[m.model_name for m in known], contexts=[m.max_context_length for m in known])

    run = service.create_lora_training_client(MODEL, rank=RANK, seed=7, user_metadata={"renderer": "none"})
    info = run.get_info()
    text = run.get_tokenizer().decode(run.get_tokenizer().encode("a tokenizer"))
    say("info", run=info.model_id, name=info.model_data.model_name, rank=info.lora_rank, text=text)
    start = run.save_weights_external("start").result()
    say("start", path=start.path, files=download(service, start.path, out / "start"))

    steps = [submit(run), submit(run)]
    saving = run.save_state("mid", user_metadata={"step": "2"})
    steps += [submit(run), submit(run)]
    mid = saving.result().path
    norms = [step.result().metrics for *_, step in steps]
    end = download(service, run.save_weights_external("end").result().path, out / "end")
    say("steps", losses=losses(steps), mid=mid, norms=norms, files=end)

    resumed = service.create_training_client_from_state_with_optimizer(mid)
    weights_only = service.create_training_client_from_state(mid)
    say("resumed", losses=losses([submit(resumed), submit(resumed)]), rank=resumed.get_info().lora_rank)
    say("weights only", losses=losses([submit(weights_only) for _ in range(3)]))
    run.load_state_with_optimizer(mid).result()
    say("loaded with optimizer", losses=losses([submit(run), submit(run)]))
    run.load_state(mid).result()
    say("loaded", losses=losses([submit(run) for _ in range(3)]))

    say("again", error=error_of(lambda: run.save_state("mid").result()))
    say("overwritten", path=run.save_state("mid", overwrite=True).result().path)

    many = run.forward(DATA * 400, "cross_entropy").result()  # two requests, sent at once
    say("chunks", few=outputs(run.forward(DATA, "cross_entropy").result()), many=outputs(many))

    named = run.save_weights_for_sampler("named").result().path
    samplers = [run.save_weights_and_get_sampling_client(), run.create_sampling_client(named)]
    submit(run)[-1].result()  # published adapters do not change under their samplers
    prompts = [tinker.ModelInput.from_ints(ids) for ids in SEQUENCES]
    say("scores", named=named, scores=[[s.compute_logprobs(p).result() for p in prompts] for s in samplers])
    say("moved on", **outputs(run.forward(DATA, "cross_entropy").result()))
    say("coroutine", **asyncio.run(in_a_coroutine(service, mid)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    done()
