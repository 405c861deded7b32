"""Official SDKs of earlier days (0.4.1 to 0.26.0): the whole flow that they know.

Argument: a directory for downloads.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tinker
import torch
from report import ADAM, MODEL, PROMPT, RANK, SEQUENCES, done, error_of, outputs, say
from tinker import types

VERSION = tuple(int(part) for part in tinker.__version__.split("."))
OLD = [-4.0, -3.5, -6.0, -2.5, -5.0, -4.5, -3.0, -5.5]
ADVANTAGES = [0.0, 1.0, -1.0, 0.5, -2.0, 1.5, 2.0, -0.5]


def datum(ids: list[int], **inputs: Any) -> Any:
    given = {"target_tokens": ids[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


DATA = [datum(ids, weights=[1.0] * (len(ids) - 1)) for ids in SEQUENCES]


def submit(client: Any) -> list[Any]:
    return [client.forward_backward(DATA, "cross_entropy"), client.optim_step(types.AdamParams(**ADAM))]


def losses(steps: list[list[Any]]) -> list[float]:
    return [passing.result().metrics["loss:sum"] for passing, _ in steps]


def custom(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return -torch.stack([given.sum() for given in logprobs]).sum(), {"seen": float(len(data))}


def training(service: Any) -> Any:
    run = service.create_lora_training_client(MODEL, rank=RANK, seed=7, user_metadata={"renderer": "r"})
    info = run.get_info()
    text = run.get_tokenizer().decode(run.get_tokenizer().encode("a tokenizer"))
    say("info", run=info.model_id, name=info.model_data.model_name, text=text)
    say("first", **outputs(run.forward(DATA, "cross_entropy").result()))
    scored = [
        datum(ids, logprobs=OLD[: len(ids) - 1], advantages=ADVANTAGES[: len(ids) - 1]) for ids in SEQUENCES
    ]
    kinds = ["importance_sampling", "ppo"] + (["cispo", "dro"] if VERSION >= (0, 5, 1) else [])
    for kind in kinds:
        config = {"beta": 0.05} if kind == "dro" else None
        result = run.forward(scored, kind, loss_fn_config=config).result()
        say(kind, **outputs(result))

    steps = [submit(run), submit(run)]
    saving = run.save_state("mid")
    steps += [submit(run), submit(run)]
    mid = saving.result().path
    say("steps", losses=losses(steps), mid=mid, metrics=[step.result().metrics for _, step in steps])
    resume = getattr(service, "create_training_client_from_state_with_optimizer", None)
    resumed = (resume or service.create_training_client_from_state)(mid)
    say("resumed", losses=losses([submit(resumed), submit(resumed)]))
    if resume is not None:
        weights_only = service.create_training_client_from_state(mid)
        say("weights only", losses=losses([submit(weights_only) for _ in range(2)]))
        run.load_state_with_optimizer(mid).result()
    else:
        run.load_state(mid).result()
    say("loaded", losses=losses([submit(run), submit(run)]))

    many = run.forward(DATA * 60, "cross_entropy").result()  # several requests of the oldest ones
    say("chunks", few=outputs(run.forward(DATA, "cross_entropy").result()), many=outputs(many))
    twin = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
    metrics = twin.forward_backward_custom(DATA, custom).result().metrics
    twin.optim_step(types.AdamParams(**ADAM)).result()
    say("custom", metrics=metrics, after=outputs(twin.forward(DATA, "cross_entropy").result()))
    wrong = run.forward_backward([datum([1, 2, 3], weights=[1.0])], "cross_entropy")
    step = run.optim_step(types.AdamParams(**ADAM))
    say("wrong", error=error_of(wrong.result), stepped=error_of(step.result))
    say("asynchronous", **asyncio.run(asynchronous(run)))
    return run


async def asynchronous(run: Any) -> dict[str, Any]:
    first = await run.forward_backward_async(DATA, "cross_entropy")
    step = await run.optim_step_async(types.AdamParams(**ADAM))
    before = (await first.result_async()).metrics["loss:sum"]
    await step.result_async()
    after = await (await run.forward_async(DATA, "cross_entropy")).result_async()
    return {"before": before, "after": after.metrics["loss:sum"]}


def sampling(service: Any, run: Any) -> str:
    path = run.save_weights_for_sampler("sampler").result().path
    trained = outputs(run.forward(DATA, "cross_entropy").result())["logprobs"]
    samplers = [run.create_sampling_client(path), run.save_weights_and_get_sampling_client(name="other")]
    ids = [types.ModelInput.from_ints(sequence) for sequence in SEQUENCES]
    scores = [[sampler.compute_logprobs(p).result() for p in ids] for sampler in samplers]
    say("scores", trained=trained, scores=scores, path=path)

    base = service.create_sampling_client(base_model=MODEL)

    def draw(n: int = 1, **params: Any) -> list[dict[str, Any]]:
        asked = types.SamplingParams(**{"max_tokens": 16, "stop": [], **params})
        found = base.sample(types.ModelInput.from_ints(PROMPT), n, asked).result().sequences
        return [{"tokens": s.tokens, "logprobs": s.logprobs, "stop": s.stop_reason} for s in found]

    free = draw(3, seed=5)
    say("drawn", first=free, again=draw(3, seed=5), greedy=draw(temperature=0.0), top=draw(top_k=1))
    say("stopped", stop=free[0]["tokens"][4], sequences=draw(1, seed=5, stop=[free[0]["tokens"][4]]))
    one, prompt = types.SamplingParams(max_tokens=1), types.ModelInput.from_ints(PROMPT)
    scored = base.sample(prompt, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    say("prompt", logprobs=scored.prompt_logprobs, top=scored.topk_prompt_logprobs)
    long = types.ModelInput.from_ints([1] * 250)
    params = types.SamplingParams(max_tokens=10)
    say("too long", error=error_of(lambda: base.sample(long, 1, params).result()))
    if VERSION >= (0, 13):
        clone = pickle.loads(pickle.dumps(base))
        asked = types.SamplingParams(max_tokens=16, seed=5, stop=[])
        say("pickled", tokens=[s.tokens for s in clone.sample(prompt, 3, asked).result().sequences])
    return path


def rest_calls(service: Any, run_id: str, path: str, out: Path) -> None:
    rest = service.create_rest_client()
    runs = rest.list_training_runs().result()
    say("runs", ids=[r.training_run_id for r in runs.training_runs], total=runs.cursor.total_count)
    found = rest.get_training_run_by_tinker_path(path).result()
    say("run", id=found.training_run_id, model=found.base_model, rank=found.lora_rank)

    def now() -> dict[str, bool]:
        return {c.checkpoint_id: c.public for c in rest.list_checkpoints(run_id).result().checkpoints}

    before = now()
    rest.publish_checkpoint_from_tinker_path(path).result()
    published = now()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    say("checkpoints", before=before, published=published, unpublished=now())
    listed = rest.list_user_checkpoints().result()
    say("of user", ids=sorted(c.checkpoint_id for c in listed.checkpoints), total=listed.cursor.total_count)
    archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    (out / "archive.tar").write_bytes(urllib.request.urlopen(archive.url).read())
    expires = archive.expires if archive.expires.tzinfo else archive.expires.replace(tzinfo=UTC)
    say("archive", left=(expires - datetime.now(UTC)).total_seconds())
    if VERSION >= (0, 13):
        rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
        say("weights", rank=rest.get_weights_info_by_tinker_path(path).result().lora_rank)
        say("sessions", ids=rest.list_sessions().result().sessions)
    rest.delete_checkpoint_from_tinker_path(path).result()
    say(
        "deleted",
        ids=sorted(now()),
        error=error_of(lambda: rest.delete_checkpoint_from_tinker_path(path).result()),
    )


def main(out: Path) -> None:
    service = tinker.ServiceClient(user_metadata={"why": "compat"})
    known = service.get_server_capabilities().supported_models
    say("capabilities", version=tinker.__version__, models=[m.model_name for m in known])
    run = training(service)
    path = sampling(service, run)
    rest_calls(service, run.get_info().model_id, path, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    done()
