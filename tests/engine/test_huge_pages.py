"""Memory in huge pages: ordinary tensors, apart from each other, in memory that asks for such pages."""

from __future__ import annotations

import gc
import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.engine.tiny import tiny_model
from tinkex.engine.torch.huge_pages import HugeArena, huge_bytes
from tinkex.engine.torch.load import load_decoder

linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such advice")
MIB = 1 << 20


def _mapping(address: int) -> list[str]:
    """The lines of /proc/self/smaps on the mapping that holds `address`; none if nothing is mapped there."""
    lines: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split()[0].split("-")
        if len(bounds) == 2 and not line.split()[0].endswith(":"):
            if lines:
                break
            lines = [line] if int(bounds[0], 16) <= address < int(bounds[1], 16) else []
        elif lines:
            lines.append(line)
    return lines


def test_tensors_of_an_arena_do_not_overlap() -> None:
    shapes = [
        ((3, 5), torch.float32),
        ((7,), torch.uint8),
        ((), torch.float32),
        ((1 << 20, 3), torch.bfloat16),
    ]
    arena = HugeArena(sum(HugeArena.size_of(*one) for one in shapes))
    taken = [arena.take(*one) for one in shapes]
    for i, tensor in enumerate(taken):
        tensor.fill_(i + 1)
    for i, (tensor, (shape, dtype)) in enumerate(zip(taken, shapes, strict=True)):
        assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == i + 1).all()


@linux
def test_large_memory_asks_for_huge_pages_and_is_returned() -> None:
    tensor = huge_bytes(5 * MIB)
    address = tensor.data_ptr()
    assert len(tensor) == 5 * MIB
    assert address % (2 * MIB) == 0
    assert not tensor.any()
    flags = next(line for line in _mapping(address) if line.startswith("VmFlags"))
    assert "hg" in flags.split()
    del tensor
    gc.collect()
    assert not any("hg" in line.split() for line in _mapping(address))


def test_the_weights_of_a_decoder_on_a_cpu_are_in_one_piece(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "qwen3"))
    bounds = sorted((weight.data_ptr(), weight.nbytes) for weight in decoder.parameters())
    gaps = [after - (at + size) for (at, size), (after, _) in pairwise(bounds)]
    assert all(0 <= gap < 64 for gap in gaps)
