"""A weight in 4 or 8 bits: codes, the scales of their blocks, and products that dequantise it tile by tile.

All formats of files become this one form (`quantised_files`), and `quantise` makes it from plain weights.
Values are computed in fp32 on the codes' device. Knows neither files nor the decoder.

Shapes: N rows, I in-features, O out-features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tinkex.errors import InvalidInputError

SCHEMES = ("nf4", "fp8", "int8")  # what `quantise` makes
TILE = 64  # rows, and columns of 4 bits, that kernels multiply at a time
ALIGNED = 16  # elements: where rows of scales begin, as kernels read them
_DEQUANTISED = 1 << 21  # values that are dequantised at a time
_NF4_BLOCK = 64
_FP8_MAX = 448.0

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """[O, I] or a stack [E, O, I] of them: (value of the code - zero) * scale of its block * factor."""

    codes: Tensor  # with a table: uint8 […, O, I/2], the even column in the low bits; else […, O, I]
    scale: Tensor  # […, blocks of rows, blocks of columns]
    block: tuple[int, int]  # rows and columns of a block; the last ones may be cut short
    table: Tensor | None = None  # the values of the 16 codes
    zero: Tensor | None = None  # like `scale`
    factor: float = 1.0
    transposed: bool = False  # its user expects […, I, O]
    tiled: bool = False  # with a table: in the order of `_tile`, as kernels read it

    def __post_init__(self) -> None:
        grid = [-(-n // step) for n, step in zip(self._stored[-2:], self.block, strict=True)]
        if (given := list(self.scale.shape)) != (wanted := [*self._stored[:-2], *grid]):
            raise InvalidInputError(
                f"scales of shape {given} do not fit a weight of {list(self._stored)} in blocks of "
                f"{list(self.block)}, which has {wanted}"
            )

    @property
    def _stored(self) -> torch.Size:
        *rest, columns = self.codes.shape
        return torch.Size((*rest, columns if self.table is None else 2 * columns))

    @property
    def shape(self) -> torch.Size:
        *rest, rows, columns = self._stored
        return torch.Size((*rest, columns, rows) if self.transposed else (*rest, rows, columns))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scale, self.zero) if part is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @cached_property
    def kind(self) -> str:
        """What its codes are: "nf4", "fp4", "table" (others of 4 bits), "fp8" (e4m3), "int8", or "other"."""
        if self.table is not None:
            known = {"nf4": NF4, "fp4": FP4} if self.zero is None else {}
            table = self.table.float().cpu()
            found = (name for name, values in known.items() if torch.equal(table, torch.tensor(values)))
            return next(found, "table")
        kinds = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"} if self.zero is None else {}
        return kinds.get(self.codes.dtype, "other")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i: int) -> QuantisedWeight:
        """One matrix of a stack."""
        return self._cut(self.codes[i], i)

    def _cut(self, codes: Tensor, blocks: Any) -> QuantisedWeight:
        """With these of its codes, and what there is of these of its blocks."""
        zero = None if self.zero is None else self.zero[blocks]
        return replace(self, codes=codes, scale=self.scale[blocks], zero=zero)

    def select(self, rows: slice) -> QuantisedWeight | Tensor:
        """These rows of a matrix, or of every one of a stack; dequantised if their blocks would be torn."""
        high, (start, stop, step) = self.block[0], rows.indices(self._stored[-2])
        if self.transposed or (high > 1 and (step != 1 or start % high or stop % high)):
            return self.dequantise()[..., rows, :]
        of_scale = rows if high == 1 else slice(start // high, stop // high)
        return self._cut(self.codes[..., rows, :], (..., of_scale, slice(None)))

    def columns(self, some: slice) -> QuantisedWeight | Tensor:
        """These columns, one after the other; dequantised if their blocks would be torn."""
        wide, (start, stop, _) = self.block[1], some.indices(self._stored[-1])
        if (start, stop) == (0, self._stored[-1]) and not self.transposed:
            return self
        torn = wide < self._stored[-1] and (start % wide or stop % wide)
        torn = torn or (self.table is not None and (start % 2 or stop % 2))
        if torn or self.transposed or self.tiled:
            return self.dequantise()[..., some]
        packed = 1 if self.table is None else 2
        codes = self.codes[..., start // packed : stop // packed]
        if wide >= self._stored[-1]:
            return replace(self, codes=codes, block=(self.block[0], stop - start))
        return self._cut(codes, (..., slice(start // wide, stop // wide)))

    def transpose(self) -> QuantisedWeight:
        return replace(self, transposed=not self.transposed)

    def to(self, device: str | torch.device) -> QuantisedWeight:
        parts = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **{name: part.to(device, copy=True) for name, part in parts.items()})

    def for_kernels(self, dtype: torch.dtype) -> QuantisedWeight:
        """With scales in `dtype`, and in tiles if it is cut into whole ones."""
        scale, (high, wide) = (self.scale.float() * self.factor).to(dtype), self.block
        (rows, columns), fits = self._stored[-2:], self.kind in ("nf4", "fp4") and wide in (32, 64, 128)
        if self.tiled or not fits or high > 1 or rows % TILE or columns % max(wide, TILE):
            return replace(self, scale=scale, factor=1.0)
        if wide > TILE:
            scale, wide = scale.repeat_interleave(wide // TILE, dim=-1), TILE
        codes = _tile(self.codes, wide)
        return replace(self, codes=codes, scale=_aligned(scale), block=(1, wide), factor=1.0, tiled=True)

    def dequantise(self) -> Tensor:
        """All values in fp32."""
        if self.codes.dim() == 3:
            return torch.stack([self[i].dequantise() for i in range(len(self))])
        values = self.rows(0, self._stored[0])
        return values.t() if self.transposed else values

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Stored rows start:stop of a matrix."""
        columns, (high, wide), codes = self._stored[1], self.block, self.codes[start:stop]
        if self.tiled:
            first = start - start % TILE
            codes = _untile(self.codes[first : stop + -stop % TILE], wide)[start - first : stop - first]
        values = self._values(codes)
        first, last = start // high, -(-stop // high)
        of_blocks = [each[first:last].float() for each in (self.scale, self.zero) if each is not None]
        if high > 1:
            row = torch.arange(start, stop, device=values.device) // high - first
            of_blocks = [each[row] for each in of_blocks]
        if columns % wide:
            column = torch.arange(columns, device=values.device) // wide
            of_blocks, wide = [each[:, column] for each in of_blocks], 1
        blocks, scale = values.view(stop - start, -1, wide), of_blocks[0] * self.factor
        for zero in of_blocks[1:]:
            blocks.sub_(zero[:, :, None])
        return blocks.mul_(scale[:, :, None]).view(stop - start, columns).to(dtype)

    def _values(self, codes: Tensor) -> Tensor:
        if self.table is not None:  # both values of a byte at once
            byte = torch.arange(256, device=codes.device)
            pairs = torch.stack([self.table[byte & 15], self.table[byte >> 4]], dim=1)
            return F.embedding(codes.int(), pairs).flatten(1)
        if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":  # three times as fast as a cast
            bits = codes.view(torch.uint8).to(torch.int32)
            return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).view(torch.float32).mul_(2.0**120)
        return codes.float()


# A tile is what one warpgroup multiplies at a time: 64 rows of 32 bytes. The 16 bytes of a thread lie
# together, in the order of its registers: row 16·w + 8·h + r and byte 16·c + 8·g + 2·q + l are stored by warp
# w, lane (r, q), and then c, g, h and l. In a byte, a column of the first half of a block is in the low bits,
# and one of the second half in the high bits.
_STORED = (4, 8, 4, 2, 2, 2, 2)  # w, r, q, c, g, h, l


def _tile(codes: Tensor, wide: int) -> Tensor:
    """Codes of rows, the even column of a byte in the low bits, as tiles, in the same shape."""
    blocks = codes.unflatten(-1, (-1, wide // 2))
    low, high = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).chunk(2, dim=-1)
    cut = (low | high << 4).reshape(-1, 4, 2, 8, codes.shape[-1] // 32, 2, 2, 4, 2)
    return cut.permute(0, 4, 1, 3, 7, 5, 6, 2, 8).reshape(codes.shape)


def _untile(codes: Tensor, wide: int) -> Tensor:
    """The inverse of `_tile`, of a matrix."""
    cut = codes.reshape(-1, codes.shape[-1] // 32, *_STORED).permute(0, 2, 7, 3, 1, 5, 6, 4, 8)
    blocks = cut.reshape(len(codes), -1, wide // 2)
    ordered = torch.cat((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    return ordered[:, 0::2] | ordered[:, 1::2] << 4


def united(parts: Sequence[QuantisedWeight | Tensor]) -> QuantisedWeight | None:
    """Matrices stacked along the output as one; None if they are not of one form."""
    form = lambda w: (w.codes.dtype, w.codes.shape[1:], w.block, w.zero is None, w.factor, w.kind, w.tiled)  # noqa: E731
    whole = [part for part in parts if isinstance(part, QuantisedWeight) and not part.transposed]
    if len(whole) < len(parts) or any(form(part) != form(whole[0]) for part in whole):
        return None
    first = whole[0]
    same = first.kind != "table" or all(torch.equal(part.table, first.table) for part in whole)  # type: ignore[arg-type]
    if not same or any(part.shape[0] % part.block[0] for part in whole):
        return None
    zeros = [part.zero for part in whole if part.zero is not None]
    codes, scale = torch.cat([part.codes for part in whole]), torch.cat([part.scale for part in whole])
    scale = _aligned(scale) if first.tiled else scale
    return replace(first, codes=codes, scale=scale, zero=torch.cat(zeros) if zeros else None)


def _aligned(scale: Tensor) -> Tensor:
    """The same scales, whose rows begin at multiples of ALIGNED elements; zeros lie between them.

    So kernels load several scales in one instruction, and overlap loads with products.
    """
    columns = scale.shape[-1]
    return scale if columns % ALIGNED == 0 else F.pad(scale, (0, -columns % ALIGNED))[..., :columns]


class QuantisedMatrix:
    """The weights of a Projection's parts, stacked along the output, each quantised or plain.

    Takes the place of its weight, and is filled part by part.
    """

    def __init__(self, outs: Sequence[int], columns: int, dtype: torch.dtype) -> None:
        self._outs, self._columns, self._dtype = outs, columns, dtype
        self._parts: dict[int, QuantisedWeight | Tensor] = {}
        self._turned = False
        self.whole: QuantisedWeight | None = None  # all parts as one, once `unite` has made it

    @property
    def shape(self) -> torch.Size:
        rows = sum(self._outs)
        return torch.Size((self._columns, rows) if self._turned else (rows, self._columns))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    def numel(self) -> int:
        return self.shape.numel()

    def t(self) -> QuantisedMatrix:
        """Its transpose, of the same memory."""
        other = copy.copy(self)
        other._turned = not self._turned
        return other

    def part_shape(self, index: int) -> torch.Size:
        return torch.Size((self._outs[index], self._columns))

    def head(self, index: int) -> Tensor:
        """The first numbers of a part."""
        part = self._parts[index]
        row = part[0] if isinstance(part, Tensor) else part.rows(0, 1)[0]
        return row[:16].clone()  # a view would keep all of the row, of thousands of experts

    def put(self, index: int, weight: QuantisedWeight | Tensor, scheme: str, device: torch.device) -> None:
        """Keep a part's weight: quantised by one of `SCHEMES`, or with "file" as it is."""
        anew = scheme in SCHEMES and self._columns % 2 == 0
        if isinstance(weight, QuantisedWeight) and (anew or weight.transposed):
            weight = weight.dequantise()
        if isinstance(weight, QuantisedWeight):
            self._parts[index] = weight.to(device)
        elif anew:
            self._parts[index] = quantise(weight.to(device), scheme)
        else:
            self._parts[index] = weight.to(device, self._dtype, copy=True)

    @property
    def parts(self) -> list[QuantisedWeight | Tensor]:
        return [part for _, part in sorted(self._parts.items())]

    def unite(self, whole: QuantisedWeight | None = None) -> None:
        """Keep all parts as one weight, as kernels read it, if they are of one form: `whole`, if given."""
        if whole is None:
            for index, part in self._parts.items():
                if isinstance(part, QuantisedWeight):
                    self._parts[index] = part.for_kernels(self._dtype)
            whole = united(self.parts)
        if whole is None:
            return
        self.whole, start = whole, 0
        for index, count in enumerate(self._outs):
            self._parts[index] = whole.select(slice(start, start + count))
            start += count

    def plain(self) -> Tensor | None:
        """The weight, if no part of it is quantised."""
        parts = [part for part in self.parts if isinstance(part, Tensor)]
        return torch.cat(parts) if len(parts) == len(self._outs) else None

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ self.T + bias, without autograd."""
        shape = x.shape[0], self.shape[0]
        y, done = x.new_zeros(shape) if self._turned else x.new_empty(shape), 0
        for index, count in enumerate(self._outs):
            for start, tile in _tiles(self._parts[index], x.dtype):
                here = slice(done + start, done + start + len(tile))
                if self._turned:
                    y.addmm_(x[:, here], tile)
                else:
                    torch.mm(x, tile.t(), out=y[:, here])
            done += count
        return y if bias is None else y.add_(bias)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same with autograd: only x gets a gradient."""
        return _QuantisedLinear.apply(x, self, bias) if x.requires_grad else self.product(x, bias)  # type: ignore[return-value]


class QuantisedStack(Sequence[QuantisedMatrix]):
    """The matrices of a layer's experts, which take the place of a stacked weight [E, O, I]."""

    def __init__(self, count: int, outs: Sequence[int], columns: int, dtype: torch.dtype) -> None:
        self._matrices = [QuantisedMatrix(outs, columns, dtype) for _ in range(count)]
        self.whole: QuantisedWeight | None = None  # [E, O, I], once `unite` has made it

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, index: Any) -> Any:
        return self._matrices[index]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self._matrices[0].shape))

    def plain(self) -> Tensor | None:
        """The stacked weight, if no part of it is quantised."""
        weights = [weight for matrix in self._matrices if (weight := matrix.plain()) is not None]
        return torch.stack(weights) if len(weights) == len(self) else None

    def unite(self) -> None:
        """Keep all matrices as one weight, as kernels read it, if they are of one form."""
        for matrix in self._matrices:
            matrix.unite()
        each = [matrix.whole for matrix in self._matrices if matrix.whole is not None]
        if len(each) < len(self) or (rows := united(each)) is None:
            return
        split = lambda part: None if part is None else part.unflatten(0, (len(self), -1))  # noqa: E731
        self.whole = replace(rows, codes=split(rows.codes), scale=split(rows.scale), zero=split(rows.zero))
        for i, matrix in enumerate(self._matrices):
            matrix.unite(self.whole[i])


def _tiles(part: QuantisedWeight | Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Rows of a matrix and where they start, so many at a time that they stay small."""
    if isinstance(part, Tensor):
        yield 0, part
        return
    rows, columns = part.shape
    step = max(1, _DEQUANTISED // columns)
    for start in range(0, rows, step):
        yield start, part.rows(start, min(start + step, rows), dtype)


class _QuantisedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantisedMatrix, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return weight.product(x, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.weight.t().product(grads[0]), None, None


def quantise(weight: Tensor, scheme: str) -> QuantisedWeight:
    """A matrix [O, I], I even, in nf4 (blocks of 64 columns), fp8 or int8 (one scale for each row)."""
    weight = weight.float()
    if scheme == "nf4":
        return _nf4(weight)
    most = _FP8_MAX if scheme == "fp8" else 127.0
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30) / most
    codes = weight / scale
    codes = codes.to(torch.float8_e4m3fn) if scheme == "fp8" else codes.round_().to(torch.int8)
    return QuantisedWeight(codes, scale, (1, weight.shape[1]))


def _nf4(weight: Tensor) -> QuantisedWeight:
    """The nearest of the 16 values, times the largest of its block."""
    count, columns = weight.shape
    padded = F.pad(weight, (0, -columns % _NF4_BLOCK)).view(count, -1, _NF4_BLOCK)
    scale = padded.abs().amax(dim=2).clamp_(min=1e-30)
    table = torch.tensor(NF4, device=weight.device)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(padded / scale[:, :, None], middles, out_int32=True).to(torch.uint8)
    codes = codes.view(count, -1)[:, :columns]
    return QuantisedWeight(codes[:, 0::2] | codes[:, 1::2] << 4, scale, (1, _NF4_BLOCK), table)
