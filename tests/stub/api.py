"""The stub's endpoints, one method each, and the table that routes to them.

They answer as the protocol says and keep just enough state (sessions, runs, samplers, checkpoints) that a
whole session of any Tinker SDK makes sense. No HTTP parsing, no threads.
"""

from __future__ import annotations

import base64
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import orjson

from tests.stub import canned
from tests.stub.futures import PROTOBUF, Call, Futures, Promise, Run
from tests.stub.http import API, Reply, Request, reply

WHEN = "2026-01-02T03:04:05Z"
FOLDERS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class Api(Futures):
    """Every endpoint of the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}  # what client/config and client/dynamic_config answer
        self.metrics: dict[str, float] | Callable[[canned.Pass], dict[str, float]] = {"loss:sum": 1.5}
        self.jwt_seconds = 3600
        self.models = ["stub/base", "stub/other"]
        self.url = ""

    def clear(self) -> None:
        super().clear()
        self.sessions: dict[str, dict[str, Any]] = {}
        self.samplers: dict[str, dict[str, Any]] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.telemetry: list[dict[str, Any]] = []

    def route(self, call: Call) -> None:
        handler = EXACT.get((call.request.method, call.request.path))
        if handler is None:
            handler, call.params = find_route(call.request.method, call.request.path)
        try:
            answer = handler(self, call)
        except (KeyError, ValueError, IndexError) as error:
            answer = reply({"detail": f"the stub cannot read this request: {error!r}"}, 422)
        if answer is not None:
            call.answer(answer)

    def refuse(self, request: Request) -> None:
        """A refused training request uses up its seq id all the same."""
        if EXACT.get((request.method, request.path)) not in TRAINING:
            return
        if PROTOBUF in request.headers.get("content-type", ""):
            if self.json_only:
                return  # what cannot be read has no number
            given = canned.read_pass(plain(request))
            model_id, seq_id = given.model_id, given.seq_id
        else:
            model_id, seq_id = request.json.get("model_id"), request.json.get("seq_id", 0)
        if run := self.runs.get(model_id):
            refused = Promise(self.new_id(), "refused", lambda: (None, {}))
            self.seen[model_id, seq_id] = self.promises[refused.request_id] = refused
            self.enqueue(run, seq_id, refused)

    # --- bootstrap and sessions

    def client_config(self, call: Call) -> Reply:
        return reply(self.config)

    def auth_token(self, call: Call) -> Reply:
        claims = {
            "exp": int(time.time()) + self.jwt_seconds,
            "sub": "tml:user:1",
            "org_id": "org",
            "email": "a@b.c",
        }
        parts = [
            base64.urlsafe_b64encode(orjson.dumps(p)).rstrip(b"=").decode() for p in ({"alg": "none"}, claims)
        ]
        return reply({"jwt": f"{parts[0]}.{parts[1]}.{next(self.ids)}"})

    def apikey(self, call: Call) -> Reply:
        details = {"org_details": {"name": "org"}, "user_details": {"email": "a@b.c"}}
        return reply({"key_id": 1, "name": "key", "note": "", "details": details})

    def capabilities(self, call: Call) -> Reply:
        known = {"max_context_length": 32768, "trainable": True, "sampleable": True}
        return reply({"supported_models": [{"model_name": name, **known} for name in self.models]})

    def take_telemetry(self, call: Call) -> Reply:
        self.telemetry.append(call.json)
        return reply({"status": "accepted"})

    def create_session(self, call: Call) -> Reply:
        session_id = f"session-{next(self.ids)}"
        self.sessions[session_id] = {"request": call.json, "finished": None}
        return reply({"session_id": session_id, "type": "create_session"})

    def heartbeat(self, call: Call) -> Reply:
        return reply({"type": "session_heartbeat"})

    def finish_session(self, call: Call) -> Reply:
        self.sessions[call.params[0]]["finished"] = call.json
        return Reply(204, headers={"content-type": None})

    def list_sessions(self, call: Call) -> Reply:
        return reply({"sessions": page(call, list(self.sessions), 20)})

    def get_session(self, call: Call) -> Reply:
        session_id = call.params[0]
        if session_id not in self.sessions:
            return reply({"detail": f"no session {session_id}"}, 404)
        given = self.sessions[session_id]["request"]
        of = [
            [name for name in names if name.startswith(f"{session_id}:")]
            for names in (self.runs, self.samplers)
        ]
        known = {key: given.get(key) for key in ("user_metadata", "display_name")}
        return reply({"training_run_ids": of[0], "sampler_ids": of[1], **known})

    def search_sessions(self, call: Call) -> Reply:
        known = {"created_at": WHEN, "owner": "tml:user:1", "project_id": "p", "checkpoints_count": 0}
        found = [{"session_id": name, "status": {"type": "active"}, **known} for name in self.sessions]
        return reply({"sessions": found[: call.json.get("limit", 50)], "next_cursor": None})

    def trace_export(self, call: Call) -> Reply:
        return reply({"status": "ready", "url": f"{self.url}/files/trace"})

    # --- runs

    def create_model(self, call: Call) -> Reply:
        body = call.json
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        if known := self.seen.get((model_id, 0)):
            return reply({"request_id": known.request_id})
        rank = (body.get("lora_config") or {}).get("rank", 32)
        self.runs[model_id] = Run(model_id, body["base_model"], rank)
        made = {"model_id": model_id, "type": "create_model"}
        promise = Promise(self.new_id(), "create_model", lambda: (None, made))
        self.seen[model_id, 0] = promise
        answer = self.accept(call, promise)
        self.begin(promise)
        return answer

    def get_info(self, call: Call) -> Reply:
        run = self.runs[call.json["model_id"]]
        data = {"arch": "stub", "model_name": run.base_model, "tokenizer_id": None}
        known = {"is_lora": True, "lora_rank": run.rank, "model_name": run.base_model, "type": "get_info"}
        return reply({"model_id": run.model_id, "model_data": data, **known})

    def forward_backward(self, call: Call) -> Reply:
        binary = PROTOBUF in call.request.headers.get("content-type", "")
        if binary and self.json_only:
            return reply({"detail": "protobuf is not understood here"}, 415)
        given = canned.read_pass(plain(call.request)) if binary else canned.read_json_pass(call.json)

        def make() -> tuple[bytes, Any]:
            metrics = self.metrics(given) if callable(self.metrics) else self.metrics
            as_json = functools.partial(canned.pass_json, given, metrics)
            return canned.pass_output(given.shapes, metrics), as_json

        op = "forward" if given.forward_only else "forward_backward"
        return self.accept_numbered(call, op, given.model_id, given.seq_id, make)

    def optim_step(self, call: Call) -> Reply:
        made = {"metrics": {"grad_norm": 1.0}}
        return self.accept_numbered(call, "optim_step", *numbered(call), lambda: (None, made))

    def unload_model(self, call: Call) -> Reply:
        made = {"model_id": call.json["model_id"], "type": "unload_model"}
        return self.accept_free(call, "unload_model", made)

    def create_custom_loss(self, call: Call) -> Reply:
        made = {"loss_id": f"loss-{call.json['custom_loss_seq_id']}", "type": "create_custom_loss"}
        return self.accept_free(call, "create_custom_loss", made)

    # --- weights

    def save(self, call: Call) -> Reply:
        """All three saves; one without a name publishes an adapter and opens a sampling session for it."""
        op, body = call.request.op, call.json
        model_id, seq_id = numbered(call)

        def make() -> tuple[None, Any]:
            run = self.runs[model_id]
            if body.get("path") is None:
                session_id, number = model_id.partition(":train:")[0], body["sampling_session_seq_id"]
                return None, {
                    "sampling_session_id": self._open_sampler(session_id, number, run.base_model, None)
                }
            path = f"tinker://{model_id}/{FOLDERS[op]}/{body['path']}"
            self.checkpoints[path] = checkpoint(path, body)
            return None, {"path": path, "type": op}

        return self.accept_numbered(call, op, model_id, seq_id, make)

    def load_weights(self, call: Call) -> Reply:
        body = call.json
        if body.get("session_id") is not None:  # a run created from a checkpoint, addressed by its session
            model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
            self.runs.setdefault(
                model_id, Run(model_id, body.get("base_model") or self._base_of(body["path"]))
            )
            made = {"model_id": model_id, "path": body["path"], "type": "load_weights"}
            return self.accept_free(call, "load_weights", made)
        made = {"path": body["path"], "type": "load_weights"}
        return self.accept_numbered(call, "load_weights", *numbered(call), lambda: (None, made))

    def _base_of(self, path: str) -> str:
        run = self.runs.get(path.removeprefix("tinker://").partition("/")[0])
        return run.base_model if run else self.models[0]

    def weights_info(self, call: Call) -> Reply:
        path = call.json["tinker_path"]
        run = self.runs.get(path.removeprefix("tinker://").partition("/")[0])
        parts = {"train_unembed": True, "train_mlp": True, "train_attn": True}
        known = {"is_lora": True, "lora_rank": run.rank if run else 32, **parts}
        return reply({"base_model": self._base_of(path), **known})

    def copy_weights(self, call: Call) -> Reply:
        name = call.json["source_path"].rpartition("/")[2]
        path = f"tinker://copy-{next(self.ids)}/weights/{name}"
        self.checkpoints[path] = checkpoint(path, {})
        return reply({"tinker_path": path})

    # --- sampling

    def _open_sampler(self, session_id: str, number: int, base_model: str, path: str | None) -> str:
        sampler_id = f"{session_id}:sample:{number}"
        self.samplers[sampler_id] = {"sampler_id": sampler_id, "base_model": base_model, "model_path": path}
        return sampler_id

    def create_sampling_session(self, call: Call) -> Reply:
        body, path = call.json, call.json.get("model_path")
        base = body.get("base_model") or self._base_of(path or "")
        sampler_id = self._open_sampler(body["session_id"], body["sampling_session_seq_id"], base, path)
        return reply({"sampling_session_id": sampler_id, "type": "create_sampling_session"})

    def join_sampling_session(self, call: Call) -> Reply:
        return reply({"client_counter": next(self.ids), "type": "join_sampling_session"})

    def get_sampler(self, call: Call) -> Reply:
        found = self.samplers.get(call.params[0])
        return reply(found) if found else reply({"detail": f"no sampler {call.params[0]}"}, 404)

    def asample(self, call: Call) -> Reply:
        body = call.json
        sampler_id, seq_id = body["sampling_session_id"], body["seq_id"]
        known = self.seen.get((sampler_id, seq_id))
        if known is None or known.request_id in self.gone:
            binary, value = canned.sample_output(body), functools.partial(canned.sample_json, body)
            channel = self.channel(sampler_id, seq_id // 1_000_000_000)
            known = Promise(self.new_id(), "asample", lambda: (binary, value), channel=channel)
            self.seen[sampler_id, seq_id] = known
            self.accept(call, known)
            self.begin(known)
        ids = [f"{known.request_id}.{index}" for index in range(body.get("num_samples", 1))]
        return reply({"request_id": known.request_id, "sample_sequence_ids": ids})

    # --- REST

    def list_runs(self, call: Call) -> Reply:
        runs = page(call, [self._run_info(run) for run in self.runs.values()], 20)
        return reply({"training_runs": runs, "cursor": cursor(call, len(self.runs), 20)})

    def get_run(self, call: Call) -> Reply:
        run = self.runs.get(call.params[0])
        return reply(self._run_info(run)) if run else reply({"detail": f"no run {call.params[0]}"}, 404)

    def _run_info(self, run: Run) -> dict[str, Any]:
        known = {
            "model_owner": "tml:user:1",
            "is_lora": True,
            "lora_rank": run.rank,
            "last_request_time": WHEN,
        }
        return {"training_run_id": run.model_id, "base_model": run.base_model, "corrupted": False, **known}

    def list_checkpoints(self, call: Call) -> Reply:
        return reply({"checkpoints": self._checkpoints_of(call.params[0]), "cursor": None})

    def list_all_checkpoints(self, call: Call) -> Reply:
        found = page(call, list(self.checkpoints.values()), 100)
        return reply({"checkpoints": found, "cursor": cursor(call, len(self.checkpoints), 100)})

    def _checkpoints_of(self, run_id: str) -> list[dict[str, Any]]:
        return [value for path, value in self.checkpoints.items() if path.startswith(f"tinker://{run_id}/")]

    def change_checkpoint(self, call: Call) -> Reply:
        """Delete, publish, unpublish, and set the time to live."""
        run_id, checkpoint_id, *_ = call.params
        path = f"tinker://{run_id}/{checkpoint_id}"
        if path not in self.checkpoints:
            return reply({"detail": f"no checkpoint {path}"}, 404)
        match call.request.method, call.request.path.rpartition("/")[2]:
            case "PUT", "ttl":
                self.checkpoints[path]["expires_at"] = None if call.json["ttl_seconds"] is None else WHEN
            case method, "publish":
                self.checkpoints[path]["public"] = method == "POST"
            case _:
                del self.checkpoints[path]
        return Reply(204, headers={"content-type": None})

    def archive(self, call: Call) -> Reply:
        expires = "Fri, 02 Jan 2026 03:04:05 GMT"
        return Reply(302, headers={"location": f"{self.url}/files/archive", "expires": expires})

    def external_urls(self, call: Call) -> Reply:
        return reply(
            {"urls": {"adapter_config.json": f"{self.url}/files/adapter_config.json"}, "expires": WHEN}
        )

    def audit(self, call: Call) -> Reply:
        return reply({"entries": [{"timestamp": WHEN, "event": "checkpoint.saved", "event_details": {}}]})

    def billing_events(self, call: Call) -> Reply:
        event = {
            "bucket_start": WHEN,
            "bucket_end": WHEN,
            "event_info": {"type": "training", "token_count": 7},
        }
        return reply({"data": [event], "sessions": {}})

    def billing_storage(self, call: Call) -> Reply:
        return reply({"data": [{"checkpoint_count": 1, "size_bytes": 10, "size_gigabytes": 1e-8}]})

    def nothing(self, call: Call) -> Reply:
        return Reply(204, headers={"content-type": None})

    def healthz(self, call: Call) -> Reply:
        return reply({"status": "ok"})

    def file(self, call: Call) -> Reply:
        return Reply(200, b"stub file", {"content-type": "application/octet-stream"})

    def missing(self, call: Call) -> Reply:
        return reply({"detail": f"no such endpoint: {call.request.method} {call.request.path}"}, 404)


def checkpoint(path: str, body: dict[str, Any]) -> dict[str, Any]:
    folder, name = path.removeprefix("tinker://").split("/")[1:]
    known = {
        "checkpoint_id": f"{folder}/{name}",
        "checkpoint_type": KINDS[folder],
        "time": WHEN,
        "size_bytes": 10,
    }
    expires = WHEN if body.get("ttl_seconds") else None
    metadata = body.get("user_metadata")
    return {"tinker_path": path, "public": False, "expires_at": expires, "user_metadata": metadata, **known}


def plain(request: Request) -> bytes:
    if request.headers.get("content-encoding") != "zstd":
        return request.body
    from backports import zstd

    return zstd.decompress(request.body)


def numbered(call: Call) -> tuple[str, int]:
    return call.json["model_id"], call.json["seq_id"]


def span(call: Call, limit: int) -> tuple[int, int]:
    return int(call.request.query.get("offset", 0)), int(call.request.query.get("limit", limit))


def page(call: Call, items: list[Any], limit: int) -> list[Any]:
    start, size = span(call, limit)
    return items[start : start + size]


def cursor(call: Call, total: int, limit: int) -> dict[str, int]:
    offset, size = span(call, limit)
    return {"offset": offset, "limit": size, "total_count": total}


Handler = Callable[[Api, Call], Reply | None]
RUN_CHECKPOINT = API + r"training_runs/([^/]+)/checkpoints/([^/]+/[^/]+)"
EXACT: dict[tuple[str, str], Handler] = {
    (method, API + path): handler
    for method, path, handler in [
        ("POST", "client/config", Api.client_config),
        ("POST", "client/dynamic_config", Api.client_config),
        ("POST", "auth/token", Api.auth_token),
        ("GET", "auth/apikey/me", Api.apikey),
        ("DELETE", "auth/apikey/me", Api.nothing),
        ("GET", "healthz", Api.healthz),
        ("GET", "get_server_capabilities", Api.capabilities),
        ("POST", "telemetry", Api.take_telemetry),
        ("POST", "create_session", Api.create_session),
        ("POST", "session_heartbeat", Api.heartbeat),
        ("GET", "sessions", Api.list_sessions),
        ("POST", "sessions/search", Api.search_sessions),
        ("POST", "create_model", Api.create_model),
        ("POST", "get_info", Api.get_info),
        ("POST", "forward_backward", Api.forward_backward),
        ("POST", "forward", Api.forward_backward),
        ("POST", "optim_step", Api.optim_step),
        ("POST", "unload_model", Api.unload_model),
        ("POST", "create_custom_loss", Api.create_custom_loss),
        ("POST", "save_weights", Api.save),
        ("POST", "save_weights_for_sampler", Api.save),
        ("POST", "save_weights_external", Api.save),
        ("POST", "load_weights", Api.load_weights),
        ("POST", "weights_info", Api.weights_info),
        ("POST", "copy_weights", Api.copy_weights),
        ("POST", "create_sampling_session", Api.create_sampling_session),
        ("POST", "join_sampling_session", Api.join_sampling_session),
        ("POST", "asample", Api.asample),
        ("POST", "retrieve_future", Api.retrieve_future),
        ("POST", "retrieve_futures", Api.retrieve_futures),
        ("POST", "cancel_future", Api.cancel_future),
        ("GET", "training_runs", Api.list_runs),
        ("GET", "checkpoints", Api.list_all_checkpoints),
        ("GET", "audit", Api.audit),
        ("GET", "billing/usage/events", Api.billing_events),
        ("GET", "billing/usage/checkpoints/current", Api.billing_storage),
    ]
}
PATTERNS: list[tuple[str, re.Pattern[str], Handler]] = [
    (methods, re.compile(pattern), handler)
    for methods, pattern, handler in [
        ("POST", API + r"sessions/([^/]+)/finish", Api.finish_session),
        ("PUT", API + r"sessions/([^/]+)/project", Api.nothing),
        ("DELETE", API + r"sessions/([^/]+)", Api.nothing),
        ("DELETE", API + r"training_runs/([^/]+)", Api.nothing),
        ("GET", API + r"sessions/([^/]+)/trace_export", Api.trace_export),
        ("GET", API + r"sessions/([^/]+)", Api.get_session),
        ("GET", API + r"samplers/([^/]+)", Api.get_sampler),
        ("GET", API + r"training_runs/([^/]+)", Api.get_run),
        ("GET", API + r"training_runs/([^/]+)/checkpoints", Api.list_checkpoints),
        ("GET", RUN_CHECKPOINT + r"/external_weights_urls", Api.external_urls),
        ("GET", RUN_CHECKPOINT + r"/archive", Api.archive),
        ("POST DELETE PUT", RUN_CHECKPOINT + r"/(publish|ttl)", Api.change_checkpoint),
        ("DELETE", RUN_CHECKPOINT, Api.change_checkpoint),
        ("GET", r"/files/(.+)", Api.file),
    ]
]


TRAINING = (Api.forward_backward, Api.optim_step, Api.save, Api.load_weights)


def find_route(method: str, path: str) -> tuple[Handler, tuple[str, ...]]:
    for methods, pattern, handler in PATTERNS:
        if method in methods.split() and (found := pattern.fullmatch(path)):
            return handler, found.groups()
    return Api.missing, ()
