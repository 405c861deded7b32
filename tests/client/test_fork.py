"""Fork and spawn: a forked child gets an error at once, a spawned one works."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.stub import Stub

pytestmark = pytest.mark.slow

PARENT = """
import multiprocessing, os, pickle, sys, traceback
import tinkex

def service():
    return tinkex.ServiceClient(base_url=sys.argv[1])

def in_fork(check):
    # Run `check` in a forked child; True if it passed.
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def refused(call):
    try:
        call()
    except tinkex.ForkedClientError as error:
        assert "spawn" in str(error), error
    else:
        raise AssertionError(f"{call} was not refused")

PROMPT, PARAMS = tinkex.ModelInput.from_ints([1]), tinkex.SamplingParams(max_tokens=1)
"""


def parent(stub: Stub, code: str, timeout: float = 25) -> None:
    """Run `code` after PARENT in a process of its own; a hang is a failure, not a hang."""
    program = PARENT + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program, stub.url], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr


def test_everything_inherited_is_refused_at_once(stub: Stub) -> None:
    """A future, each kind of client, an unpickled one, and a new one; and the parent goes on."""
    stub.hold("optim_step")
    parent(
        stub,
        """
        client = service()
        run = client.create_lora_training_client("stub/base")
        sampler = client.create_sampling_client(base_model="stub/base")
        sampler.sample(PROMPT, 1, PARAMS).result(20)
        done, pickled = sampler.sample(PROMPT, 1, PARAMS), pickle.dumps(sampler)
        done.result(20)
        pending = run.optim_step()

        def check():
            import asyncio
            refused(lambda: pending.result())
            refused(lambda: pending.exception())
            refused(lambda: asyncio.run(pending.result_async()))
            refused(lambda: run.optim_step())
            refused(lambda: run.get_info())
            refused(lambda: sampler.sample(PROMPT, 1, PARAMS))
            refused(lambda: client.create_lora_training_client("stub/base"))
            refused(lambda: client.close())
            refused(lambda: pickle.loads(pickled).sample(PROMPT, 1, PARAMS))
            refused(lambda: service().create_sampling_client(base_model="stub/base"))
            assert done.result().sequences, "what had arrived before the fork can be read"

        assert in_fork(check)
        sampler.sample(PROMPT, 1, PARAMS).result(20)
        """,
    )


def test_a_child_that_drops_what_it_inherited_leaves_the_parents_session_alone(stub: Stub) -> None:
    parent(
        stub,
        """
        client = service()
        sampler = client.create_sampling_client(base_model="stub/base")

        def check():
            global client, sampler
            import gc
            del client, sampler
            gc.collect()

        assert in_fork(check)
        sampler.sample(PROMPT, 1, PARAMS).result(20)
        """,
    )
    assert [session["finished"]["reason"]["type"] for session in stub.sessions.values()] == ["success"]
    assert stub.count("sessions/*/finish") == 1


def test_a_child_forked_before_any_use_works(stub: Stub) -> None:
    parent(
        stub,
        """
        client = service()  # made, but not used

        def check():
            service().create_sampling_client(base_model="stub/base").sample(PROMPT, 1, PARAMS).result(20)
            client.create_sampling_client(base_model="stub/base").sample(PROMPT, 1, PARAMS).result(20)

        assert in_fork(check)
        check()
        """,
    )


def test_a_fork_while_many_threads_use_the_client(stub: Stub) -> None:
    """No lock that a thread of the parent held is waited for in the child."""
    parent(
        stub,
        """
        import threading
        sampler = service().create_sampling_client(base_model="stub/base")
        going = True

        def use():
            while going:
                sampler.sample(PROMPT, 1, PARAMS).result(20)

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        passed = [in_fork(lambda: refused(lambda: sampler.sample(PROMPT, 1, PARAMS))) for _ in range(10)]
        going = False
        for thread in threads:
            thread.join()
        assert all(passed)
        """,
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(stub: Stub, method: str, tmp_path) -> None:
    """With `fork` a clear error, with `spawn` a working sampler."""
    script = tmp_path / "main.py"
    script.write_text(
        PARENT
        + textwrap.dedent(
            """
            def work(sampler, answers):
                try:
                    answers.put(len(sampler.sample(PROMPT, 1, PARAMS).result(10).sequences))
                except Exception as error:
                    answers.put(type(error).__name__)

            if __name__ == "__main__":
                context = multiprocessing.get_context(sys.argv[2])
                answers = context.Queue()
                sampler = service().create_sampling_client(base_model="stub/base")
                sampler.sample(PROMPT, 1, PARAMS).result(20)
                process = context.Process(target=work, args=(sampler, answers))
                process.start()
                print(answers.get(timeout=15))
                process.join(10)
                assert process.exitcode == 0, process.exitcode
            """
        )
    )
    command = [sys.executable, str(script), stub.url, method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == {"fork": "ForkedClientError", "spawn": "1"}[method]
