"""A weight in 4 or 8 bits: codes, the scales of their blocks, and the products that expand it tile by tile.

All formats of files become this one form (`quantised_files`), and `quantise` makes it from plain weights.
Values are computed in fp32 on the codes' device. Knows neither files nor the decoder.

Shapes: N rows, I in-features, O out-features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tinkex.errors import InvalidInputError

SCHEMES = ("nf4", "fp8", "int8")  # what `quantise` makes
_TILE = 1 << 21  # values that are expanded at a time
_NF4_BLOCK = 64
_FP8_MAX = 448.0

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """[O, I] or a stack [E, O, I] of them: (value of the code - zero) * scale of its block * factor."""

    codes: Tensor  # with a table: uint8 […, O, I/2], the even column in the low bits; else [..., O, I]
    scale: Tensor  # […, blocks of rows, blocks of columns]
    block: tuple[int, int]  # rows and columns of a block; the last ones may be cut short
    table: Tensor | None = None  # the values of the 16 codes
    zero: Tensor | None = None  # like `scale`
    factor: float = 1.0
    transposed: bool = False  # its user expects […, I, O]

    def __post_init__(self) -> None:
        grid = tuple(-(-n // step) for n, step in zip(self._stored[-2:], self.block, strict=True))
        if tuple(self.scale.shape) != (*self._stored[:-2], *grid):
            given, wanted = list(self.scale.shape), [*self._stored[:-2], *grid]
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

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i: int) -> QuantisedWeight:
        """One matrix of a stack."""
        zero = None if self.zero is None else self.zero[i]
        return replace(self, codes=self.codes[i], scale=self.scale[i], zero=zero)

    def select(self, rows: slice) -> QuantisedWeight | Tensor:
        """These rows of a matrix, or of every one of a stack; expanded if their blocks would be torn."""
        if self.transposed or self.block[0] > 1:
            return self.expand()[..., rows, :]
        zero = None if self.zero is None else self.zero[..., rows, :]
        return replace(self, codes=self.codes[..., rows, :], scale=self.scale[..., rows, :], zero=zero)

    def transpose(self) -> QuantisedWeight:
        """Of every matrix."""
        return replace(self, transposed=not self.transposed)

    def to(self, device: str | torch.device) -> QuantisedWeight:
        move = lambda part: None if part is None else part.to(device, copy=True)  # noqa: E731
        return replace(
            self, codes=move(self.codes), scale=move(self.scale), zero=move(self.zero), table=move(self.table)
        )

    def expand(self) -> Tensor:
        """All values in fp32."""
        if self.codes.dim() == 3:
            return torch.stack([self[i].expand() for i in range(len(self))])
        values = self.rows(0, self._stored[0])
        return values.t() if self.transposed else values

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Stored rows start:stop of a matrix."""
        columns, (high, wide) = self._stored[1], self.block
        values, scale, zero = self._values(self.codes[start:stop]), self.scale, self.zero
        first, last = start // high, -(-stop // high)
        scale = scale[first:last].float() * self.factor
        zero = None if zero is None else zero[first:last].float()
        if high > 1:
            row = torch.arange(start, stop, device=values.device) // high - first
            scale, zero = scale[row], None if zero is None else zero[row]
        if columns % wide:
            column = torch.arange(columns, device=values.device) // wide
            scale, zero = scale[:, column], None if zero is None else zero[:, column]
            wide = 1
        blocks = values.view(stop - start, -1, wide)
        if zero is not None:
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


class QuantisedMatrix:
    """The weights of a Projection's parts, stacked along the output, each quantised or plain.

    Takes the place of its weight, and is filled part by part.
    """

    def __init__(self, outs: Sequence[int], columns: int, dtype: torch.dtype) -> None:
        self._outs, self._columns, self._dtype = outs, columns, dtype
        self._parts: dict[int, QuantisedWeight | Tensor] = {}
        self._turned = False

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
        _, tile = next(_tiles(self._parts[index], torch.float32))
        return tile[0, :16]

    def put(self, index: int, weight: QuantisedWeight | Tensor, scheme: str, device: torch.device) -> None:
        """Keep a part's weight: quantised by one of `SCHEMES`, or with "file" as it is."""
        if scheme in SCHEMES and self._columns % 2 == 0:
            plain = weight if isinstance(weight, Tensor) else weight.expand()
            self._parts[index] = quantise(plain.to(device), scheme)
        elif isinstance(weight, Tensor) or weight.transposed:
            plain = weight if isinstance(weight, Tensor) else weight.expand()
            self._parts[index] = plain.to(device, self._dtype, copy=True)
        else:
            self._parts[index] = weight.to(device)

    def plain(self) -> Tensor | None:
        """The weight, if no part of it is quantised."""
        parts = [part for _, part in sorted(self._parts.items()) if isinstance(part, Tensor)]
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
        """The same as autograd sees it: a gradient to x alone."""
        return _QuantisedLinear.apply(x, self, bias) if x.requires_grad else self.product(x, bias)  # type: ignore[return-value]


def _tiles(part: QuantisedWeight | Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Rows of a matrix and where they start, so many at a time that they stay small."""
    if isinstance(part, Tensor):
        yield 0, part
        return
    rows, columns = part.shape
    step = max(1, _TILE // columns)
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
