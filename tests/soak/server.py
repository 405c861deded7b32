"""A real server with short patience, in a process to be killed: sessions lapse, journals are cut often."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tinkex.engine.protocol import EngineConfig
from tinkex.server.serve import ServerConfig, serve
from tinkex.service import service as upkeep
from tinkex.service.config import ServiceConfig

MODEL = "rough/model"


def main(home: str, model: str, port: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    upkeep.TICK = 1.0  # seconds: sessions are found lapsed soon after
    service = ServiceConfig(
        Path(home), models={MODEL: model}, engine=EngineConfig("", device="cpu", threads=1), preload=True,
        session_lapse=2.0, snapshot_steps=5, snapshot_seconds=5.0, keep_delivered=5.0, keep_superseded=5.0,
        long_poll=3.0,
    )  # fmt: skip
    serve(ServerConfig(service, "127.0.0.1", int(port), "", 0.5), print)


if __name__ == "__main__":
    main(*sys.argv[1:])
