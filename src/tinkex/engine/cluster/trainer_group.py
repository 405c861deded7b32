"""The processes of one trainer: one, or several that share the datums of every pass (data parallel).

Each has every adapter. All check a pass, and each computes its share of the datums. A step begins with one
all-reduce of the run's gradient (`gradient_group`), which gives all the same sum. So their adapters stay
bitwise identical, and the first one writes files. If only some of them fail, the trainer is lost. For
processes on other nodes, files of this process's disk are read and written here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from tinkex import store
from tinkex.engine import protocol as p
from tinkex.engine.cluster.actors import is_lost
from tinkex.engine.cluster.node_files import read_files, this_node, write_files
from tinkex.types.params import LoraConfig


class TrainerGroup:
    """Executes one command at a time; `beat` is the first process's last report."""

    def __init__(self, actors: Sequence[Any], beat: p.Heartbeat, nodes: Sequence[str]) -> None:
        self.actors, self.beat = list(actors), beat
        self._far = [node != this_node() for node in nodes]
        # By ticket: the runs whose passes are not abandoned, and what each process has of the passes.
        self._tickets: dict[str, tuple[set[str], dict[int, p.PassProgress | p.SharedPasses]]] = {}

    def execute_all(self, commands: Sequence[p.Command[Any]]) -> list[Any]:
        """The results of some short commands, an EngineError where one failed; RayError as `execute`."""
        try:
            if len(commands) == 1:
                return [self.execute(commands[0])]
        except p.EngineError as error:
            return [error]
        told = ray.get([actor.execute_all.remote(commands) for actor in self.actors])
        self.beat = told[0][1]
        return [_agreed(answers) for answers in zip(*(results for results, _ in told), strict=True)]

    def execute(self, command: p.Command[Any]) -> Any:
        """The result; RayError if a process is gone, EngineError as they say."""
        match command:
            case p.SaveAdapter(_, location) if self._far[0] and not store.is_remote(location):
                return self._save(command)
            case p.LoadAdapter(run):
                lora = self._load(command)
                self._abandon(run)
                return lora
            case _ if len(self.actors) == 1:
                return self._ask([self.actors[0].execute.remote(command)])[0]
            case p.ForwardBackward(passes):
                sent, count = ray.put(passes), len(self.actors)
                begun = self._all(lambda actor, n: actor.begin.remote(sent, (n, count)))
                return self._progress(begun[0].ticket, {one.run for one in passes}, dict(enumerate(begun)))
            case p.ContinuePasses(ticket):
                return self._continue(ticket)
            case p.CreateAdapter(run, lora):
                seed = secrets.randbits(63) if lora.seed is None else lora.seed
                return self._create(p.CreateAdapter(run, replace(lora, seed=seed)))
            case p.SaveAdapter() | p.ExportAdapter() | p.CheckLoss():
                return self._ask([self.actors[0].execute.remote(command)])[0]
            case p.ClearGradients(run) | p.DropAdapter(run):
                self._abandon(run)
                return self._all(lambda actor, _: actor.execute.remote(command))[0]
            case _:
                return self._all(lambda actor, _: actor.execute.remote(command))[0]

    def _save(self, command: p.SaveAdapter) -> int:
        ((files,),) = self._ask([self.actors[0].save.remote(command)])
        options = {"overwrite": command.overwrite, "sync": command.sync}
        try:
            with store.atomic_directory(command.location, **options) as directory:
                write_files(ray.get(files), directory)
        except store.LocationExistsError as error:
            raise p.EngineError(str(error), "user") from None
        except OSError as error:  # a disk that is full or gone
            raise p.EngineError(f"SaveAdapter failed: {error}") from error
        return store.directory_bytes(command.location)

    def _load(self, command: p.LoadAdapter) -> LoraConfig:
        directory, sent = Path(command.location), None
        if any(self._far) and not store.is_remote(command.location) and directory.is_dir():
            sent = ray.put(read_files(directory))

        def ask(actor: Any, n: int) -> Any:
            if sent is None or not self._far[n]:
                return actor.execute.remote(command)
            return actor.load.remote(command, sent)

        return self._all(ask)[0]

    def _abandon(self, run: str) -> None:
        """Forget the tickets of which all passes are abandoned, as the processes do."""
        for ticket, (runs, _) in list(self._tickets.items()):
            runs.discard(run)
            if not runs:
                del self._tickets[ticket]

    def _continue(self, ticket: str) -> Any:
        if ticket not in self._tickets:
            raise p.EngineError(f"no passes with the ticket {ticket!r} are under way")
        runs, shares = self._tickets.pop(ticket)  # nobody can continue those that fail now
        going = [n for n, share in shares.items() if isinstance(share, p.PassProgress)]
        answers = self._ask([self.actors[n].execute.remote(p.ContinuePasses(ticket)) for n in going])
        if failed := [one for one in answers if isinstance(one, p.EngineError)]:
            raise failed[0]
        return self._progress(ticket, runs, shares | dict(zip(going, answers, strict=True)))

    def _progress(
        self, ticket: str, runs: set[str], shares: dict[int, p.PassProgress | p.SharedPasses]
    ) -> Any:
        """How far the last of them is; the outcomes, once all have computed their shares."""
        if going := [share for share in shares.values() if isinstance(share, p.PassProgress)]:
            self._tickets[ticket] = runs, shares
            return min(going, key=lambda one: one.done / one.total)
        sent = ray.put(tuple(shares.values()))
        return self._all(lambda actor, n: actor.finish.remote(ticket, sent, n == 0))[0]

    def _create(self, command: p.CreateAdapter) -> None:
        answers = self._ask([actor.execute.remote(command) for actor in self.actors])
        failed = [one for one in answers if isinstance(one, p.EngineError)]
        if failed and len(failed) < len(answers):  # one has no room for it
            self._all(lambda actor, _: actor.execute.remote(p.DropAdapter(command.run)))
        if failed:
            raise failed[0]

    def _all(self, ask: Callable[[Any, int], Any]) -> list[Any]:
        """The results of a call of every process."""
        answers = self._ask([ask(actor, n) for n, actor in enumerate(self.actors)])
        if isinstance(agreed := _agreed(answers), p.EngineError):
            raise agreed
        return answers

    def _ask(self, references: list[Any]) -> list[Any]:
        answers = ray.get(references)
        self.beat = answers[0][1]
        results = [result for result, _ in answers]
        if lost := next(filter(is_lost, results), None):
            raise lost
        if len(results) == 1 and isinstance(results[0], p.EngineError):
            raise results[0]
        return results


def _agreed(answers: Sequence[Any]) -> Any:
    """What all processes answered one command; EngineLost if only some of them failed."""
    failed = [one for one in answers if isinstance(one, p.EngineError)]
    if lost := next(filter(is_lost, failed), None):
        return lost
    if 0 < len(failed) < len(answers):
        return p.EngineLost(f"{len(failed)} of its {len(answers)} processes failed alone: {failed[0]}")
    return answers[0]
