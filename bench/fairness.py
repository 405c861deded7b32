"""One tenant floods the server in each of eight ways; what another tenant notices: `make bench-fairness`.

    flood (a process, key "flood")  ──►  `tinkex serve`, 2 threads, 5 M parameters  ◄──  victim (a process)

The victim is measured alone, then under each flood: the p99 of one-token samples, and passes with their
steps a second. The bound on the p99 is five times alone plus the longest micro-batch of one datum, which no
scheduler can interrupt. The server's memory is its peak above what it had planned. The flood's own process
takes cores from both on this machine, which is no fault of the server's: the table says how many. Each flood
has a server of its own. A missed goal does not fail the run; a crash does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL, VOCAB = "m/line", 4096
TIMES, SHARE, MEMORY = 5.0, 0.45, 1 << 30  # the goals
Figures = dict[str, float]

# -- the victim ----------------------------------------------------------------------------------------------


def victim() -> None:
    """Answers each line `SECONDS` on stdin with its figures, half of the time sampling, half training."""
    import tinkex

    service = tinkex.ServiceClient()
    run = service.create_lora_training_client(MODEL, rank=8)
    sampler = run.save_weights_and_get_sampling_client()
    data = [_datum(64, seed) for seed in range(4)]
    prompt = tinkex.types.ModelInput.from_ints(list(range(3, 19)))
    one_token = tinkex.types.SamplingParams(max_tokens=1, temperature=1.0)

    def sample() -> None:
        sampler.sample(prompt, num_samples=1, sampling_params=one_token).result(timeout=300)

    def train() -> None:
        done = run.forward_backward(data, "cross_entropy")
        run.optim_step(tinkex.types.AdamParams(learning_rate=1e-4)).result(timeout=300)
        done.result(timeout=300)

    for warm in (sample, train) * 3:
        warm()
    began = time.perf_counter()
    run.forward([_datum(1000, 0)], "cross_entropy").result()
    run.forward_backward([_datum(1000, 0)], "cross_entropy").result()
    run.optim_step(tinkex.types.AdamParams(learning_rate=1e-4)).result()
    print(json.dumps({"ready": 1.0, "datum_s": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        seconds = float(line)
        waits = _repeat(sample, seconds / 2)
        steps = _repeat(train, seconds / 2)
        waits.sort()
        found = {
            "samples": len(waits),
            "p50_ms": 1e3 * waits[len(waits) // 2],
            "p99_ms": 1e3 * waits[min(len(waits) - 1, int(0.99 * len(waits)))],
            "steps_s": len(steps) / sum(steps),
        }
        print(json.dumps(found), flush=True)


def _repeat(call: Callable[[], None], seconds: float) -> list[float]:
    """How long each call took; at least one, and calls are begun for so many seconds."""
    took: list[float] = []
    began = time.perf_counter()
    while not took or time.perf_counter() - began < seconds:
        at = time.perf_counter()
        call()
        took.append(time.perf_counter() - at)
    return took


def _datum(tokens: int, seed: int) -> Any:
    import tinkex

    ids = [3 + (seed * 7919 + i * 104729) % (VOCAB - 3) for i in range(tokens + 1)]
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * tokens}
    return tinkex.types.Datum(model_input=tinkex.types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


# -- the floods: each is called without end --------------------------------------------------------------


def flood(name: str, url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    act = FLOODS[name](url, (host, int(port)))
    print(json.dumps({"ready": 1.0}), flush=True)
    while True:
        try:
            act()
        except (
            Exception
        ) as error:  # a refusal is what a server should answer; go on at once, as an attacker does
            print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
            time.sleep(0.01)


def _losses(url: str, address: tuple[str, int]) -> Callable[[], None]:
    """Passes with an uploaded loss of five singular value decompositions: one refused, one just allowed."""
    import tinkex

    service = tinkex.ServiceClient()
    run = service.create_lora_training_client(MODEL, rank=8)

    def costly(logprobs: Any) -> Any:
        square = logprobs.unsqueeze(0) * logprobs.unsqueeze(1)
        loss = square.norm(p="nuc")
        for _ in range(4):
            square = square * 1.01
            loss = loss + square.norm(p="nuc")
        return loss, {}

    loss = service.create_custom_loss(costly, {"logprobs": 1}).result()
    refused, allowed = ([_datum(tokens, seed) for seed in range(60)] for tokens in (1000, 400))

    def act() -> None:
        with contextlib.suppress(tinkex.RequestFailedError):
            run.forward_backward_custom(refused, loss).result(timeout=600)
        run.forward_backward_custom(allowed, loss).result(timeout=600)

    return act


def _samples(url: str, address: tuple[str, int]) -> Callable[[], None]:
    """Requests for 4,096 samples of 64 tokens, four at a time."""
    import tinkex

    sampler = tinkex.ServiceClient().create_sampling_client(base_model=MODEL)
    prompt = tinkex.types.ModelInput.from_ints(list(range(3, 67)))
    params = tinkex.types.SamplingParams(max_tokens=64, temperature=1.0, stop=[])

    def act() -> None:
        for one in [sampler.sample(prompt, num_samples=4096, sampling_params=params) for _ in range(4)]:
            one.result(timeout=600)

    return act


def _pass(url: str, address: tuple[str, int]) -> Callable[[], None]:
    """Passes of 300 datums of 1,000 tokens."""
    import tinkex

    run = tinkex.ServiceClient().create_lora_training_client(MODEL, rank=8)
    data = [_datum(1000, seed) for seed in range(300)]
    return lambda: run.forward_backward(data, "cross_entropy").result(timeout=600)


def _top_k(url: str, address: tuple[str, int]) -> Callable[[], None]:
    """Small requests with large results, logprobs at every sampled token: one refused, three just allowed."""
    import tinkex

    sampler = tinkex.ServiceClient().create_sampling_client(base_model=MODEL)
    prompt = tinkex.types.ModelInput.from_ints(list(range(3, 67)))
    params = tinkex.types.SamplingParams(max_tokens=1000, temperature=1.0, stop=[])

    def act() -> None:
        asked = [
            sampler.sample(prompt, num_samples=64, sampling_params=params, topk_sample_logprobs=k)
            for k in (VOCAB, 100, 100, 100)
        ]
        for one in asked:
            with contextlib.suppress(tinkex.TinkerError):
                one.result(timeout=600)

    return act


def _headers(url: str, address: tuple[str, int]) -> Callable[[], None]:
    """Connections that never finish their headers, one of them without end."""
    idle = []
    for _ in range(500):
        with contextlib.suppress(OSError):
            idle.append(socket.create_connection(address, timeout=10))
            idle[-1].sendall(b"GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\n")

    def act() -> None:
        with socket.create_connection(address, timeout=30) as one:
            one.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\n")
            line = b"x-padding: " + b"a" * 60000 + b"\r\n"
            while True:
                one.sendall(line)

    return act


def _metadata(url: str, address: tuple[str, int]) -> Callable[[], None]:
    """Sessions with 100 MB of metadata that compress to a few kilobytes."""
    from backports.zstd import compress

    body = {
        "tags": ["x"],
        "user_metadata": {"m": "a" * 100_000_000},
        "sdk_version": "0.36.0",
        "type": "create_session",
    }
    packed = compress(json.dumps(body).encode())
    headers = {"content-type": "application/json", "content-encoding": "zstd"}
    return lambda: _post(address, "/api/v1/create_session", packed, headers)


def _json(url: str, address: tuple[str, int]) -> Callable[[], None]:
    """Large JSON on the OpenAI endpoints, and hundreds of thousands of stop strings."""
    text = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1, "user": "a" * 60_000_000}).encode()
    stops = {"model": MODEL, "prompt": "a", "max_tokens": 1, "stop": [f"s{i}" for i in range(300_000)]}
    bodies = [text, json.dumps(stops).encode()]
    headers = {"content-type": "application/json"}

    def act() -> None:
        for body in bodies:
            _post(address, "/v1/completions", body, headers)

    return act


def _bodies(url: str, address: tuple[str, int]) -> Callable[[], None]:
    """Unfinished bodies on 32 connections, and runs of rank 1,024."""
    import tinkex

    head = _head("/api/v1/forward_backward", 254_000_000, {"content-type": "application/json"})
    for _ in range(32):
        threading.Thread(target=_unfinished, args=(address, head), daemon=True).start()
    service = tinkex.ServiceClient()
    return lambda: service.create_lora_training_client(MODEL, rank=1024)


def _unfinished(address: tuple[str, int], head: bytes) -> None:
    block = b"a" * (1 << 20)
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=60) as one:
            one.sendall(head)
            for _ in range(240):
                one.sendall(block)
            one.recv(1)
        time.sleep(0.1)


def _head(path: str, length: int, headers: dict[str, str]) -> bytes:
    fields = {"host": "x", "x-api-key": os.environ["TINKER_API_KEY"], "content-length": str(length)} | headers
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def _post(address: tuple[str, int], path: str, body: bytes, headers: dict[str, str]) -> None:
    with socket.create_connection(address, timeout=60) as one:
        one.sendall(_head(path, len(body), headers) + body)
        one.recv(1 << 16)


FLOODS: dict[str, Callable[[str, tuple[str, int]], Callable[[], None]]] = {
    "losses": _losses, "samples": _samples, "pass": _pass, "top-k": _top_k,
    "headers": _headers, "metadata": _metadata, "json": _json, "bodies": _bodies,
}  # fmt: skip

# -- processes -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
    started = subprocess.Popen(
        [sys.executable, *command], env=kept | environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE if "serve" in command else None,
    )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@contextlib.contextmanager
def server(home: Path, model: str, threads: int) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its URL, and its log as it grows."""
    command = ["serve", "--home", str(home), "--model", f"{MODEL}={model}", "--port", "0", "--device", "cpu"]
    with process("-m", "tinkex.cli", *command, OMP_NUM_THREADS=str(threads), COLUMNS="200") as started:
        assert started.stdout is not None
        assert started.stderr is not None
        log: list[str] = []
        threading.Thread(target=log.extend, args=[started.stderr], daemon=True).start()
        for line in started.stdout:
            if found := re.search(r"(http://127\.0\.0\.1:\d+)", line):
                threading.Thread(target=started.stdout.read, daemon=True).start()
                yield started, found.group(1), log
                return
        raise SystemExit(f"the server ended with exit status {started.wait()}: {log[-5:]}")


def hear(child: subprocess.Popen[str], seconds: float | None = None) -> Figures:
    """The child's next line. A victim that does not answer in time has waited for so long."""
    assert child.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(child.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(seconds)
    if not lines:
        return {"samples": 0, "p50_ms": float("inf"), "p99_ms": float("inf"), "steps_s": 0.0}
    if not lines[0]:
        raise SystemExit(f"{child.args}: exit status {child.wait()}")
    return json.loads(lines[0])


class MemoryWatch:
    """The highest resident memory of a process since `start`, in bytes."""

    def __init__(self, pid: int) -> None:
        self._file, self.peak, self._over = Path(f"/proc/{pid}/status"), 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", self._file.read_text())
        return int(found.group(1)) << 10 if found else 0

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            with contextlib.suppress(OSError):
                self.peak = max(self.peak, self.now())

    def stop(self) -> int:
        self._over.set()
        return self.peak


# -- measuring -----------------------------------------------------------------------------------------------


def measure(name: str, options: argparse.Namespace, model: str, directory: Path) -> Figures:
    """The victim alone, then under one flood."""
    home = directory / f"home-{name}"
    keys = {who: _key(home, who) for who in ("victim", "flood")}
    with server(home, model, options.threads) as (started, url, log):
        common = {"TINKER_BASE_URL": url, "TINKER_TELEMETRY": "0"}
        me = str(Path(__file__).resolve())
        with process(me, "--child", "victim", TINKER_API_KEY=keys["victim"], **common) as honest:
            datum_s = hear(honest)["datum_s"]
            alone = _ask(honest, options.seconds)
            memory = MemoryWatch(started.pid)
            with process(me, "--child", name, "--url", url, TINKER_API_KEY=keys["flood"], **common) as bad:
                hear(bad)
                time.sleep(2)
                used, began = _cpu(bad), time.perf_counter()
                flooded = _ask(honest, options.seconds)
                cores = (_cpu(bad) - used) / (time.perf_counter() - began)
            planned = re.findall(r"(?:weights|kv|adapters|activations) (\d+) MiB", " ".join(log))
            peak = memory.stop()
            over = peak - (sum(map(int, planned)) << 20)
            if started.poll() is not None:
                print(f"the server died under {name}: {started.returncode}", file=sys.stderr)
    bound = TIMES * alone["p99_ms"] + 1e3 * datum_s
    share = flooded["steps_s"] / alone["steps_s"]
    return {
        "alone_ms": alone["p99_ms"], "p99_ms": flooded["p99_ms"], "bound_ms": bound,
        "datum_ms": 1e3 * datum_s, "alone_steps_s": alone["steps_s"], "share": share,
        "flood_cores": cores, "peak_bytes": peak, "over_bytes": over,
    }  # fmt: skip


def middle(rounds: list[Figures]) -> Figures:
    """The median of each figure, and whether they meet the goals."""
    row = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    met = row["p99_ms"] <= row["bound_ms"] and row["share"] >= SHARE and row["over_bytes"] <= MEMORY
    return row | {"met": met}


def _ask(victim: subprocess.Popen[str], seconds: float) -> Figures:
    assert victim.stdin is not None
    print(seconds, file=victim.stdin, flush=True)
    return hear(victim, 10 * seconds + 120)


def _cpu(child: subprocess.Popen[str]) -> float:
    """Seconds of CPU that it has used, user and system, in all threads."""
    return time.clock_gettime(~child.pid << 3 | 2)  # as clock_getcpuclockid makes it on Linux


def _key(home: Path, name: str) -> str:
    command = [sys.executable, "-m", "tinkex.cli", "server", "keys", "add", name, "--home", str(home)]
    made = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "300"}
    )
    found = re.search(r"tml-\S+", made.stdout + made.stderr)
    assert found, made.stdout
    return found.group(0)


def table(rows: dict[str, Figures]) -> str:
    head = f"{'flood':<10}{'p99 alone':>11}{'p99':>11}{'bound':>11}{'steps':>9}{'goal':>8}"
    head += f"{'flood takes':>13}{'memory':>13}  met"
    lines = [head, "-" * len(head)]
    for name, row in rows.items():
        times = "".join(f"{row[key]:>8,.1f} ms" for key in ("alone_ms", "p99_ms", "bound_ms"))
        rest = f"{row['flood_cores']:>7.2f} cores{row['over_bytes'] / 2**20:>+9,.0f} MiB"
        lines.append(
            f"{name:<10}{times}{row['share']:>8.0%} {'≥ 45 %':>8}{rest}  {'yes' if row['met'] else 'NO'}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--only", choices=FLOODS, action="append", help="this flood alone (may be repeated)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=1, help="of each flood; the table has medians")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of the server")
    parser.add_argument("--child", choices=["victim", *FLOODS], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "victim":
        return victim()
    if options.child:
        return flood(options.child, options.url)
    from shapes import write_model

    rows: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as directory:
        model = write_model("line", Path(directory), "cpu")
        for name in options.only or FLOODS:
            rounds = list[Figures]()
            for _ in range(options.rounds):
                home = Path(tempfile.mkdtemp(dir=directory))
                rounds.append(measure(name, options, model, home))
                shutil.rmtree(home)
                if not options.json:
                    print(f"{name}: {rounds[-1]}", file=sys.stderr, flush=True)
            rows[name] = middle(rounds)
    about = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "seconds": options.seconds,
        "rounds": options.rounds,
    }
    if options.json:
        print(json.dumps({"about": about, "floods": rows}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
        print(table(rows))


if __name__ == "__main__":
    main()
