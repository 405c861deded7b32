"""Official SDK: sampling with every option, on the base model."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import tinker
import torch
from report import MODEL, PROMPT, done, say

SCORED = torch.tensor([[7, 8], [9, -1], [-1, -1], [1, 2], [3, 4], [-1, 5], [6, -1]])  # rows of PROMPT[1:]


def sequences(response: Any) -> list[dict[str, Any]]:
    return [
        {"tokens": s.tokens, "logprobs": s.logprobs, "stop": s.stop_reason, "top": s.topk_logprobs}
        for s in response.sequences
    ]


def printable(tokenizer: Any, tokens: list[int]) -> str:
    """Two neighbours of the text that are plain characters."""
    texts = [tokenizer.decode([t]) for t in tokens]
    pairs = [a + b for a, b in pairwise(texts[8:]) if (a + b).isascii() and len(a + b) == 2]
    return next(pair for pair in pairs if pair.isprintable())


def stopping(sampler: Any, prompt: Any) -> None:
    def draw(stop: Any, n: int = 1, tokens: int = 200) -> Any:
        params = tinker.SamplingParams(max_tokens=tokens, seed=11, stop=stop)
        return sequences(sampler.sample(prompt, n, params).result())

    free = draw([], 6)
    say("never stopped", sequences=free)
    say("stopped at eos", sequences=draw(None, 6))
    tokens = free[0]["tokens"]
    say("stopped at an id", stop=tokens[5], sequences=draw([tokens[5], 258]))
    tokenizer = sampler.get_tokenizer()
    text = printable(tokenizer, tokens)
    texts = [tokenizer.decode([t]) for t in tokens]
    end = next(i for i in range(len(tokens)) if text in "".join(texts[: i + 1]))
    say("stopped at a string", text=text, end=end, sequences=draw(text))
    say("stopped at one of several", sequences=draw(["no such text", text]))


def scoring(sampler: Any, prompt: Any) -> None:
    one = tinker.SamplingParams(max_tokens=1, seed=1)
    everything = sampler.sample(
        prompt, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3, prompt_alt_tokens_k=2
    ).result()
    alternatives = everything.prompt_alt_tokens
    say(
        "prompt", logprobs=everything.prompt_logprobs, top=everything.topk_prompt_logprobs,
        alt_shape=list(alternatives.tokens.shape), alt_tokens=alternatives.tokens.tolist(),
        alt_logprobs=alternatives.logprobs.tolist(), cached=everything.prompt_cache_hit_tokens,
    )  # fmt: skip
    say("scored", logprobs=sampler.compute_logprobs(prompt).result())
    say("scored at the end", logprobs=sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result())
    dense = tinker.TensorData.from_torch(SCORED)
    wide = torch.nn.functional.pad(SCORED, (0, 14), value=-1)
    sparse = tinker.TensorData.from_torch_sparse(wide, pad_value=-1)
    for name, targets in (("dense", dense), ("sparse", sparse)):
        given = sampler.sample(prompt, 1, one, target_prompt_logprobs=targets).result().target_prompt_logprobs
        say(
            f"targets {name}", shape=list(given.shape), values=given.to_torch().to_dense().tolist(),
            csr=given.sparse_crow_indices is not None,
        )  # fmt: skip


def cancelling(sampler: Any, prompt: Any) -> None:
    params = tinker.SamplingParams(max_tokens=200, stop=[])
    before = answered("sample")
    futures = [sampler.sample(prompt, 32, params) for _ in range(40)]  # more than are done by then
    eventually(lambda: answered("sample") >= before + 40)  # until the server has them all
    time.sleep(1.0)  # and the client has read so: of others it does not know what to cancel
    cancelled = [future.cancel() for future in futures]
    after = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=2)).result()
    eventually(lambda: answered("cancel_future") >= 8)  # the client reports them in the background
    say("cancelled", cancelled=cancelled, after=sequences(after), told=answered("cancel_future"))


def eventually(happened: Callable[[], bool]) -> None:
    for _ in range(600):
        if happened():
            break
        time.sleep(0.1)


def answered(op: str) -> int:
    """How many requests of this kind the server says it has accepted."""
    metrics = urllib.request.urlopen(f"{os.environ['TINKER_BASE_URL']}/metrics").read().decode()
    counts = re.findall(rf'^tinkex_requests_total{{op="{op}",status="20\d"}} (\d+)', metrics, re.MULTILINE)
    return sum(map(int, counts))


def main() -> None:
    service = tinker.ServiceClient()
    sampler = service.create_sampling_client(base_model=MODEL)
    prompt = tinker.ModelInput.from_ints(PROMPT)

    def draw(n: int = 1, **options: Any) -> Any:
        scores = {k: options.pop(k) for k in ("topk_sample_logprobs",) if k in options}
        params = tinker.SamplingParams(**{"max_tokens": 24, "stop": [], **options})
        return sequences(sampler.sample(prompt, n, params, **scores).result())

    say("base", model=sampler.get_base_model())
    say("seeded", first=draw(4, seed=5), again=draw(4, seed=5), other=draw(4, seed=6))
    say("unseeded", first=draw(), again=draw())
    say("warm", sequences=draw(2, seed=5, temperature=0.7, topk_sample_logprobs=4))
    say("greedy", sequences=draw(temperature=0.0, topk_sample_logprobs=4))
    say("top_k 1", sequences=draw(top_k=1, seed=1))
    say("top_p 0", sequences=draw(top_p=1e-6, seed=1))
    say("top_k 5", sequences=draw(4, top_k=5, seed=1, topk_sample_logprobs=5))
    long = tinker.ModelInput.from_ints([i % 250 for i in range(250)])
    say("to the end", sequences=sequences(sampler.sample(long, 1, tinker.SamplingParams(stop=[])).result()))
    stopping(sampler, prompt)
    scoring(sampler, prompt)
    cancelling(sampler, prompt)


if __name__ == "__main__":
    main()
    done()
