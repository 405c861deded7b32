"""Run a decoder on packed sequences, and what to compare it with: the input of tests that compare logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.engine.commands import do
from tinkex.engine.protocol import ForwardBackward, Pass
from tinkex.engine.torch.backend import choose_backend
from tinkex.engine.torch.hooks import LoraHook
from tinkex.engine.torch.load import read_fields, tokenizer_size
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.transformers_model import load_transformers
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput


def through_transformers(path: Path) -> Decoder:
    """The decoder that a directory would be if `families` did not know it: an oracle with the same hooks."""
    cpu = "cpu", torch.float32, "none", choose_backend("cpu", torch.float32, kernels=False)
    return load_transformers(path, read_fields(path), tokenizer_size(path), *cpu)


LENGTHS = (5, 1, 40, 40, 17, 90)


def sequences(lengths: Sequence[int] = LENGTHS, vocab: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def hidden(decoder: Decoder, data: list[list[int]], lora: LoraHook | None = None, **options: bool) -> Tensor:
    lengths = [len(ids) for ids in data]
    positions = torch.cat([torch.arange(n) for n in lengths])
    attend = PackedAttend(lengths, decoder.config.windows)
    tokens = torch.tensor([token for ids in data for token in ids])
    states = decoder.backend.packed_states(decoder.config, lengths, tokens.device)
    return decoder(tokens, positions, attend, lora, states=states, **options)


def logprobs_of(trainer: TorchTrainer, run: str | None, text: np.ndarray) -> np.ndarray:
    """The trainer's, of every token of a text but the first; `run` None: of the base model."""
    targets = text[1:].astype(np.int64)
    if run is None:
        with torch.no_grad():
            logits = trainer.decoder.logits(hidden(trainer.decoder, [text[:-1].tolist()]))
        return logits.log_softmax(-1)[torch.arange(len(targets)), torch.from_numpy(targets)].numpy()
    datum = Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": targets})
    (out,) = do(trainer, ForwardBackward((Pass(run, [datum], "cross_entropy", backward=False),)))
    return out.loss_fn_outputs[0]["logprobs"].to_numpy()
