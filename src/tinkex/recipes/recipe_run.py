"""What every recipe does around its steps: open or resume the run, save it, stop at Ctrl-C, finish it.

Its methods are the fixed part of a recipe; losses, data and evaluation are the recipe's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import tinkex
from tinkex.recipes.interrupts import ctrl_c
from tinkex.recipes.progress import Progress
from tinkex.recipes.run_directory import Interrupted, Outcome, trained
from tinkex.recipes.schedule import default_learning_rate, learning_rate_at
from tinkex.recipes.settings import TrainConfig


class RecipeRun:
    """One run of a recipe, as a `with` block. A run that is finished has an `outcome` from the start.

    `what` is the data or environment that names the directory, and `facts` tell whether it is the same data.
    """

    def __init__(
        self, recipe: str, what: str, config: TrainConfig, service: tinkex.ServiceClient | None,
        progress: Progress | None, **facts: Any,
    ) -> None:  # fmt: skip
        self.progress = progress or Progress(quiet=True)
        self._recipe, self._config, self._service = recipe, config, service
        self._stack = ExitStack()
        self.directory = self._stack.enter_context(config.open(recipe, what, self.progress, **facts))
        self.outcome = self.directory.outcome
        if self.outcome is not None:
            self.progress.note(f"{self.directory.path} is finished; --fresh trains anew")

    @cached_property
    def service(self) -> tinkex.ServiceClient:
        """The caller's, or one of its own."""
        return self._service or self._stack.enter_context(tinkex.ServiceClient())

    @cached_property
    def client(self) -> tinkex.TrainingClient:
        """The adapter: as it was saved last; or a new one, or another run's with a new optimizer."""
        config, name = self._config, self.directory.name
        if (saved := self.directory.resume(self.service)) is not None:
            return saved
        if config.start_from is not None:
            start = trained(config.start_from, state=True)
            return self.service.create_training_client_from_state(start, name=name)
        return self.service.create_lora_training_client(
            config.model, config.rank, seed=config.seed, train_unembed=config.train_unembed, name=name
        )

    def begin(self, title: str, steps: int) -> None:
        """Show what is trained. From here on Ctrl-C stops the run after a step."""
        self.steps, self._peak = steps, self._config.learning_rate
        if self._peak is None:
            model, offered = self._config.model, self.service.get_server_capabilities().supported_models
            size = next((each.parameters for each in offered if each.model_name == model), None)
            self._peak = default_learning_rate(model, size, self._recipe)
        self.progress.begin(f"{title}, learning rate {self._peak:g}", steps, self.directory.done)
        self.stopped = self._stack.enter_context(ctrl_c())

    def __iter__(self) -> Iterator[int]:
        """The steps that are left, from 1 on; each one ends as `end_step` says."""
        for step in range(self.directory.done + 1, self.steps + 1):
            yield step
            self.end_step(step, stop=self.stopped())

    def adam(self, step: int) -> tinkex.AdamParams:
        """The optimizer's settings of a step."""
        assert self._peak is not None
        config = self._config
        rate = learning_rate_at(step - 1, self.steps, self._peak, config.schedule, config.warmup)
        return replace(config.adam, learning_rate=rate)

    def end_step(self, step: int, *, stop: bool, save: bool = False, best: str | None = None) -> None:
        """Save the state if it is time to, or if the run stops here; `best` is the best adapter so far."""
        if save or stop or step % self._config.save_every == 0 or step == self.steps:
            self.directory.save(self.service, self.client, step, best)
        if stop and step < self.steps:
            raise Interrupted(f"stopped after step {step} of {self.steps}; the same command continues")

    def finish(self) -> Outcome:
        return self.directory.finish(self.client)

    def __enter__(self) -> RecipeRun:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
