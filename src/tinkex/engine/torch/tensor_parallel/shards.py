"""One rank of a tensor-parallel group: the collectives, and where a decoder needs them.

Every block of a layer gives a partial sum on each rank, adapters included: `Shards.block` sums them, and the
gradients to the block's input in the backward. The vocabulary is split too (`sharded_vocab`). A decoder on
one device has no `Shards`. Knows neither which weights are split (`sharding`) nor where other ranks run.
Shapes: T tokens, N rows, D width, V padded vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.torch.hooks import ForwardContext, PartialProjection
from tinkex.engine.torch.models.projection import total

Reduction = Literal["sum", "max", "min"]


class Shards:
    """This process's rank and the collectives of its group. `calls` counts them."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count, self.calls = rank, count, 0

    # -- collectives: every rank calls them in the same order ------------------------------------------

    def reduce(self, x: Tensor, how: Reduction = "sum") -> Tensor:
        """The sum (or another reduction) over all ranks, in place; bitwise the same on all of them."""
        self.calls += 1
        self._reduce(x, how)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, in place."""
        self.calls += 1
        self._broadcast(x)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """The `x` of all ranks, which have one shape."""
        self.calls += 1
        return self._gather(x)

    def joined(self, part_NV: Tensor, width: int) -> Tensor:
        """What all ranks have of rows, side by side: the first `width` columns."""
        return torch.cat(self.gather(part_NV), -1)[:, :width]

    def captured(self, step: Callable[[], None], record: Callable[[Callable[[], None]], Any]) -> Any:
        """A graph of what `step` launches, as `record` captures it: NCCL's collectives are part of it."""
        return record(step)

    def _reduce(self, x: Tensor, how: Reduction) -> None:
        raise NotImplementedError

    def _broadcast(self, x: Tensor) -> None:
        raise NotImplementedError

    def _gather(self, x: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def close(self) -> None:
        """End waiting collectives; none can be called any more."""

    # -- what a decoder does with them -----------------------------------------------------------------

    def block(
        self,
        block: Callable[[Tensor, ForwardContext], Tensor | PartialProjection],
        h_TD: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """The sum over ranks of what a block makes of `h_TD`, which all ranks have."""
        entered = _Enter.apply(h_TD, self) if h_TD.requires_grad else h_TD
        y_TD = total(block(entered, context))
        return _Leave.apply(y_TD, self) if y_TD.requires_grad else self.reduce(y_TD.contiguous())  # type: ignore[return-value]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks inside a block, where what follows is not linear."""
        return _Sum.apply(x, self) if x.requires_grad else self.reduce(x.clone())  # type: ignore[return-value]

    def mean_square(self, x: Tensor) -> Tensor:
        """The mean of x² over the last dimension, of which each rank has an equal part; in fp32."""
        square = x.float().square().sum(-1, keepdim=True)
        return self.sum(square) / (x.shape[-1] * self.count)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, of which each rank has an equal part."""
        return (x.float() * (self.mean_square(x) + eps).rsqrt()).to(x.dtype) * weight

    def embed(self, tokens_T: Tensor, embedding_VD: Tensor) -> Tensor:
        """The tokens' embeddings, of which each rank has those of its part of the vocabulary."""
        local_T = tokens_T - self.rank * len(embedding_VD)
        ours_T = (local_T >= 0) & (local_T < len(embedding_VD))
        x_TD = F.embedding(torch.where(ours_T, local_T, 0), embedding_VD)
        return self.reduce(x_TD * ours_T[:, None])


class _Enter(Function):
    """x, whose gradients are partial sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.shards.reduce(grads[0].contiguous().clone()), None


class _Leave(Function):
    """The sum of partial sums; every rank's has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, shards: Shards) -> Tensor:
        return shards.reduce(y.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Sum(Function):
    """The sum over ranks, where what each makes of it is a partial sum again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return shards.reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.shards.reduce(grads[0].contiguous().clone()), None


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessShards(Shards):
    """A rank that is a process: NCCL between GPUs, gloo between CPUs.

    `store` is a file that all ranks can reach, or torch's store. Has its own process groups, so one process
    may be in several. Ranks on several machines need this one's `address`.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        store: Any,
        device: torch.device,
        *,
        address: str = "127.0.0.1",
        timeout: timedelta = timedelta(hours=1),
    ) -> None:
        super().__init__(rank, count)
        gloo: Any = dist.ProcessGroupGloo
        prefix: Any = dist.PrefixStore  # type: ignore[reportPrivateImportUsage]
        if isinstance(store, str):
            store = dist.FileStore(store, count)  # type: ignore[reportPrivateImportUsage]
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timeout
        self._host = gloo(prefix("host", store), rank, count, options)
        self._device: Any = self._host
        if device.type == "cuda":
            nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]
            nccl_options = nccl.Options()
            nccl_options._timeout = timeout
            self._device = nccl(prefix("device", store), rank, count, nccl_options)

    def _group(self, x: Tensor) -> Any:
        return self._device if x.is_cuda else self._host

    def _reduce(self, x: Tensor, how: Reduction) -> None:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPS[how]
        self._group(x).allreduce([x], options).wait()

    def _broadcast(self, x: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group(x).broadcast([x], options).wait()

    def _gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.count)]
        self._group(x).allgather([found], [x]).wait()
        return found

    def close(self) -> None:
        self._device.abort()
        if self._host is not self._device:
            self._host.abort()
