"""`kill -9` of trainers, samplers, Ray nodes and the server, while clients train and sample on a cluster.

    python -m tests.cluster.kills --kills 100 --seed 3 [--shared]

Every kill falls into a phase in which all runs have steps, saves and samples under way. Losses, tokens and
the weights at the end must be bit for bit those of an undisturbed workload, and no client may see an error.
With `--shared`, two servers behind a load balancer share a Postgres and an S3 store, each with engines of its
own. The server that is killed is the sessions' owner: the other one takes over, and the first starts again.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from tests.cloud.members import balancer, eventually
from tests.cloud.servers import control_plane
from tests.cluster.nodes import Nodes, actors
from tests.server.served import MODEL, Serve
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient, TrainingClient, store

# Of the runs, one on each trainer: the gradients of runs that share a batch are rounded as the batch is made
# up, which depends on when requests arrive.
RANKS = (4, 16)
STEPS = 5  # of a run in a phase
SECONDS = 240.0  # that anything may take, recovery included
VICTIMS = ("TrainerActor", "SamplerActor", "node", "server")


class Servers:
    """One server; or, given a database and a store, two of them behind a load balancer."""

    def __init__(self, directory: Path, nodes: Nodes, shared: tuple[str, str] | None = None) -> None:
        self._members, self._shared, self._stack = list[Serve](), shared, ExitStack()
        options = ["--cluster", nodes.address, "--dtype", "float32", "--deterministic"]
        options += ["--durability", "process"]
        if shared:
            options += ["--ledger", shared[0], "--store", shared[1], "--lease", "2"]
        try:
            for name in ("a", "b") if shared else ("a",):
                (directory / name).mkdir()
                placed = f",trainers={len(RANKS)},samplers=2"
                self._members.append(Serve(directory / name, *options, placed=placed))
                self._stack.callback(self._members[-1].kill)
            ports = [one.port for one in self._members]
            self.url = self._stack.enter_context(balancer(ports)) if shared else self._members[0].url
        except BaseException:
            self._stack.close()
            raise

    def kill_owner(self, run_id: str) -> None:
        """Kill the server that a run's session belongs to; start it again, with two once the other has it."""
        owner = next(one for one in self._members if self._owns(one, run_id))
        owner.kill()
        if self._shared:
            eventually(lambda: not self._owns(owner, run_id), SECONDS)
        owner.start()

    def _owns(self, server: Serve, run_id: str) -> bool:
        if self._shared is None:
            return True
        with psycopg.connect(self._shared[0]) as db:
            found = db.execute("SELECT server FROM leases WHERE session_id = %s", [run_id.partition(":")[0]])
            return found.fetchone() == ((server.home / "server").read_text(),)

    def weights(self, run_id: str) -> dict[str, bytes]:
        """The files of a run's checkpoint "end", by name."""
        if self._shared is None:
            place = self._members[0].journal(run_id).parent / "weights" / "end"
            return {file.name: file.read_bytes() for file in sorted(place.glob("*.safetensors"))}
        with psycopg.connect(self._shared[0]) as db:  # a fenced owner may have saved beside it
            asked = (
                "SELECT directory FROM checkpoints WHERE run_id = %s AND kind = 'weights' AND name = 'end'"
            )
            found = db.execute(asked, [run_id]).fetchone()
        assert found is not None, "the row of the checkpoint"
        place = store.join(self._shared[1], found[0])
        wanted = sorted(name for name in store.files(place) if name.endswith(".safetensors"))
        return {name: store.read_file(store.join(place, name)) for name in wanted}

    def close(self) -> None:
        self._stack.close()


class Workload:
    """Some clients of the servers, each with a run of its own."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._service = ServiceClient(base_url=servers.url, api_key="tml-kills")
        self._runs = [
            self._service.create_lora_training_client(MODEL, rank=rank, seed=n)
            for n, rank in enumerate(RANKS)
        ]
        self._threads = ThreadPoolExecutor(len(self._runs))

    @property
    def a_run(self) -> str:
        return self._runs[0].model_id

    def phase(self, number: int) -> list[Any]:
        """What every run reports of its steps and samples; sent ahead, fetched at the end."""
        working = [self._threads.submit(_work, run, n, number) for n, run in enumerate(self._runs)]
        return [work.result(SECONDS) for work in working]

    def end(self) -> list[bytes]:
        """The weights and the optimizer's states at the end."""
        saved: list[bytes] = []
        for run in self._runs:
            run.save_state("end").result(SECONDS)
            files = self._servers.weights(run.model_id)
            assert len(files) == 2, f"the adapter and the optimizer's state, not {list(files)}"
            saved += files.values()
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


def kill(victim: str, servers: Servers, run_id: str, nodes: Nodes, chance: random.Random) -> None:
    if victim == "server":
        servers.kill_owner(run_id)
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


def check(
    directory: Path, nodes: Nodes, kills: int, seed: int, shared: tuple[str, str] | None = None
) -> None:
    """Raise AssertionError if kills change anything that clients see."""
    chance = random.Random(seed)
    victims = [VICTIMS[n % len(VICTIMS)] for n in range(kills)]
    chance.shuffle(victims)
    servers = Servers(directory, nodes, shared)
    try:
        calm = Workload(servers)
        expected = [*map(calm.phase, range(kills)), calm.end()]
        workload = Workload(servers)

        def strike(victim: str) -> None:
            time.sleep(chance.uniform(0.0, 0.6))
            kill(victim, servers, workload.a_run, nodes, chance)

        for number, got in enumerate(watched(workload, victims, strike)):
            assert got == expected[number], f"what came after {victims[: number + 1]} differs"
    finally:
        servers.close()
    sys.stdout.write(f"{dict(Counter(victims))}: {kills} kills changed nothing\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--shared", action="store_true", help="two servers on one Postgres and S3 store")
    given = parser.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinkex-kills-")))
        database_and_store = None
        if given.shared:
            _, database, _, root = stack.enter_context(control_plane(place))
            database_and_store = database, root
        cluster = Nodes()
        stack.callback(cluster.close)
        check(place, cluster, given.kills, given.seed, database_and_store)
