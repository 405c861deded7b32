"""A real process, killed at random moments of a pipelined loop of the real client: losses stay the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.tiny import tiny_model
from tests.service.child import MODEL, SocketTransport
from tests.service.harness import datum
from tinkex import AdamParams, ModelInput, SamplingParams, ServiceClient
from tinkex.client.server_connection import ServerConnection

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KILLS = 10


class Child:
    """A service that comes back each time it is killed."""

    def __init__(self, home: Path, kind: str, model: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tx")  # a socket's path must be short
        self.socket = Path(self._directory.name) / "s"
        self._command = [sys.executable, "-m", "tests.service.child", home, self.socket, kind, model]
        self.start()

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._directory.cleanup()


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def loop(socket: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> Iterator[list[float]]:
    """Passes and steps sent ahead, saves among them; yields what came of each step."""
    monkeypatch.setattr(
        "tinkex.local.connection", lambda settings: ServerConnection(SocketTransport(socket), settings)
    )
    service = ServiceClient()
    run = service.create_lora_training_client(MODEL, rank=4, seed=5)
    ahead = []
    for n in range(steps):
        data = [datum(3 * n + i, length=8) for i in range(3)]
        passes = [
            run.forward_backward(data, "cross_entropy"),
            run.forward_backward(data[:1], "cross_entropy"),
        ]
        step = run.optim_step(AdamParams(learning_rate=1e-2))
        saved = run.save_state(f"c{n}") if n % 7 == 3 else None
        ahead.append((passes, step, saved))
        if len(ahead) == 4:
            yield _settle(ahead.pop(0))
        if n % 10 == 9:
            sampler = run.save_weights_and_get_sampling_client()
            params = SamplingParams(max_tokens=6, seed=n, temperature=1.0, stop=[])
            sampled = sampler.sample(ModelInput.from_ints([7, 8, 9]), 2, params).result(60)
            yield [x for sequence in sampled.sequences for x in sequence.logprobs or []]
    yield from (_settle(item) for item in ahead)
    again = service.create_training_client_from_state_with_optimizer(f"tinker://{run.model_id}/weights/c3")
    yield [again.forward([datum(0, length=8)], "cross_entropy").result(60).metrics["loss:sum"]]


def _settle(item) -> list[float]:
    passes, step, saved = item
    if saved is not None:
        assert saved.result(60).path
    return [p.result(60).metrics["loss:sum"] for p in passes] + [step.result(60).metrics["optimizer_step"]]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("model", "steps", "tolerance"),
    [("fake", 60, 0.0), ("llama3", 24, 1e-5), ("qwen3_moe", 24, 1e-5), ("qwen3_5", 24, 1e-4)],
)
def test_ten_kills_change_nothing(model, steps, tolerance, tmp_path: Path, monkeypatch, no_key):
    kind = "fake" if model == "fake" else "torch"
    model = "fake" if kind == "fake" else str(tiny_model(tmp_path, model))
    quiet = Child(tmp_path / "quiet", kind, model)
    try:
        expected = list(loop(quiet.socket, monkeypatch, steps))
    finally:
        quiet.close()

    child, random_, stop = Child(tmp_path / "killed", kind, model), random.Random(11), threading.Event()
    kills = 0

    def disturb() -> None:
        nonlocal kills
        while kills < KILLS:
            # A process takes a while to come up; then any moment will do.
            while not child.socket.exists():
                if stop.wait(0.01):
                    return
            if stop.wait(random_.uniform(0.0, 0.25)):
                return
            child.kill()
            kills += 1
            child.start()

    killer = threading.Thread(target=disturb)
    killer.start()
    try:
        losses = list(loop(child.socket, monkeypatch, steps))
        # What is left of the kills falls on a loop that is done: its results are there all the same.
        killer.join()
    finally:
        stop.set()
        killer.join()
        child.close()
    assert kills == KILLS
    assert len(losses) == len(expected)
    for got, wanted in zip(losses, expected, strict=True):
        assert got == pytest.approx(wanted, abs=tolerance, rel=tolerance)
