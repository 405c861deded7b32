"""The thread that training and sampling share, and how an engine is planned."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.commands import do
from tests.engine.tiny import tiny_model
from tinkex.config import child_environment
from tinkex.engine.native.build import library
from tinkex.engine.protocol import (
    CreateAdapter,
    EngineConfig,
    EngineError,
    EngineLost,
    ForwardBackward,
    Pass,
    SampleWork,
    build_engine,
)
from tinkex.engine.torch import cpu_threads, engine_thread
from tinkex.engine.torch.cpu_threads import ComputeThreads, threads_beside
from tinkex.engine.torch.engine import TorchEngine, check_deterministic, choose_device
from tinkex.engine.torch.engine_thread import EngineThread
from tinkex.engine.torch.kv import PAGE
from tinkex.engine.torch.load import load_decoder
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import LoraConfig, SamplingParams

pytestmark = pytest.mark.slow

PAGE_BYTES = 2 * 2 * PAGE * 2 * 16 * 4  # keys and values, two layers, two heads of 16, float32


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model"), "llama3"))


@pytest.fixture
def engine(model: str) -> Iterator[TorchEngine]:
    config = EngineConfig(model, device="cpu", kv_bytes=40 * PAGE_BYTES, max_pass_tokens=64, threads=1)
    engine = build_engine(config)
    assert isinstance(engine, TorchEngine)
    yield engine
    engine.close()


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 320, length).astype(np.int32)


def work(seed: int = 0, length: int = 10, max_tokens: int = 20, **more) -> SampleWork:
    return SampleWork(prompt(seed, length), SamplingParams(max_tokens=max_tokens, stop=[], seed=seed), **more)


def data(count: int, length: int = 50) -> list[Datum]:
    return [
        Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:].astype(np.int64)})
        for ids in (prompt(seed, length) for seed in range(count))
    ]


# -- turns -------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_many_commands_do_not_starve_sampling(engine: TorchEngine):
    """Nor it them: forty that were there first and fifty steps take turns."""
    do(engine.trainer, CreateAdapter("run", LoraConfig(rank=2)))
    one, release = ForwardBackward((Pass("run", data(1), "cross_entropy"),)), threading.Event()
    engine._thread.submit(release.wait)
    with ThreadPoolExecutor(40) as pool:
        commands = [pool.submit(do, engine.trainer, one) for _ in range(40)]
        while len(engine._thread._commands) < 40:
            await asyncio.sleep(0.001)
        sampling = asyncio.create_task(engine.sampler.sample(work(max_tokens=50)))
        while not engine._thread._posted:
            await asyncio.sleep(0.001)
        order: list[str] = []
        engine._thread.submit(lambda: order.append("commands are done"))
        release.set()
        response = await sampling
        assert len(response.sequences[0].tokens) == 50
        assert order == ["commands are done"]  # so each had its turn before the fiftieth step
        assert all(command.result(30) for command in commands)


@pytest.mark.anyio
@pytest.mark.parametrize("busy", [False, True])
async def test_cancelling_frees_pages_also_of_those_that_wait(engine: TorchEngine, busy: bool):
    """Forty pages: not all of these fit, so some run, some wait and some were preempted."""
    tasks = [asyncio.create_task(engine.sampler.sample(work(i, 60, 120))) for i in range(12)]
    wanted = {"sequences_running", "sequences_waiting", *(["preemptions"] if busy else [])}
    while not all(engine.heartbeat().stats[name] for name in wanted):
        await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True)
    )
    await engine.sampler.retire("nobody")  # posted too: what was posted before it is done
    stats = engine._stats()
    assert stats["kv_pages_used"] == stats["sequences_running"] == stats["sequences_waiting"] == 0


@pytest.mark.anyio
async def test_a_request_cancelled_before_its_turn_never_starts(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
):
    started: list[SampleWork] = []
    submit = engine._batch.submit

    def seen(given: SampleWork, *more: Any, **named: Any) -> Any:
        started.append(given)
        return submit(given, *more, **named)

    monkeypatch.setattr(engine._batch, "submit", seen)
    begun, release = threading.Event(), threading.Event()
    engine._thread.submit(lambda: (begun.set(), release.wait()))
    await asyncio.to_thread(begun.wait)
    task = asyncio.create_task(engine.sampler.sample(work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    other = work(1)
    await engine.sampler.sample(other)
    assert started == [other]


@pytest.mark.anyio
async def test_a_refusal_does_not_wait_for_its_turn(engine: TorchEngine):
    release = threading.Event()
    engine._thread.submit(release.wait)
    try:
        with pytest.raises(EngineError, match="context window"):
            await asyncio.wait_for(engine.sampler.sample(work(max_tokens=500)), timeout=10)
    finally:
        release.set()


# -- the thread --------------------------------------------------------------------------------------------


class Idle:
    busy = False

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.busy = False
        raise RuntimeError("a bug")

    def fail_all(self, error: EngineError) -> None:
        self.failed = error


def started(decoding: Any, *options: Any, **more: Any) -> EngineThread:
    thread = EngineThread(decoding, *options, **more)
    thread.start()
    return thread


def test_commands_run_in_order_and_errors_stay_theirs():
    thread = started(Idle())
    done: list[int] = []
    futures: list[Future[object]] = [thread.submit(lambda i=i: done.append(i)) for i in range(20)]
    broken = thread.submit(lambda: 1 // 0)
    refused = thread.submit(lambda: choose_device(EngineConfig("m", device="nonsense")))
    after = thread.submit(lambda: "still here")
    assert after.result(timeout=10) == "still here"
    assert done == list(range(20))
    assert all(f.done() for f in futures)
    with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
        broken.result()
    assert caught.value.category == "server"
    with pytest.raises(EngineError):
        refused.result()
    thread.close()


def test_what_is_posted_overtakes_commands_that_wait():
    thread = started(Idle())
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()
    first = thread.submit(lambda: (begun.set(), go.wait(), order.append("first")))
    begun.wait()
    second = thread.submit(lambda: order.append("second"))
    thread.post(lambda: order.append("posted"))
    go.set()
    second.result(timeout=10)
    first.result(timeout=10)
    assert order == ["first", "posted", "second"]
    thread.close()


def test_a_bug_in_a_step_does_not_end_the_thread():
    steps = Idle()
    thread = started(steps)
    thread.post(lambda: setattr(steps, "busy", True)).result(timeout=10)
    assert thread.submit(lambda: "still here").result(timeout=10) == "still here"
    thread.close()
    assert steps.steps == 1


def test_requests_that_come_together_are_taken_together(monkeypatch: pytest.MonkeyPatch):
    """After a rest, so that the first step is not one of the first request alone."""
    monkeypatch.setattr(engine_thread, "_PAUSE", 5.0)
    monkeypatch.setattr(engine_thread, "_LONGEST", 60.0)
    taken: list[int] = []
    seen: list[int] = []

    class Burst(Idle):
        busy = False

        def step(self) -> None:
            seen.append(len(taken))
            self.busy = False

    steps = Burst()

    def take(i: int) -> None:
        taken.append(i)
        steps.busy = True

    thread = started(steps)
    for i in range(5):
        thread.post(lambda i=i: take(i)).result(timeout=10)  # the thread has nothing left to do meanwhile
    thread.submit(lambda: None).result(timeout=10)  # a command does not wait for further requests
    thread.close()
    assert seen == [5]


class Endless(Idle):
    """Decoding that always has another step, which takes `seconds`."""

    busy = True

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0

    def step(self) -> None:
        self.steps += 1
        time.sleep(self.seconds)


def test_long_steps_leave_half_of_the_time_to_short_commands():
    """Each is sent when the one before has its result, as a step follows its pass."""
    steps = Endless(0.05)
    thread = started(steps)
    for _ in range(40):
        thread.submit(lambda: time.sleep(0.005)).result(timeout=10)
    thread.close()
    assert steps.steps <= 20  # 0.2 s of commands: four, and some after commands that came late


def test_there_is_a_step_between_any_two_long_commands():
    steps = Endless(0.001)
    thread = started(steps)
    counts: list[int] = []
    done = [thread.submit(lambda: (counts.append(steps.steps), time.sleep(0.02))) for _ in range(10)]
    for future in done:
        future.result(timeout=10)
    thread.close()
    assert all(later > earlier for earlier, later in itertools.pairwise(counts[1:]))


def test_closing_fails_what_waits_behind_a_command():
    thread = started(Idle())
    begun, go = threading.Event(), threading.Event()
    running, queued = thread.submit(lambda: (begun.set(), go.wait())), thread.submit(lambda: None)
    begun.wait()
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread.trouble:
        time.sleep(0.001)
    go.set()
    assert running.result(timeout=10)
    with pytest.raises(EngineLost, match="closed"):
        queued.result(timeout=10)
    with pytest.raises(EngineLost, match="closed"):
        thread.submit(lambda: None)
    closing.join(timeout=10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_takes_nobody_with_it():
    def begin():
        raise SystemExit  # the quietest way for a thread to die

    thread = started(Idle(), begin)
    with pytest.raises(EngineError, match="closed"):
        thread.submit(lambda: None).result(timeout=10)
    thread._thread.join(timeout=10)


def test_a_device_that_is_gone_ends_the_thread_and_everyone_is_told():
    """Errors like an illegal address stay with a CUDA context: whatever is tried afterwards fails too."""
    gone = threading.Event()

    def probe() -> None:
        if gone.is_set():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    thread = started(Idle(), probe=probe)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        thread.submit(lambda: 1 // 0).result(timeout=10)
    assert thread.submit(lambda: not thread.trouble).result(timeout=10), "one command's own failure"
    begun = threading.Event()
    broken = thread.submit(lambda: (begun.wait(), gone.set(), 1 // 0))
    behind = thread.submit(lambda: None)
    begun.set()
    with pytest.raises(EngineLost, match="only a restart helps"):  # so that it is replayed, not answered
        broken.result(timeout=10)
    with pytest.raises(EngineError, match="only a restart helps: CUDA error: an illegal"):
        behind.result(timeout=10)
    assert thread.trouble
    with pytest.raises(EngineError, match="only a restart helps"):
        thread.submit(lambda: None)


def test_a_decoding_step_that_loses_the_device_stops_the_engine(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
):
    def sample() -> None:
        asyncio.run(engine.sampler.sample(work(0, 2)))

    monkeypatch.setattr(engine._batch, "_forward", lambda plan: 1 // 0)
    with pytest.raises(EngineError, match="a decoding step failed: ZeroDivisionError"):
        sample()
    engine._thread.submit(lambda: None).result(timeout=10)  # the step is over, and the device was looked at
    assert engine.heartbeat().alive

    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr("tinkex.engine.torch.engine.probe", lost)
    with pytest.raises(EngineError, match="a decoding step failed: ZeroDivisionError"):
        sample()
    engine._thread._thread.join(timeout=10)
    assert not engine.heartbeat().alive
    with pytest.raises(EngineError, match="unspecified launch failure"):
        sample()


def test_what_was_posted_before_the_end_are_still_run():
    """So that a request which just arrived is known to the steps, and fails with all others."""
    thread = started(Idle())
    begun, release = threading.Event(), threading.Event()
    thread.submit(lambda: (begun.set(), release.wait()))
    begun.wait()
    posted = thread.post(lambda: "done")
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread._closed:
        time.sleep(0.001)
    release.set()
    assert posted.result(timeout=10) == "done"
    closing.join(timeout=10)


# -- planning ------------------------------------------------------------------------------------------------


def test_memory_is_planned_from_what_is_free_or_as_told(model: str, engine: TorchEngine):
    memory = engine.heartbeat().memory
    assert memory["kv"] == 40 * PAGE_BYTES
    assert engine.heartbeat().stats["kv_pages_total"] == 40
    once = 4 * engine.info.parameters  # and once more for compiled steps, the embedding aside
    assert memory["weights"] == once if library() is None else once < memory["weights"] < 2 * once
    planned = build_engine(EngineConfig(model, device="cpu", max_batch=3, adapter_bytes=12345, threads=1))
    memory = planned.heartbeat().memory
    assert memory["adapters"] == 12345
    assert memory["kv"] == 3 * 256 // PAGE * PAGE_BYTES  # three full contexts: no more is ever used
    assert memory["kv"] + memory["activations"] < memory["free"]
    planned.close()


def test_the_context_can_be_made_shorter_but_not_longer(model: str):
    for asked, got in ((100, 100), (10**6, 256)):
        engine = build_engine(EngineConfig(model, device="cpu", max_context=asked, threads=1))
        assert engine.info.max_context == got
        engine.close()


def test_what_an_engine_says_of_its_model(engine: TorchEngine):
    assert engine.info.arch == "llama"
    assert engine.info.vocab_size == 320
    assert engine.info.eos_ids == (2, 3)
    assert engine.info.layers == 2
    assert {"cross_entropy", "ppo", "custom"} <= set(engine.info.losses)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(EngineError, match="no CUDA device") as caught:
        build_engine(EngineConfig(str(tmp_path), device="cuda"))
    assert caught.value.category == "user"


@pytest.mark.parametrize(
    ("load", "cores", "count"),
    [(0.0, 2, 2), (0.3, 2, 2), (0.5, 2, 1), (1.0, 2, 1), (5.0, 2, 1), (0.2, 1, 1), (2.1, 8, 6)],
)
def test_threads_leave_to_others_the_cores_they_use(load: float, cores: int, count: int):
    assert threads_beside(load, cores) == count


TEAMS = """
import os, time, torch
from tinkex.engine.torch.cpu_threads import apart
torch.set_num_threads(2)
x = torch.randn(1200, 1200)
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
apart(lambda: (x @ x).exp())
end = time.monotonic() + 60
while threads() > before and time.monotonic() < end:  # they take a moment to end
    time.sleep(0.01)
left = threads() - before
(x @ x).exp()
print(left, threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_what_is_computed_apart_keeps_no_threads():
    """And computed on a thread that goes on, it does: more of them than cores slow every pass down."""
    told = subprocess.check_output(
        [sys.executable, "-c", TEAMS], text=True, env=child_environment(OMP_NUM_THREADS="2")
    )
    apart, here = map(int, told.split())
    assert (apart, here > 0) == (0, True)


@pytest.mark.parametrize(("work", "inside"), [(99, 1), (100, 2)])
def test_small_work_is_not_shared(monkeypatch: pytest.MonkeyPatch, work: int, inside: int):
    """And the number of threads is what it was afterwards."""
    count = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: count.__setitem__(0, n))
    with cpu_threads.shared(work, 100):
        assert count == [inside]
    assert count == [2]


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x", ""])
def test_a_device_that_does_not_exist_is_refused_by_name(device: str):
    with pytest.raises(
        EngineError, match=f"no device {device!r}; allowed: auto, cpu, cuda, cuda:N"
    ) as caught:
        choose_device(EngineConfig("m", device=device))
    assert caught.value.category == "user"


def test_an_architecture_that_is_not_supported_is_the_users_error(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "novel", "architectures": ["NovelForCausalLM"]}')
    why = r"'novel' \(NovelForCausalLM\) is not one of our families, and transformers .* does not know it"
    with pytest.raises(EngineError, match=why) as caught:
        build_engine(EngineConfig(str(tmp_path), device="cpu"))
    assert caught.value.category == "user"


def test_an_engine_that_cannot_be_loaded_says_why(tmp_path: Path):
    with pytest.raises(EngineError, match="nothing-here") as caught:
        build_engine(EngineConfig(str(tmp_path / "nothing-here"), device="cpu"))
    assert caught.value.category == "user"


def test_threads_follow_what_others_use(monkeypatch: pytest.MonkeyPatch):
    """A clock of our own: (now, CPU seconds of everyone, CPU seconds of this process)."""
    clock = iter([(0.0, 0.0, 0.0), (10.0, 20.0, 19.0), (20.0, 40.0, 29.0), (30.0, 50.0, 38.0)])
    set_to: list[int] = []
    monkeypatch.setattr(ComputeThreads, "_used", lambda self: next(clock))
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(cpu_threads.time, "monotonic", lambda: 1e9)
    monkeypatch.setattr(cpu_threads.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    chosen = ComputeThreads(None)
    for _ in range(3):
        chosen.adjust()
    assert set_to == [2, 1, 2]  # alone; then others used a whole core; then they went
    fixed = ComputeThreads.__new__(ComputeThreads)
    fixed._fixed = 1
    fixed.adjust()  # a number that was given is final
    assert set_to == [2, 1, 2]


def test_other_python_threads_of_this_process_are_others():
    """As the event loop of a server is; the CPU time of OpenMP's threads is ours."""
    chosen, over = ComputeThreads(1), threading.Event()
    _, _, before = chosen._used()
    process = time.process_time()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    other = threading.Thread(target=spin)
    other.start()
    while time.process_time() < process + 0.5:
        time.sleep(0.01)
    _, _, after = chosen._used()
    over.set()
    other.join()
    assert after - before < 0.25


def test_a_load_that_has_ended_costs_a_thread_only_for_a_moment(monkeypatch: pytest.MonkeyPatch):
    """The load average remembers a minute: half a second later, what others really use decides."""
    clock = [0.0, 0.0]  # now, and the CPU seconds of others
    monkeypatch.setattr(ComputeThreads, "_used", lambda self: (clock[0], clock[0] + clock[1], clock[0]))
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(cpu_threads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cpu_threads.os, "getloadavg", lambda: (1.3, 0.0, 0.0))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    chosen = ComputeThreads(None)
    counts = []
    for clock[:] in ([0.1, 0.0], [0.6, 0.0], [2.0, 1.4], [3.7, 3.1]):  # others come back at 0.6
        chosen.adjust()
        counts.append(chosen.count)
    assert counts == [1, 2, 2, 1]  # after the first look it takes seconds: a moment's work changes nothing


@pytest.mark.parametrize(
    ("family", "dtype", "shape", "why"),
    [
        ("llama3", torch.float32, {}, "float32"),
        ("qwen3_moe", torch.bfloat16, {}, "has experts"),
        ("llama3", torch.bfloat16, {"intermediate_size": 100}, "multiples of 8"),
    ],
)
def test_what_cannot_be_deterministic_on_cuda_is_refused(
    family: str,
    dtype: torch.dtype,
    shape: dict[str, int],
    why: str,
    tmp_path: Path,
):
    decoder = load_decoder(tiny_model(tmp_path, family, **shape), "cpu", dtype)
    with pytest.raises(EngineError, match=f"dense models in bfloat16, and .*{why}") as refused:
        check_deterministic(decoder)
    assert refused.value.category == "user"


def test_a_deterministic_engine_on_a_cpu_starts(model: str):
    engine = TorchEngine(EngineConfig(model, device="cpu", threads=1, deterministic=True))
    engine.close()
    assert engine.info.layers == 2
