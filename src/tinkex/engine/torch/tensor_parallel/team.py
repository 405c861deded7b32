"""The ranks of one engine's tensor-parallel group, as rank 0 sees them.

Orders reach every rank in the order they are given. If a rank ends or fails in an order, the whole group is
lost: `check` raises from then on, and waiting collectives abort. Does not interpret orders.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tinkex.engine.protocol import EngineConfig, EngineError, EngineLost
from tinkex.engine.torch.tensor_parallel.shards import ProcessShards, Shards

log = logging.getLogger("tinkex")
_PATIENCE = 10.0  # seconds that a rank may take to end


class Team:
    """Base class of groups. `lost` is set to the reason when a rank is lost."""

    def __init__(self, shards: Shards) -> None:
        self.shards, self.trouble = shards, ""
        self.lost: Future[str] = Future()
        self._lock, self._closed = threading.Lock(), False

    def least_free(self) -> float:
        """Bytes of free memory of the rank that has the least, once all have loaded their parts."""
        raise NotImplementedError

    @contextlib.contextmanager
    def order(self, order: Any) -> Iterator[None]:
        """Send an order to all other ranks; this rank computes its part in the block."""
        self.check()
        try:
            self._send(order)
            yield
        except EngineError:
            raise  # every rank has raised the same
        except BaseException as error:
            self.lose(f"rank 0 failed: {type(error).__name__}: {error}")
            raise

    def check(self) -> None:
        """Raise if a rank is gone."""
        if self.trouble:
            raise EngineLost(self.trouble)

    def lose(self, why: str) -> None:
        with self._lock:
            if self.trouble or self._closed:
                return
            self.trouble = why
        log.error("a tensor-parallel group is lost: %s", why)
        self.shards.close()
        self.lost.set_result(why)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.trouble = self.trouble or "the engine was closed"
        self._end()

    def _send(self, order: Any) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class ProcessTeam(Team):
    """Ranks that are child processes of this one, each with its own GPU, or on the CPU."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="tinkex-ranks-"))
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            for rank in range(1, config.tensor):
                self._ranks.append(
                    _start(config, rank, str(self._place / "store"), rank_device(device, rank))
                )
            for rank, (_, connection) in enumerate(self._ranks, 1):
                _receive(connection, rank)  # it has started, and joins the group now
            store = str(self._place / "store")
            super().__init__(ProcessShards(0, config.tensor, store, rank_device(device, 0)))
        except BaseException:
            self._end()
            raise
        for rank, (process, _) in enumerate(self._ranks, 1):
            name = f"tinkex-rank-{rank}"
            threading.Thread(target=self._wait_for, args=(rank, process), name=name, daemon=True).start()

    def least_free(self) -> float:
        free = [float("inf")]
        for rank, (_, connection) in enumerate(self._ranks, 1):
            state, value = _receive(connection, rank)
            if state == "failed":
                raise value
            free.append(value)
        return min(free)

    def _wait_for(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.lose(f"rank {rank} ended with exit code {process.wait()}")

    def _send(self, order: Any) -> None:
        data = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        for _, connection in self._ranks:
            connection.send_bytes(data)

    def _end(self) -> None:
        for _, connection in self._ranks:
            connection.close()  # the process exits at end of file
        for process, _ in self._ranks:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._place, ignore_errors=True)


def rank_device(device: torch.device, rank: int) -> torch.device:
    """GPUs are taken in order from the one that was asked for."""
    return device if device.type != "cuda" else torch.device("cuda", (device.index or 0) + rank)


def _start(
    config: EngineConfig, rank: int, store: str, device: torch.device
) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tinkex.engine.torch.tensor_parallel.worker", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    connection = Connection(ours.detach())
    connection.send((config, rank, store, str(device)))
    return process, connection


def _receive(connection: Connection, rank: int) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        raise EngineError(f"rank {rank} ended while it was starting; its messages are in the log") from None
