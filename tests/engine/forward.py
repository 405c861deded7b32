"""Run a decoder on packed sequences, and what to compare it with: the input of tests that compare logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tinkex.engine.torch.backend import choose_backend
from tinkex.engine.torch.hooks import LoraHook
from tinkex.engine.torch.load import read_fields, tokenizer_size
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.transformers_model import load_transformers
from tinkex.engine.torch.states import packed_states


def through_transformers(path: Path) -> Decoder:
    """The decoder that a directory would be if `families` did not know it: an oracle with the same hooks."""
    cpu = "cpu", torch.float32, "none", choose_backend("cpu", torch.float32, uniform=False)
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
    states = packed_states(decoder.config, lengths, tokens.device)
    return decoder(tokens, positions, attend, lora, states=states, **options)
