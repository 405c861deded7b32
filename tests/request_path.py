"""Which files of the package execute a `forward_backward` and an `optim_step` on a tiny model.

    python -m tests.request_path embedded MODEL_DIRECTORY     # prints {file: [functions]} as JSON
    python -m tests.request_path served MODEL_DIRECTORY       # over HTTP, with the server in the same process

It profiles every thread from its start. It notes calls between the call of `forward_backward` and the result
of `optim_step`, in a second round, so that what is made once exists already.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import tinkex

PACKAGE = str(Path(tinkex.__file__).parent) + "/"


class Recorder:
    """Collects the functions of the package that are entered while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.called: dict[str, set[str]] = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.called[frame.f_code.co_filename.removeprefix(PACKAGE)].add(frame.f_code.co_qualname)


def train(service: tinkex.ServiceClient, model: str, recorder: Recorder) -> None:
    run = service.create_lora_training_client(model, rank=4, seed=1)
    data = [tinkex.Datum(tinkex.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
    for recorder.on in (False, True):
        passed = run.forward_backward(data, "cross_entropy")
        stepped = run.optim_step(tinkex.AdamParams(learning_rate=1e-4))
        passed.result(timeout=60)
        stepped.result(timeout=60)
    recorder.on = False


def trace(mode: str, model: str) -> dict[str, list[str]]:
    """The files that the two calls go through, from the root of the package, each with its functions."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    if mode == "embedded":
        with tinkex.ServiceClient() as service:
            train(service, model, recorder)
    else:
        from tests.server.conftest import Running
        from tinkex.server.serve import ServerConfig
        from tinkex.service.config import ServiceConfig

        running = Running(
            ServerConfig(ServiceConfig(Path(os.environ["TINKEX_HOME"]), models={"m": model}), port=0)
        )
        with tinkex.ServiceClient(base_url=running.url, api_key="tml-reader") as service:
            train(service, "m", recorder)
        running.stop()
    sys.setprofile(None)
    return {file: sorted(names) for file, names in sorted(recorder.called.items())}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ["TINKEX_HOME"] = home
        json.dump(trace(*sys.argv[1:]), sys.stdout)
