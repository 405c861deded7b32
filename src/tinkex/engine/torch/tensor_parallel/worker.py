"""The process of one rank: `python -m tinkex.engine.torch.tensor_parallel.worker FD`, started by `team`.

Executes orders from a socket until it closes. Exits when its parent is gone, or when an order fails.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Connection

import torch

from tinkex.engine.protocol import EngineConfig, EngineError
from tinkex.engine.request import user_error
from tinkex.engine.torch import memory
from tinkex.engine.torch.cpu_threads import usable_cores
from tinkex.engine.torch.load import load_decoder, wanted_dtype
from tinkex.engine.torch.tensor_parallel.follower import Follower
from tinkex.engine.torch.tensor_parallel.sharding import LoadedPart
from tinkex.engine.torch.tensor_parallel.shards import ProcessShards, Shards
from tinkex.errors import InvalidInputError


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_outlive_nobody, args=(os.getppid(),), daemon=True).start()
    config, rank, store, device = connection.recv()
    torch.set_num_threads(config.threads or max(1, usable_cores() // config.tensor))  # they share the cores
    if (place := torch.device(device)).type == "cuda":
        torch.cuda.set_device(place)
    connection.send("here")
    shards = ProcessShards(rank, config.tensor, store, place)
    try:
        follower = load_follower(config, shards, place)
    except (EngineError, InvalidInputError) as error:
        connection.send(("failed", error if isinstance(error, EngineError) else user_error(str(error))))
        return
    connection.send(("ready", memory.free_bytes(place)))
    while True:
        try:
            order = connection.recv()
        except (EOFError, OSError):
            break
        follower.execute(order)
    os._exit(0)  # without waiting for a collective that no rank answers


def load_follower(config: EngineConfig, shards: Shards, device: torch.device) -> Follower:
    part = LoadedPart(shards)
    decoder = load_decoder(config.model, device, wanted_dtype(config.dtype, device), config.quantize, part)
    return Follower(decoder, part.plan)


def _outlive_nobody(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
