"""A rank other than 0: executes the orders of rank 0 on its shard of the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.protocol import EngineError
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.backend import DecodeAhead, DecodeSteps, PlacedRows
from tinkex.engine.torch.continuous_batch import StepLimits
from tinkex.engine.torch.device_copies import to_device
from tinkex.engine.torch.kv import KVCache, TokenSpan
from tinkex.engine.torch.logprobs import Targets, target_logprobs
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.next_tokens import Choice
from tinkex.engine.torch.optim import adamw_step
from tinkex.engine.torch.states import StatePool
from tinkex.engine.torch.step_runner import StepRunner, StepTokens
from tinkex.engine.torch.tensor_parallel import orders
from tinkex.engine.torch.tensor_parallel.sharded_adapters import AdapterShards
from tinkex.engine.torch.tensor_parallel.sharded_vocab import ShardedVocab
from tinkex.engine.torch.tensor_parallel.sharding import ShardPlan
from tinkex.engine.torch.tensor_parallel.shards import Shards


class Follower:
    """Executes orders on its rank's `decoder`."""

    def __init__(self, decoder: Decoder, plan: ShardPlan) -> None:
        assert decoder.shards is not None
        self._decoder, self._shards, weight = decoder, decoder.shards, decoder.unembed_weight
        self._device, self._dtype = weight.device, weight.dtype
        self._parts = AdapterShards(plan, self._shards, self._device)
        self._vocab = ShardedVocab(self._shards, decoder.config)
        self._adapters: dict[int, Adapter] = {}
        self._cache: KVCache | None = None
        self._states: StatePool | None = None
        self._runner: StepRunner | None = None
        self._ahead: DecodeAhead | None = None
        self._h_TD: Tensor | None = None

    def execute(self, order: Any) -> None:
        match order:
            case orders.Prepare(pages, slots, limits):
                self._prepare(pages, slots, limits)
            case orders.MakeAdapter(key, lora, seed):
                self._adapters[key] = self._parts.fresh(lora, seed)
            case orders.TakeAdapter(key):
                self._adapters[key] = receive_adapter(self._parts, self._shards, order)
            case orders.FreeAdapters(keys):
                for key in keys:
                    self._adapters.pop(key, None)
            case orders.ComputeBatch():
                self._compute(order)
            case orders.StepAdapter(key, params):
                adapter = self._adapters[key]
                self._parts.sync(adapter)
                with suppress(EngineError):  # refused: rank 0 says so
                    adamw_step(adapter, params, lambda grad: self._parts.norm(adapter, grad))
            case orders.CollectAdapter(key, optimizer):
                self._parts.whole(self._adapters[key], optimizer=optimizer)
            case orders.AdvanceSequences():
                self._advance(order)
            case orders.PlaceRows(pages, temperature, adapters, keeps_logits):
                self._steps.place(PlacedRows(pages, temperature, self._of(adapters), keeps_logits))
            case orders.LaunchStep(changes, given):
                self._change(changes)
                self._steps.launch(torch.from_numpy(given))
            case orders.ShareTokens():
                self._steps.share_tokens()
            case orders.ReadLogits(rows, adapters, counts):
                with torch.inference_mode():
                    self._vocab.whole(self._logits(rows, adapters, counts))
            case orders.DrawTokens(rows, adapters, temperature, keys):
                with torch.inference_mode():
                    logits_NV = self._logits(rows, adapters, [1] * len(rows))
                    uncut = np.zeros(len(keys), np.int64), np.ones(len(keys), np.float32)
                    self._vocab.draw(logits_NV, Choice(temperature, *uncut, keys))
            case _:
                raise TypeError(f"{type(order).__name__} is no order")

    @property
    def _steps(self) -> DecodeSteps:
        assert self._ahead is not None
        return self._ahead.steps

    def _prepare(self, pages: int, slots: int, limits: StepLimits) -> None:
        config, clears = self._decoder.config, self._decoder.backend.clears_pages
        self._cache = KVCache(config.kv_shapes, pages, self._device, self._dtype, clears=clears)
        if config.state_shapes:
            self._states = StatePool(config.state_shapes, slots, self._device)
        of = self._decoder, self._cache, limits, self._states
        self._ahead, prefill = self._decoder.backend.captured_steps(*of)
        self._runner = StepRunner(self._decoder, self._cache, self._states, prefill)

    def _compute(self, order: orders.ComputeBatch) -> None:
        for key in order.clear:
            self._adapters[key].take_grad()
        backend, config = self._decoder.backend, self._decoder.config
        lora = backend.lora(
            [self._adapters[key] for key in order.adapters], order.lengths, train=order.backward
        )
        attend = backend.packed_attend(order.lengths, config.windows)
        given = (order.tokens, order.positions, order.rows, order.ids)
        tokens_T, positions_T, rows_M, ids_M = (to_device(array, self._device) for array in given)
        targets = Targets(rows_M, ids_M, torch.from_numpy(order.starts))
        states = backend.packed_states(config, order.lengths, self._device)
        with torch.set_grad_enabled(order.backward), torch.autograd.set_multithreading_enabled(False):
            read = tokens_T, positions_T
            h_TD = self._decoder(*read, attend, lora, states=states, checkpoint=order.recompute)
            of = h_TD.detach(), self._decoder.unembed_weight, targets, lora, config.vocab_size
            grad_TD = None
            for with_gradient in order.calls:  # the gradient to the logprobs is rank 0's
                grad_of = (lambda lp, first, last: torch.empty_like(lp)) if with_gradient else None
                _, grad_TD = target_logprobs(*of, grad_of, compute=self._vocab.logprob_chunk)
            if grad_TD is not None and h_TD.requires_grad:
                h_TD.backward(grad_TD)

    def _advance(self, order: orders.AdvanceSequences) -> None:
        assert self._runner is not None
        self._change(order.changes)
        pieces = [TokenSpan(*span) for span in order.spans]
        with torch.inference_mode():
            step = StepTokens(order.tokens, pieces, self._of(order.adapters), order.slots)
            self._h_TD = self._runner.forward(step)

    def _change(self, changes: Sequence[orders.Change]) -> None:
        assert self._cache is not None
        for kind, one, other in changes:
            if kind == "clear":
                self._cache.clear(one)
            elif kind == "copy":
                self._cache.copy_page(one, other)
            else:
                assert self._states is not None
                self._states.copy_state(one, other)

    def _of(self, keys: Sequence[orders.Key]) -> list[Adapter | None]:
        return [None if key is None else self._adapters[key] for key in keys]

    def _logits(
        self, rows: np.ndarray | slice, adapters: Sequence[orders.Key], counts: Sequence[int]
    ) -> Tensor:
        assert self._runner is not None
        assert self._h_TD is not None
        return self._runner.logits(self._h_TD, rows, self._of(adapters), counts)


def receive_adapter(parts: AdapterShards, shards: Shards, order: orders.TakeAdapter) -> Adapter:
    """This rank's part of the adapter that rank 0 broadcasts."""
    whole = Adapter(order.lora, parts.whole_shapes(order.lora, order.shared))
    whole.step = order.step
    shards.broadcast(whole.flat)
    if order.moments:
        for moment in whole.moments():
            shards.broadcast(moment)
    return parts.part(whole)
