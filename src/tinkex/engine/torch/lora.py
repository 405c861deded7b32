"""Many adapters on one frozen Linear in one pass.

`LoraBatch` adds scale·x·Aᵀ·Bᵀ to every contiguous segment of tokens with that segment's adapter, of any rank;
the backward adds gradients only to that adapter's buffer. Only x and its down-projection x·Aᵀ ("shrink") are
saved for the backward.

Shapes: T tokens, N rows, I in-features, O out-features, R rank, P parts of a site, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinkex.engine.torch.adapters import Adapter, Matrices
from tinkex.engine.torch.functions import frozen_product
from tinkex.engine.torch.hooks import Frozen, LoraHook, Site


class AdapterRows(NamedTuple):
    """Rows start:stop of a projection belong to one adapter, and there to one expert."""

    start: int
    stop: int
    adapter: Adapter
    expert: int


class LoraBatch(LoraHook):
    """The adapters of one pass: `adapters[i]` (None: the base model) has the next `lengths[i]` tokens.

    With `train`, outputs carry gradients and a backward adds to each `Adapter.grad`.
    """

    def __init__(
        self, adapters: Sequence[Adapter | None], lengths: Sequence[int], *, train: bool = False
    ) -> None:
        self.train = train
        self.segments: list[tuple[Adapter | None, int, int]] = []
        stop = 0
        for adapter, length in zip(adapters, lengths, strict=True):
            start, stop = stop, stop + length
            if self.segments and self.segments[-1][0] is adapter:
                start = self.segments.pop()[1]
            self.segments.append((adapter, start, stop))
        self.tokens = stop
        if train:
            for adapter in {a for a in adapters if a is not None}:
                adapter.open_grad()
        self._anchor = torch.zeros((), requires_grad=train)  # makes autograd record frozen inputs' functions

    def __call__(
        self, site: Site, x: Tensor, y: Tensor, *, rows: Tensor | None = None, experts: Tensor | None = None
    ) -> Tensor:
        jobs = self.jobs(site, rows=rows, experts=experts)
        if not jobs:
            return y
        if self.train and torch.is_grad_enabled():
            return _Apply.apply(y, x, self._anchor, site, jobs)  # type: ignore[return-value]
        add(site, jobs, x, y)
        return y

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor:
        if not (self.train and torch.is_grad_enabled()):
            return self(site, x, frozen(x))
        if jobs := self.jobs(site):
            return _Project.apply(x, self._anchor, frozen, site, jobs)  # type: ignore[return-value]
        return frozen(x)

    def jobs(
        self,
        site: Site,
        start: int = 0,
        stop: int | None = None,
        *,
        rows: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> list[AdapterRows]:
        """The adapters at `site` of tokens start:stop, or of `rows` (ascending within each expert)."""
        if rows is not None:
            return self._row_jobs(site, rows, experts)
        stop = self.tokens if stop is None else stop
        return [
            AdapterRows(max(first, start) - start, min(last, stop) - start, adapter, 0)
            for adapter, first, last in self.segments
            if adapter is not None and site in adapter.shapes and first < stop and last > start
        ]

    def _row_jobs(self, site: Site, rows: Tensor, experts: Tensor | None) -> list[AdapterRows]:
        if not self.jobs(site):
            return []
        ends = torch.tensor([last for _, _, last in self.segments], device=rows.device)
        segment = torch.searchsorted(ends, rows, right=True)
        groups = segment if experts is None else experts * len(self.segments) + segment
        keys, counts = torch.unique_consecutive(groups, return_counts=True)
        jobs, stop = [], 0
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            start, stop = stop, stop + count
            expert, index = divmod(key, len(self.segments))
            adapter = self.segments[index][0]
            if adapter is not None and site in adapter.shapes:
                jobs.append(AdapterRows(start, stop, adapter, expert))
        return jobs


def add(site: Site, jobs: Sequence[AdapterRows], x: Tensor, y: Tensor) -> list[Tensor]:
    """y += scale·x·Aᵀ·Bᵀ in place; returns the down-projections, which the backward needs."""
    kept = shrink(site, jobs, x)
    for job, y_job, u in zip(jobs, _rows(y, jobs), kept, strict=True):
        matrices = job.adapter.matrices(x.dtype)[site][job.expert]
        for y_part, u_part, b_part in zip(*_parts(matrices, y_job, u), matrices.b_t, strict=True):
            y_part.addmm_(u_part, b_part, alpha=job.adapter.scale)
    return kept


def shrink(site: Site, jobs: Sequence[AdapterRows], x: Tensor) -> list[Tensor]:
    """The down-projection x·Aᵀ of each adapter's rows, all parts side by side: [rows, P·R]."""
    return [
        x_job @ job.adapter.matrices(x.dtype)[site][job.expert].a.t()
        for job, x_job in zip(jobs, _rows(x, jobs), strict=True)
    ]


def add_backward(
    site: Site,
    jobs: Sequence[AdapterRows],
    grad_y: Tensor,
    x: Tensor,
    kept: Sequence[Tensor],
    grad_x: Tensor | None,
) -> None:
    """Add to each adapter's gradients, and to `grad_x` in place if it is given."""
    grad_x_rows = _rows(grad_x, jobs) if grad_x is not None else [None] * len(jobs)
    rows = zip(jobs, _rows(grad_y, jobs), _rows(x, jobs), kept, grad_x_rows, strict=True)
    for job, grad_y_job, x_job, u, grad_x_job in rows:
        matrices = job.adapter.matrices(x.dtype)[site][job.expert]
        grads, scale = job.adapter.grad_matrices(site)[job.expert], job.adapter.scale
        grad_u = torch.empty_like(u)
        parts = _parts(matrices, grad_y_job, u, grad_u)
        for grad_y_part, u_part, grad_u_part, b_t, to in zip(*parts, matrices.b_t, grads.b_t, strict=True):
            torch.mm(grad_y_part, b_t.t(), out=grad_u_part)
            _accumulate(to, u_part.t(), grad_y_part, scale)
        _accumulate(grads.a, grad_u.t(), x_job, scale)
        if grad_x_job is not None:
            grad_x_job.addmm_(grad_u, matrices.a, alpha=scale)


def _rows(x: Tensor, jobs: Sequence[AdapterRows]) -> list[Tensor]:
    sizes, done = [], 0
    for job in jobs:
        sizes += [job.start - done, job.stop - job.start]
        done = job.stop
    return list(x.split_with_sizes([*sizes, x.shape[0] - done]))[1::2]  # faster than split


def _parts(matrices: Matrices, y: Tensor, *us: Tensor) -> list[Sequence[Tensor]]:
    """The columns of each part: of an output, and of any number of down-projections."""
    count = len(matrices.b_t)
    if count == 1:
        return [(y,), *((u,) for u in us)]
    return [y.split_with_sizes([b.shape[1] for b in matrices.b_t], 1), *(u.chunk(count, 1) for u in us)]


def _accumulate(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right, alpha=scale)
    else:
        total.add_(left @ right, alpha=scale)


class _Apply(torch.autograd.Function):
    """`add`, in place on y, with a backward that writes straight into the adapters' gradient buffers."""

    @staticmethod
    def forward(ctx: Any, y, x, anchor: Tensor, site: Site, jobs: list[AdapterRows]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, *add(site, jobs, x, y))
        ctx.site, ctx.jobs = site, jobs
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, *kept), (grad_y,) = ctx.saved_tensors, grads
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        add_backward(ctx.site, ctx.jobs, grad_y, x, kept, grad_x)
        return grad_y, grad_x, None, None, None


class _Project(torch.autograd.Function):
    """A frozen product and `add` to it; the backward makes one gradient to x instead of two to be summed."""

    @staticmethod
    def forward(ctx: Any, x, anchor, frozen: Frozen, site: Site, jobs: list[AdapterRows]) -> Tensor:  # type: ignore[override]
        y = frozen_product(x, frozen.weight, frozen.bias, frozen.packed)
        ctx.save_for_backward(x, *add(site, jobs, x, y))
        ctx.weight, ctx.site, ctx.jobs = frozen.weight, site, jobs
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, *kept), (grad_y,) = ctx.saved_tensors, grads
        grad_x = frozen_product(grad_y, ctx.weight.t()) if ctx.needs_input_grad[0] else None
        add_backward(ctx.site, ctx.jobs, grad_y, x, kept, grad_x)
        return grad_x, None, None, None, None
