"""One measurement of one SDK, for bench/client.py: `python client_child.py PART {official,ours} [--quick]`.

Prints one JSON object of figures. It runs in the interpreter that has the SDK, and uses only the API that
both SDKs share, so that both sides execute the same lines. TINKER_BASE_URL is the stub server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import itertools
import json
import os
import queue
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONCURRENT = 1_000
HELD = 2_000
PERIOD = 0.001  # seconds between the ticks by which stalls are measured
Figures = dict[str, float]


class Clock:
    """CPU (all threads) and wall seconds since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    @property
    def cpu(self) -> float:
        return time.process_time() - self._cpu

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._wall


def stub_control(what: str, body: Any = None) -> dict[str, Any]:
    """Control the stub server, e.g. make it hold results; returns its counters."""
    url = f"{os.environ['TINKER_BASE_URL']}/stub/{what}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body or {}).encode())) as response:
        return json.load(response)


# --- samples ----------------------------------------------------------------------------------------------


class Samples:
    """A sampler, and calls for 128 tokens after a 1,000-token prompt that differs from call to call."""

    def __init__(self, tinker: Any) -> None:
        self.types = tinker.types
        self.sampler = tinker.ServiceClient().create_sampling_client(base_model="stub/base")
        self.params = tinker.types.SamplingParams(max_tokens=128, temperature=1.0)
        self.tokens = [(i * 7919) % 150_000 for i in range(1_000)]

    def arguments(self, number: int) -> dict[str, Any]:
        prompt = self.types.ModelInput.from_ints([number, *self.tokens[1:]])
        return {"prompt": prompt, "num_samples": 1, "sampling_params": self.params}

    def run(self, count: int) -> list[float]:
        """`count` calls, 1,000 in flight, from one thread; returns their latencies."""
        slots, latencies = threading.Semaphore(CONCURRENT), []

        def noting(started: float) -> Callable[[Any], None]:
            def note(_: Any) -> None:
                latencies.append(time.perf_counter() - started)
                slots.release()

            return note

        futures = []
        for number in range(count):
            slots.acquire()
            future = self.sampler.sample(**self.arguments(number))
            future.add_done_callback(noting(time.perf_counter()))
            futures.append(future)
        for future in futures:
            use(future.result())
        return latencies

    async def run_async(self, count: int) -> list[float]:
        slots, latencies = asyncio.Semaphore(CONCURRENT), []

        async def one(number: int) -> None:
            async with slots:
                started = time.perf_counter()
                use(await self.sampler.sample_async(**self.arguments(number)))
                latencies.append(time.perf_counter() - started)

        await asyncio.gather(*(one(number) for number in range(count)))
        return latencies


def use(result: Any) -> None:
    """Read a result as a caller would: every token and logprob."""
    (sequence,) = result.sequences
    assert sum(sequence.tokens) == 128 * 129 // 2
    assert sum(sequence.logprobs) == -64


def sample(tinker: Any, quick: bool) -> Figures:
    samples, count = Samples(tinker), 1_000 if quick else 3_000
    samples.run(200)
    clock = Clock()
    return sample_figures(samples.run(count), clock.cpu, clock.wall)


def sample_async(tinker: Any, quick: bool) -> Figures:
    samples, count = Samples(tinker), 1_000 if quick else 3_000

    async def measure() -> Figures:
        await samples.run_async(200)
        clock = Clock()
        return sample_figures(await samples.run_async(count), clock.cpu, clock.wall)

    return asyncio.run(measure())


def sample_figures(latencies: list[float], cpu: float, wall: float) -> Figures:
    cuts = statistics.quantiles(latencies, n=100)
    each = {"cpu_ms": cpu * 1e3 / len(latencies), "per_s": len(latencies) / wall}
    return {**each, "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


# --- passes -----------------------------------------------------------------------------------------------


def build_batch(types: Any) -> list[Any]:
    """128 datums of 2,048 tokens with four numpy tensors each."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, (128, 2_049), dtype=np.int64)
    floats = rng.standard_normal((3, 128, 2_048), dtype=np.float32)
    keys = ("weights", "logprobs", "advantages")
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[row, :-1].tolist()),
            loss_fn_inputs={"target_tokens": tokens[row, 1:], **dict(zip(keys, floats[:, row], strict=True))},
        )
        for row in range(128)
    ]


def train(tinker: Any, quick: bool) -> Figures:
    calls = 5 if quick else 10
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(base_model="stub/base", rank=8)
    build_batch(tinker.types)  # loads numpy
    clock = Clock()
    batch = build_batch(tinker.types)
    figures = {"build_cpu_ms": clock.cpu * 1e3}
    call_cost(trainer, batch)
    again = [call_cost(trainer, batch) for _ in range(calls)]
    fresh = [call_cost(trainer, build_batch(tinker.types)) for _ in range(calls)]
    cpu, wall = (statistics.median(costs) for costs in zip(*again, strict=True))
    figures |= {"cpu_ms": cpu, "wall_ms": wall, "fresh_cpu_ms": statistics.median(cpu for cpu, _ in fresh)}
    figures |= asyncio.run(user_stall(trainer, batch, calls))
    loop = sdk_loop(tinker, service.create_sampling_client(base_model="stub/base"))
    return figures | sdk_stall(trainer, loop, batch, calls)


def call_cost(trainer: Any, batch: list[Any]) -> tuple[float, float]:
    """CPU and wall milliseconds from the call to the last logprob read."""
    clock = Clock()
    read_logprobs(trainer.forward_backward(batch, "ppo").result())
    return clock.cpu * 1e3, clock.wall * 1e3


def read_logprobs(output: Any) -> None:
    """Read a result as a caller would: every logprob."""
    assert sum(each["logprobs"].to_numpy().sum() for each in output.loss_fn_outputs) == -0.5 * 128 * 2_048


Tick = tuple[float, float]  # wall and this thread's CPU, seconds


def tick_now() -> Tick:
    return time.perf_counter(), time.thread_time()


class Ticker:
    """A timer of 1 ms on an event loop, its own or another thread's; `ticks` is when it came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._running = loop, True
        self.ticks: list[Tick] = []

    def __enter__(self) -> Ticker:
        self._loop.call_soon_threadsafe(self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False

    def _tick(self) -> None:
        self.ticks.append(tick_now())
        if self._running:
            self._loop.call_later(PERIOD, self._tick)


def stalls(name: str, idle: list[list[Tick]], busy: list[list[Tick]]) -> Figures:
    """The longest gap between ticks beyond their period, and the most CPU that the loop's thread used in one.

    The wall figures include everything that delayed the loop, other processes too (hence the idle one).
    The CPU figure includes only work on the loop itself.
    """

    def longest(ticks: list[Tick], which: int) -> float:
        return max((b[which] - a[which] for a, b in itertools.pairwise(ticks)), default=0.0) * 1e3

    def longest_wall(ticks: list[Tick]) -> float:
        return longest(ticks, 0) - PERIOD * 1e3

    walls = [longest_wall(ticks) for ticks in busy]
    return {
        f"{name}_stall_ms": max(walls),
        f"{name}_stall_p50_ms": statistics.median(walls),
        f"{name}_idle_ms": max(longest_wall(ticks) for ticks in idle),
        f"{name}_work_ms": max(longest(ticks, 1) for ticks in busy),
    }


async def user_stall(trainer: Any, batch: list[Any], calls: int) -> Figures:
    """How long calls keep the caller's event loop from a 1 ms timer."""

    async def call() -> None:
        future = await trainer.forward_backward_async(batch, "ppo")
        await future.result_async()

    async def ticks_during(work: Callable[[], Any]) -> list[Tick]:
        with Ticker(asyncio.get_running_loop()) as ticker:
            await asyncio.sleep(0.01)
            await work()
            await asyncio.sleep(0.01)
        return ticker.ticks

    idle = [await ticks_during(lambda: asyncio.sleep(0.1)) for _ in range(calls)]
    busy = [await ticks_during(call) for _ in range(calls)]
    return stalls("user", idle, busy)


def sdk_stall(trainer: Any, loop: asyncio.AbstractEventLoop, batch: list[Any], calls: int) -> Figures:
    """How long calls keep the SDK's own event loop, which is in another thread, from a 1 ms timer."""

    def ticks_during(work: Callable[[], Any]) -> list[Tick]:
        with Ticker(loop) as ticker:
            time.sleep(0.01)
            work()
            time.sleep(0.01)
        return ticker.ticks

    idle = [ticks_during(lambda: time.sleep(0.1)) for _ in range(calls)]
    busy = [ticks_during(lambda: trainer.forward_backward(batch, "ppo").result()) for _ in range(calls)]
    return stalls("sdk", idle, busy)


def sdk_loop(tinker: Any, sampler: Any) -> asyncio.AbstractEventLoop:
    """The SDK's own loop: ours has a name, and the official one calls callbacks on it."""
    if tinker.__name__ == "tinkex":
        return importlib.import_module("tinkex.client.loop").get_loop()
    found: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
    prompt, params = tinker.types.ModelInput.from_ints([1]), tinker.types.SamplingParams(max_tokens=1)
    future = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)
    future.add_done_callback(lambda _: found.put(asyncio.get_running_loop()))
    return found.get(timeout=10)


# --- memory and sockets -----------------------------------------------------------------------------------


def memory(tinker: Any, quick: bool) -> Figures:
    """What 2,000 pending samples of one shared prompt add to the process."""
    samples = Samples(tinker)
    samples.run(100)
    arguments = samples.arguments(0)
    gc.collect()
    before = resident_kb()
    stub_control("hold", {"ops": ["asample"]})
    futures = [samples.sampler.sample(**arguments) for _ in range(HELD)]
    while stub_control("stats")["held"] < HELD:
        time.sleep(0.2)
    time.sleep(1.0)  # every one of them is being polled now
    figures = {"kb_each": (resident_kb() - before) / HELD, "sockets": float(open_sockets())}
    stub_control("release", {"ops": ["asample"]})
    for future in futures:
        use(future.result())
    return figures


def memory_batch(tinker: Any, quick: bool) -> Figures:
    stub_control("config", {"sample_use_retrieve_futures": True})
    try:
        return memory(tinker, quick)
    finally:
        stub_control("config", {})


def resident_kb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def open_sockets() -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(fd).startswith("socket:")
    return found


# --- a host that never answers ----------------------------------------------------------------------------


def dead(tinker: Any, quick: bool) -> Figures:
    clock = Clock()
    try:
        tinker.ServiceClient().create_sampling_client(base_model="stub/base")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return {"seconds": clock.wall}
    raise AssertionError("a host that does not exist was reached")


PARTS = {part.__name__: part for part in (sample, sample_async, train, memory, memory_batch, dead)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("side", choices=("official", "ours"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    tinker = importlib.import_module("tinker" if options.side == "official" else "tinkex")
    print(json.dumps(PARTS[options.part](tinker, options.quick)), flush=True)
    os._exit(0)  # a measurement is over when it is printed: an SDK's threads must not hold it back


if __name__ == "__main__":
    main()
