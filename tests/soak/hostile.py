"""A tenant with a key who floods: what one request may ask for, and as many as a server takes.

It goes through the floods in turn until it is told to stop. To be refused is what it expects; an answer that
blames the server, other than "later", is a fault. It waits for little, and cancels what it gave up.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import tinkex
from tests.soak.server import MODEL
from tests.soak.vandal import STATUSES_SEEN_LIMIT

KEY = "tml-hostile"
GLANCE = 3.0  # seconds for which it waits for a result
RANK = 256


class Hostile(threading.Thread):
    """Floods until it is told to stop; `happened` counts what it did, `faults` blame the server."""

    def __init__(self, url: str, vocabulary: int) -> None:
        super().__init__(name="hostile", daemon=True)
        self._url, self._vocabulary = url, vocabulary
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._over, self._round = threading.Event(), threading.Event()
        self.happened, self.faults = Counter[str](), list[str]()

    def stop(self, patience: float) -> None:
        """After a round of all floods, if it ends in so many seconds."""
        self._round.wait(patience)
        self._over.set()
        self.join(60)

    def run(self) -> None:
        try:
            self._flood()
        except tinkex.TinkerError as error:  # of closing: each flood looks after its own
            self.happened["failed"] += 1
            self.faults += [repr(error)] if isinstance(error, tinkex.InternalServerError) else []

    def _flood(self) -> None:
        with tinkex.ServiceClient(base_url=self._url, api_key=KEY) as service:
            floods = self._floods(service)
            while not self._over.is_set():
                for name, flood in floods.items():
                    if not self._over.wait(0.05):
                        self._try(name, flood)
                self._round.set()

    def _try(self, name: str, flood: Callable[[], object]) -> None:
        try:
            flood()
        except tinkex.APIStatusError as error:
            self._look(name, error.status_code, error.message)
        except (tinkex.TinkerError, OSError):
            self.happened["failed"] += 1  # refused, given up, or the server is being restarted
        self.happened[name] += 1

    def _look(self, name: str, status: int, said: str) -> None:
        self.happened["refused"] += status >= 400
        if status >= STATUSES_SEEN_LIMIT and status != 503:
            self.faults.append(f"{name}: {status} {said[:300]}")

    # -- by the client -----------------------------------------------------------------------------------

    def _floods(self, service: tinkex.ServiceClient) -> dict[str, Callable[[], object]]:
        prompt = tinkex.ModelInput.from_ints([n % self._vocabulary for n in range(64)])

        def sample(count: int, tokens: int, **asked: Any) -> Callable[[], object]:
            def flood() -> None:
                sampler = service.create_sampling_client(base_model=MODEL, timeout=30)
                params = tinkex.SamplingParams(max_tokens=tokens, stop=[])
                self._glance([sampler.sample(prompt, count, params, **asked) for _ in range(4)])

            return flood

        def train(passing: Callable[[tinkex.TrainingClient], Any]) -> Callable[[], object]:
            def flood() -> None:
                run = service.create_lora_training_client(MODEL, rank=4, timeout=30)
                self._glance([passing(run)])

            return flood

        def custom(run: tinkex.TrainingClient) -> Any:
            loss = service.create_custom_loss(_costly, {"logprobs": 1}).result(30)
            return run.forward_backward_custom(self._data(8, 200), loss)

        def runs() -> None:
            for _ in range(3):
                service.create_lora_training_client(MODEL, rank=RANK, timeout=30)

        return {
            "samples": sample(512, 64),
            "top-k": sample(64, 100, topk_sample_logprobs=self._vocabulary),
            "pass": train(lambda run: run.forward_backward(self._data(100, 200), "cross_entropy")),
            "losses": train(custom),
            "runs": runs,
            "metadata": self._metadata,
            "json": self._json,
            "headers": self._headers,
            "bodies": self._bodies,
            "connections": self._connections,
        }

    def _glance(self, futures: list[Any]) -> None:
        try:
            for future in futures:
                future.result(GLANCE)
        finally:
            for future in futures:
                future.cancel()

    def _data(self, count: int, length: int) -> list[tinkex.Datum]:
        ids = [(7 * n) % self._vocabulary for n in range(length + 1)]
        return [tinkex.Datum(tinkex.ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]})] * count

    # -- by hand -----------------------------------------------------------------------------------------

    def _metadata(self) -> None:
        """Megabytes in a few kilobytes, for the server to keep."""
        body = {"tags": ["x"], "user_metadata": {"m": "a" * 20_000_000}, "sdk_version": "0.36.0"}
        packed = gzip.compress(json.dumps(body).encode())
        self._post("metadata", "/api/v1/create_session", packed, {"content-encoding": "gzip"})

    def _json(self) -> None:
        asked = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        for more in ({"user": "a" * 10_000_000}, {"stop": [f"s{n}" for n in range(100_000)]}):
            self._post("json", "/v1/completions", json.dumps(asked | more).encode(), {})

    def _headers(self) -> None:
        with self._connected() as connection:
            connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\n")
            for _ in range(200):
                connection.sendall(b"x-padding: " + b"a" * 60_000 + b"\r\n")

    def _bodies(self) -> None:
        """Bodies that are announced, begun and never finished."""
        with contextlib.ExitStack() as held:
            for _ in range(8):
                connection = held.enter_context(self._connected())
                connection.sendall(self._head("/api/v1/forward_backward", 50_000_000, {}) + bytes(5_000_000))
            self._over.wait(1.0)

    def _connections(self) -> None:
        with contextlib.ExitStack() as held:
            for _ in range(100):
                held.enter_context(self._connected()).sendall(b"GET /api/v1/healthz HTTP/1.1\r\n")
            self._over.wait(1.0)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(self._address, timeout=5) as connection:
            yield connection

    def _head(self, path: str, length: int, headers: dict[str, str]) -> bytes:
        fields = {"host": "x", "x-api-key": KEY, "content-length": length, "content-type": "application/json"}
        lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in {**fields, **headers}.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    def _post(self, name: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        with self._connected() as connection:
            connection.settimeout(30)
            connection.sendall(self._head(path, len(body), headers) + body)
            said = connection.recv(4096)
        if said.startswith(b"HTTP/1.1 "):
            self._look(name, int(said.split(b" ")[1]), repr(said))


def _costly(logprobs: Any) -> Any:
    """Few nodes, each a singular value decomposition."""
    square = logprobs.unsqueeze(0) * logprobs.unsqueeze(1)
    loss = square.norm(p="nuc")
    for _ in range(4):
        square = square * 1.01
        loss = loss + square.norm(p="nuc")
    return loss, {}


FLOODS = (
    "samples", "top-k", "pass", "losses", "runs", "metadata", "json", "headers", "bodies", "connections",
)  # fmt: skip
