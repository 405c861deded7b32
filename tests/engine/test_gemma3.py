"""Gemma 3 270M, the real base model, from its GGUF file: against transformers' own reading of that file."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.commands import do
from tests.engine.forward import hidden
from tests.engine.gguf_files import TEXTS
from tinkex.engine.protocol import CreateAdapter, ForwardBackward, OptimStep, Pass
from tinkex.engine.torch.gguf import convert_gguf
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import AdamParams, LoraConfig

pytestmark = pytest.mark.slow
ENGLISH = (Path(__file__).parents[2] / "LICENSE").read_text()


@pytest.fixture(scope="module", autouse=True)
def one_reader() -> Iterator[None]:
    """Reading the vocabulary of 262,144 takes seconds: once for us and transformers."""
    with pytest.MonkeyPatch.context() as patch:
        reader = functools.cache(gguf.GGUFReader)
        patch.setattr(gguf, "GGUFReader", lambda path: reader(str(path)))
        yield


@pytest.fixture(scope="module")
def converted(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(gemma3_gguf, tmp_path_factory.mktemp("models") / "gemma-3-270m")


@pytest.fixture(scope="module")
def decoder(converted: Path) -> Decoder:
    return load_decoder(converted)


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> Any:
    return AutoTokenizer.from_pretrained(converted)


def test_its_shape(decoder: Decoder) -> None:
    config = decoder.config
    assert (config.arch, config.layers, config.width, config.tied) == ("gemma3_text", 18, 640, True)
    assert config.windows == (512, 512, 512, 512, 512, None) * 3
    assert [rope.inv_freq[1] for rope in config.ropes] == pytest.approx(
        [1e4 ** (-1 / 128), 1e6 ** (-1 / 128)]
    )
    assert decoder.parameter_count == 268_098_176


def test_perplexity_equals_transformers(gemma3_gguf: Path, decoder: Decoder, tokenizer: Any) -> None:
    """On 700 tokens of English: more than the window of its sliding layers."""
    ids = torch.tensor(tokenizer(ENGLISH).input_ids[:700])
    where = {"pretrained_model_name_or_path": gemma3_gguf.parent, "gguf_file": gemma3_gguf.name}
    reference = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    with torch.no_grad():
        ours = cross_entropy(decoder.logits(hidden(decoder, [ids.tolist()])[:-1]), ids[1:]).exp()
        theirs = cross_entropy(reference(ids[None]).logits[0, :-1], ids[1:]).exp()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-4)
    assert float(ours) < 12
    weights = reference.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in decoder.weights().items())


def test_tokenizer_equals_transformers(gemma3_gguf: Path, tokenizer: Any) -> None:
    theirs = AutoTokenizer.from_pretrained(gemma3_gguf.parent, gguf_file=gemma3_gguf.name)
    marks = "<start_of_turn>user\nHi<end_of_turn>\n"
    for text in [*TEXTS, "  the", "a\n\n\n b", marks, ENGLISH.partition("1. Definitions")[2]]:
        begin, *ids = tokenizer(text).input_ids
        assert begin == 2  # the file asks for it; transformers leaves it out
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


def test_training_lowers_its_loss(decoder: Decoder, tokenizer: Any) -> None:
    trainer = TorchTrainer(decoder, "gemma-3-270m")
    do(trainer, CreateAdapter("run", LoraConfig(4, seed=1, train_unembed=False)))
    ids = np.array(tokenizer("Every tinker of this town mends pans on Tuesdays; the kettles wait.").input_ids)
    weights = np.ones(len(ids) - 1, np.float32)
    datum = Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": weights})
    losses = []
    for _ in range(5):
        (output,) = do(trainer, ForwardBackward([Pass("run", [datum], "cross_entropy")]))
        losses.append(output.metrics["loss:sum"])
        do(trainer, OptimStep("run", AdamParams(learning_rate=1e-3)))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]
