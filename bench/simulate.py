"""A thousand tenants on 64 GPUs, simulated: the real scheduler, router and partition; GPUs are clocks.

    python bench/simulate.py [--tenants 1000] [--hours 1] [--plot docs/images/cluster-simulation.svg]

Each tenant trains by reinforcement learning: it samples groups of answers with its newest adapter, makes a
pass over them and a step, publishes, and thinks for a while. The GPUs' times are fitted to the figures of an
H200 with the 8B shape in bench/RESULTS.md. Every hour each GPU's process dies with a given chance, and comes
back when the model is loaded again. What it shows is queueing, not kernels.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tinkex.engine.cluster.routing import choose, route_key
from tinkex.service.runs.partition import choose_trainer
from tinkex.service.scheduler import QueuedRequest, Scheduler

# The 8B shape on an H200, in seconds: 190 tokens/s with 1 sequence, 24,548 with 256; 17,699 trained tokens/s.
STEP, STEP_EACH = 5.24e-3, 20.2e-6  # of a decode step, and for each sequence in it
TRAIN_RATE, PREFILL_RATE = 17_699.0, 3 * 17_699.0  # tokens a second; a forward is a third of a pass
OPTIM, PUBLISH, MICRO_BATCH = 0.004, 0.15, 16_384
KV_TOKENS = 400_000  # that a sampler's cache holds, at 147 kB each
CAPACITY = 256  # sequences of a sampler
RESTART = 60.0  # until a lost process has loaded the model again
# Of one tenant's step; tokens of the shared prompt, of an answer.
GROUPS, SAMPLES, PREFIX, ANSWER = 8, 8, 1500, 350
THINK = 60.0  # mean seconds of a tenant between its steps: rewards, environments, pauses
Router = Callable[[bytes, dict[int, int], int, int], "int | None"]


class Clock:
    """Events in order of time."""

    def __init__(self) -> None:
        self.now, self._queue, self._serial = (
            0.0,
            list[tuple[float, int, Callable[[], None]]](),
            itertools.count(),
        )

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._serial), what))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] < until:
            self.now, _, what = heapq.heappop(self._queue)
            what()


@dataclass(eq=False)
class Request:
    """A group of answers to one prompt."""

    key: bytes
    prompt: int
    steps: int  # of the longest answer
    done: Callable[[], None]
    asked: float = 0.0


@dataclass(eq=False)
class SimulatedSampler:
    """Sequences decode together; a request ends when as many steps were made as it has tokens."""

    clock: Clock
    made: float = 0.0  # steps so far
    since: float = 0.0
    load: int = 0
    busy: float = 0.0
    running: list[tuple[float, int, Request]] = field(default_factory=list)
    cached: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    version: int = 0  # of its next event
    alive: bool = True

    def _pass_time(self) -> None:
        passed = self.clock.now - self.since
        if self.running:
            self.made += passed / (STEP + STEP_EACH * self.load)
            self.busy += passed * self.load / CAPACITY
        self.since = self.clock.now

    def start(self, request: Request, serial: int) -> tuple[int, int]:
        """Returns the prompt's tokens, and those that were in the cache."""
        self._pass_time()
        hit = request.prompt if request.key in self.cached else 0
        self.cached[request.key] = request.prompt
        self.cached.move_to_end(request.key)
        while sum(self.cached.values()) > KV_TOKENS:
            self.cached.popitem(last=False)
        self.load += SAMPLES
        prefill = (request.prompt - hit + 200) / PREFILL_RATE / (STEP + STEP_EACH * self.load)
        heapq.heappush(self.running, (self.made + prefill + request.steps, serial, request))
        self._schedule()
        return request.prompt, hit

    def _schedule(self) -> None:
        self.version += 1
        if self.running:
            left = max(0.0, self.running[0][0] - self.made) * (STEP + STEP_EACH * self.load)
            version = self.version
            self.clock.at(self.clock.now + left, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self.version:
            return
        self._pass_time()
        _, _, request = heapq.heappop(self.running)
        self.load -= SAMPLES
        self._schedule()
        request.done()

    def die(self) -> list[Request]:
        self._pass_time()
        lost, self.running, self.load, self.alive = [r for _, _, r in self.running], [], 0, False
        self.version += 1
        self.cached.clear()
        return lost


class Samplers:
    """The pool: the real router, and a queue while all are full."""

    def __init__(self, clock: Clock, count: int, router: Router) -> None:
        self.clock, self.router = clock, router
        self.all = [SimulatedSampler(clock) for _ in range(count)]
        self.waiting: list[Request] = []
        self.waits: list[float] = []
        self.tokens, self.hits, self._serial = 0, 0, itertools.count()

    def ask(self, request: Request) -> None:
        request.asked = self.clock.now
        self.waiting.append(request)
        self.admit()

    def admit(self) -> None:
        while self.waiting:
            loads = {n: one.load for n, one in enumerate(self.all) if one.alive}
            number = self.router(self.waiting[0].key, loads, SAMPLES, CAPACITY)
            if number is None:
                return
            request = self.waiting.pop(0)
            self.waits.append(self.clock.now - request.asked)
            tokens, hit = self.all[number].start(request, next(self._serial))
            self.tokens, self.hits = self.tokens + tokens, self.hits + hit

    def kill(self, number: int) -> None:
        sampler = self.all[number]
        self.waiting[:0] = sampler.die()  # what had streamed nothing is repeated elsewhere

        def back() -> None:
            sampler.alive = True
            self.admit()

        self.clock.at(self.clock.now + RESTART, back)
        self.admit()


class SimulatedTrainer:
    """A trainer with the real scheduler: one micro-batch, or some steps, at a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.scheduler = clock, Scheduler()
        self.done: dict[str, Callable[[], None]] = {}
        self.asked: dict[str, float] = {}
        self.waits: list[float] = []
        self.parts: dict[str, float] = {}  # of a batch under way, by its first request
        self.working, self.busy, self.alive = False, 0.0, True

    def submit(self, request: QueuedRequest, done: Callable[[], None]) -> None:
        self.scheduler.submit(request, self.clock.now)
        self.done[request.request_id], self.asked[request.request_id] = done, self.clock.now
        self.turn()

    def turn(self) -> None:
        if self.working or not self.alive:
            return
        batch = self.scheduler.next_batch(self.clock.now)
        if not batch:
            return
        for work in batch:
            if (asked := self.asked.pop(work.request_id, None)) is not None and work.is_pass:
                self.waits.append(self.clock.now - asked)
        tokens = sum(work.tokens for work in batch)
        part = self.parts.get(batch[0].request_id, 0.0)
        ends = part + (MICRO_BATCH / tokens if tokens else 1.0)
        seconds = OPTIM if not tokens else min(MICRO_BATCH, tokens * (1 - part)) / TRAIN_RATE
        self.working, self.busy = True, self.busy + seconds
        self.clock.at(self.clock.now + seconds, lambda: self._end(batch, ends))

    def _end(self, batch: list[QueuedRequest], part: float) -> None:
        self.working = False
        if part < 1.0:
            self.parts[batch[0].request_id] = part
            self.scheduler.progressed(batch, part, self.clock.now)
        else:
            self.parts.pop(batch[0].request_id, None)
            for work in batch:
                self.scheduler.done(work, self.clock.now)
            for work in batch:
                self.done.pop(work.request_id)()
        self.turn()

    def kill(self) -> None:
        """Its runs come back from snapshot and journal; the replay of some steps takes a while too."""
        self.alive = False

        def back() -> None:
            self.alive = True
            self.turn()

        self.clock.at(self.clock.now + RESTART + 20.0, back)


@dataclass(eq=False)
class Tenant:
    """One run, step after step."""

    name: str
    chance: random.Random
    clock: Clock
    samplers: Samplers
    trainer: SimulatedTrainer
    seq: int = 1
    left: int = 0
    tokens: int = 0
    begun: float = 0.0
    steps: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.begun, self.left, self.tokens = self.clock.now, GROUPS, 0
        # Each group has a question of its own after the prompt that they share.
        key = route_key(f"{self.name}@{self.seq}", np.arange(8, dtype=np.int32))
        for _ in range(GROUPS):
            steps = int(self.chance.lognormvariate(np.log(ANSWER), 0.5))
            self.tokens += SAMPLES * (PREFIX // 4 + steps)
            self.samplers.ask(Request(key, PREFIX, steps, self._sampled))

    def _sampled(self) -> None:
        self.samplers.admit()
        self.left -= 1
        if not self.left:
            self._submit(True, self.tokens, lambda: self._submit(False, 0, self._published))

    def _submit(self, is_pass: bool, tokens: int, done: Callable[[], None]) -> None:
        request = QueuedRequest(
            self.name, self.seq, f"{self.name}#{self.seq}", is_pass, tokens, shares=not is_pass
        )
        self.seq += 1
        self.trainer.submit(request, done)

    def _published(self) -> None:
        self.steps.append(self.clock.now - self.begun)
        self.clock.at(self.clock.now + PUBLISH + self.chance.expovariate(1 / THINK), self.step)


def round_robin() -> Router:
    turns = itertools.count()

    def route(key: bytes, loads: dict[int, int], size: int, capacity: int) -> int | None:
        free = [n for n in sorted(loads) if loads[n] + size <= capacity]
        return free[next(turns) % len(free)] if free else None

    return route


def simulate(
    tenants: int, gpus: int, trainers: int, hours: float, router: Router, failures: float, seed: int = 1
) -> dict[str, float | list[float]]:
    """Figures of one simulated system; `failures` of each process an hour."""
    clock, chance = Clock(), random.Random(seed)
    samplers = Samplers(clock, gpus - trainers, router)
    trained = [SimulatedTrainer(clock) for _ in range(trainers)]
    runs = [0] * trainers
    everybody: list[Tenant] = []
    for n in range(tenants):
        where = choose_trainer(-1, runs)
        runs[where] += 1
        tenant = Tenant(f"tenant-{n}", random.Random(seed * 100_003 + n), clock, samplers, trained[where])
        trained[where].scheduler.open(tenant.name, tenant.name)
        clock.at(chance.uniform(0, THINK), tenant.step)
        everybody.append(tenant)
    for n in range(gpus):
        when = chance.expovariate(max(failures, 1e-12)) * 3600
        while when < hours * 3600:
            victim = trained[n].kill if n < trainers else (lambda n=n: samplers.kill(n - trainers))
            clock.at(when, victim)
            when += chance.expovariate(max(failures, 1e-12)) * 3600
    clock.run(hours * 3600)
    seconds = hours * 3600
    steps = [s for tenant in everybody for s in tenant.steps]
    return {
        "steps an hour": len(steps) / hours,
        "step p50, s": statistics.median(steps),
        "step p99, s": float(np.percentile(steps, 99)),
        "sample queue p50, s": statistics.median(samplers.waits),
        "sample queue p99, s": float(np.percentile(samplers.waits, 99)),
        "pass queue p50, s": statistics.median(w for t in trained for w in t.waits),
        "pass queue p99, s": float(np.percentile([w for t in trained for w in t.waits], 99)),
        "trainers busy": sum(t.busy for t in trained) / trainers / seconds,
        "sampler slots in use": sum(s.busy for s in samplers.all) / len(samplers.all) / seconds,
        "prefix hits": samplers.hits / samplers.tokens,
        "_steps": steps,
    }


def plot(results: dict[str, dict[str, float | list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for name, result in results.items():
        steps = np.sort(np.asarray(result["_steps"]))
        left.plot(steps, np.linspace(0, 1, len(steps)), label=name)
    left.set(
        xlabel="seconds from the first sample to the end of the step", ylabel="share of steps", xlim=(0, None)
    )
    left.legend(loc="lower right", fontsize=8)
    kinds = ["trainers busy", "sampler slots in use", "prefix hits"]
    for n, (name, result) in enumerate(results.items()):
        right.bar(
            [i + 0.2 * n for i in range(len(kinds))], [float(result[k]) for k in kinds], 0.18, label=name
        )  # type: ignore[arg-type]
    right.set_xticks([i + 0.3 for i in range(len(kinds))], kinds)
    right.set_ylim(0, 1)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def shown(value: float) -> str:
    """
    >>> shown(46660.0), shown(0.5)
    ('46,660', '0.50')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A thousand tenants on 64 GPUs, simulated.")
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--trainers", type=int, default=44)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    size = (given.tenants, given.gpus, given.trainers, given.hours)
    results = {
        "affinity": simulate(*size, choose, 0.0),
        "affinity, failures": simulate(*size, choose, 1.0),
        "round robin": simulate(*size, round_robin(), 0.0),
        "round robin, failures": simulate(*size, round_robin(), 1.0),
    }
    names = [name for name in results["affinity"] if not name.startswith("_")]
    print(f"| | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    for name in names:
        print(f"| {name} | {' | '.join(shown(result[name]) for result in results.values())} |")  # type: ignore[arg-type]
    if given.plot:
        plot(results, given.plot)


if __name__ == "__main__":
    main()
