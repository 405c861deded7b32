"""The stub's futures: accepted, executed in the order of seq ids, settled, retrieved by long poll.

A repeated seq id gets the same request id; a missing one is waited for `gap_seconds`. Knows no endpoint but
the three that retrieve and cancel.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.stub.http import Reply, Request, reply

PROTOBUF = "application/x-protobuf"


@dataclass
class Promise:
    """An accepted request; `make` computes its result when its turn has come: (protobuf or None, JSON)."""

    request_id: str
    op: str
    make: Callable[[], tuple[bytes | None, Any]]
    run: Run | None = None
    channel: Channel | None = None
    failure: tuple[str, str] | None = None
    result: tuple[bytes | None, Any] | None = None
    done: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Run:
    model_id: str
    base_model: str
    rank: int = 32
    next_seq: int = 1
    parked: dict[int, Promise] = field(default_factory=dict)
    current: Promise | None = None


@dataclass
class Channel:
    """Finished samples of one (sampling session, clone) for retrieve_futures; a cursor counts its events."""

    events: list[dict[str, Any]] = field(default_factory=list)
    waiters: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Call:
    """A request on its way to an answer: a handler returns a Reply, or None and calls `answer` later."""

    request: Request
    answer: Callable[[Reply], None]
    failure: tuple[str, str] | None = None
    params: tuple[str, ...] = ()

    @property
    def json(self) -> Any:
        return self.request.json


class Futures:
    """State and order of everything that was accepted; runs on the server's event loop."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.latency = 0.0  # seconds from a request's turn to its result
        self.poll_seconds = 30.0  # how long a long poll waits before its 408
        self.gap_seconds = 0.2  # how long a run waits for a missing seq id
        self.queue_state: dict[str, str] = {"queue_state": "active"}
        self.metadata_first = False  # answer complete_metadata where the client allows it
        self.json_only = False  # an older server: refuses protobuf bodies, sends JSON results
        self.held_ops: set[str] = set()
        self.clear()

    def clear(self) -> None:
        self.executed: list[tuple[str, int, str]] = []  # (model id, seq id, op) in the order of execution
        self.cancelled: list[str] = []
        self.runs: dict[str, Run] = {}
        self.promises: dict[str, Promise] = {}
        self.held: list[Promise] = []
        self.gone: set[str] = set()
        self.seen: dict[tuple[str, int], Promise] = {}
        self.channels: dict[tuple[str, int], Channel] = {}
        self.ids = itertools.count(1)

    def new_id(self) -> str:
        return f"r{next(self.ids)}"

    def let_go(self, ops: set[str]) -> None:
        """Settle the held results of these ops, and hold no more."""
        self.held_ops -= ops
        freed = [promise for promise in self.held if promise.op in ops]
        self.held = [promise for promise in self.held if promise.op not in ops]
        for promise in freed:
            self.settle(promise)

    def lose_results(self) -> None:
        self.gone.update(self.promises)
        self.promises.clear()
        self.held.clear()

    def accept(self, call: Call, promise: Promise, **extra: Any) -> Reply:
        promise.failure = call.failure
        self.promises[promise.request_id] = promise
        return reply({"request_id": promise.request_id, **extra})

    def accept_numbered(
        self, call: Call, op: str, model_id: str, seq_id: int, make: Callable[[], Any]
    ) -> Reply:
        """A training request: a known (model id, seq id) gets its request id again, others their turn."""
        if known := self.seen.get((model_id, seq_id)):
            return reply({"request_id": known.request_id})
        run = self.runs[model_id]

        def execute() -> tuple[bytes | None, Any]:
            self.executed.append((model_id, seq_id, op))
            return make()

        promise = Promise(self.new_id(), op, execute, run)
        self.seen[model_id, seq_id] = promise
        answer = self.accept(call, promise)
        self.enqueue(run, seq_id, promise)
        return answer

    def accept_free(self, call: Call, op: str, made: Any) -> Reply:
        """A request outside any run's order."""
        promise = Promise(self.new_id(), op, lambda: (None, made))
        answer = self.accept(call, promise)
        self.begin(promise)
        return answer

    def enqueue(self, run: Run, seq_id: int, promise: Promise) -> None:
        promise.run = run
        run.parked[seq_id] = promise
        self.advance(run)

    def advance(self, run: Run) -> None:
        if run.current is not None or not run.parked:
            return
        if (first := min(run.parked)) > run.next_seq:
            self.loop.call_later(self.gap_seconds, self.skip_gap, run, run.next_seq)
            return
        run.current = run.parked.pop(first)
        run.next_seq = max(run.next_seq, first + 1)
        self.begin(run.current)

    def skip_gap(self, run: Run, missing: int) -> None:
        if run.next_seq == missing and run.parked:
            run.next_seq = min(run.parked)
            self.advance(run)

    def begin(self, promise: Promise) -> None:
        if promise.op in self.held_ops:
            self.held.append(promise)
        elif self.latency:
            self.loop.call_later(self.latency, self.settle, promise)
        else:
            self.settle(promise)

    def settle(self, promise: Promise) -> None:
        if not promise.done:
            promise.result = (None, {}) if promise.failure else promise.make()
            promise.done = True
            wake(promise.waiters)
            if promise.channel is not None:
                state = "failed" if promise.failure else "finished"
                event: dict[str, Any] = {"state": state, "request_id": promise.request_id}
                if self.metadata_first and promise.result[0] is not None:
                    event["response_payload_uncompressed_size"] = len(promise.result[0])
                promise.channel.events.append(event)
                wake(promise.channel.waiters)
        if promise.run is not None and promise.run.current is promise:
            promise.run.current = None
            self.advance(promise.run)

    def long_poll(
        self,
        call: Call,
        waiters: list[Callable[[], None]],
        ready: Callable[[], Reply],
        not_yet: Callable[[], Reply],
        seconds: float | None = None,
    ) -> None:
        def wake_up() -> None:
            timer.cancel()
            call.answer(ready())

        def expire() -> None:
            if wake_up in waiters:
                waiters.remove(wake_up)
                call.answer(not_yet())

        timer = self.loop.call_later(self.poll_seconds if seconds is None else seconds, expire)
        waiters.append(wake_up)

    def retrieve_future(self, call: Call) -> Reply | None:
        request_id = call.json["request_id"]
        promise = self.promises.get(request_id)
        if promise is None:
            return reply({"detail": f"no future {request_id}"}, 410 if request_id in self.gone else 404)
        if promise.done:
            return self.result(call, promise)

        def not_yet() -> Reply:
            return reply({"type": "try_again", "request_id": request_id, **self.queue_state}, 408)

        return self.long_poll(call, promise.waiters, lambda: self.result(call, promise), not_yet)

    def result(self, call: Call, promise: Promise) -> Reply:
        if promise.failure:
            return reply({"error": promise.failure[0], "category": promise.failure[1]})
        assert promise.result is not None
        binary, value = promise.result
        if binary is not None and PROTOBUF in call.request.headers.get("accept", "") and not self.json_only:
            if self.metadata_first and call.json.get("allow_metadata_only"):
                return reply({"status": "complete_metadata", "response_payload_size": len(binary)})
            return Reply(200, binary, {"content-type": PROTOBUF})
        return reply(value() if callable(value) else value)

    def retrieve_futures(self, call: Call) -> Reply | None:
        target, cursor = call.json["target"], call.json["prev_cursor"]
        channel = self.channel(target["sampling_session_id"], target.get("cloned_sampler_id") or 0)

        def ready() -> Reply:  # none, when the poll's time is up
            return reply({"completions": channel.events[cursor:], "cursor": len(channel.events)})

        if len(channel.events) > cursor:
            return ready()
        return self.long_poll(call, channel.waiters, ready, ready, call.json.get("timeout"))

    def channel(self, sampler_id: str, clone: int) -> Channel:
        return self.channels.setdefault((sampler_id, clone), Channel())

    def cancel_future(self, call: Call) -> Reply:
        self.cancelled.append(call.json["request_id"])
        promise = self.promises.get(call.json["request_id"])
        if promise is not None and not promise.done:
            promise.failure = ("cancelled by the client", "user")
            self.settle(promise)
        return reply({})


def wake(waiters: list[Callable[[], None]]) -> None:
    woken, waiters[:] = list(waiters), []
    for waiter in woken:
        waiter()
