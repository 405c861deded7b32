"""Features of images in sequences, against transformers' models given the same embeddings.

How features are made is not asked here: they are random.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.commands import do
from tests.engine.stepping import finish
from tests.engine.tiny import reference_model, tiny_model
from tinkex.engine import protocol as p
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.images import PlacedImage, page_extras
from tinkex.engine.torch.kv import PAGE, KVCache, chain
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.states import StatePool
from tinkex.engine.torch.trainer import TorchTrainer, TrainingPass
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import LoraConfig, SamplingParams

# Families in which the tokens of an image see each other, and the fields that make it so.
WHOLE: dict[str, dict[str, Any]] = {
    "gemma3 that sees": {},
    "gemma4": {"use_bidirectional_attention": "vision"},
}
PLACEHOLDER = 7  # the token id at an image's positions: it must not matter
CPU = torch.device("cpu")
Images = tuple[PlacedImage, ...]


def image(decoder: Decoder, seed: int, start: int, length: int) -> PlacedImage:
    vision = decoder.config.vision_config or {}
    generator = torch.Generator().manual_seed(seed)
    layers = len(vision.get("deepstack_visual_indexes", ()))
    features = [torch.randn(length, decoder.config.width, generator=generator) for _ in range(1 + layers)]
    return PlacedImage(start, features[0], seed.to_bytes(32), tuple(features[1:]))


def prompt(seed: int, length: int, images: Images = ()) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(10, 250, length).astype(np.int32)
    for one in images:
        ids[one.start : one.stop] = PLACEHOLDER
    return ids


def their_logits(model: Any, ids: np.ndarray, images: Images) -> Tensor:
    """Of transformers, given the embeddings."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    embeds, seen = model.get_input_embeddings()(tokens).detach(), torch.zeros_like(tokens, dtype=torch.bool)
    for one in images:
        embeds[0, one.start : one.stop] = one.features_ND
        seen[0, one.start : one.stop] = True
    given: dict[str, Any] = {"inputs_embeds": embeds, "use_cache": False}
    if model.config.model_type == "gemma3":
        given["token_type_ids"] = seen.long()
    if model.config.model_type == "gemma4_text":  # in its sliding layers alone
        masks = causal(len(ids)), causal(len(ids), model.config.sliding_window, images)
        given["attention_mask"] = dict(zip(("full_attention", "sliding_attention"), masks, strict=True))
    if not any(one.deeper for one in images):
        return model(**given).logits[0]
    given["position_ids"] = torch.arange(len(ids)).expand(3, 1, -1)
    deeper = [torch.cat(each) for each in zip(*(one.deeper for one in images), strict=True)]
    inner = model.model.language_model(visual_pos_masks=seen, deepstack_visual_embeds=deeper, **given)
    return model.lm_head(inner.last_hidden_state)[0]


def causal(length: int, window: int | None = None, images: Images = ()) -> Tensor:
    """A mask to add, [1, 1, length, length], in which tokens of an image see each other."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = key <= query
    for one in images:
        inside = [(at >= one.start) & (at < one.stop) for at in (query, key)]
        seen = seen | (inside[0] & inside[1])
    if window is not None:
        seen = seen & (query - key < window)
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)


def their_logprobs(model: Any, ids: np.ndarray, images: Images) -> Tensor:
    """Of each token but the first."""
    logprobs = their_logits(model, ids[:-1], images).log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]


# -- training ------------------------------------------------------------------------------------------


class SeeingTrainer(TorchTrainer):
    """A trainer whose passes have images in their datums."""

    def __init__(self, decoder: Decoder, images: list[Images], **options: Any) -> None:
        super().__init__(decoder, "model", **options)
        self._images = images

    def _read(self, work: p.Pass) -> Generator[None, None, TrainingPass]:
        training = yield from super()._read(work)
        pairs = zip(training.examples, self._images, strict=True)
        training.examples = [replace(example, images=images) for example, images in pairs]
        return training


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "mistral3 that sees", *WHOLE])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.slow
def test_training_equals_transformers(tmp_path: Path, family: str, recompute: bool) -> None:
    """Logprobs and the gradients of B, of a batch in which some datums have images."""
    path = tiny_model(tmp_path, family, **WHOLE.get(family, {}))
    decoder, model = load_decoder(path), reference_model(path).requires_grad_(True)
    images: list[Images] = [
        (image(decoder, 1, 3, 20), image(decoder, 2, 40, 6)), (), (image(decoder, 3, 0, 9),)
    ]  # fmt: skip
    texts = [prompt(i, length, images[i]) for i, length in enumerate((61, 30, 61))]
    trainer = SeeingTrainer(decoder, images, recompute=recompute)
    do(trainer, p.CreateAdapter("run", LoraConfig(4, seed=1)))
    data = [Datum(ModelInput.from_ints(t[:-1]), {"target_tokens": t[1:].astype(np.int64)}) for t in texts]
    (out,) = do(trainer, p.ForwardBackward((p.Pass("run", data, "cross_entropy"),)))
    theirs = [their_logprobs(model, *pair) for pair in zip(texts, images, strict=True)]
    for ours, want in zip(out.loss_fn_outputs, theirs, strict=True):
        np.testing.assert_allclose(ours["logprobs"].to_numpy(), want.detach().numpy(), atol=1e-4)

    (-torch.cat(theirs).sum()).backward()
    weights = {n.replace("model.language_model.", "model."): w for n, w in model.named_parameters()}
    adapter, compared = trainer.adapter("run"), 0
    assert adapter.grad is not None
    for name, (a, b) in adapter.named(adapter.grad).items():
        if (weight := weights.get(f"{name}.weight")) is None or name == "lm_head":
            continue
        want = 32 / 4 * weight.grad @ adapter.named()[name][0].T  # a fresh B is zero
        torch.testing.assert_close(b, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)
        assert not a.any()
        compared += 1
    assert compared >= 4 * len(decoder.config.attention)


# -- sampling ------------------------------------------------------------------------------------------


def new_batch(decoder: Decoder) -> ContinuousBatch:
    config = decoder.config
    cache = KVCache(config.kv_shapes, 100, CPU, torch.float32)
    limits = StepLimits(context=256, sequences=16, prefill_alone=24, prefill_beside=9)
    states = StatePool(config.state_shapes, 40, CPU) if config.state_shapes else None
    return ContinuousBatch(decoder, cache, limits, states=states)


def submit(batch: ContinuousBatch, ids: np.ndarray, images: Images) -> Future[SampleResponse]:
    params, future = SamplingParams(max_tokens=5, stop=[], seed=1), Future[SampleResponse]()
    work = p.SampleWork(ids, params, num_samples=2, prompt_logprobs=True)
    batch.submit(work, batch.check_work(work), None, future, images=images)
    return future


def check_response(model: Any, ids: np.ndarray, images: Images, response: SampleResponse) -> None:
    for sequence in response.sequences:
        text = np.concatenate([ids, np.array(sequence.tokens, np.int32)])
        with torch.no_grad():
            want = their_logprobs(model, text, images).numpy()
        assert response.prompt_logprobs_np is not None
        np.testing.assert_allclose(response.prompt_logprobs_np[1:], want[: len(ids) - 1], atol=1e-4)
        np.testing.assert_allclose(sequence.logprobs_np, want[len(ids) - 1 :], atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", *WHOLE])
@pytest.mark.slow
def test_sampling_equals_transformers(tmp_path: Path, family: str) -> None:
    """Prompts in chunks that end within images, forks, prompts with and without images in one step."""
    path = tiny_model(tmp_path, family, **WHOLE.get(family, {}))
    decoder, model = load_decoder(path), reference_model(path)
    batch = new_batch(decoder)
    images: list[Images] = [
        (image(decoder, 1, 3, 30), image(decoder, 2, 40, 6)), (), (image(decoder, 3, 0, 50),)
    ]  # fmt: skip
    prompts = [prompt(i, length, images[i]) for i, length in enumerate((61, 30, 50))]
    pairs = list(zip(prompts, images, strict=True))
    futures = [submit(batch, *pair) for pair in pairs]
    finish(batch)
    for pair, future in zip(pairs, futures, strict=True):
        check_response(model, *pair, future.result(timeout=0))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", *WHOLE])
@pytest.mark.slow
def test_prompts_of_equal_ids_share_only_pages_with_equal_images(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family, **WHOLE.get(family, {}))
    decoder, model = load_decoder(path), reference_model(path)
    batch, start = new_batch(decoder), 2 * PAGE + 3
    first, other, moved = (
        (image(decoder, seed, at, 40),) for seed, at in ((1, start), (2, start), (1, start + 1))
    )
    ids = prompt(0, 90, first)
    ids[start + 40] = PLACEHOLDER  # so that it has the moved image's ids too
    hits = []
    for images in (first, first, other, moved, ()):
        params, future = SamplingParams(max_tokens=5, stop=[], seed=1), Future[SampleResponse]()
        work = p.SampleWork(ids, params)
        batch.submit(work, batch.check_work(work), None, future, images=images)
        finish(batch)
        response = future.result(timeout=0)
        (sequence,) = response.sequences
        text = np.concatenate([ids, np.array(sequence.tokens, np.int32)])
        with torch.no_grad():
            want = their_logprobs(model, text, images)[len(ids) - 1 :].numpy()
        np.testing.assert_allclose(sequence.logprobs_np, want, atol=1e-4)
        hits.append(response.prompt_cache_hit_tokens)
    before = 0 if decoder.config.state_shapes else 2 * PAGE  # there is no snapshot of the page before
    assert hits == [0, 5 * PAGE, before, before, before]


def test_digests_cover_which_image_is_where() -> None:
    features, ids = torch.zeros(20, 1), np.full(5 * PAGE, PLACEHOLDER, np.int32)

    def links(*images: tuple[int, bytes]) -> list[bytes]:
        return chain(b"root", ids, [], page_extras(PlacedImage(at, features, of) for at, of in images))

    plain = chain(b"root", ids, [])
    a, b = b"a" * 32, b"b" * 32
    variants = [plain, links((18, a)), links((18, b)), links((19, a)), links((18, a), (38, b)),
                links((18, b), (38, a))]  # fmt: skip
    assert links() == plain
    assert all(variant[0] == plain[0] for variant in variants)  # the page before them
    assert len({variant[1] for variant in variants}) == 4  # the images that begin later are in later pages
    assert len({variant[2] for variant in variants}) == len(variants)
    assert len({variant[4] for variant in variants}) == len(variants)  # and whatever follows
