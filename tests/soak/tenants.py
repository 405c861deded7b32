"""Tenants with a plan: what each does is a function of its seed, and so is what must come of it.

A tenant trains, saves, resumes, samples with seeds, gives up on samples, loses patience with results and
goes on, hands in passes that are wrong, and at last dozes off until its session has lapsed. What it notes,
another day with the same seed must note too.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import tinkex
from tests.soak.server import MODEL

VOCABULARY = 320
ADAM = tinkex.AdamParams(learning_rate=5e-3)
PATIENCE = 240.0  # for one result: several kills and restarts long


class Tenant(threading.Thread):
    """One user in a thread; `notes` are what its plan came to, `trouble` what must not have happened."""

    def __init__(
        self, url: str, seed: int, actions: int, evicted: Callable[[str], bool], calm: threading.Event
    ) -> None:
        """`evicted` tells whether the server has put a run on disk for want of a sign of life.

        After a kill all runs are on disk, so that is waited for once the last one is over and it is `calm`.
        """
        super().__init__(name=f"tenant-{seed}", daemon=True)
        self._url, self._seed, self._actions, self._evicted = url, seed, actions, evicted
        self._calm = calm
        self._random = random.Random(seed)
        self.notes: list[Any] = []
        self.trouble: BaseException | None = None
        self.resolved = 0
        self.happened: Counter[str] = Counter()

    def run(self) -> None:
        try:
            with tinkex.ServiceClient(base_url=self._url, api_key=f"tml-tenant-{self._seed}") as service:
                self._live(service)
        except BaseException as error:
            self.trouble = error

    def _live(self, service: tinkex.ServiceClient) -> None:
        run = service.create_lora_training_client(MODEL, rank=4, seed=self._seed, timeout=PATIENCE)
        sampler = run.save_weights_and_get_sampling_client(timeout=PATIENCE)
        for number in range(self._actions):
            match self._random.choices(
                ["train", "sample", "give up", "impatient", "wrong", "publish", "resume"],
                [8, 4, 2, 2, 1, 1, 1],
            )[0]:
                case "train":
                    self._train(run)
                case "sample":
                    self._sample(sampler, number)
                case "give up":
                    self._give_up(sampler)
                case "impatient":
                    self._lose_patience(run)
                case "wrong":
                    self._hand_in_nonsense(run)
                case "publish":
                    sampler = run.save_weights_and_get_sampling_client(timeout=PATIENCE)
                case "resume":
                    path = self._wait(run.save_state(f"at-{number}")).path
                    run = service.create_training_client_from_state_with_optimizer(path, timeout=PATIENCE)
        self._doze(run)

    def _wait(self, future: Any) -> Any:
        outcome = future.result(PATIENCE)
        self.resolved += 1
        return outcome

    def _data(self) -> list[tinkex.Datum]:
        lengths = [self._random.randint(3, 24) for _ in range(self._random.randint(1, 4))]
        made = []
        for length in lengths:
            tokens = np.array([self._random.randrange(VOCABULARY) for _ in range(length + 1)])
            made.append(
                tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:].copy()})
            )
        return made

    def _train(self, run: tinkex.TrainingClient) -> None:
        """Sent ahead, as real loops do."""
        sent = []
        for _ in range(self._random.randint(1, 4)):
            sent.append((run.forward_backward(self._data(), "cross_entropy"), run.optim_step(ADAM)))
        for passed, stepped in sent:
            self.notes.append(("loss", self._wait(passed).metrics["loss:sum"]))
            self.notes.append(("step", self._wait(stepped).metrics["optimizer_step"]))

    def _sample(self, sampler: tinkex.SamplingClient, number: int) -> None:
        prompt = tinkex.ModelInput.from_ints([self._random.randrange(VOCABULARY) for _ in range(12)])
        params = tinkex.SamplingParams(max_tokens=self._random.randint(1, 24), seed=number, stop=[])
        answers = [sampler.sample(prompt, 2, params) for _ in range(3)]
        for answer in answers:
            for sequence in self._wait(answer).sequences:
                self.notes.append(("sampled", list(sequence.tokens)))
                self.notes.append(("logprobs", sum(sequence.logprobs or [])))

    def _give_up(self, sampler: tinkex.SamplingClient) -> None:
        params = tinkex.SamplingParams(max_tokens=100, seed=1, stop=[])
        asked = [sampler.sample(tinkex.ModelInput.from_ints([5, 6, 7]), 4, params) for _ in range(4)]
        for future in asked:
            self.happened["cancels"] += future.cancel()
            assert future.done()

    def _lose_patience(self, run: tinkex.TrainingClient) -> None:
        passed = run.forward_backward(self._data(), "cross_entropy")
        try:
            passed.result(0.0001)
        except tinkex.ResultTimeoutError:
            self.happened["timeouts"] += 1
        self.notes.append(("loss", self._wait(passed).metrics["loss:sum"]))
        self.notes.append(("step", self._wait(run.optim_step(ADAM)).metrics["optimizer_step"]))

    def _doze(self, run: tinkex.TrainingClient) -> None:
        """Say nothing until the session has lapsed, then go on."""
        self._calm.wait(PATIENCE)
        self._train(run)
        for _ in range(150):
            if self._evicted(run.model_id):
                self.happened["lapses"] += 1
                break
            time.sleep(0.2)
        self._train(run)

    def _hand_in_nonsense(self, run: tinkex.TrainingClient) -> None:
        """A token that the model does not have: the pass fails, its step with it, and nothing else."""
        wrong = tinkex.Datum(tinkex.ModelInput.from_ints([VOCABULARY + 7, 1]), {"target_tokens": [1, 2]})
        for future in (run.forward_backward([wrong], "cross_entropy"), run.optim_step(ADAM)):
            try:
                future.result(PATIENCE)
            except (tinkex.RequestFailedError, tinkex.PassIncompleteError) as error:
                self.notes.append(("refused", type(error).__name__))
            else:
                raise AssertionError("nonsense was trained on")
