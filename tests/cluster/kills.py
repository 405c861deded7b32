"""`kill -9` of trainers, samplers, Ray nodes and the server, while clients train and sample on a cluster.

    python -m tests.cluster.kills --kills 100 --seed 3

Every kill falls into a phase in which all runs have steps, saves and samples under way. Losses, tokens and
the weights at the end must be bit for bit those of an undisturbed workload, and no client may see an error.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.cluster.nodes import Nodes, actors
from tests.server.served import MODEL, Serve
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient, TrainingClient

# Of the runs, one on each trainer: the gradients of runs that share a batch are rounded as the batch is made
# up, which depends on when requests arrive.
RANKS = (4, 16)
STEPS = 5  # of a run in a phase
SECONDS = 240.0  # that anything may take, recovery included
VICTIMS = ("TrainerActor", "SamplerActor", "node", "server")


def serve(directory: Path, nodes: Nodes) -> Serve:
    options = ("--cluster", nodes.address, "--dtype", "float32", "--deterministic", "--durability", "process")
    return Serve(directory, *options, placed=f",trainers={len(RANKS)},samplers=2")


class Workload:
    """Some clients of one server, each with a run of its own."""

    def __init__(self, server: Serve) -> None:
        self._server = server
        self._service = ServiceClient(base_url=server.url, api_key="tml-kills")
        self._runs = [
            self._service.create_lora_training_client(MODEL, rank=rank, seed=n)
            for n, rank in enumerate(RANKS)
        ]
        self._threads = ThreadPoolExecutor(len(self._runs))

    def phase(self, number: int) -> list[Any]:
        """What every run reports of its steps and samples; sent ahead, fetched at the end."""
        working = [self._threads.submit(_work, run, n, number) for n, run in enumerate(self._runs)]
        return [work.result(SECONDS) for work in working]

    def end(self) -> list[bytes]:
        """The weights and the optimizer's states at the end."""
        saved: list[bytes] = []
        for run in self._runs:
            run.save_state("end").result(SECONDS)
            place = self._server.journal(run.model_id).parent / "weights" / "end"
            saved += [file.read_bytes() for file in sorted(place.glob("*.safetensors"))]
        self._service.close().result(SECONDS)
        self._threads.shutdown()
        return saved


def _work(run: TrainingClient, index: int, phase: int) -> list[Any]:
    passes = []
    for step in range(STEPS):
        data = [_datum(1000 * index + 10 * phase + step, length) for length in (8, 17, 5)]
        passes.append(run.forward_backward(data, "cross_entropy"))
        run.optim_step(AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
    sampler = run.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=12, seed=phase, stop=[])
    prompts = [ModelInput.from_ints(list(range(3 + n, 9 + n))) for n in range(3)]
    samples = [sampler.sample(prompt, 2, params) for prompt in prompts]
    losses = [one.result(SECONDS).metrics["loss:sum"] for one in passes]
    drawn = [s for sample in samples for s in sample.result(SECONDS).sequences]
    # The last bits of a sampled logprob depend on what else is decoded at that moment.
    return [losses, [s.tokens for s in drawn], [np.round(s.logprobs or [], 3).tolist() for s in drawn]]


def _datum(seed: int, length: int) -> Datum:
    ids = np.random.default_rng(seed).integers(3, 90, length + 1)
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]})


def kill(victim: str, server: Serve, nodes: Nodes, chance: random.Random) -> None:
    if victim == "server":
        server.kill()
        server.start()
    elif victim == "node":
        nodes.kill()
    elif running := actors(victim):
        chance.choice(running).kill()


def watched(workload: Workload, victims: list[str], strike: Callable[[str], None]) -> Iterator[Any]:
    """What clients see in phases in each of which one of these is killed; in the end, the weights."""
    with ThreadPoolExecutor(1) as beside:
        for number, victim in enumerate(victims):
            phase = beside.submit(workload.phase, number)
            strike(victim)
            begun = time.monotonic()
            yield phase.result()
            sys.stdout.write(f"{number}: {victim}, all done after {time.monotonic() - begun:.1f} s\n")
    yield workload.end()


def check(directory: Path, nodes: Nodes, kills: int, seed: int) -> None:
    """Raise AssertionError if kills change anything that clients see."""
    chance = random.Random(seed)
    victims = [VICTIMS[n % len(VICTIMS)] for n in range(kills)]
    chance.shuffle(victims)
    server = serve(directory, nodes)

    def strike(victim: str) -> None:
        time.sleep(chance.uniform(0.0, 0.6))
        kill(victim, server, nodes, chance)

    try:
        calm = Workload(server)
        expected = [*map(calm.phase, range(kills)), calm.end()]
        for number, got in enumerate(watched(Workload(server), victims, strike)):
            assert got == expected[number], f"what came after {victims[: number + 1]} differs"
    finally:
        server.kill()
    sys.stdout.write(f"{dict(Counter(victims))}: {kills} kills changed nothing\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    cluster = Nodes()
    try:
        with tempfile.TemporaryDirectory(prefix="tinkex-kills-") as place:
            check(Path(place), cluster, given.kills, given.seed)
    finally:
        cluster.close()
