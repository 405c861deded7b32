"""Rank 0: the ordinary trainer and sampler steps, each after an order broadcast to the other ranks.

If a rank fails, the others block in a collective, so the whole engine is lost.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import protocol as p
from tinkex.engine.torch import adapter_files
from tinkex.engine.torch.adapters import Adapter, AdapterExport
from tinkex.engine.torch.backend import PlacedRows, StepLead
from tinkex.engine.torch.kv import KVCache
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.next_tokens import Choice
from tinkex.engine.torch.optim import adamw_step
from tinkex.engine.torch.sampler_files import SamplerCopy
from tinkex.engine.torch.states import StatePool
from tinkex.engine.torch.step_runner import Adapters, Rows, StepRunner, StepTokens
from tinkex.engine.torch.tensor_parallel import orders
from tinkex.engine.torch.tensor_parallel.orders import LaunchStep, PlaceRows
from tinkex.engine.torch.tensor_parallel.sharded_adapters import CPU, AdapterShards
from tinkex.engine.torch.tensor_parallel.sharded_vocab import ShardedVocab
from tinkex.engine.torch.tensor_parallel.sharding import ShardPlan
from tinkex.engine.torch.tensor_parallel.team import Team
from tinkex.engine.torch.trainer import MicroBatch, TorchTrainer
from tinkex.types.params import AdamParams, LoraConfig


class AdapterKeys:
    """Numbers the adapters that other ranks have a part of, and tracks which numbers are free again."""

    def __init__(self, team: Team) -> None:
        self._team, self._serial = team, itertools.count()
        self._keys: weakref.WeakKeyDictionary[Adapter, int] = weakref.WeakKeyDictionary()
        self._freed: deque[int] = deque()

    def enter(self, adapter: Adapter, key: int) -> Adapter:
        self._keys[adapter] = key
        weakref.finalize(adapter, self._freed.append, key).atexit = False
        return adapter

    def new(self) -> int:
        """A new number; first has the other ranks drop the freed ones."""
        if self._freed:
            keys = tuple(self._freed.popleft() for _ in range(len(self._freed)))
            with self._team.order(orders.FreeAdapters(keys)):
                pass
        return next(self._serial)

    def __getitem__(self, adapter: Adapter) -> int:
        return self._keys[adapter]

    def of(self, adapters: Adapters) -> list[orders.Key]:
        return [None if adapter is None else self._keys[adapter] for adapter in adapters]


class LeadingTrainer(TorchTrainer):
    """`TorchTrainer` over all ranks."""

    def __init__(
        self, team: Team, plan: ShardPlan, keys: AdapterKeys, fingerprint: str, *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.base = adapter_files.BaseIdentity(self.base.name, fingerprint)
        self._team, self._plan, self._keys = team, plan, keys
        self._parts = AdapterShards(plan, team.shards, self._device)
        self._chunk = ShardedVocab(team.shards, self.decoder.config).logprob_chunk
        self._decided = False  # whether layers of this micro-batch are recomputed

    def _fresh(self, lora: LoraConfig) -> Adapter:
        self._check_room(lora)
        seed = secrets.randbits(63) if lora.seed is None else lora.seed
        key = self._keys.new()
        with self._team.order(orders.MakeAdapter(key, lora, seed)):
            return self._keys.enter(self._parts.fresh(lora, seed), key)

    def _step(self, adapter: Adapter, params: AdamParams) -> dict[str, float]:
        if adapter.grad is None:
            return super()._step(adapter, params)
        with self._team.order(orders.StepAdapter(self._keys[adapter], params)):
            self._parts.sync(adapter)
            return adamw_step(adapter, params, lambda grad: self._parts.norm(adapter, grad))

    def _collected(self, adapter: Adapter, *, optimizer: bool = False) -> Adapter:
        with self._team.order(orders.CollectAdapter(self._keys[adapter], optimizer)):
            return self._parts.whole(adapter, optimizer=optimizer)

    def sampler_copy(self, command: p.SaveAdapter) -> SamplerCopy:
        whole = self._collected(self.adapter(command.run))
        return SamplerCopy(whole, self.base, self.decoder.unembed_weight.dtype, command)

    def _save(self, adapter: Adapter, command: p.SaveAdapter) -> int:
        if command.sampling:
            return self.sampler_copy(command).write()
        return super()._save(self._collected(adapter, optimizer=command.optimizer), command)

    def _export(self, adapter: Adapter) -> AdapterExport:
        return AdapterExport(self._collected(adapter), self.base.fingerprint, adapter.shared)

    def load(self, location: p.Location, *, optimizer: bool = False) -> Adapter:
        with adapter_files.reading(location) as directory:
            whole = adapter_files.load_adapter(
                directory, self._plan.whole, self.base, optimizer=optimizer, device=CPU
            )
        return self._distributed(whole)

    def published(self, source: p.Location | p.ExportedAdapter) -> Adapter:
        if not isinstance(source, AdapterExport):
            return super().published(source)
        self._check_fingerprint(source)
        shapes = self._parts.whole_shapes(source.lora, source.shared)
        return self._distributed(source.on(shapes, CPU))

    def _distributed(self, whole: Adapter) -> Adapter:
        """Give every rank its part."""
        moments = () if whole.exp_avg is None else whole.moments()
        key = self._keys.new()
        order = orders.TakeAdapter(key, whole.lora, whole.shared, whole.step, bool(moments))
        with self._team.order(order):
            for flat in (whole.flat, *moments):
                self._team.shards.broadcast(flat.clone())  # an exported adapter is immutable
            adapter = self._parts.part(whole)
        return self._keys.enter(adapter, key)

    def _compute_packed(self, batch: MicroBatch) -> None:
        assert batch.images is None, "images are for engines on one GPU"
        adapters = [self.adapter(item.training.run) for item in batch.items]
        fresh = [self._keys[adapter] for adapter in adapters if adapter.grad is None]
        local = all(part.loss is not None and part.loss.local for part, *_ in self._pass_cells(batch))
        self._decided, targets = super()._recomputes(batch), batch.targets
        order = orders.ComputeBatch(
            adapters=[self._keys[adapter] for adapter in adapters],
            lengths=batch.lengths,
            tokens=_array(batch.tokens_T),
            positions=_array(batch.positions_T),
            rows=_array(targets.rows_M),
            ids=_array(targets.ids_M),
            starts=targets.starts.numpy(),
            clear=fresh,
            backward=batch.backward,
            recompute=self._decided,
            calls=[False] if not batch.backward else [True] if local else [False, True],
        )
        # A collective in the backward must run on this thread, which the other ranks wait for.
        with self._team.order(order), torch.autograd.set_multithreading_enabled(False):
            computed = self._forward(batch)
            if computed is None:
                raise torch.OutOfMemoryError("memory is short for a micro-batch")
            self._backward(batch, *computed)

    def _recomputes(self, batch: MicroBatch) -> bool:
        return self._decided


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


class LeadingCache(KVCache):
    """A KV cache that records changes, to be repeated by the other ranks."""

    def __init__(self, changes: list[orders.Change], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._changes = changes

    def clear(self, pages: list[int]) -> None:
        self._changes.append(("clear", pages, None))
        super().clear(pages)

    def copy_page(self, source: int, target: int) -> None:
        self._changes.append(("copy", source, target))
        super().copy_page(source, target)


class LeadingStates(StatePool):
    """A pool of states that records changes, to be repeated by the other ranks."""

    def __init__(self, changes: list[orders.Change], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._changes = changes

    def copy_state(self, target: int, source: int | None) -> None:
        self._changes.append(("state", target, source))
        super().copy_state(target, source)


def _taken(changes: list[orders.Change]) -> tuple[orders.Change, ...]:
    taken = tuple(changes)
    changes.clear()
    return taken


class LeadingSteps(StepLead):
    """Repeats rank 0's captured decode steps on the other ranks; `changes` as in `LeadingRunner`."""

    def __init__(self, team: Team, keys: AdapterKeys, changes: list[orders.Change]) -> None:
        self._team, self._keys, self._changes = team, keys, changes

    def place(self, rows: PlacedRows) -> AbstractContextManager[None]:
        keys = self._keys.of(rows.adapters)
        return self._team.order(PlaceRows(rows.pages, rows.temperature, keys, rows.keeps_logits))

    def launch(self, orders: Tensor) -> AbstractContextManager[None]:
        return self._team.order(LaunchStep(_taken(self._changes), orders.numpy().copy()))

    def share_tokens(self) -> AbstractContextManager[None]:
        return self._team.order(orders.ShareTokens())


class LeadingRunner(StepRunner):
    """`StepRunner` over all ranks; `changes` are those that its cache and its states note."""

    draws = True

    def __init__(
        self, team: Team, keys: AdapterKeys, changes: list[orders.Change], decoder: Decoder, *args: Any
    ) -> None:
        super().__init__(decoder, *args)
        self._team, self._keys, self._changes = team, keys, changes
        self._vocab = ShardedVocab(team.shards, decoder.config)

    def forward(self, step: StepTokens) -> Tensor:
        assert step.images is None, "images are for engines on one GPU"
        spans = [(list(piece.pages), piece.start, piece.new) for piece in step.pieces]
        adapters, changes = self._keys.of(step.adapters), _taken(self._changes)
        with self._team.order(
            orders.AdvanceSequences(changes, step.tokens, spans, adapters, list(step.slots))
        ):
            return super().forward(step)

    def logits(self, h_TD: Tensor, rows: Rows, adapters: Adapters, counts: Sequence[int]) -> Tensor:
        with self._team.order(orders.ReadLogits(rows, self._keys.of(adapters), list(counts))):
            return self._vocab.whole(super().logits(h_TD, rows, adapters, counts))

    def draw(
        self, h_TD: Tensor, rows: np.ndarray, adapters: Adapters, choice: Choice
    ) -> tuple[list[int], list[float]]:
        order = orders.DrawTokens(rows, self._keys.of(adapters), choice.temperature, choice.keys)
        with self._team.order(order):
            return self._vocab.draw(super().logits(h_TD, rows, adapters, [1] * len(rows)), choice)
