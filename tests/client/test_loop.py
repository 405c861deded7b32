"""The background thread at the very end of a process: after the interpreter, and before exit is done."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.stub import Stub

pytestmark = pytest.mark.slow

EXITS_SLOWLY = """
import asyncio, ctypes, sys, threading
from tinkex.client import loop

started = threading.Event()

async def wake_up_late():
    started.set()
    await asyncio.sleep(0.5)

loop.call_soon(lambda: loop.spawn(wake_up_late()))
started.wait()
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)  # called with the exit status: a second, once the interpreter is gone
sys.exit(1)
"""

ASKS_LATE = """
import atexit
from tinkex.errors import TinkerError

def late():
    try:
        loop.get_loop()
    except TinkerError as error:
        print(error)

atexit.register(late)  # before the loop's own, so called after it
from tinkex.client import loop
loop.get_loop()
"""


OUTLIVES_THE_MAIN_THREAD = """
import concurrent.futures.thread, sys, threading, time
import numpy as np, tinkex

service = tinkex.ServiceClient(base_url=sys.argv[1])
run = service.create_lora_training_client("stub/base")
sampler = service.create_sampling_client(base_model="stub/base")
tokens = np.arange(400)
datum = tinkex.Datum(tinkex.ModelInput.from_ints(tokens), {"target_tokens": tinkex.TensorData(tokens)})
called = threading.Event()

def work():
    while not concurrent.futures.thread._shutdown:
        time.sleep(0.01)
    passed = run.forward_backward([datum] * 200, "cross_entropy")  # a body that is built off the loop
    step = run.optim_step()
    step.add_done_callback(lambda _: called.set())
    print(len(passed.result(20).loss_fn_outputs), step.result(20).metrics, called.wait(20))
    long = tinkex.ModelInput.from_ints(np.arange(100_000))
    print(len(sampler.sample(long, 1, tinkex.SamplingParams(max_tokens=1)).result(20).sequences))

threading.Thread(target=work).start()
"""


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)


def test_a_timer_that_is_due_after_the_interpreter_has_gone_does_not_crash() -> None:
    done = python(EXITS_SLOWLY)
    assert done.returncode == 1, done.stderr


def test_asking_when_it_is_too_late_is_an_error_and_no_wait() -> None:
    done = python(ASKS_LATE)
    assert done.returncode == 0, done.stderr
    assert "the interpreter is exiting" in done.stdout


def test_a_thread_that_outlives_the_main_one_trains_on(stub: Stub) -> None:
    done = python(OUTLIVES_THE_MAIN_THREAD, stub.url)
    assert (done.stdout, done.stderr) == ("200 {'grad_norm': 1.0} True\n1\n", "")
    assert all(session["finished"] for session in stub.sessions.values())
