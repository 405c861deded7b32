"""What watching costs: the server's CPU time per training step and sample with 0 and with 20 live pages open.

    python bench/console.py [--pages 20] [--seconds 3] [--rounds 9] [--paced | --engine SHAPE]
    python bench/console.py --capture fake|smollm2-135m [--tokens 64] [--likely 0] [--rounds 20]
    python bench/console.py --recorder

The server is `tinkex serve` with the fake engine, in a process of its own, so that the console's share of its
CPU is as large as it can be: a real engine computes longer. The last line is the same for rollouts that are
kept (--keep-rollouts 1). CPU time, because what else the machine does changes it little; rates are told too.
With and without alternate, and the change is the median over pairs, with its quartiles.

With --engine the server computes: the CPU engine with random weights of a shape of bench/shapes.py trains on
8 sequences of 128 tokens and samples, and the change of its rates is told as the mean with its 95 % interval.
Every other page is the one of what goes on now. Their readers run on the same cores.

With --paced the client sends a fixed number of requests a second, so that both sides do the same work. The
difference is what watching takes of a core, the most that it can take of the throughput of the event loop; it
is told as the mean over rounds with its 95 % interval.

With --capture it measures rollouts alone: two servers, one of which keeps every rollout, are sampled from in
turn as fast as they answer. It tells the server's CPU for 1,000 sampled tokens. The engine is the fake one,
or the CPU engine with random weights of a shape of bench/shapes.py.

With --recorder there is no server: the recorder is given rollouts, and then the passes that train on them.
Without other work its thread wakes up with cold caches, so this is about the most that it takes.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np

from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from tinkex.types.outputs import SampledSequence, SampleResponse, TopkLogprobs
from tinkex.types.sampling import SampleRequest
from tinkex.types.tensor import TensorData

KEY, MODEL = "tml-bench", "m/base"
PACE = 4  # steps, and sample requests, a second
DATA = [Datum(ModelInput.from_ints(list(range(1, 65))), {"target_tokens": list(range(2, 66))})]
BATCH = [Datum(ModelInput.from_ints(list(range(1, 129))), {"target_tokens": list(range(2, 130))})] * 8
PROMPT = ModelInput.from_ints(list(range(1, 129)))


class Server:
    """A server process on a free port."""

    def __init__(self, directory: Path, *options: str, place: str = "/none") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        engine = ["--engine", "fake"] if place == "/none" else []
        command = [
            sys.executable, "-m", "tinkex.cli", "serve", *engine, "--model", f"{MODEL}={place}",
            "--home", str(directory), "--port", str(self.port), "--drain", "0.1", "--log-level", "warning",
            *options,
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if " serves http" in line:
                break
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.port}"

    def cpu(self) -> float:
        """Seconds of CPU, user and system, in all threads; not in ticks of 10 ms."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # as clock_getcpuclockid makes it on Linux

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Pages:
    """Live pages of one run, read to the end of each event and thrown away."""

    def __init__(self, server: Server, run_id: str, count: int) -> None:
        cookie = _log_in(server)
        self._connections = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(count)]
        pages = itertools.cycle((f"/console/runs/{run_id}/events", "/console/now/events"))
        for connection, page in zip(self._connections, pages, strict=False):
            headers = {"cookie": cookie, "accept": "text/event-stream"}
            connection.request("GET", page, headers=headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            threading.Thread(target=_drain, args=(response,), daemon=True).start()

    def close(self) -> None:
        for connection in self._connections:
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()


def _log_in(server: Server) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    form = {"content-type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/console/login", urlencode({"key": KEY}), form)
    return connection.getresponse().headers["set-cookie"].partition(";")[0]


def _drain(response: http.client.HTTPResponse) -> None:
    try:
        while response.readline():
            pass
    except (OSError, ValueError, AttributeError):
        pass


def steps(run: Any, seconds: float, data: list[Datum] = DATA) -> int:
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        run.forward_backward(data, "cross_entropy")
        run.optim_step(AdamParams()).result(60)
        count += 1
    return count


def samples(sampler: Any, seconds: float, tokens: int = 64, likely: int = 0) -> int:
    count, began = 0, time.perf_counter()
    params = SamplingParams(max_tokens=tokens, stop=[])
    while time.perf_counter() - began < seconds:
        futures = [sampler.sample(PROMPT, 4, params, topk_sample_logprobs=likely) for _ in range(16)]
        for future in futures:
            future.result(60)
        count += len(futures)
    return count


class Cost(NamedTuple):
    """Of one step or sample request."""

    cpu_seconds: float
    per_second: float


class Client:
    """One client of one server, which trains and samples for some time; what each costs the server's CPU."""

    def __init__(self, directory: Path, *options: str, place: str = "/none") -> None:
        self.server = Server(directory, *options, place=place)
        self.service = ServiceClient(base_url=self.server.url, api_key=KEY)
        self.run = self.service.create_lora_training_client(MODEL, rank=4)
        self.sampler = self.run.save_weights_and_get_sampling_client()
        for what in ("step", "sample"):
            self.cost(what, 2.0)  # what is made at the first requests is not counted

    def cost(self, what: str, seconds: float) -> Cost:
        before, began = self.server.cpu(), time.perf_counter()
        count = steps(self.run, seconds) if what == "step" else samples(self.sampler, seconds)
        return Cost((self.server.cpu() - before) / count, count / (time.perf_counter() - began))

    def paced(self, seconds: float) -> float:
        """The share of a core that the server takes for PACE steps and as many sample requests a second."""
        params, pending = SamplingParams(max_tokens=64, stop=[]), list[Any]()
        before, began = self.server.cpu(), time.perf_counter()
        for number in range(int(PACE * seconds)):
            time.sleep(max(0.0, began + number / PACE - time.perf_counter()))
            self.run.forward_backward(DATA, "cross_entropy")
            pending += [self.run.optim_step(AdamParams()), self.sampler.sample(PROMPT, 4, params)]
        for future in pending:
            future.result(60)
        return (self.server.cpu() - before) / (time.perf_counter() - began)

    def per_token(self, seconds: float, tokens: int, likely: int) -> float:
        """Seconds of the server's CPU for a token that is sampled, as many as it can."""
        before = self.server.cpu()
        count = samples(self.sampler, seconds, tokens, likely)
        time.sleep(0.2)  # until what was sampled last is written
        return (self.server.cpu() - before) / (count * 4 * tokens)

    def close(self) -> None:
        self.service.close().result(10)
        self.server.close()


def told(what: str, how: str, pairs: list[tuple[Cost, Cost]]) -> None:
    """The medians, and the median of what changed within each pair with its quartiles."""
    bare, changed = (statistics.median(pair[side].cpu_seconds for pair in pairs) * 1000 for side in (0, 1))
    line = f"{what:14} {bare:.3f} ms of CPU, {changed:.3f} ms {how}"
    for name, of in (("CPU", 0), ("rate", 1)):
        changes = sorted(pair[1][of] / pair[0][of] - 1 for pair in pairs)
        low, middle, high = statistics.quantiles(changes, n=4)
        line += f"; {name} {middle:+.1%} ({low:+.1%} to {high:+.1%})"
    print(line, flush=True)


def watching(pages: int, seconds: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        client = Client(Path(directory))
        for what in ("step", "sample"):
            pairs = list[tuple[Cost, Cost]]()
            for number in range(rounds):
                found = dict[bool, Cost]()
                for watched in (number % 2 == 0, number % 2 == 1):  # neither is always the first
                    opened = Pages(client.server, client.run.model_id, pages if watched else 0)
                    time.sleep(1.5)  # a page's first event has all that was before
                    found[watched] = client.cost(what, seconds)
                    opened.close()
                pairs.append((found[False], found[True]))
            told(what, f"with {pages} pages", pairs)
        opened = Pages(client.server, client.run.model_id, pages)
        time.sleep(1.5)
        before = client.server.cpu()
        time.sleep(10)
        print(
            f"{pages} pages of a run that does nothing: {client.server.cpu() - before:.2f} s of CPU in 10 s"
        )
        opened.close()
        client.close()


def computing(engine: str, pages: int, seconds: float, rounds: int) -> None:
    """What live pages change of the rates of a server that computes."""
    from shapes import write_model

    with tempfile.TemporaryDirectory() as directory:
        client = Client(Path(directory) / "home", place=write_model(engine, Path(directory), "cpu"))
        rates: dict[str, list[list[float]]] = {"steps": [[], []], "samples": [[], []]}
        for number in range(rounds):
            for watched in (number % 2, 1 - number % 2):
                opened = Pages(client.server, client.run.model_id, pages * watched)
                time.sleep(1.5)  # a page's first event has all that was before
                for what, found in rates.items():
                    began = time.perf_counter()
                    many = (
                        steps(client.run, seconds, BATCH)
                        if what == "steps"
                        else samples(client.sampler, seconds)
                    )
                    found[watched].append(many / (time.perf_counter() - began))
                opened.close()
        for what, (bare, watched) in rates.items():
            changes = [b / a - 1 for a, b in zip(bare, watched, strict=True)]
            rate, change = statistics.mean(bare), "{:+.2%} (95 % interval {:+.2%} to {:+.2%})"
            print(f"{what:8} {rate:.2f} a second; with {pages} pages " + change.format(*interval(changes)))
        client.close()


def paced(pages: int, seconds: float, rounds: int) -> None:
    """What 20 pages, and rollouts that are kept, take of a core beside the same requests."""
    with tempfile.TemporaryDirectory() as directory:
        plain, kept = (Client(Path(directory) / share, "--keep-rollouts", share) for share in ("0", "1"))
        found: dict[str, list[float]] = {"no pages": [], f"{pages} pages": [], "rollouts kept": []}
        for number in range(rounds):
            for what in sorted(found, reverse=bool(number % 2)):
                client = kept if what == "rollouts kept" else plain
                opened = Pages(client.server, client.run.model_id, pages if what[0].isdigit() else 0)
                time.sleep(1.5)  # a page's first event has all that was before
                found[what].append(client.paced(seconds))
                opened.close()
        for what, shares in found.items():
            line = f"{what:14} {statistics.mean(shares):.2%} of a core"
            if shares is not found["no pages"]:
                apart = [one - bare for one, bare in zip(shares, found["no pages"], strict=True)]
                line += "; {:+.2%} of a core (95 % interval {:+.2%} to {:+.2%})".format(*interval(apart))
            print(line, flush=True)
        for client in (plain, kept):
            client.close()


def interval(values: list[float]) -> tuple[float, float, float]:
    """The mean, and its 95 % interval."""
    mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - 2.1 * error, mean + 2.1 * error  # Student's t for some 20 values


def capture(engine: str, tokens: int, likely: int, seconds: float, rounds: int) -> None:
    """What keeping every rollout takes of the server's CPU at the highest rate of sampling."""
    with tempfile.TemporaryDirectory() as directory:
        home, place = Path(directory), "/none"
        if engine != "fake":
            from shapes import write_model

            place = write_model(engine, home, "cpu")
        shares = ("0", "1")
        clients = [Client(home / share, "--keep-rollouts", share, place=place) for share in shares]
        found: list[list[float]] = [[], []]
        for number in range(rounds):
            for one, client in order(clients, number):
                found[one].append(client.per_token(seconds, tokens, likely) * 1e6)
        bare, kept = map(statistics.mean, found)
        print(f"{engine}, 4 x {tokens} tokens with {likely} likely ones: CPU of the server for 1,000 tokens")
        print(f"    {bare:.2f} ms, {kept:.2f} ms with rollouts kept", end="")
        apart = [b - a for a, b in zip(*found, strict=True)]
        print("; {:+.3f} ms (95 % interval {:+.3f} to {:+.3f})".format(*interval(apart)), end="")
        changes = [b / a - 1 for a, b in zip(*found, strict=True)]
        print("; {:+.2%} ({:+.2%} to {:+.2%})".format(*interval(changes)), flush=True)
        for client in clients:
            client.close()


def recording(rounds: int) -> None:
    """CPU of the recorder alone for what a server gives it in GATHERED seconds at 20,000 tokens a second."""
    from tinkex.service.rollouts import GATHERED, RolloutRecorder

    print("tokens of a sample, likely ones: CPU for 1,000 tokens that were sampled, and trained on")
    for tokens, likely in itertools.product((64, 128, 256, 512), (0, 5)):
        count = max(1, round(20_000 * GATHERED / (4 * tokens)))
        requests, passes = zip(*(rollout(tokens, likely, seed) for seed in range(count)), strict=True)
        found: list[list[float]] = [[], []]
        with tempfile.TemporaryDirectory() as directory:
            home: Any = SimpleNamespace(run_dir={"s:train:0": Path(directory)}.__getitem__)
            ledger: Any = SimpleNamespace(run=lambda _: SimpleNamespace(owner="ann"))
            recorder = RolloutRecorder(home, ledger, 1.0, 1 << 28, lambda _: 0)
            for number in range(2 * rounds):
                began = time.process_time()
                for given in passes if number % 2 else requests:
                    recorder.worked(given, 0.1) if number % 2 else recorder.sampled(*given)
                time.sleep(2 * GATHERED)
                recorder.flush()
                found[number % 2].append((time.process_time() - began) / (count * 4 * tokens) * 1e6)
            recorder.stop()
        sampled, trained = map(statistics.median, found)
        print(f"{tokens:5} {likely:3}: {sampled:.3f} ms, {trained:.3f} ms", flush=True)


def rollout(tokens: int, likely: int, seed: int) -> tuple[Any, Any]:
    """What a recorder is told of four answers to one prompt, and of the pass that trains on them."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(0, 49_000, 128).astype(np.int32)
    answers, data, outputs = list[SampledSequence](), list[Datum](), list[Any]()
    for k in range(4):
        answer = draw.integers(0, 49_000, tokens).astype(np.int32)
        logprobs = -draw.exponential(0.5, tokens).astype(np.float32)
        top = draw.integers(0, 49_000, (tokens, likely)).astype(np.int32)
        listed = TopkLogprobs(top, -draw.exponential(2.0, top.shape).astype(np.float32)) if likely else None
        answers.append(SampledSequence("length", "", answer, logprobs, listed))
        whole, before = np.concatenate([prompt, answer]), np.zeros(127, np.float32)
        inputs = {"target_tokens": whole[1:], "logprobs": np.concatenate([before, logprobs]),
                  "advantages": np.concatenate([before, np.full(tokens, k - 1.5, np.float32)])}  # fmt: skip
        data.append(Datum(ModelInput.from_ints(whole[:-1]), inputs))
        outputs.append({"logprobs": TensorData.from_numpy(inputs["logprobs"])})
    row = SimpleNamespace(adapter_dir="runs/s/train-0/adapter", sampler_id="s:sample:0", owner="ann")
    params = SamplingParams(max_tokens=tokens)
    request = SampleRequest(ModelInput.from_ints(prompt), params, 4, topk_sample_logprobs=likely)
    outcome = SimpleNamespace(loss_fn_outputs=outputs)
    work = SimpleNamespace(
        backward=True, run=SimpleNamespace(id="s:train:0"), tokens=4 * (127 + tokens),
        future=SimpleNamespace(failed=False, outcome=outcome), one_pass=SimpleNamespace(data=data),
    )  # fmt: skip
    return (row, 0.1, SampleResponse(answers), request), work


def keeping(seconds: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        clients = [Client(Path(directory) / share, "--keep-rollouts", share) for share in ("0", "1")]
        pairs = list[tuple[Cost, Cost]]()
        for number in range(rounds):
            found = {one: client.cost("sample", seconds) for one, client in order(clients, number)}
            pairs.append((found[0], found[1]))
        told("sample of 4x64", "with rollouts kept", pairs)
        for client in clients:
            client.close()


def order(clients: list[Client], number: int) -> list[tuple[int, Client]]:
    """Both, with the other one first each time."""
    return list(enumerate(clients))[:: 1 if number % 2 else -1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--engine", metavar="SHAPE", help="a server that computes: a shape of shapes.py")
    parser.add_argument("--paced", action="store_true", help="a fixed number of requests a second")
    parser.add_argument("--capture", metavar="ENGINE", help="rollouts alone: fake, or a shape of shapes.py")
    parser.add_argument("--tokens", type=int, default=64, help="of a sample, with --capture")
    parser.add_argument("--likely", type=int, default=0, help="tokens listed for each, with --capture")
    parser.add_argument("--recorder", action="store_true", help="rollouts alone, without a server")
    given = parser.parse_args()
    if given.recorder:
        recording(given.rounds)
        raise SystemExit
    if given.capture:
        capture(given.capture, given.tokens, given.likely, given.seconds, given.rounds)
        raise SystemExit
    if given.engine:
        computing(given.engine, given.pages, given.seconds, given.rounds)
        raise SystemExit
    if given.paced:
        paced(given.pages, given.seconds, given.rounds)
        raise SystemExit
    watching(given.pages, given.seconds, given.rounds)
    keeping(given.seconds, given.rounds)
