"""Weights in 4 and 8 bits by kernels: dequantised and multiplied, against the plain implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.by_kernels import BF16, DEVICE, MARKS, random
from tests.engine.plain_lora import PlainLora
from tinkex.engine.cuda import lora_kernels, packed_codes
from tinkex.engine.cuda import packed_weights as packed
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Part, Site
from tinkex.engine.torch.quantised import FP4, NF4, QuantisedMatrix, QuantisedStack, QuantisedWeight, quantise
from tinkex.types.params import LoraConfig

pytestmark = [*MARKS, pytest.mark.slow]

O, I = 192, 192


def weight_of(kind: str, seed: int = 0, rows: int = O, columns: int = I) -> QuantisedWeight:
    """As the kernels read it."""
    plain = random(rows, columns, seed=seed, dtype=torch.float32)
    if kind in ("nf4", "fp8", "int8"):
        weight = quantise(plain, kind)
    elif kind == "blocks":
        codes = (plain * 20).to(torch.float8_e4m3fn)
        weight = QuantisedWeight(codes, random(-(-rows // 16), columns // 64, seed=seed + 1).abs(), (16, 64))
    else:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8).to(DEVICE)
        scale = random(rows, columns // 32, seed=seed + 1)
        table = torch.tensor(FP4) if kind != "table" else torch.arange(16.0)
        scale = scale.round().exp2() if kind == "fp4" else scale
        zero = torch.randint(0, 16, scale.shape).to(DEVICE, torch.uint8) if kind == "table" else None
        weight = QuantisedWeight(codes, scale, (1, 32), table.to(DEVICE), zero)
    return weight.for_kernels(BF16)


def near(got: Tensor, want: Tensor, bound: float = 1e-2) -> None:
    assert (got.double() - want.double()).norm() <= bound * want.double().norm()


@pytest.mark.parametrize("rows", [O, 80])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "fp8", "int8", "blocks", "table"])
def test_values_are_those_of_the_plain_code(kind: str, rows: int) -> None:
    weight = weight_of(kind, rows=rows)
    assert weight.tiled == (kind in ("nf4", "fp4") and rows == O)
    near(packed.dequantise(weight, BF16), weight.dequantise())


@pytest.mark.parametrize("wide", [32, 64, 128])
def test_tiles_hold_the_same_values(wide: int) -> None:
    codes = torch.randint(0, 256, (3, 128, 128), dtype=torch.uint8)
    scale = random(3, 128, 256 // wide, dtype=torch.float32).cpu()
    weight = QuantisedWeight(codes, scale, (1, wide), torch.tensor(NF4))
    tiled = weight.for_kernels(torch.float32)
    assert tiled.tiled
    assert not torch.equal(tiled.codes, weight.codes)
    assert torch.equal(tiled.dequantise(), weight.dequantise())
    assert torch.equal(tiled[1].rows(70, 75), weight[1].rows(70, 75))
    cut, whole = (one.select(slice(64, 128)) for one in (tiled, weight))
    assert isinstance(cut, QuantisedWeight)
    assert isinstance(whole, QuantisedWeight)
    assert torch.equal(cut.dequantise(), whole.dequantise())


@pytest.mark.parametrize("kind", ["nf4", "fp4", "fp8", "int8", "blocks"])
@pytest.mark.parametrize(
    ("rows", "tiles", "splits", "columns"), [(1, 1, 1, 64), (5, 2, 1, 128), (40, 1, 2, 64), (130, 2, 1, 64)]
)
def test_few_rows_multiply_with_codes(kind: str, rows: int, tiles: int, splits: int, columns: int) -> None:
    """192 features are three tiles, so that two or four at a time leave a rest."""
    weight, x = weight_of(kind), random(rows, I, seed=3)
    assert packed.suits(weight)
    tiles = packed.tiles_of(weight, tiles)
    tile = packed.tile_for(min(rows, 64), weight)._replace(tiles=tiles, splits=splits, columns=columns)
    got = packed.product(x, weight, tile)
    assert len(got) == splits
    near(got.sum(0), x.float() @ weight.dequantise().float().t())
    near(packed.product(x, weight).sum(0), x.float() @ weight.dequantise().float().t())


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("times", [1, 17])
def test_adapters_beside_the_product(kind: str, splits: int, times: int) -> None:
    lengths, site = [5 * times, 3 * times, 4 * times], Site(0, "qkv")
    sites = {site: (I, tuple(Part(name, 64, "attn") for name in "qkv"))}
    held = [Adapter.fresh(LoraConfig(rank=rank, seed=rank), sites, DEVICE) for rank in (8, 12)]
    for one in held:
        one.flat.copy_(0.3 * torch.randn(one.flat.shape, generator=torch.Generator().manual_seed(1)))
    used, weight, x = [held[0], None, held[1]], weight_of(kind), random(sum(lengths), I, seed=3)
    lora = CudaBackend(DEVICE, BF16).lora(used, lengths)
    at = lora.site(site)
    assert at is not None
    tile = packed.tile_for(len(x), weight)._replace(splits=splits)
    y, u = packed.product_and_shrink(x, weight, tile, at)
    plain = x.float() @ weight.dequantise().float().t()
    near(y.sum(0), plain)
    base, want = plain[None].expand(splits, -1, -1) / splits, PlainLora(used, lengths)(site, x.float(), plain)
    mine = [
        row for row in range(12 * times) if not 5 <= row // times < 8
    ]  # tiles must cover every row that is read
    for summed in (True, False):
        united = lora_kernels.unite(u, base.contiguous(), BF16, at.b, summed=summed)
        near(united[mine], want[mine])


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_projection_of_several_parts(rows: int, mixed: bool) -> None:
    outs = [64, 128, 64]
    matrix = QuantisedMatrix(outs, I, BF16)
    plain = [random(out, I, seed=i, dtype=torch.float32) for i, out in enumerate(outs)]
    for i, part in enumerate(plain):
        matrix.put(i, part, "file" if mixed and i == 1 else "nf4", DEVICE)
    matrix.unite()
    assert (matrix.whole is None) == mixed
    want = torch.cat(
        [part.float() if isinstance(part, Tensor) else part.dequantise() for part in matrix.parts]
    )
    x, bias = random(rows, I, seed=5), random(256, seed=6)
    near(packed.linear(x, matrix, bias), x.float() @ want.float().t() + bias.float())
    # The plain code still reads it.
    near(matrix.product(x, bias), x.float() @ want.float().t() + bias.float())
    leaf = x.clone().requires_grad_()
    packed.linear(leaf, matrix, bias).backward(random(rows, 256, seed=7))
    assert leaf.grad is not None
    near(leaf.grad, random(rows, 256, seed=7).float() @ want.float())


def test_a_stack_is_dequantised_at_once() -> None:
    stack = QuantisedStack(3, [64, 64], 64, BF16)
    for i, matrix in enumerate(stack):
        for k in range(2):
            matrix.put(k, replace(weight_of("fp4", 2 * i + k, 64, 64)), "file", DEVICE)
    stack.unite()
    assert stack.whole is not None
    assert stack.whole.shape == (3, 128, 64)
    want = torch.stack([torch.cat([part.dequantise() for part in matrix.parts]) for matrix in stack])
    near(packed.dequantise(stack.whole, BF16), want)


# -- the assembler's lines, which the interpreter skips ----------------------------------------------------


def _prmt(a: int, b: int, selectors: int) -> int:
    held, found = [(word >> 8 * i) & 255 for word in (a, b) for i in range(4)], 0
    for i in range(4):
        selector = (selectors >> 4 * i) & 15
        byte = held[selector & 7]
        found |= ((255 if byte & 128 else 0) if selector & 8 else byte) << 8 * i
    return found


def _lop3(a: int, b: int, c: int, table: int) -> int:
    return sum(((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1)) & 1) << i for i in range(32))


def _pair(word: int) -> Tensor:
    halves = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
    return halves.to(torch.int16).view(torch.bfloat16)


def _word(pair: Tensor) -> int:
    low, high = (pair.view(torch.int16).int() & 0xFFFF).tolist()
    return low | high << 16


def assembled(ptx: str, given: dict[str, int]) -> dict[str, int]:
    """What a block of PTX computes, instruction by instruction."""
    held = dict(given)
    steps = {
        "prmt": _prmt, "lop3": _lop3, "and": int.__and__, "or": int.__or__, "shr": int.__rshift__,
        "shl": lambda a, count: a << count & 0xFFFFFFFF, "cvt": int,
        "mul": lambda a, b: _word(_pair(a) * _pair(b)),
        "sub": lambda a, b: _word(_pair(a) - _pair(b)),
    }  # fmt: skip
    for line in filter(None, map(str.strip, ptx.strip()[1:-1].split(";"))):
        name, _, rest = line.partition(" ")
        if name == "mov.b32" and rest.startswith("{"):
            *to, word = (part.strip("{} ") for part in rest.split(","))
            held |= {to[0]: held[word] & 0xFFFF, to[1]: held[word] >> 16}
        elif name == "mov.b32":
            to, value = (part.strip() for part in rest.split(","))
            held[to] = held[value] if value in held else int(value, 0)
        elif name != ".reg":
            to, *values = (part.strip() for part in rest.split(","))
            numbers = [int(value, 0) if value[0].isdigit() else held[value] for value in values]
            held[to] = steps[name.partition(".")[0]](*numbers)
    return held


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_assembled_values_of_four_bits(kind: str) -> None:
    ptx = (packed_codes._NF4_PTX if kind == "nf4" else packed_codes._FP4_PTX).value
    table = torch.tensor(NF4 if kind == "nf4" else FP4).bfloat16()
    for seed in range(16):
        codes = torch.randint(0, 256, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        scale = torch.randn(4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        word = sum(code << 8 * i for i, code in enumerate(codes))
        found = assembled(ptx, {"$4": word, "$5": _word(scale[:2]), "$6": _word(scale[2:])})
        low, high = (torch.cat([_pair(found[a]), _pair(found[b])]) for a, b in (("$0", "$1"), ("$2", "$3")))
        assert torch.equal(low, table[[code & 15 for code in codes]] * scale)
        assert torch.equal(high, table[[code >> 4 for code in codes]] * scale)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_assembled_values_of_eight_bits(kind: str) -> None:
    ptx = (packed_codes._FP8_PTX if kind == "fp8" else packed_codes._INT8_PTX).value
    codes = torch.arange(256, dtype=torch.uint8).view(-1, 2)
    values = codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8).float().bfloat16()
    for scale in torch.tensor([1.0, -0.3, 7.5, 2e-3]).bfloat16():
        for (low, high), wanted in zip(codes.tolist(), values, strict=True):
            found = assembled(ptx, {"$2": low | high << 8, "$3": _word(scale.expand(2))})
            there = ~wanted.isnan()  # which no weight is
            both = _pair(found["$0"] | found["$1"] << 16)
            assert torch.equal(both[there], (wanted * scale)[there])
