"""Server-sent events of a streamed sample, as a stub sends them."""

from __future__ import annotations

import json
from typing import Any

from tests.stub import status


def events(*pairs: tuple[str, Any], raw: bytes = b"", code: int = 200) -> Any:
    body = b"".join(f"event: {name}\r\ndata: {json.dumps(data)}\r\n\r\n".encode() for name, data in pairs)
    return status(code, {"content-type": "text/event-stream", "content-length": None}, body + raw)


TOKENS = ("tokens", {"sequence": 0, "tokens": [7, 8], "logprobs": [-0.5, -1.0]})
DONE = (
    "done",
    {"sequences": [{"stop_reason": "length", "tokens": [7, 8], "logprobs": [-0.5, -1.0]}],
     "sample_sequence_ids": ["s-0"]},
)  # fmt: skip
