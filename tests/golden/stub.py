"""A server that agrees to everything and writes down what it was asked. Standard library alone.

Used by record.py inside an environment that has an official SDK and not this project.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEPT_HEADERS = (
    "accept", "content-type", "content-encoding", "x-tinker-request-type", "x-tinker-sampling-backpressure",
    "x-tinker-weights-access-token", "x-sdk-method",
)  # fmt: skip
CHECKPOINT = {
    "checkpoint_id": "weights/c1",
    "checkpoint_type": "training",
    "time": "2026-01-02T03:04:05Z",
    "tinker_path": "tinker://S:train:0/weights/c1",
}
RUN = {
    "training_run_id": "S:train:0",
    "base_model": "m/base",
    "model_owner": "o",
    "is_lora": True,
    "lora_rank": 8,
    "last_request_time": "2026-01-02T03:04:05Z",
}
CURSOR = {"offset": 0, "limit": 20, "total_count": 1}
_CLAIMS = json.dumps({"exp": 9999999999, "sub": "u", "org_id": "o"}).encode()
JWT = f"e30.{base64.urlsafe_b64encode(_CLAIMS).decode()}.x"

# What a GET, PUT or DELETE is answered, by the end of its path; the first that fits.
REST: list[tuple[str, Any]] = [
    ("/get_server_capabilities", {"supported_models": [{"model_name": "m/base"}]}),
    ("/external_weights_urls", {"urls": {"a": "http://x/a"}, "expires": "2026-01-02T03:04:05Z"}),
    ("/checkpoints/current", {"data": []}),
    ("/checkpoints", {"checkpoints": [CHECKPOINT], "cursor": CURSOR}),
    ("/training_runs", {"training_runs": [RUN], "cursor": CURSOR}),
    ("/training_runs/S:train:0", RUN),
    ("/trace_export", {"status": "ready", "url": "http://x/trace"}),
    ("/sessions", {"sessions": ["S"]}),
    ("/sessions/S", {"training_run_ids": ["S:train:0"], "sampler_ids": []}),
    ("/audit", {"entries": []}),
    ("/usage/events", {"data": []}),
]
# What the promises of these endpoints resolve to.
RESULTS = {
    "create_model": {"model_id": "S:train:0", "type": "create_model"},
    "optim_step": {"metrics": {"lr": 0.5}},
    "save_weights": {"path": "tinker://S:train:0/weights/c1"},
    "save_weights_for_sampler": {
        "path": "tinker://S:train:0/sampler_weights/s1",
        "sampling_session_id": "S:sample:9",
    },
    "save_weights_external": {"path": "tinker://S:train:0/external_weights/e1", "size_bytes": 5},
    "load_weights": {"path": "tinker://S:train:0/weights/c1"},
    "create_custom_loss": {"loss_id": "L1", "type": "create_custom_loss"},
    "unload_model": {"model_id": "S:train:0"},
}
# What the synchronous POST endpoints answer.
POSTS = {
    "auth/token": {"jwt": JWT},
    "telemetry": {"status": "accepted"},
    "create_session": {"session_id": "S"},
    "session_heartbeat": {},
    "get_info": {"model_id": "S:train:0", "model_data": {"model_name": "m/base"}},
    "weights_info": {"base_model": "m/base", "is_lora": True, "lora_rank": 8, "train_unembed": True},
    "copy_weights": {"tinker_path": "tinker://S:train:1/weights/c1"},
    "create_sampling_session": {"sampling_session_id": "S:sample:0"},
    "join_sampling_session": {"client_counter": 7},
    "sessions/search": {"sessions": []},
    "cancel_future": {},
}

Answer = tuple[int, str, bytes]


class Stub:
    """`flags` are what client/config says; `reply(kind, accept)` gives the body of an array result."""

    def __init__(self, reply: Callable[[str, str, int], Answer]) -> None:
        self.flags: dict[str, Any] = {}
        self.dynamic: dict[str, Any] = {}
        self.seen: list[dict[str, Any]] = []
        self.hold_samples = False
        self._reply = reply
        self._promises: dict[str, tuple[str, int]] = {}
        self._completed: list[str] = []
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {k: self.headers[k] for k in KEPT_HEADERS if k in self.headers}
                status, kind, out = stub.answer(self.command, self.path, headers, body)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(out)))
                if status == 302:
                    self.send_header("location", "http://127.0.0.1:1/archive")
                self.end_headers()
                self.wfile.write(out)

            do_GET = do_PUT = do_DELETE = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        row = {"method": method, "path": path, "headers": headers, "body": base64.b64encode(body).decode()}
        with self._lock:
            self.seen.append(row)
            answer = self._decide(method, path.partition("?")[0], headers, body)
        return (answer[0], answer[1], answer[2]) if isinstance(answer, tuple) else _json(answer)

    def _decide(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        name = path.removeprefix("/api/v1/")
        if path.endswith("/archive"):
            return _json({}, 302)
        if method != "POST":
            return next(
                (v for end, v in REST if path.endswith(end)), {"sampler_id": "S", "base_model": "m/base"}
            )
        if name == "client/config":
            return self.flags
        if name == "client/dynamic_config":
            return self.dynamic
        if name == "retrieve_future":
            kind, count = self._promises[json.loads(body)["request_id"]]
            if kind in RESULTS:
                return RESULTS[kind]
            return self._reply(kind, headers.get("accept", ""), count)
        if name == "retrieve_futures":
            done, self._completed = self._completed, []
            rows = [
                {"state": "finished", "request_id": r, "response_payload_uncompressed_size": 9} for r in done
            ]
            return {"completions": rows, "cursor": len(self._promises)}
        if name in RESULTS or name in ("forward", "forward_backward", "asample"):
            return self._promise(name, body)
        return POSTS.get(name, {})

    def _promise(self, name: str, body: bytes) -> Any:
        request_id = f"{name}-{len(self._promises)}"
        count = json.loads(body)["num_samples"] if name == "asample" else 1
        kind = "hold" if name == "asample" and self.hold_samples else name
        self._promises[request_id] = kind, count
        promise: dict[str, Any] = {"request_id": request_id}
        if name == "asample":
            self._completed.append(request_id)
            promise["sample_sequence_ids"] = [f"q{i}" for i in range(count)]
        return promise


def _json(value: Any, status: int = 200) -> Answer:
    return status, "application/json", json.dumps(value).encode()
