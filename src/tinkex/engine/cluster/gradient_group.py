"""The processes of one trainer as a torch.distributed group: sums their gradients, once per optimizer step.

NCCL if each has a GPU of its own, else gloo. They find each other through a store in the first one. If one is
gone, or silent for TIMEOUT, the others raise EngineLost. Knows no Ray; only actors import it.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tinkex.engine.protocol import EngineLost
from tinkex.engine.torch.tensor_parallel.shards import ProcessShards

TIMEOUT = timedelta(seconds=60)


def host_store(here: str) -> tuple[Any, tuple[str, int]]:
    """The first process's store, and where it is."""
    listening = socket.create_server((here, 0))
    address = here, listening.getsockname()[1]
    # Without a socket it would listen on all addresses of the machine.
    return store_at(address, is_master=True, master_listen_fd=listening.detach()), address


def store_at(address: tuple[str, int], **more: Any) -> Any:
    options = {"timeout": TIMEOUT, "wait_for_workers": False, **more}
    return dist.TCPStore(*address, **options)  # type: ignore[reportPrivateImportUsage]


class GradientGroup:
    """This process's part; `here` is the address that the others reach it at."""

    def __init__(self, rank: int, count: int, store: Any, here: str, *, gpus: bool) -> None:
        device = torch.device("cuda" if gpus and torch.cuda.is_available() else "cpu")
        self._shards = ProcessShards(rank, count, store, device, address=here, timeout=TIMEOUT)

    def total(self, row: Any) -> None:
        """Sum a tensor or an array over the group, in place; bitwise the same in all processes."""
        try:
            self._shards.reduce(torch.as_tensor(row))
        except RuntimeError as error:
            raise EngineLost(f"the trainer's processes could not sum their gradients: {error}") from None
