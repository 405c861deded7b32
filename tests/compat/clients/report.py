"""What the client scripts share: what they train on, and how they tell the test what they saw.

Each script runs by itself in its client's environment, so nothing here knows a client or our own code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

MODEL = "m/base"
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [50, 40, 30, 20, 10], [9, 8, 7, 6, 5, 4, 3, 12, 11]]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
RANK = 4
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def say(step: str, **facts: Any) -> None:
    """One fact sheet for the test."""
    print(json.dumps({"step": step, **facts}), flush=True)


def done() -> NoReturn:
    """Leave at once: official clients now and then abort while the interpreter takes their threads down."""
    os._exit(0)


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    """How `call` failed, and how long that took."""
    begun = time.monotonic()
    try:
        value = call()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "message": str(error),
            "status": getattr(error, "status_code", None),
            "category": getattr(getattr(error, "category", None), "value", None),
            "seconds": time.monotonic() - begun,
        }
    return {"type": "", "message": f"no error, but {value!r}", "seconds": time.monotonic() - begun}


def outputs(result: Any) -> dict[str, Any]:
    """The loss and the logprobs of a pass."""
    return {
        "loss": result.metrics["loss:sum"],
        "logprobs": [list(output["logprobs"].data) for output in result.loss_fn_outputs],
    }
