"""What watching costs: steps and samples per second of one client with 0 and with 20 live pages open.

    python bench/console.py [--pages 20] [--seconds 10]

The server is `tinkex serve` with the fake engine, in a process of its own, so that the console's share of its
CPU is as large as it can be: a real engine computes longer. It also compares the server's CPU time per sample
with rollouts kept (--keep-rollouts 1) and without. Rounds alternate, and the table has the medians.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

import psutil

from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient

KEY, MODEL = "tml-bench", "m/base"
DATA = [Datum(ModelInput.from_ints(list(range(1, 65))), {"target_tokens": list(range(2, 66))})]
PROMPT = ModelInput.from_ints(list(range(1, 129)))


class Server:
    """A server process on a free port."""

    def __init__(self, directory: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [
            sys.executable, "-m", "tinkex.cli", "serve", "--engine", "fake", "--model", f"{MODEL}=/none",
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
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Pages:
    """Live pages of one run, read to the end of each event and thrown away."""

    def __init__(self, server: Server, run_id: str, count: int) -> None:
        cookie = _log_in(server)
        self._connections = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(count)]
        for connection in self._connections:
            headers = {"cookie": cookie, "accept": "text/event-stream"}
            connection.request("GET", f"/console/runs/{run_id}/events", headers=headers)
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


def steps_per_second(run: object, seconds: float) -> float:
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        run.forward_backward(DATA, "cross_entropy")  # type: ignore[attr-defined]
        run.optim_step(AdamParams()).result(60)  # type: ignore[attr-defined]
        count += 1
    return count / (time.perf_counter() - began)


def samples_per_second(sampler: object, seconds: float) -> tuple[float, int]:
    count, began = 0, time.perf_counter()
    params = SamplingParams(max_tokens=64, stop=[])
    while time.perf_counter() - began < seconds:
        futures = [sampler.sample(PROMPT, 4, params) for _ in range(16)]  # type: ignore[attr-defined]
        for future in futures:
            future.result(60)
        count += len(futures)
    return count / (time.perf_counter() - began), count


def watching(pages: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory))
        service = ServiceClient(base_url=server.url, api_key=KEY)
        run = service.create_lora_training_client(MODEL, rank=4)
        sampler = run.save_weights_and_get_sampling_client()
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(3):
            for count in (0, pages):
                opened = Pages(server, run.model_id, count)
                found.setdefault(("steps", count), []).append(steps_per_second(run, seconds))
                found.setdefault(("samples", count), []).append(samples_per_second(sampler, seconds)[0])
                opened.close()
        for what in ("steps", "samples"):
            bare, watched = (statistics.median(found[what, count]) for count in (0, pages))
            change = f"{watched / bare - 1:+.1%}"
            print(f"{what:8} per second: {bare:.1f} alone, {watched:.1f} with {pages} pages ({change})")
        service.close().result(10)
        server.close()


def keeping(seconds: float) -> None:
    costs: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(3):
        for share in costs:
            with tempfile.TemporaryDirectory() as directory:
                server = Server(Path(directory), "--keep-rollouts", share)
                service = ServiceClient(base_url=server.url, api_key=KEY)
                sampler = service.create_lora_training_client(
                    MODEL, rank=4
                ).save_weights_and_get_sampling_client()
                samples_per_second(sampler, 1.0)
                before = server.cpu()
                _, count = samples_per_second(sampler, seconds)
                costs[share].append((server.cpu() - before) / count * 1000)
                service.close().result(10)
                server.close()
    bare, kept = (statistics.median(costs[share]) for share in ("0", "1"))
    change = f"{kept / bare - 1:+.1%}"
    print(f"CPU of a request of 4 x 64 tokens: {bare:.2f} ms, {kept:.2f} ms with rollouts ({change})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=re.sub(r"\n\n.*", "", __doc__ or ""))
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    watching(given.pages, given.seconds)
    keeping(given.seconds)
