"""An engine whose trainers and samplers are Ray actors: builds them, watches them, replaces samplers.

One placement group holds the trainers and the fewest samplers; more are added and removed by
how long requests wait. Ray restarts and retries nothing. A trainer that dies is EngineLost for its own runs
only, and is rebuilt when its partition is requested again. A sampler that dies is replaced here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinkex.engine.cluster.actors import BuildEngine, EngineActor, SamplerActor, TrainerActor
from tinkex.engine.cluster.connection import connect
from tinkex.engine.cluster.heartbeats import Heartbeats
from tinkex.engine.cluster.remote_trainer import RemoteTrainer, fetch
from tinkex.engine.cluster.routing import Autoscaler
from tinkex.engine.cluster.sampler_pool import CLOSED, RemoteSampler, SamplerPool
from tinkex.engine.cluster.trainer_group import TrainerGroup
from tinkex.engine.protocol import (
    EngineConfig,
    EngineError,
    EngineLost,
    Heartbeat,
    ModelInfo,
    Placement,
    build_engine,
)

log = logging.getLogger("tinkex")
A = TypeVar("A")
T = TypeVar("T")
PATIENCE = 120.0  # seconds for the cluster to make room for the actors
BEAT = 0.5  # seconds between two looks at the actors
PLACING = 60.0  # seconds for the cluster to find room for a sampler beyond the fewest
MAX_FAILURES = 3  # attempts in a row to build a trainer or a sampler, before the engine is given up


class ActorDied(EngineError):
    """A process ended while its engine was made: by itself, or with its node."""


class NoRoom(EngineError):
    """The cluster has not placed an actor."""


class TrainerPart:
    """The engine of one trainer; its sampler is shared by all of them."""

    def __init__(self, index: int, info: ModelInfo, trainer: RemoteTrainer, sampler: SamplerPool) -> None:
        self.index, self.info, self.trainer, self.sampler = index, info, trainer, sampler

    def heartbeat(self) -> Heartbeat:
        trouble = self.trainer.trouble
        return replace(self.trainer.beat, alive=not trouble, trouble=trouble)

    def close(self) -> None:
        self.trainer.close()


class ClusterEngine:
    """One base model on a cluster; `build` makes the engine inside each actor."""

    def __init__(self, config: EngineConfig, build: BuildEngine = build_engine) -> None:
        assert config.placement is not None
        connect(config.placement.cluster)
        self._config, self._build = config, build
        self._placement = _checked(config.placement)
        self._share = _share(config, self._placement)
        self._lock = threading.Lock()
        self._parts: dict[int, TrainerPart] = {}
        self._building: dict[int, threading.Lock] = {
            i: threading.Lock() for i in range(self._placement.trainers)
        }
        self._serial, self._failures = itertools.count(), 0
        self._making: dict[int | None, threading.Thread] = {}  # samplers that are being made, by place
        self._heartbeats = Heartbeats()
        self._wake, self._closed = threading.Event(), False
        self.sampler = SamplerPool(config.max_batch, self._wake.set)
        self._scaler = Autoscaler(self._placement.samplers, self._placement.max_samplers, config.max_batch)
        self._group = _reserve(self._share, self._placement)
        try:
            first = self._start_trainer(0)
            samplers = [(self._start(SamplerActor, b), b) for b in self._sampler_bundles()]
            self._parts[0] = self._insist(lambda: self._start_trainer(0), lambda a: self._part(0, a), first)
            self.info = self._parts[0].info
            for actor, bundle in samplers:
                self._insist(
                    partial(self._start, SamplerActor, bundle), partial(self._join, bundle=bundle), actor
                )
        except BaseException:
            self.sampler.close()
            remove_placement_group(self._group)
            raise
        self._watching = threading.Thread(target=self._watch, name="tinkex-cluster", daemon=True)
        self._watching.start()

    # -- the contract ------------------------------------------------------------------------------------

    @property
    def trainer(self) -> RemoteTrainer:
        return self._parts[0].trainer

    def partition(self, index: int) -> TrainerPart:
        if index not in self._building:
            raise EngineError(f"there is no trainer {index}: there are {len(self._building)}")
        with self._building[index]:
            part = self._parts.get(index)
            if part is None or part.trainer.trouble:
                part = self._insist(partial(self._start_trainer, index), partial(self._part, index))
                self._parts[index] = part
            if self._closed:
                part.close()
                raise EngineLost(CLOSED)
            return part

    def heartbeat(self) -> Heartbeat:
        """Of the samplers; of the trainers, what they have in common with an engine in one process."""
        beat = self.sampler.heartbeat()
        parts = [part.heartbeat() for part in list(self._parts.values())]  # `partition` may add one
        stats = {**beat.stats, "trainers": float(sum(part.alive for part in parts))}
        for name in ("adapters_live", "adapter_bytes"):
            stats[name] = sum(part.stats.get(name, 0.0) for part in parts)
        return replace(beat, stats=stats)

    def processes(self) -> list[tuple[str, Heartbeat]]:
        trainers = [(f"trainer {index}", part.heartbeat()) for index, part in sorted([*self._parts.items()])]
        samplers = [(f"sampler {n}", one.beat) for n, one in sorted([*self.sampler.samplers.items()])]
        return trainers + samplers

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake.set()
        self.sampler.close()
        for part in list(self._parts.values()):
            part.close()
        self._watching.join(5.0)  # it starts the others; after this, Ray may be left
        for thread in list(self._making.values()):
            thread.join(5.0)
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)

    # -- actors ------------------------------------------------------------------------------------------

    def _start(self, kind: type[EngineActor], bundle: int | None) -> Any:
        """An actor that is being made: `_described` waits for it."""
        role = "trainer" if kind is TrainerActor else "sampler"
        config = replace(self._config, placement=None, role=role)
        options: dict[str, Any] = {
            "num_cpus": self._share["CPU"], "num_gpus": self._share.get("GPU", 0),
            "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4096,
        }  # fmt: skip
        if bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, bundle)
        return ray.remote(kind).options(**options).remote(config, self._build)

    def _described(self, actor: Any, patience: float = math.inf) -> tuple[ModelInfo, Heartbeat, str]:
        """Wait for an actor's engine. EngineError says why there is none; a dead actor is one too.

        `patience`: seconds for Ray to place the actor.
        """
        try:
            self._wait(actor.__ray_ready__.remote(), patience)
            found = self._wait(actor.describe.remote())
            if isinstance(found, EngineError):
                raise found
            return found
        except RayError as error:
            raise ActorDied(f"an actor died while it was made: {error}") from error
        except EngineError:
            with contextlib.suppress(RayError):
                ray.kill(actor)
            raise

    def _wait(self, asked: Any, patience: float = math.inf) -> Any:
        end = time.monotonic() + patience
        while not ray.wait([asked], timeout=0.5)[0]:  # its node may have to be found first
            if self._closed:
                raise EngineLost(CLOSED)
            if time.monotonic() > end:
                raise NoRoom(f"the cluster had no room for it in {patience:.0f} s")
        return fetch(asked)

    def _insist(self, start: Callable[[], A], finish: Callable[[A], T], started: A | None = None) -> T:
        """Make something of actors; once more with new ones if they die meanwhile.

        Ray may place an actor on a node that is gone, before it knows that.
        """
        for left in reversed(range(MAX_FAILURES)):
            actors, started = start() if started is None else started, None
            try:
                return finish(actors)
            except ActorDied as error:
                if not left:
                    raise
                log.warning("%s of %s: trying again", error, self._config.name or self._config.model)
        raise AssertionError

    def _start_trainer(self, index: int) -> list[Any]:
        """The processes of one trainer, being made."""
        count = self._placement.data
        return [self._start(TrainerActor, bundle) for bundle in range(index * count, (index + 1) * count)]

    def _part(self, index: int, actors: list[Any]) -> TrainerPart:
        try:
            described = [self._described(actor) for actor in actors]
            if len(actors) > 1:
                self._introduce(actors)
        except BaseException:
            for actor in actors:
                with contextlib.suppress(RayError):
                    ray.kill(actor)
            raise
        group = TrainerGroup(actors, described[0][1], [node for _, _, node in described])
        return TrainerPart(index, described[0][0], RemoteTrainer(group), self.sampler)

    def _introduce(self, actors: list[Any]) -> None:
        """Have the processes of one trainer form a group."""
        gpus = self._share.get("GPU", 0) >= 1
        try:
            address = self._wait(actors[0].meet.remote())
            joining = [actor.join.remote(n, len(actors), address, gpus) for n, actor in enumerate(actors)]
            answers = [self._wait(one) for one in joining]
        except RayError as error:
            raise ActorDied(f"an actor died while it was made: {error}") from error
        if failed := next(filter(None, answers), None):
            raise ActorDied(f"the processes of a trainer did not find each other: {failed}")

    def _sampler_bundles(self) -> list[int]:
        first = self._placement.trainers * self._placement.data
        return list(range(first, first + self._placement.samplers))

    def _join(self, actor: Any, bundle: int | None) -> None:
        """Have a sampler serve, once it is there."""
        _, beat, _ = self._described(actor, PLACING if bundle is None else math.inf)
        self.sampler.add(RemoteSampler(next(self._serial), actor, beat, bundle))

    # -- watching ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed:
            self._wake.wait(BEAT)
            self._wake.clear()
            try:
                self._look()
                self._scale()
            except Exception:
                if not self._closed:
                    log.exception("a look at the actors of %s failed", self._config.name)

    def _look(self) -> None:
        """Take the actors' reports; one that is gone is noticed even if nobody asks it."""
        samplers = {sampler.actor: sampler for sampler in [*self.sampler.samplers.values()]}
        parts = [part.trainer for part in [*self._parts.values()] if not part.trainer.trouble]
        trainers = {actor: trainer for trainer in parts for actor in trainer.actors}
        for actor, told in self._heartbeats.collect([*samplers, *trainers]):
            if actor in trainers:
                trainers[actor].heard(actor, told)
            elif isinstance(told, Heartbeat) and told.alive:
                samplers[actor].beat = told
            else:
                self.sampler.lose(samplers[actor])

    def _scale(self) -> None:
        """Replace what was lost, add what is needed, let go of what is not."""
        making = {*self._making}  # first: one that is done meanwhile is then among those that we have
        have = [s for s in [*self.sampler.samplers.values()] if not s.leaving]
        for sampler in list(self.sampler.samplers.values()):
            if sampler.leaving and not sampler.load:
                self.sampler.lose(sampler)
        in_flight, waited = self.sampler.in_flight()
        wanted = self._scaler.wanted(time.monotonic(), len(have), in_flight, waited)
        if wanted < len(have):
            self.sampler.spare()
        # What is reserved comes first, and one beyond it, for which there may be no room, holds nothing up.
        free = [b for b in self._sampler_bundles() if b not in making | {s.bundle for s in have}]
        lacking = max(0, wanted - len(have) - len(making - {None}))
        for place in [*free, *({None} - making)][:lacking]:
            if self._closed:
                return
            thread = threading.Thread(target=self._make, args=(place,), name="tinkex-sampler", daemon=True)
            self._making[place] = thread
            thread.start()

    def _make(self, place: int | None) -> None:
        """Add a sampler, however long that takes."""
        model = self._config.name or self._config.model
        log.info("%s gets another sampler", model)
        try:
            self._join(self._start(SamplerActor, place), place)
            self._failures = 0
        except NoRoom as error:
            log.warning("%s gets no other sampler: %s", model, error)
        except (EngineError, RayError) as error:
            if self._closed:
                return
            self._failures += 1
            log.error("a sampler of %s could not be made: %s", model, error)
            if self._failures >= MAX_FAILURES and not self.sampler.samplers:
                self.sampler.close(f"no sampler could be made: {error}")
        finally:
            del self._making[place]


def _checked(placement: Placement) -> Placement:
    least = min(placement.trainers, placement.data, placement.samplers)
    if least < 1 or placement.max_samplers < placement.samplers:
        raise EngineError(
            f"a model needs a trainer and a sampler, and max_samplers ≥ samplers: {placement}", "user"
        )
    return placement


def _share(config: EngineConfig, placement: Placement) -> dict[str, float]:
    """What each actor takes of the cluster."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0 and config.kind != "fake" and config.device != "cpu"
    gpus = placement.gpus if placement.gpus is not None else float(has_gpus) * config.tensor
    # On CPUs, engines adjust their threads to the load of the machine themselves.
    return {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 0.1}


def _reserve(share: dict[str, float], placement: Placement) -> PlacementGroup:
    """Room for the trainers and the fewest samplers; on as many nodes as there are."""
    trainers = placement.trainers * placement.data
    count = trainers + placement.samplers
    group = placement_group([dict(share) for _ in range(count)], strategy="SPREAD")
    try:
        ray.get(group.ready(), timeout=PATIENCE)
    except GetTimeoutError:
        remove_placement_group(group)
        have = {name: n for name, n in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise EngineError(
            f"the cluster has no room for {trainers} processes of trainers and {placement.samplers} samplers "
            f"of {share} each; free are {have}. Ask for fewer with trainers=, data=, samplers=, or add nodes"
        ) from None
    return group
