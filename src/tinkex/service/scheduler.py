"""What the trainer of one base model executes next. Pure: no I/O, no clock, no engine, no futures.

Requests of a run are executed in seq-id order, not in the order of arrival; a repeated seq id is the same
request; a gap is waited for and then given up for good. Passes of different runs share a batch. Owners are
served fairly, by tokens; of the runs of one owner, the one that waited longest since its last turn is next.

A round is some barriers (steps, saves, loads), then one micro-batch of passes. Barriers come first, because
one may make a pass ready that can join the batch; but one that takes long waits while an owner who was served
less has anything ready. An owner is charged for each micro-batch: more for tokens that take longer than the
usual, and for barriers by their time.

Runs usually send their next request a few ms after the last result. The scheduler waits briefly for such
runs so that they share a batch: at most 1/PART of the last micro-batch's duration. It waits in the same way
for an owner who has been served less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, count

from tinkex.service.barrier_costs import LONG, BarrierCosts

BATCH_TOKENS = 65536  # of passes executed together
SHARED_TOKENS = 512  # any owner may join a batch with so many; with more, if its first owner has as many
LEAST_CHARGE = 128  # tokens that a pass counts as, at least: its fixed cost
BARRIERS_A_ROUND = 8  # of one owner, between two batches
REMEMBERED = 4096  # seq ids of a run, for recognising repeats
PATIENCE = 0.010  # seconds that a batch waits for runs that are due, at the most
TURN_PATIENCE = 0.100  # seconds that an owner's turn waits for one who was served less, at the most
PART = 4  # nothing waits longer than the last micro-batch took, divided by this


@dataclass(frozen=True)
class QueuedRequest:
    """One accepted request of a run, as far as its order is concerned."""

    run_id: str
    seq_id: int
    request_id: str
    is_pass: bool
    tokens: int = 0  # how much of a batch's budget a pass takes
    digest: bytes = b""  # of the request: a seq id that comes again with another one is a mistake
    shares: bool = False  # a barrier that may be executed together with others like it, of other runs
    alone: bool = False  # a pass that shares its batch with no other


class Verdict(Enum):
    """What becomes of a request."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"  # the same request again: answer with the first one's id
    CONFLICT = "conflict"  # this seq id was another request
    LATE = "late"  # its gap was given up: executing it now would be out of order


@dataclass(eq=False)
class OrderedRequests:
    """The requests of one run, in their order."""

    owner: str
    next_seq: int  # the seq id that is executed next
    waiting: dict[int, QueuedRequest] = field(default_factory=dict[int, QueuedRequest])
    gap_since: float | None = None  # since when the head has been missing while something waits behind it
    running: int = 0
    turn: int = 0  # when it was last served, counted in turns of all runs
    known: dict[int, tuple[str, bytes]] = field(default_factory=dict[int, tuple[str, bytes]])
    journaling: set[int] = field(default_factory=set[int])  # seq ids whose requests are being journaled
    given_up: int = 0  # gaps below this seq id are given up
    rests_since: float | None = None  # when the last of its requests was done
    rested: float | None = None  # seconds, about the last time

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def head(self) -> QueuedRequest | None:
        return None if self.running else self.waiting.get(self.next_seq)

    @property
    def missing(self) -> int | None:
        """The seq id that this run waits for, while others wait behind it."""
        return None if self.gap_since is None else self.next_seq

    @property
    def next_free(self) -> int:
        """The seq id of a request whose client does not number them: the next one after all others."""
        return max([self.next_seq - 1, *self.waiting]) + 1

    def judge(self, seq_id: int, digest: bytes) -> tuple[Verdict, str]:
        """What would become of a request, without accepting it; of a repeated one also its first id."""
        if (known := self.known.get(seq_id)) is not None:
            return (Verdict.REPEATED if known[1] == digest else Verdict.CONFLICT), known[0]
        return (Verdict.LATE if seq_id < self.next_seq else Verdict.ACCEPTED), ""

    def remember(self, seq_id: int, request_id: str, digest: bytes) -> None:
        """This seq id is that request: if it comes again, it is a repeat."""
        self.known[seq_id] = (request_id, digest)
        if len(self.known) > REMEMBERED:
            del self.known[next(iter(self.known))]

    @contextmanager
    def arriving(self, seq_id: int) -> Generator[None]:
        """While an accepted request is being journaled: its gap is not given up meanwhile."""
        self.journaling.add(seq_id)
        try:
            yield
        finally:
            self.journaling.discard(seq_id)

    def give_up(self, below: int, now: float) -> None:
        """Give up the gaps below this seq id."""
        self.given_up = max(self.given_up, below)
        self.watch_gap(now)

    def watch_gap(self, now: float) -> None:
        if self.next_seq < self.given_up and not self.running and self.next_seq not in self.waiting:
            self.next_seq = min([self.given_up, *self.waiting])
        if not self.waiting or self.running or self.next_seq in self.waiting:
            self.gap_since = None
        elif self.gap_since is None:
            self.gap_since = now

    def overdue_at(self, end: float, times: float = 1.0) -> float:
        """Until when its next request may come, after so many times its last pause; 0.0: not by `end`."""
        if self.rests_since is None or self.rested is None or self.rests_since + self.rested > end:
            return 0.0
        return self.rests_since + times * self.rested + PATIENCE


class Scheduler:
    """The queues of all runs on one base model."""

    def __init__(self, *, batch_tokens: int = BATCH_TOKENS, gap_patience: float = 60.0) -> None:
        self.batch_tokens = batch_tokens
        self.gap_patience = gap_patience
        self._runs: dict[str, OrderedRequests] = {}
        self._served: defaultdict[str, float] = defaultdict(float)  # tokens, by owner
        self._level = 0.0  # tokens that the owner served last had been served before that
        self._took: dict[str, float] = {}  # seconds of the last micro-batch, by owner
        self._under_way: list[list[QueuedRequest]] = []  # batches of which micro-batches are left
        self._charged: dict[str, float] = {}  # the part of a pass under way, by request id
        self._executing: list[QueuedRequest] = []  # the last batch of passes, and
        self._weight: float | None = None  # how much its tokens count, once that is known
        self._usual: float | None = None  # seconds that a token takes
        self._barriers: defaultdict[str, int] = defaultdict(int)  # this round, by owner
        self._costs = BarrierCosts()
        self._turns = count(1)
        self._began = 0.0  # the last micro-batch
        self._patience = 0.0  # how long the next batch may wait
        self._ready_since: float | None = None  # when a pass was ready for the first time since then

    def open(self, run: str, owner: str, next_seq: int = 1) -> OrderedRequests:
        self._served.setdefault(owner, self._level)
        queue = self._runs[run] = OrderedRequests(owner, next_seq)
        return queue

    def close(self, run: str) -> None:
        """Forget a run, and what it has waiting."""
        queue = self._runs.pop(run, None)
        if queue is not None and not any(other.owner == queue.owner for other in self._runs.values()):
            self._served.pop(queue.owner, None)
            self._took.pop(queue.owner, None)
            self._costs.forget(queue.owner)

    def withdraw(self, run: str, now: float) -> list[list[QueuedRequest]]:
        """Forget a run's waiting requests, and its batches under way without other runs; returns those."""
        queue = self._runs[run]
        queue.waiting.clear()
        queue.watch_gap(now)
        gone = [batch for batch in self._under_way if all(work.run_id == run for work in batch)]
        self._under_way = [batch for batch in self._under_way if batch not in gone]
        return gone

    def abandon(self) -> None:
        """Forget the batches under way: their engine was lost."""
        self._under_way.clear()
        self._charged.clear()

    def waiting(self) -> int:
        """How much work is accepted and not begun."""
        return sum(len(queue.waiting) for queue in self._runs.values())

    def order(self) -> tuple[list[str], list[str]]:
        """The runs of which something is executed, and those that wait: about in the order of their turns."""
        waiting = [run for run, queue in self._runs.items() if queue.head is not None]
        waiting.sort(key=lambda run: (self._served[self._runs[run].owner], self._runs[run].turn))
        return [run for run, queue in self._runs.items() if queue.running], waiting

    def submit(self, work: QueuedRequest, now: float) -> tuple[Verdict, str]:
        """Accept a request, or say why not; with the id under which its result will be found."""
        queue = self._runs[work.run_id]
        verdict, first_id = queue.judge(work.seq_id, work.digest)
        if verdict is Verdict.ACCEPTED:
            if queue.rests_since is not None:
                pause, known = now - queue.rests_since, queue.rested
                # One long pause does not make a run slow.
                queue.rested = pause if known is None else min(pause, 2 * known + PATIENCE / 10)
                queue.rests_since = None
            if all(other.idle for other in self._runs.values() if other.owner == queue.owner):
                # An owner that was idle starts level with the others, neither ahead of all nor behind.
                self._served[queue.owner] = max(self._served[queue.owner], self._level)
            queue.waiting[work.seq_id] = work
            queue.remember(work.seq_id, work.request_id, work.digest)
            queue.watch_gap(now)
        return verdict, first_id or work.request_id

    def give_up_gaps(self, now: float) -> float | None:
        """Skip gaps that were waited for long enough; returns when to call again, if any is left."""
        again: list[float] = []
        for queue in self._runs.values():
            if queue.gap_since is not None and queue.gap_since + self.gap_patience <= now:
                queue.next_seq = min([*queue.journaling, *queue.waiting])
                queue.gap_since = None
                queue.watch_gap(now)  # what is being journaled is waited for again
            if queue.gap_since is not None:
                again.append(queue.gap_since + self.gap_patience)
        return min(again, default=None)

    def wait_until(self, now: float) -> float | None:
        """Until when to delay the next micro-batch, because passes are about to come; None: begin now."""
        heads = self._heads()
        barriers = [head for head in heads if not head.is_pass and not self._must_wait(head, heads)]
        if not all(map(self._is_long, barriers)) or not (chosen := barriers or self._chosen(heads)):
            return None
        self._ready_since = now if self._ready_since is None else self._ready_since
        end = self._ready_since + self._patience
        begins = chosen not in self._under_way and sum(head.tokens for head in heads) < self.batch_tokens
        begins = begins and not barriers
        if begins and now < end and any(now < queue.overdue_at(end) for queue in self._runs.values()):
            return end
        owner = self._least_served(chosen)
        took = self._costs.expected(owner, chosen[0].shares) if barriers else self._took.get(owner, 0.0)
        end = self._ready_since + min(TURN_PATIENCE, took / PART)
        served = self._served[owner]
        behind = (q for q in self._runs.values() if max(self._served[q.owner], self._level) < served)
        times = 4.0 if barriers else 2.0
        end = min(end, max((queue.overdue_at(end, times) for queue in behind), default=0.0))
        return end if now < end else None

    def next_batch(self, now: float) -> list[QueuedRequest]:
        """What to execute now: one barrier, several that share, or a batch of passes; [] if none is ready.

        A batch that `progressed` is the same list again.
        """
        heads = sorted(self._heads(), key=lambda head: self._runs[head.run_id].turn)
        if barriers := self._next_barriers(heads):
            if self._is_long(barriers[0]):
                self._ready_since = None
                self._level = max(self._level, self._served[self._owner(barriers[0])])
            self._costs.begin(now, len(barriers))
            return self._begin(barriers)
        self._barriers.clear()
        self._costs.begin_round()
        chosen = self._chosen(heads)
        if heads and not chosen:  # every owner had had its barriers of this round
            return self.next_batch(now)
        self._began, self._ready_since = now, None
        self._weight = None
        if chosen not in self._under_way:
            self._executing = self._fill([head for head in heads if head.is_pass])
            return self._begin(self._executing)
        self._under_way.remove(chosen)
        self._executing = chosen
        self._level = max(self._level, self._served[self._least_served(chosen)])
        for work in chosen:
            self._runs[work.run_id].turn = next(self._turns)
        return chosen

    def progressed(self, batch: list[QueuedRequest], part: float, now: float) -> None:
        """A micro-batch is computed, which makes `part` of these passes; the rest has its turn later."""
        for work in batch:
            self._charge(work, part, now)
        self._under_way.append(batch)

    def _charge(self, work: QueuedRequest, part: float, now: float) -> None:
        """Charge the owner for `part` of a pass, less what it was charged for before."""
        owner, seconds = self._owner(work), now - self._began
        if self._weight is None:
            self._weight = self._weigh(sum(self._due(w, part) for w in self._executing), seconds)
            self._executing = []  # they may be large
        self._served[owner] += self._weight * self._due(work, part)
        self._charged[work.request_id] = part
        self._took[owner] = seconds
        self._patience = min(PATIENCE, seconds / PART)

    def _due(self, work: QueuedRequest, part: float) -> float:
        return max(work.tokens, LEAST_CHARGE) * (part - self._charged.get(work.request_id, 0.0))

    def _weigh(self, tokens: float, seconds: float) -> float:
        """What each of the tokens of a micro-batch counts, by how long they took; about 1."""
        if tokens <= 0 or seconds <= 0:
            return 1.0
        each = seconds / tokens
        usual = self._usual or each
        self._usual = usual + (each - usual) / 16
        return min(4.0, max(0.25, each / usual))

    def _chosen(self, heads: list[QueuedRequest]) -> list[QueuedRequest]:
        """The passes whose turn it is: a batch under way, or the pass that a batch begins with."""

        def turn(passes: list[QueuedRequest]) -> tuple[float, int]:
            return self._served[self._least_served(passes)], self._runs[passes[0].run_id].turn

        candidates = [*self._under_way, *([head] for head in heads if head.is_pass)]
        return min(candidates, key=turn) if candidates else []

    def _least_served(self, passes: list[QueuedRequest]) -> str:
        return min(map(self._owner, passes), key=lambda owner: self._served[owner])

    def _heads(self) -> list[QueuedRequest]:
        return [head for queue in self._runs.values() if (head := queue.head) is not None]

    def _next_barriers(self, heads: list[QueuedRequest]) -> list[QueuedRequest]:
        """The next barrier; if it shares, also those that follow it and share."""
        chosen: list[QueuedRequest] = []
        ready = [head for head in heads if not head.is_pass and not self._must_wait(head, heads)]
        if all(w.shares for w in ready) and len(set(map(self._owner, chain(heads, *self._under_way)))) == 1:
            self._barriers.clear()  # steps of an owner who is alone: the passes behind them share a batch
        while ready := [w for w in ready if self._barriers[self._owner(w)] < BARRIERS_A_ROUND]:
            barrier = min(ready, key=lambda w: (self._barriers[self._owner(w)], self._served[self._owner(w)]))
            if chosen and not barrier.shares:
                break
            self._barriers[self._owner(barrier)] += 1
            chosen.append(barrier)
            if not barrier.shares:
                break
            ready = [work for work in ready if work is not barrier]
        return chosen

    def _is_long(self, barrier: QueuedRequest) -> bool:
        return self._costs.expected(self._owner(barrier), barrier.shares) >= LONG

    def _must_wait(self, barrier: QueuedRequest, heads: list[QueuedRequest]) -> bool:
        """Does it take long, and has an owner who was served less anything ready?"""
        served = self._served[self._owner(barrier)]
        ready = chain(heads, *self._under_way)
        return self._is_long(barrier) and any(self._served[self._owner(work)] < served for work in ready)

    def _fill(self, heads: list[QueuedRequest]) -> list[QueuedRequest]:
        """Passes up to the token budget, least served owner first; a run's next pass may follow its first."""
        by_owner: defaultdict[str, list[QueuedRequest]] = defaultdict(list)
        for head in heads:
            by_owner[self._owner(head)].append(head)
        batch: list[QueuedRequest] = []
        room, taken, first = self.batch_tokens, dict.fromkeys(by_owner, 0), ""
        while by_owner:
            owner = min(by_owner, key=lambda o: self._served[o] + taken[o])
            work = by_owner[owner].pop(0)
            if batch and (work.tokens > room or work.alone or batch[0].alone):
                break
            first = first or owner
            # All results of a batch come at its end: nobody's small pass must wait for another's large one.
            if owner != first and taken[owner] + work.tokens > max(taken[first], SHARED_TOKENS):
                del by_owner[owner]
                continue
            self._level = max(self._level, self._served[owner])
            batch.append(work)
            room -= work.tokens
            taken[owner] += max(work.tokens, 1)
            after = self._runs[work.run_id].waiting.get(work.seq_id + 1)
            if after is not None and after.is_pass:
                by_owner[owner].append(after)
            if not by_owner[owner]:
                del by_owner[owner]
        return batch

    def _begin(self, batch: list[QueuedRequest]) -> list[QueuedRequest]:
        for work in batch:
            queue = self._runs[work.run_id]
            queue.running += 1
            queue.turn = next(self._turns)
            queue.next_seq = work.seq_id + 1
            del queue.waiting[work.seq_id]
        return batch

    def done(self, work: QueuedRequest, now: float) -> None:
        """A request was executed, or failed: its run may go on."""
        queue = self._runs.get(work.run_id)
        if queue is not None:
            if work.is_pass:
                self._charge(work, 1.0, now)
            else:
                seconds = self._costs.end(queue.owner, work.shares, now)
                self._served[queue.owner] += seconds / self._usual if self._usual else 0.0
            queue.running -= 1
            queue.watch_gap(now)
            if queue.idle:
                queue.rests_since = now
        self._charged.pop(work.request_id, None)

    def _owner(self, work: QueuedRequest) -> str:
        return self._runs[work.run_id].owner
