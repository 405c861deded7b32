"""Builds the trainer, sampler and adapters of a tensor-parallel engine, in place of those for one device."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from tinkex.engine.protocol import EngineConfig
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.tensor_parallel import orders
from tinkex.engine.torch.tensor_parallel.leader import (
    AdapterKeys,
    LeadingCache,
    LeadingRunner,
    LeadingStates,
    LeadingSteps,
    LeadingTrainer,
)
from tinkex.engine.torch.tensor_parallel.sharding import LoadedPart, ShardPlan
from tinkex.engine.torch.tensor_parallel.team import Team


class Ranks:
    """Rank 0's parts, each of which leads its counterparts on the other ranks of `team`."""

    def __init__(self, team: Team) -> None:
        self._team, self._part, self._keys = team, LoadedPart(team.shards), AdapterKeys(team)
        self._fingerprint = ""

    @property
    def lost(self) -> Future[str]:
        """Set to the reason when a rank is lost."""
        return self._team.lost

    @property
    def plan(self) -> ShardPlan:
        return self._part.plan

    def load(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
        decoder = load_decoder(config.model, device, dtype, config.quantize, self._part)
        self._fingerprint = self._part.fingerprint(decoder)
        return decoder

    def free(self, ours: float) -> float:
        """Bytes that every rank has free, `ours` being this one's; waits until all have loaded."""
        return min(ours, self._team.least_free())

    def batch(self, decoder: Decoder, pages: int, slots: int, limits: StepLimits) -> ContinuousBatch:
        changes: list[orders.Change] = []
        config, weight = decoder.config, decoder.unembed_weight
        of = config.kv_shapes, pages, weight.device, weight.dtype
        with self._team.order(orders.Prepare(pages, slots, limits)):
            cache = LeadingCache(changes, *of, clears=decoder.backend.clears_pages)
            states = LeadingStates(changes, config.state_shapes, slots, weight.device) if slots else None
            lead = LeadingSteps(self._team, self._keys, changes)
            pipeline, prefill = decoder.backend.captured_steps(decoder, cache, limits, states, lead)
        runner = LeadingRunner(self._team, self._keys, changes, decoder, cache, states, prefill)
        return ContinuousBatch(
            decoder, cache, limits, pipeline, probe=self.check, states=states, runner=runner
        )

    def trainer(self, *args: Any, **options: Any) -> LeadingTrainer:
        return LeadingTrainer(self._team, self.plan, self._keys, self._fingerprint, *args, **options)

    def check(self) -> None:
        """Raise if a rank is lost."""
        self._team.check()

    def close(self) -> None:
        self._team.close()
