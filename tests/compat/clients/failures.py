"""Official SDK: what users do wrong comes back as a typed error, soon, and later calls work."""

from __future__ import annotations

import base64
from typing import Any

import tinker
from report import MODEL, PROMPT, done, error_of, outputs, say


def datum(**inputs: Any) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(PROMPT[:4]), loss_fn_inputs=inputs)


def sampling(service: Any) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)

    def fails(name: str, ids: list[int], **params: Any) -> None:
        prompt = tinker.ModelInput.from_ints(ids)
        say(name, error=error_of(lambda: sampler.sample(prompt, 1, tinker.SamplingParams(**params)).result()))

    fails("too long", [1] * 250, max_tokens=10)
    fails("no tokens", PROMPT, max_tokens=0)
    fails("no such id", [1, 100_000], max_tokens=1)
    fails("no prompt", [], max_tokens=1)
    fails("no temperature", PROMPT, max_tokens=1, temperature=-1.0)
    pixel = base64.b64decode("iVBORw0KGgo=")
    image = tinker.types.ImageChunk(data=pixel, format="png", expected_tokens=1)
    seeing = tinker.ModelInput(chunks=[image])
    one = tinker.SamplingParams(max_tokens=1)
    say("no eyes", error=error_of(lambda: sampler.sample(seeing, 1, one).result()))
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints([1] * 256)).result()
    say("whole context", length=len(scored))


def unknown(service: Any) -> None:
    rest = tinker.RestClient()
    none = "tinker://00000000-0000-0000-0000-000000000000:train:0/weights/none"
    calls = {
        "no such model": lambda: service.create_lora_training_client("no/such-model"),
        "no such model to sample": lambda: service.create_sampling_client(base_model="no/such-model"),
        "no rank": lambda: service.create_lora_training_client(MODEL, rank=0),
        "nothing to train": lambda: service.create_lora_training_client(
            MODEL, rank=1, train_mlp=False, train_attn=False, train_unembed=False
        ),
        "no optimizer": lambda: service.create_lora_training_client(
            MODEL, rank=1, optimizer=tinker.DimuonOptimizerConfig()
        ),
        "no such state": lambda: service.create_training_client_from_state(none),
        "no such sampler weights": lambda: service.create_sampling_client(model_path=none),
        "no such run": lambda: rest.get_training_run("none:train:0").result(),
        "no such session": lambda: rest.get_session("none").result(),
        "no such checkpoint": lambda: rest.delete_checkpoint_from_tinker_path(none).result(),
    }
    for name, call in calls.items():
        say(name, error=error_of(call))


def training(service: Any) -> None:
    run = service.create_lora_training_client(MODEL, rank=2, seed=1)
    good, step = datum(target_tokens=[5, 6, 7, 8]), tinker.AdamParams(learning_rate=0.01)
    before = outputs(run.forward([good], "cross_entropy").result())
    beyond = [5] * 300  # the model reads 256
    long = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(beyond), loss_fn_inputs={"target_tokens": beyond}
    )
    wrong = {
        "no such loss": ([good], "nonsense"),
        "no targets": ([datum(weights=[1.0] * 4)], "cross_entropy"),
        "short targets": ([datum(target_tokens=[5, 6])], "cross_entropy"),
        "no such target": ([datum(target_tokens=[5, 6, 7, 100_000])], "cross_entropy"),
        "not a number": ([datum(target_tokens=[5, 6, 7, 8], weights=[float("nan")] * 4)], "cross_entropy"),
        "no advantages": ([good], "importance_sampling"),
        "bad chunk of two": ([good] * 1100 + [datum(target_tokens=[5])], "cross_entropy"),
        "too long a sequence": ([good] * 1100 + [long], "cross_entropy"),
    }
    for name, (data, loss) in wrong.items():
        passing = run.forward_backward(data, loss)
        stepping = run.optim_step(step)
        after = run.forward([good], "cross_entropy")
        failed = error_of(lambda f=passing: f.result(timeout=30))
        stepped = error_of(lambda f=stepping: f.result(timeout=15))
        say(name, error=failed, stepped=stepped, same=outputs(after.result(timeout=15)) == before)
    for name, ttl in (("bad/name", None), ("../up", None), ("ok", 10)):
        say(f"saved {name}", error=error_of(lambda n=name, t=ttl: run.save_state(n, ttl_seconds=t).result()))
    sampler_path = run.save_weights_for_sampler("s").result().path
    resume = service.create_training_client_from_state_with_optimizer
    say("resumed from a sampler", error=error_of(lambda: resume(sampler_path)))
    run.forward_backward([good], "cross_entropy").result()
    run.optim_step(step).result()
    say("went on", before=before, after=outputs(run.forward([good], "cross_entropy").result()))


def refused(service: Any) -> None:
    """A loss that the server has not, in a batch of two requests; then a step."""
    run = service.create_lora_training_client(MODEL, rank=2, seed=1)
    inputs = {"logprobs": [-1.0] * 4, "advantages": [1.0] * 4}
    batch = [datum(target_tokens=[5, 6, 7, 8], **inputs)] * 1100
    passing = run.forward_backward(batch, "stable_reinforce")
    say("refused", error=error_of(lambda: passing.result(timeout=20)))
    stepping = run.optim_step(tinker.AdamParams())
    say("after a refusal", error=error_of(lambda: stepping.result(timeout=20)))


def main() -> None:
    service = tinker.ServiceClient()
    sampling(service)
    unknown(service)
    training(service)
    refused(service)
    say("bad key", error=error_of(lambda: tinker.ServiceClient(api_key="sk-1").get_server_capabilities()))


if __name__ == "__main__":
    main()
    done()
