"""Base class of trainers: executes commands, keeps adapters, splits passes into micro-batches.

Subclasses implement forward, backward and the optimizer. Passes of many runs share each micro-batch, and a
command computes at most one, so that an engine can decode between two. A pass with wrong content fails by
itself, before any of it is computed. Several trainers may share the datums of a pass: each checks all and
computes its own (`protocol.ForwardBackward.share`). Needs only numpy.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from tinkex.engine import protocol as p
from tinkex.engine.pass_content import TrainingExample
from tinkex.engine.request import user_error
from tinkex.types.params import AdamParams, LoraConfig

CHECK_SECONDS = 0.25  # of one command, for checking uploaded losses, unless a datum takes longer


@dataclass(eq=False)
class RunningPass:
    """One pass whose content was checked; `failure` is set when it cannot be finished."""

    work: p.Pass
    settings: Mapping[str, float]
    examples: list[TrainingExample]
    failure: p.Failure | None = field(default=None, kw_only=True)
    abandoned: bool = field(default=False, kw_only=True)  # its gradients are gone, and later ones are not its

    @property
    def run(self) -> str:
        return self.work.run

    def fail(self, category: Any, message: str) -> None:
        self.failure = self.failure or p.Failure(category, message)

    def size(self, datum: int, budget: int) -> int:
        """How much of a micro-batch of `budget` tokens a datum takes."""
        return self.examples[datum].tokens.size

    def results(self) -> tuple[dict[int, Any], ...]:
        """What was computed, by datum: what other trainers computed of a shared pass is added."""
        raise NotImplementedError


class TrainedAdapter(Protocol):
    @property
    def lora(self) -> LoraConfig: ...

    def take_grad(self) -> Any:
        """Return the accumulated gradients and clear them."""
        ...

    def sum_gradient(self, total: Callable[[Any], None]) -> None:
        """Make the accumulated gradients the sum over trainers, which `total` computes in place."""
        ...


A = TypeVar("A", bound=TrainedAdapter)
P = TypeVar("P", bound=RunningPass)
R = TypeVar("R")


class PackedExample(NamedTuple, Generic[P]):
    """One example of a pass, in a micro-batch."""

    training: P
    datum: int

    @property
    def example(self) -> TrainingExample:
        return self.training.examples[self.datum]


def cut(
    passes: Sequence[P], budget: int, share: tuple[int, int] = (0, 1)
) -> Iterator[list[PackedExample[P]]]:
    """Yield micro-batches of about `budget` tokens; a longer datum gets its own. `share`: every n-th datum.

    Passes with and without a backward do not mix, and each run's tokens are contiguous. Within a pass the
    longest datums come first, so that equal lengths are neighbours: attention computes those in one call.
    """
    for backward in (False, True):
        chosen = [(n, one) for n, one in enumerate(passes) if one.work.backward == backward]
        runs = {run: place for place, run in enumerate(dict.fromkeys(one.run for _, one in chosen))}
        items = [(n, PackedExample(one, i)) for n, one in chosen for i in range(len(one.examples))]
        items.sort(key=lambda it: (runs[it[1].training.run], it[0], -it[1].example.tokens.size))
        group, size = [], 0
        for _, item in items[share[0] :: share[1]]:  # neighbours are about as long: shares are even
            length = item.training.size(item.datum, budget)
            if group and size + length > budget:
                yield group
                group, size = [], 0
            group.append(item)
            size += length
        if group:
            yield group


@dataclass
class _Ticket(Generic[P]):
    works: Sequence[p.Pass]
    share: tuple[int, int]
    checking: Generator[None, None, list[P | p.Failure]] | None  # None: all passes are checked
    checks: int = 0  # datums checked by earlier commands
    abandoned: set[str] = field(default_factory=set[str])  # runs, while the passes are being checked
    passes: list[P | p.Failure] = field(default_factory=list)  # a Failure: refused, nothing was computed
    batches: list[list[PackedExample[P]]] = field(default_factory=list)
    done: int = 0

    def under_way(self, run: str) -> bool:
        if self.checking is not None:
            return any(work.run == run for work in self.works) and run not in self.abandoned
        going = (one for one in self.passes if not isinstance(one, p.Failure) and one.failure is None)
        return any(one.run == run for one in going)

    def progress(self, name: str) -> p.PassProgress:
        """Checks that took several commands are half of the way."""
        if self.checking is not None:
            return p.PassProgress(
                name, self.checks, 2 * max(self.checks, sum(len(w.data) for w in self.works))
            )
        before = len(self.batches) if self.checks else 0
        return p.PassProgress(name, before + self.done, before + len(self.batches))


def _part(one: RunningPass | p.Failure) -> p.PassPart:
    return p.PassPart(None, one) if isinstance(one, p.Failure) else p.PassPart(one.results(), one.failure)


def _give_up(training: RunningPass) -> None:
    training.fail("server", f"the pass of run {training.run!r} was abandoned")
    training.abandoned = True


class CommandTrainer(ABC, Generic[A, P]):
    """Executes commands; a subclass computes."""

    def __init__(self) -> None:
        self.adapters: dict[str, A] = {}
        self._tickets: dict[str, _Ticket[P]] = {}
        self._serial = itertools.count()

    def execute(self, command: p.Command[R]) -> R:
        try:
            return cast(R, self._execute(command))
        except OSError as error:  # a disk that is full or gone
            raise p.EngineError(f"{type(command).__name__} failed: {error}") from error

    def _execute(self, command: p.Command[Any]) -> Any:
        match command:
            case p.CreateAdapter(run, lora):
                if run in self.adapters:
                    raise user_error(f"run {run!r} already has an adapter")
                self.adapters[run] = self._fresh(lora)
            case p.ForwardBackward(passes, share):
                return self._begin(passes, share)
            case p.ContinuePasses(ticket):
                return self._advance(ticket)
            case p.FinishPasses(ticket, shares):
                return self._finish_shared(ticket, shares)
            case p.OptimStep(run, params, total):
                adapter = self._without_passes(run)
                if total is not None:
                    adapter.sum_gradient(total)
                return self._step(adapter, params)
            case p.ClearGradients(run):
                self.adapter(run).take_grad()
                self._abandon(run)
            case p.SaveAdapter(run):
                return self._save(self.adapter(run), command)
            case p.LoadAdapter(run, location, optimizer):
                return self._replace(run, location, self.load(location, optimizer=optimizer))
            case p.ExportAdapter(run):
                return self._export(self.adapter(run))
            case p.DropAdapter(run):
                self.adapters.pop(run, None)
                self._abandon(run)
            case p.CheckLoss(loss):
                self._check_loss(loss)
            case _:
                raise p.EngineError(f"{type(command).__name__} is not a command this trainer knows")
        return None

    def adapter(self, run: str) -> A:
        """The live adapter of `run`."""
        if run not in self.adapters:
            raise p.EngineError(f"run {run!r} has no adapter on this engine")
        return self.adapters[run]

    def _without_passes(self, run: str) -> A:
        if any(ticket.under_way(run) for ticket in self._tickets.values()):
            raise p.EngineError(f"run {run!r} has a pass under way: its gradients are incomplete")
        return self.adapter(run)

    def _replace(self, run: str, location: str, adapter: A) -> LoraConfig:
        """Make a saved adapter the run's; one of another rank or other train flags is refused."""
        have, saved = self.adapters[run].lora if run in self.adapters else adapter.lora, adapter.lora
        for key in ("rank", "train_attn", "train_mlp", "train_unembed"):
            if getattr(have, key) != getattr(saved, key):
                raise user_error(
                    f"{location} has {key} {getattr(saved, key)}, and the run has {getattr(have, key)}; "
                    "they must be the same"
                )
        self.adapters[run] = adapter
        self._abandon(run)
        return saved

    def _begin(self, works: Sequence[p.Pass], share: tuple[int, int]) -> p.PassesResult:
        name = f"pass-{next(self._serial)}"
        self._tickets[name] = _Ticket(works, share, self._checked(works))
        return self._advance(name)

    def _checked(self, works: Sequence[p.Pass]) -> Generator[None, None, list[P | p.Failure]]:
        passes: list[P | p.Failure] = []
        for work in works:
            try:
                self.adapter(work.run)
                passes.append((yield from self._read(work)))
            except p.EngineLost:
                raise
            except p.EngineError as error:
                passes.append(p.Failure(error.category, error.message))
        return passes

    def _ticket(self, name: str) -> _Ticket[P]:
        if name not in self._tickets:
            raise p.EngineError(f"no passes with the ticket {name!r} are under way")
        return self._tickets[name]

    def _advance(self, name: str) -> p.PassesResult:
        ticket = self._ticket(name)
        try:
            if self._check(ticket) and ticket.done < len(ticket.batches):
                batch = [item for item in ticket.batches[ticket.done] if not item.training.failure]
                if batch:
                    self._compute(batch)
                ticket.done += 1
        except BaseException:
            del self._tickets[name]  # nobody can continue it
            raise
        if ticket.checking is not None or ticket.done < len(ticket.batches):
            return ticket.progress(name)
        if ticket.share[1] > 1:
            return p.SharedPasses(name, tuple(map(_part, ticket.passes)))
        del self._tickets[name]
        return [one if isinstance(one, p.Failure) else self._outcome(one) for one in ticket.passes]

    def _finish_shared(self, name: str, shares: Sequence[p.SharedPasses]) -> list[p.PassOutcome]:
        """The outcomes of passes that several trainers computed; one that failed anywhere has failed here."""
        ticket, outcomes = self._ticket(name), list[p.PassOutcome]()
        del self._tickets[name]
        for work, one, *parts in zip(ticket.works, ticket.passes, *(s.parts for s in shares), strict=True):
            failure = next((part.failure for part in parts if part.failure), None)
            if isinstance(one, p.Failure):  # refused here: elsewhere it may have been computed
                if any(part.results is not None for part in parts) and work.run in self.adapters:
                    self.adapters[work.run].take_grad()
                outcomes.append(failure or one)
                continue
            one.failure = failure
            for part in () if failure else parts:
                for mine, got in zip(one.results(), part.results or (), strict=True):
                    mine.update(got)
            outcomes.append(self._outcome(one))
        return outcomes

    def _check(self, ticket: _Ticket[P]) -> bool:
        """Go on with checking for a while; True once all passes are checked and cut."""
        if ticket.checking is None:
            return True
        checks, end = 0, time.monotonic() + CHECK_SECONDS
        try:
            while not checks or time.monotonic() < end:
                next(ticket.checking)
                checks += 1
        except StopIteration as checked:
            ticket.passes, ticket.checking = checked.value, None
            going = [one for one in ticket.passes if not isinstance(one, p.Failure)]
            for one in going:
                if one.run in ticket.abandoned:
                    _give_up(one)
            ticket.batches = list(cut(going, self.pass_tokens(), ticket.share))
        else:
            ticket.checks += checks
        return ticket.checking is None

    def _outcome(self, training: P) -> p.PassOutcome:
        if training.failure is None:
            return self._finish(training)
        if training.work.backward and not training.abandoned and training.run in self.adapters:
            self.adapters[training.run].take_grad()  # part of a pass's gradient must never be applied
        return training.failure

    def _abandon(self, run: str) -> None:
        """Fail the passes of `run` that are under way; a ticket whose passes are all abandoned is dropped."""
        for name, ticket in list(self._tickets.items()):
            if ticket.checking is not None:
                ticket.abandoned.add(run)
                if ticket.abandoned.issuperset(work.run for work in ticket.works):
                    del self._tickets[name]
                continue
            running = [one for one in ticket.passes if not isinstance(one, p.Failure)]
            for one in running:
                if one.run == run:
                    _give_up(one)
            if sum(one.abandoned for one in running) == len(ticket.passes):
                del self._tickets[name]

    # -- what a subclass computes ----------------------------------------------------------------------

    @abstractmethod
    def _fresh(self, lora: LoraConfig) -> A: ...

    @abstractmethod
    def _step(self, adapter: A, params: AdamParams) -> dict[str, float]: ...

    @abstractmethod
    def _save(self, adapter: A, command: p.SaveAdapter) -> int: ...

    @abstractmethod
    def load(self, location: p.Location, *, optimizer: bool = False) -> A:
        """A saved adapter that belongs to no run."""

    @abstractmethod
    def _export(self, adapter: A) -> p.ExportedAdapter: ...

    @abstractmethod
    def _check_loss(self, loss: p.CustomLoss) -> None: ...

    @abstractmethod
    def _read(self, work: p.Pass) -> Generator[None, None, P]:
        """Check a pass; yields where others may have their turn."""

    @abstractmethod
    def pass_tokens(self) -> int:
        """Tokens of a micro-batch."""

    @abstractmethod
    def _compute(self, batch: list[PackedExample[P]]) -> None:
        """Compute one micro-batch of passes that have not failed."""

    @abstractmethod
    def _finish(self, training: P) -> p.PassOutcome:
        """The outcome of a pass whose micro-batches are all computed."""
