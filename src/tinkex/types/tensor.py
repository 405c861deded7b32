"""TensorData: an immutable array of float32 or int64, dense or CSR, as an input or output of a loss.

Values are a numpy array from construction on. A conversion that would change values (floats as token ids,
float64 outside float32's range) is refused. Imports torch only in `to_torch`. Knows nothing of the wire.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tinkex.errors import InvalidInputError
from tinkex.strict import strict_init

if TYPE_CHECKING:
    import torch

    _Nested = list["_Nested"] | tuple["_Nested", ...] | float | np.number | np.bool_ | str | None

TensorDtype = Literal["int64", "float32"]
_NUMPY = {"int64": np.dtype(np.int64), "float32": np.dtype(np.float32)}

MAX_TOKEN = 2**31 - 1

# Cells of a sparse tensor when dense. Bounded, since a few bytes could describe terabytes.
MAX_SPARSE_CELLS = 1 << 26


def _as_wire_array(array: np.ndarray, dtype: str | None = None) -> np.ndarray:
    """`array` as C-contiguous float32 or int64; refuses conversions that change values."""
    kind = array.dtype.kind
    if kind not in "fiub":
        raise InvalidInputError(f"an array of dtype {array.dtype} cannot be sent; use floats or integers")
    target = dtype or ("float32" if kind == "f" else "int64")
    if target == "int64" and kind == "f" and array.size:
        first = array.reshape(-1)[0]
        hint = f"(the first is {first}); convert them if you mean it"
        raise InvalidInputError(f"floats given where int64 is needed {hint}")
    if target == "int64" and kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InvalidInputError(f"{int(array.max())} is too large for int64")
    if kind != "f" or array.dtype.itemsize <= 4:
        return np.ascontiguousarray(array, dtype=_NUMPY[target]).reshape(array.shape)
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(array, dtype=np.float32).reshape(array.shape)
    if (lost := np.isinf(out) & ~np.isinf(array)).any():
        raise InvalidInputError(f"{float(array[lost][0])!r} is too large for float32")
    return out


def _is_immutable(array: np.ndarray) -> bool:
    """Whether the memory can never change. Only bytes cannot: a read-only view may have a writable base."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, bytes)


def _kept(array: np.ndarray, given: Sequence[Any] | np.ndarray) -> np.ndarray:
    """`array`, which was made from `given`, read-only; copied if the caller can still write to its memory."""
    if not isinstance(given, list | tuple):
        source = given if isinstance(given, np.ndarray) else array
        if not _is_immutable(source) and np.may_share_memory(array, source):
            array = array.copy()
    array.flags.writeable = False
    return array


def as_array(data: Any) -> np.ndarray:
    """A list of numbers, or nested lists of equal length, or anything numpy accepts, as an array."""
    try:
        array = np.asarray(data)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"not a rectangular list of numbers: {_misfit(data) or error}") from None
    if array.dtype.kind in "OUS":
        raise InvalidInputError(f"not a rectangular list of numbers: {_misfit(data) or f'got {data!r}'}")
    return array.astype(np.float32) if array.size == 0 and array.dtype.kind == "f" else array


def _misfit(data: _Nested, place: str = "") -> str:
    """Describe the first element of nested lists that is no number or has another length than the first."""
    if not isinstance(data, list | tuple):
        fits = isinstance(data, int | float | np.number | np.bool_) and not abs(data) >= 2**64
        return "" if fits else f"{place or 'it'} is {data!r:.80}"
    lengths = [len(item) if isinstance(item, list | tuple) else None for item in data]
    for i, item in enumerate(data):
        if problem := _misfit(item, f"{place}[{i}]"):
            return problem
        if lengths[i] != lengths[0]:
            sizes = ["a number" if n is None else f"{n} long" for n in (lengths[i], lengths[0])]
            return f"{place}[{i}] is {sizes[0]}, {place}[0] is {sizes[1]}"
    return ""


def _as_shape(shape: Sequence[int]) -> list[int]:
    try:
        sizes = [operator.index(n) for n in shape]
    except TypeError:
        sizes = [-1]
    if any(n < 0 for n in sizes):
        raise InvalidInputError(f"shape must be a list of whole numbers from 0 on, got {shape!r}")
    return sizes


def _as_index(indices: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    array = indices if isinstance(indices, np.ndarray) else as_array(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInputError(f"{name} must be a flat list of whole numbers")
    return _kept(np.ascontiguousarray(array, dtype=np.int64), indices)


def _is_sound(values: np.ndarray) -> bool:
    if not values.size:
        return True
    if values.dtype.kind == "i":  # negative numbers are the largest as unsigned: one comparison finds both
        unsigned = values.view(np.uint64)
        return bool(unsigned[unsigned.argmax()] <= MAX_TOKEN)
    # argmax and argmin return a NaN if there is one. Together they cost half of isfinite.
    return math.isfinite(values[values.argmax()]) and math.isfinite(values[values.argmin()])


class TensorData:
    """A dense or CSR array of float32 or int64.

    >>> TensorData.from_numpy(np.arange(3)).tolist()
    [0, 1, 2]
    """

    __slots__ = ("_sound", "dense_shape", "dtype", "shape", "sparse_col_np", "sparse_crow_np", "values_np")
    _sound: bool | None
    values_np: np.ndarray  # flat: all cells if dense, the stored ones if sparse

    @strict_init
    def __init__(
        self,
        data: Sequence[float] | np.ndarray | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | np.ndarray | None = None,
        sparse_col_indices: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        if dtype is not None and (not isinstance(dtype, str) or dtype not in _NUMPY):
            raise InvalidInputError(f"dtype must be 'float32' or 'int64', got {dtype!r}")
        data = [] if data is None else data
        array = data if isinstance(data, np.ndarray) else as_array(data)
        values = _as_wire_array(array, dtype)
        self.dtype: TensorDtype = "int64" if values.dtype.kind == "i" else "float32"
        self.shape: list[int] | None = _as_shape(shape) if shape is not None else None
        if self.shape is None and values.ndim > 1:
            self.shape = list(values.shape)
        flat = values.reshape(-1)
        self.values_np = _kept(flat, data)
        self.dense_shape: tuple[int, ...] = (values.size,) if self.shape is None else tuple(self.shape)
        self.sparse_crow_np = self.sparse_col_np = None
        # Check a copy now, while it is in the CPU's cache: later it takes three times as long.
        self._sound = None if self.values_np is flat else _is_sound(self.values_np)
        if (sparse_crow_indices is None) != (sparse_col_indices is None):
            raise InvalidInputError("sparse_crow_indices and sparse_col_indices must be given together")
        if sparse_crow_indices is not None and sparse_col_indices is not None:
            self.sparse_crow_np = _as_index(sparse_crow_indices, "sparse_crow_indices")
            self.sparse_col_np = _as_index(sparse_col_indices, "sparse_col_indices")
            self._check_sparse(self.sparse_crow_np, self.sparse_col_np)
        elif self.shape is not None and math.prod(self.shape) != values.size:
            raise InvalidInputError(f"shape {self.shape} does not hold {values.size} values")

    def _check_sparse(self, crow: np.ndarray, col: np.ndarray) -> None:
        if self.shape is None or len(self.shape) != 2:
            raise InvalidInputError("a sparse tensor needs a shape of [rows, columns]")
        rows, cols = self.shape
        if rows * cols > MAX_SPARSE_CELLS:
            raise InvalidInputError(f"shape {self.shape} has more than {MAX_SPARSE_CELLS} cells")
        if crow.shape != (rows + 1,) or crow[0] != 0 or (np.diff(crow) < 0).any() or crow[-1] != col.size:
            must = "must rise from 0 to the number of values, one per row + 1"
            raise InvalidInputError(f"sparse_crow_indices {must}")
        if col.size != self.values_np.size:
            raise InvalidInputError(f"{col.size} column indices for {self.values_np.size} values")
        if col.size and (col.min() < 0 or col.max() >= cols):
            raise InvalidInputError(f"a column index is outside 0..{cols - 1}")

    @classmethod
    def split(cls, values: np.ndarray, bounds: list[int], trailing: list[int]) -> list[TensorData]:
        """Dense tensors over consecutive slices of immutable flat values, without checks or copies.

        `values` is float32 or int64; `trailing` are the dimensions after the first. A pass has thousands of
        tensors, so the loop makes no calls.
        """
        new, row = cls.__new__, math.prod(trailing)
        out: list[TensorData] = []
        dtype: TensorDtype = "int64" if values.dtype.kind == "i" else "float32"
        for start, end in itertools.pairwise(bounds):
            self = new(cls)
            self.values_np, self.dtype = values[start:end], dtype
            self.shape = [(end - start) // row, *trailing] if row else [end - start]
            self.dense_shape = tuple(self.shape)
            self.sparse_crow_np = self.sparse_col_np = self._sound = None
            out.append(self)
        return out

    @classmethod
    def of_bytes(cls, values: np.ndarray, shape: list[int]) -> TensorData:
        """Dense, over immutable flat values that are float32 or int64: without copies, and in few calls."""
        if shape and (min(shape) < 0 or math.prod(shape) != values.size):
            return cls(values, shape=shape)  # raises the error
        self = cls.__new__(cls)
        self.values_np, self.dtype = values, "int64" if values.dtype.kind == "i" else "float32"
        self.shape, self.dense_shape = shape or None, tuple(shape) or (values.size,)
        self.sparse_crow_np = self.sparse_col_np = self._sound = None
        return self

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        """From any float or integer array: floats become float32, integers int64."""
        array = np.asarray(array)
        return cls(array, shape=array.shape)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """From any torch tensor, on any device, with or without a gradient."""
        if not hasattr(tensor, "detach"):
            raise InvalidInputError(f"from_torch takes a torch tensor, got {type(tensor).__name__}")
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            tensor = tensor.float()
        return cls.from_numpy(tensor.contiguous().numpy())

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> TensorData:
        """From a 2-D tensor, as CSR without the cells equal to `pad_value` if that is smaller, else dense."""
        return cls.from_torch(tensor).compressed(pad_value)

    def compressed(self, pad_value: int = 0) -> TensorData:
        """This 2-D tensor as CSR if that is smaller, itself otherwise."""
        if self.is_sparse or self.shape is None or len(self.shape) != 2:
            return self
        rows, cols = self.shape
        grid = self.values_np.reshape(rows, cols)
        keep = grid != pad_value
        if (rows + 1) + 2 * int(keep.sum()) >= rows * cols:
            return self
        crow = np.concatenate([[0], np.cumsum(keep.sum(axis=1))])
        return TensorData(grid[keep], self.dtype, self.shape, crow, np.nonzero(keep)[1])

    @property
    def is_sparse(self) -> bool:
        return self.sparse_crow_np is not None

    @property
    def sound(self) -> bool:
        """Whether all floats are finite, or all integers are token ids. Computed once."""
        if self._sound is None:
            self._sound = _is_sound(self.values_np)
        return self._sound

    @property
    def nbytes(self) -> int:
        if self.sparse_crow_np is None or self.sparse_col_np is None:
            return self.values_np.nbytes
        return self.values_np.nbytes + self.sparse_crow_np.nbytes + self.sparse_col_np.nbytes

    @property
    def data(self) -> list[Any]:
        return self.values_np.tolist()

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        return None if self.sparse_crow_np is None else self.sparse_crow_np.tolist()

    @property
    def sparse_col_indices(self) -> list[int] | None:
        return None if self.sparse_col_np is None else self.sparse_col_np.tolist()

    def to_numpy(self, pad_value: int = 0) -> np.ndarray:
        """The dense array, read-only; cells that a sparse tensor does not store are `pad_value`."""
        if self.sparse_crow_np is None or self.sparse_col_np is None:
            return self.values_np.reshape(self.dense_shape)
        out = np.full(self.dense_shape, pad_value, dtype=self.values_np.dtype)
        rows = np.repeat(np.arange(self.dense_shape[0]), np.diff(self.sparse_crow_np))
        out[rows, self.sparse_col_np] = self.values_np
        out.flags.writeable = False
        return out

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        import torch

        return torch.as_tensor(self.to_numpy(pad_value).copy())

    def tolist(self, pad_value: int = 0) -> list[Any]:
        return self.to_numpy(pad_value).tolist()

    def model_dump(self, **_: Any) -> dict[str, Any]:
        names = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
        return {name: getattr(self, name) for name in names}

    def __len__(self) -> int:
        return self.dense_shape[0] if self.dense_shape else 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        same = self.dtype == other.dtype and self.dense_shape == other.dense_shape
        return same and np.array_equal(self.to_numpy(), other.to_numpy(), equal_nan=self.dtype == "float32")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        layout = ", sparse" if self.is_sparse else ""
        return f"TensorData({self.dtype}, shape={list(self.dense_shape)}{layout})"
