"""One adapter's tensors: all parameters in one flat fp32 buffer, gradients and moments in buffers like it.

So a step, a save or an eviction is one operation. The A matrices of a site's parts (q, k, v; gate, up) are
stacked, and B is stored transposed: products with few columns are fastest so. Experts share the factor on the
side of the hidden states (A of w1 and w3, B of w2); adapters of the older layout, where every expert has
both, still work. Shapes: I in-features, O out-features, R rank, P parts of a site, E experts (1 if
dense).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.torch.hooks import Part, Site, Sites
from tinkex.types.params import LoraConfig

ALPHA = 32.0


class Matrices(NamedTuple):
    """One expert's A [P·R, I] and each part's Bᵀ [R, O]."""

    a: Tensor
    b_t: list[Tensor]


_Strides = tuple[torch.Size, tuple[int, ...], int]  # a view's shape and strides, and where it begins


@dataclass(frozen=True)
class SiteShape:
    """One site of one adapter: for each expert the parts' A, and after all of them the Bs.

    The side that all experts share is there once.
    """

    parts: tuple[Part, ...]
    experts: int
    rank: int
    in_features: int
    start: int  # in the flat buffer
    shared: Literal["", "A", "B"] = ""

    @property
    def outs(self) -> list[int]:
        return [part.out_features for part in self.parts]

    @property
    def size(self) -> int:
        return self.a_size + self._count("B") * self.rank * sum(self.outs)

    @property
    def a_size(self) -> int:
        """Elements of all A, which come first."""
        return self._count("A") * len(self.parts) * self.rank * self.in_features

    def _count(self, side: str) -> int:
        return 1 if self.shared == side else self.experts

    def views(self, flat: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A [E, P·R, I] and each part's Bᵀ [E, R, O], as views of a buffer with the adapter's layout.

        E is 1 on the shared side.
        """
        r, a_size = self.rank, self.a_size
        a, b_t = flat[self.start : self.start + self.size].split([a_size, self.size - a_size])
        pieces = b_t.view(self._count("B"), -1).split([r * out for out in self.outs], 1)
        a = a.view(self._count("A"), -1, self.in_features)
        return a, [piece.unflatten(1, (r, -1)) for piece in pieces]

    def matrices(self, flat: Tensor) -> list[Matrices]:
        """`views` expert by expert; `Adapter` caches them, since making a view in every pass costs time."""
        # Detached: what autograd notes of a view takes more memory than the rest of it.
        (a, b_t), e = self.views(flat), self.experts
        return [
            Matrices(a_e.detach(), [part.detach() for part in b_e])
            for a_e, *b_e in zip(a.expand(e, -1, -1), *(part.expand(e, -1, -1) for part in b_t), strict=True)
        ]


def _view(flat: Tensor, place: _Strides, start: int) -> Tensor:
    shape, strides, at = place
    return flat.as_strided(shape, strides, at + start)


def lay_out(sites: Sites, lora: LoraConfig, *, shared: bool = True) -> dict[Site, SiteShape]:
    """The layout of the sites that `lora`'s train flags cover, one after the other in the flat buffer.

    Without `shared` every expert has both factors.
    """
    trained = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    shapes: dict[Site, SiteShape] = {}
    start = 0
    for site, (in_features, parts) in sites.items():
        if trained[parts[0].kind]:
            side = parts[0].shared if shared else ""
            shapes[site] = SiteShape(parts, parts[0].experts, lora.rank, in_features, start, side)
            start += shapes[site].size
    return shapes


class Adapter:
    """One adapter: parameters, gradients (None: nothing accumulated) and AdamW's state, all flat and fp32."""

    def __init__(
        self, lora: LoraConfig, shapes: Mapping[Site, SiteShape], device: torch.device | str = "cpu"
    ):
        self.lora = lora
        self.scale = ALPHA / lora.rank
        self.shapes = shapes
        size = sum(shape.size for shape in shapes.values())
        self.flat = torch.zeros(size, dtype=torch.float32, device=device)
        self.grad: Tensor | None = None
        self.step = 0
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self._grad_buffer: Tensor | None = None  # reused from step to step
        self._grad_matrices: dict[Site, list[Matrices]] = {}
        self.offsets: np.ndarray | None = None  # of matrices in `flat`, cached by cuda/adapter_table.py
        self._copies: dict[torch.dtype, Tensor] = {}
        self._matrices: dict[torch.dtype, dict[Site, list[Matrices]]] = {}

    @classmethod
    def fresh(
        cls, lora: LoraConfig, sites: Sites, device: torch.device | str = "cpu", seed: int | None = None
    ) -> Adapter:
        """A uniform in ±1/√I from `lora.seed` or `seed` (on the CPU: the same on every device), B zero."""
        adapter = cls(lora, lay_out(sites, lora), device)
        seed = lora.seed if seed is None else seed
        generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
        for shape in adapter.shapes.values():
            a, _ = shape.views(adapter.flat)
            bound = shape.in_features**-0.5
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
        return adapter

    @property
    def shared(self) -> bool:
        """Whether experts, if there are any, share a factor."""
        return not any(shape.experts > 1 and not shape.shared for shape in self.shapes.values())

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes * (1 + (self._grad_buffer is not None) + 2 * (self.exp_avg is not None))

    def named(self, flat: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """Views by Hugging Face module name: A [R, I] and B [O, R]; of experts [E, R, I] and [E, O, R].

        E is 1 on the side that experts share.
        """
        flat = self.flat if flat is None else flat
        start = int(flat.storage_offset())
        return {name: (_view(flat, a, start), _view(flat, b, start)) for name, (a, b) in self._named.items()}

    @cached_property
    def _named(self) -> dict[str, tuple[_Strides, _Strides]]:
        """Where the views of `named` lie in a flat buffer; cached: computing it takes longer than a write."""
        out: dict[str, tuple[_Strides, _Strides]] = {}
        for site, shape in self.shapes.items():
            a, b_t = shape.views(torch.empty(self.flat.shape, device="meta"))
            for part, a_part, b_part in zip(shape.parts, a.split(shape.rank, 1), b_t, strict=True):
                pair = a_part, b_part.transpose(1, 2)
                pair = pair if site.group.startswith("experts") else (pair[0][0], pair[1][0])
                first, second = ((v.shape, v.stride(), int(v.storage_offset())) for v in pair)
                out[part.name] = first, second
        return out

    def flat_as(self, dtype: torch.dtype) -> Tensor:
        """`flat` in the decoder's dtype: itself, or a copy made once per change."""
        if dtype == self.flat.dtype:
            return self.flat
        if dtype not in self._copies:
            self._copies[dtype] = self.flat.to(dtype)
        return self._copies[dtype]

    def matrices(self, dtype: torch.dtype) -> dict[Site, list[Matrices]]:
        """A and B of every site's experts in the decoder's dtype, as views of `flat_as`."""
        if dtype not in self._matrices:
            self._matrices[dtype] = self._cut(self.flat_as(dtype))
        return self._matrices[dtype]

    def _cut(self, flat: Tensor) -> dict[Site, list[Matrices]]:
        return {site: shape.matrices(flat) for site, shape in self.shapes.items()}

    def changed(self) -> None:
        """Drop the copies in other dtypes: `flat` was written to."""
        self._copies = {}
        self._matrices = {dtype: cut for dtype, cut in self._matrices.items() if dtype == self.flat.dtype}

    def open_grad(self) -> None:
        """Start accumulating gradients: the next step applies them, even if they are zeros."""
        if self._grad_buffer is None:
            self._grad_buffer = self.flat.new_empty(len(self.flat) + 1)  # the last: see `sum_gradient`
        if self.grad is None:
            self.grad = self._grad_buffer.zero_()[:-1]

    def grad_matrices(self, site: Site) -> list[Matrices]:
        """Where the gradients of `site` accumulate, once `open_grad` was called."""
        if not self._grad_matrices:
            assert self._grad_buffer is not None
            self._grad_matrices = self._cut(self._grad_buffer)
        return self._grad_matrices[site]

    def take_grad(self) -> Tensor | None:
        """Return the accumulated gradients and clear them; the tensor is valid until the next pass."""
        grad, self.grad = self.grad, None
        return grad

    def sum_gradient(self, total: Callable[[Tensor], None]) -> None:
        """Make the accumulated gradients the sum over trainers, which `total` computes in place.

        One more number tells how many of them have accumulated any; if none has, there is no gradient.
        """
        has = self.grad is not None
        self.open_grad()
        assert self._grad_buffer is not None
        self._grad_buffer[-1] = has
        total(self._grad_buffer)
        if not self._grad_buffer[-1]:
            self.take_grad()

    def snapshot(self) -> Adapter:
        copy = Adapter(self.lora, self.shapes, self.flat.device)
        copy.flat.copy_(self.flat)
        copy.offsets = self.offsets
        return copy

    def moments(self) -> tuple[Tensor, Tensor]:
        """AdamW's two moments; zeros before the first step."""
        if self.exp_avg is None or self.exp_avg_sq is None:
            self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        return self.exp_avg, self.exp_avg_sq


@dataclass(frozen=True, eq=False)
class AdapterExport:
    """The torch engine's `ExportedAdapter`; pickled, it leaves the layout to the engine that publishes it."""

    adapter: Adapter
    fingerprint: str
    shared: bool  # as `Adapter.shared`, which a pickled adapter no longer knows

    @property
    def lora(self) -> LoraConfig:
        return self.adapter.lora

    @property
    def nbytes(self) -> int:
        return self.adapter.flat.nbytes

    def on(self, shapes: Mapping[Site, SiteShape], device: torch.device) -> Adapter:
        """The adapter with `shapes` on `device`: this very one if it is there already."""
        if self.adapter.shapes and self.adapter.flat.device == device:
            return self.adapter
        adapter = Adapter(self.lora, shapes, device)
        assert adapter.flat.shape == self.adapter.flat.shape
        adapter.flat.copy_(self.adapter.flat)
        return adapter

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.lora, self.adapter.flat.cpu().numpy(), self.fingerprint, self.shared)


def _unpickled(lora: LoraConfig, flat: np.ndarray, fingerprint: str, shared: bool) -> AdapterExport:
    adapter = Adapter(lora, {})
    adapter.flat = torch.from_numpy(flat.copy())
    return AdapterExport(adapter, fingerprint, shared)
