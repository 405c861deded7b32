"""Validates a sample request, fingerprints it to detect repeats, and converts it to engine work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tinkex.engine.protocol import SampleWork
from tinkex.engine.request import token_ids
from tinkex.errors import InvalidInputError
from tinkex.service.refusal import Refusal
from tinkex.service.rows import SamplerRow
from tinkex.types import sampling as types
from tinkex.types.outputs import sample_bytes

MAX_SAMPLES = 4096  # num_samples of one request


def check_sample(request: types.SampleRequest, limit: int | None) -> int:
    """What must be a 400, because clients act on it: the prompt is too long or no text, the result too large.

    Returns how many bytes of the result lists and scores may take. `limit` is the context, if it is known.
    """
    if request.num_samples > MAX_SAMPLES:
        raise Refusal(400, f"num_samples must be at most {MAX_SAMPLES}, got {request.num_samples}")
    try:
        length = len(token_ids(request.prompt, "prompt"))
    except InvalidInputError as error:
        raise Refusal(400, str(error)) from None
    tokens = request.sampling_params.max_tokens or 1
    # Scoring a prompt draws one token that is not returned, and needs no room for it.
    scoring = tokens == 1 and bool(
        request.prompt_logprobs
        or request.topk_prompt_logprobs
        or request.prompt_alt_tokens_k
        or request.target_prompt_logprobs is not None
    )
    if limit is not None and length + tokens > limit + scoring:
        raise Refusal(
            400,
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{length} + {tokens} > {limit}",
        )
    if request.sampling_params.max_tokens is None and limit is not None:
        tokens = max(1, limit - length)
    scores = (
        request.prompt_logprobs, request.topk_prompt_logprobs, request.topk_sample_logprobs,
        request.target_prompt_logprobs, request.prompt_alt_tokens_k,
    )  # fmt: skip
    try:
        size = sample_bytes(length, tokens, request.num_samples, *scores)
        return size - sample_bytes(0, tokens, request.num_samples) if any(scores) else 0
    except InvalidInputError as error:
        raise Refusal(400, str(error)) from None


def fingerprint(request: types.SampleRequest) -> int:
    """Clones of a sampler may use the same seq ids, and none must get another's result."""
    params, targets = request.sampling_params, request.target_prompt_logprobs
    given = params.stop
    stop = given if given is None or isinstance(given, str) else (tuple(given),)
    scored = None if targets is None else (targets.to_numpy().tobytes(), *targets.dense_shape)
    return hash((
        request.prompt.to_numpy().tobytes(), request.num_samples, request.prompt_logprobs,
        request.topk_prompt_logprobs, request.topk_sample_logprobs, scored, request.prompt_alt_tokens_k,
        request.prompt_logprobs_last_n, request.record_stability_info,
        params.max_tokens, params.seed, stop, params.temperature, params.top_k, params.top_p,
        params.presence_penalty, params.frequency_penalty, params.repetition_penalty, params.min_p,
        params.min_tokens, params.ignore_eos, str(params.logit_bias), str(params.grammar),
    ))  # fmt: skip


def sample_parts(work: SampleWork, size: int) -> Iterator[SampleWork]:
    """A request in parts of `size` samples; the first one scores the prompt."""
    yield replace(work, num_samples=size)
    rest = replace(
        work, prompt_logprobs=False, prompt_logprobs_last_n=None, topk_prompt_logprobs=0,
        target_prompt_logprobs=None, prompt_alt_tokens_k=0,
    )  # fmt: skip
    for first in range(size, work.num_samples, size):
        yield replace(rest, num_samples=min(size, work.num_samples - first), first_sample=first)


def sample_work(request: types.SampleRequest, row: SamplerRow) -> SampleWork:
    params, strings = request.sampling_params, tuple[bytes, ...]()
    if given := params.stop:
        stops = [given] if isinstance(given, str) else given
        strings = tuple(stop.encode() for stop in stops if isinstance(stop, str))
        if strings:
            params = replace(params, stop=[stop for stop in stops if isinstance(stop, int)] or None)
    return SampleWork(
        request.prompt.to_numpy(), params, row.adapter, request.num_samples, strings, request.prompt_logprobs,
        request.prompt_logprobs_last_n, request.topk_prompt_logprobs, request.topk_sample_logprobs,
        request.target_prompt_logprobs, request.prompt_alt_tokens_k,
    )  # fmt: skip
