"""Random calls, cancels and failures against a stub server, from a seed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import time
from collections import defaultdict
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, datum
from tests.stub import Action, Stub, delay, drop, fail, read_pass, status
from tinkex import PassIncompleteError, ServiceClient, TinkerError

OPS = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "asample")


MISHAPS: list[Action] = [
    status(400, body={"detail": "refused"}), status(422), status(404), status(500), status(503),
    status(503, effect=True), status(429, {"retry-after-ms": "20"}), status(408), status(409),
    status(400, body=b""), drop(), drop(effect=True), delay(0.05), delay(0.03, status(422)),
    fail("user's fault"), fail("server's fault", "server"),
]  # fmt: skip


POLL_MISHAPS: list[Action] = [
    status(500), status(503), drop(), delay(0.05), status(404), status(403), status(410),
    status(408, body=b""), status(429, {"retry-after-ms": "10"}),
]  # fmt: skip


class Chaos:
    """A user who does anything at all with two runs and a sampler, on a server that does the same."""

    def __init__(self, stub: Stub, service: ServiceClient, seed: int) -> None:
        self.stub = stub
        self.random = random.Random(seed)
        self.runs = [service.create_lora_training_client("stub/base", timeout=10) for _ in range(2)]
        self.sampler = service.create_sampling_client(base_model="stub/base", timeout=10)
        self.futures: list[Any] = []
        for run in self.runs:  # so that the server is known to speak protobuf
            run.forward([datum()], "cross_entropy").result(10)

    def step(self) -> None:
        action = self.random.choice(
            [self.call] * 10 + [self.mishap] * 4 + [self.cancel] * 3 + [self.time_out] * 2
            + [self.hold, self.release, self.restart, self.pause]
        )  # fmt: skip
        action()

    def call(self) -> None:
        run, number = self.random.choice(self.runs), len(self.futures)
        calls = [
            lambda: run.forward_backward([datum()] * self.random.randint(1, 4), "cross_entropy"),
            lambda: run.forward([datum()] * self.random.randint(1, 3), "cross_entropy"),
            run.optim_step,
            lambda: run.save_state(f"s{number}"),
            lambda: run.save_weights_for_sampler(f"s{number}"),
            lambda: self.sampler.sample(PROMPT, 1, PARAMS),
        ]
        self.futures.append(self.random.choice(calls)())

    def mishap(self) -> None:
        if self.random.random() < 0.3:
            self.stub.script("retrieve_future", self.random.choice(POLL_MISHAPS))
        else:
            self.stub.script(self.random.choice(OPS), self.random.choice(MISHAPS))

    def cancel(self) -> None:
        if self.futures:
            self.random.choice(self.futures[-6:]).cancel()

    def time_out(self) -> None:
        if not self.futures:
            return
        future, wait = self.random.choice(self.futures[-6:]), self.random.random() * 0.02
        try:
            if self.random.random() < 0.5:
                future.result(wait)
            else:
                asyncio.run(future.result_async(wait))
        except (TinkerError, TimeoutError, asyncio.CancelledError, concurrent.futures.CancelledError):
            pass

    def hold(self) -> None:
        self.stub.hold(self.random.choice(("forward_backward", "optim_step", "asample")))

    def release(self) -> None:
        self.stub.release()

    def restart(self) -> None:
        self.stub.stop()
        time.sleep(0.01)
        self.stub.start()

    def pause(self) -> None:
        time.sleep(self.random.random() * 0.03)

    # -- afterwards ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The server behaves again: every future must end, with a result or a typed error."""
        self.stub.unscript()
        self.stub.release()
        for future in self.futures:
            if concurrent.futures.wait([future], timeout=10).not_done:
                pytest.fail(f"{future} never ended")
            assert future.cancelled() or isinstance(future.exception(), TinkerError | None)

    def check_runs_still_train(self) -> None:
        for run in self.runs:
            assert run.forward_backward([datum()], "cross_entropy").result(10).loss_fn_outputs
            step = run.optim_step()
            if isinstance(step.exception(10), PassIncompleteError):
                step = run.optim_step()  # told once that a pass was incomplete; now it is meant
            assert step.result(10).metrics
        assert self.sampler.sample(PROMPT, 1, PARAMS).result(10).sequences

    def check_order(self) -> None:
        """In order, nothing twice, and no number that the server never heard of."""
        executed, seen = defaultdict(list), defaultdict(set)
        for model_id, seq_id, _ in self.stub.executed:
            executed[model_id].append(seq_id)
        for request in self.stub.requests:
            if request.op == "forward_backward":
                given = read_pass(request.body)
                seen[given.model_id].add(given.seq_id)
            elif request.op in OPS and request.op != "asample":
                seen[request.json["model_id"]].add(request.json["seq_id"])
        for run in self.runs:
            order = executed[run.model_id]
            assert order == sorted(set(order))
            assert seen[run.model_id] == set(range(1, order[-1] + 1))
