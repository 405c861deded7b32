"""Records what official SDKs say, and what they understand of what we say, for the tests to compare with.

    .venv/bin/python tests/golden/record.py encode
    OFFICIAL/bin/python tests/golden/record.py record     # an environment with an official SDK and torch

`encode` writes our replies to replies.jsonl. `record` drives the SDK through its whole surface (flows.py)
against a stub (stub.py): what it sent goes to requests-VERSION.jsonl, how it read our replies to
views-VERSION.json, and which types it has to types-0.36.0.json.
The tests need neither this script nor an official SDK.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JSON, PROTO = "application/json", "application/x-protobuf"


# -- ours ------------------------------------------------------------------------------------------------


def encode() -> None:
    sys.path.insert(0, str(HERE))
    import values

    from tinkex.wire import codec

    rows = []
    for name, value in {**values.OUTPUTS, **values.SAMPLES}.items():
        for accept in (PROTO, JSON):
            kind, body = codec.encode_result(value, accept)
            rows.append({"name": name, "type": type(value).__name__, "content_type": kind, "body": body})
    for value in values.REPLIES:
        kind, body = codec.encode_reply(value)
        rows.append({"name": type(value).__name__, "type": "model", "content_type": kind, "body": body})
    with (HERE / "replies.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps({**row, "body": base64.b64encode(row["body"]).decode()}) + "\n")


def stored_replies() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (HERE / "replies.jsonl").read_text().splitlines()]
    return [{**row, "body": base64.b64decode(row["body"])} for row in rows]


# -- theirs ----------------------------------------------------------------------------------------------


def floats(values: Any) -> Any:
    """NaN as None, so that a view is JSON."""
    return None if values is None else [None if v is None or v != v else float(v) for v in values]


def tensor_view(tensor: Any) -> Any:
    if tensor is None:
        return None
    array = tensor.to_numpy()
    return {"dtype": tensor.dtype, "shape": list(array.shape), "data": floats(array.reshape(-1).tolist())}


def output_view(output: Any) -> Any:
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [{k: tensor_view(v) for k, v in r.items()} for r in output.loss_fn_outputs],
        "metrics": dict(output.metrics),
    }


def samples_view(response: Any) -> Any:
    topk = getattr(response, "topk_prompt_logprobs", None)
    view = {
        "sequences": [
            {
                "stop_reason": s.stop_reason,
                "tokens": list(s.tokens),
                "logprobs": floats(s.logprobs),
                "topk_logprobs": getattr(s, "topk_logprobs", None),
            }
            for s in response.sequences
        ],
        "prompt_logprobs": floats(response.prompt_logprobs),
        "topk_prompt_logprobs": topk,
    }
    if hasattr(response, "prompt_alt_tokens"):
        alt = response.prompt_alt_tokens
        view["target_prompt_logprobs"] = tensor_view(response.target_prompt_logprobs)
        view["prompt_cache_hit_tokens"] = response.prompt_cache_hit_tokens
        view["prompt_alt_tokens"] = alt and [tensor_view(alt.tokens), tensor_view(alt.logprobs)]
    return view


def describe(types: Any) -> dict[str, Any]:
    """The names that an SDK's types have, and of each its fields: required, or its default."""
    out: dict[str, Any] = {}
    for name in sorted(n for n in dir(types) if n[0].isupper()):
        cls = getattr(types, name)
        if hasattr(cls, "model_fields"):
            fields = {
                k: "required" if f.is_required() else f.get_default(call_default_factory=True)
                for k, f in cls.model_fields.items()
            }
        elif dataclasses.is_dataclass(cls):
            fields = {f.name: None for f in dataclasses.fields(cls) if not f.name.startswith("_")}
        else:
            fields = {}
        plain = {k: v.model_dump() if hasattr(v, "model_dump") else v for k, v in fields.items()}
        out[name] = plain
    return out


class Recorder:
    """One SDK, one stub, and the replies that the stub gives in turn."""

    def __init__(self) -> None:
        from stub import Stub

        self.replies = stored_replies()
        self.next: str | None = None
        self.stub = Stub(self._reply)
        self.views: dict[str, Any] = {}

    def _reply(self, kind: str, accept: str, count: int) -> tuple[int, str, bytes]:
        if kind == "hold":
            time.sleep(0.05)
            return 408, JSON, b"{}"
        name = self.next or (f"samples-{count}" if kind == "asample" else "output-plain")
        wanted = PROTO if PROTO in accept else JSON
        row = next(r for r in self.replies if r["name"] == name and r["content_type"] == wanted)
        return 200, row["content_type"], row["body"]

    def read_models(self, types: Any) -> None:
        for row in self.replies:
            cls = getattr(types, row["name"], None) if row["type"] == "model" else None
            if cls is not None:
                view = cls.model_validate_json(row["body"]).model_dump(mode="json")
                self.views.setdefault(row["name"], []).append(view)

    def read_results(self, forward: Callable[[], Any], sample: Callable[[int, bool], Any]) -> None:
        recorded = len(self.stub.seen)
        for name, kind in dict.fromkeys((r["name"], r["type"]) for r in self.replies):
            self.next = name
            if kind == "ForwardBackwardOutput":
                self.views[name] = output_view(forward())
            elif kind == "SampleResponse":
                count = 2 if name == "samples-2" else 1
                self.views[name] = samples_view(sample(count, name == "samples-rich"))
        self.next = None
        del self.stub.seen[recorded:]  # the same request again and again

    def save(self, version: str) -> None:
        seen = []
        for row in self.stub.seen:
            row = scrub(row)
            if row not in seen:
                seen.append(row)
        with (HERE / f"requests-{version}.jsonl").open("w") as file:
            for row in seen:
                file.write(json.dumps(row) + "\n")
        text = json.dumps(self.views, indent=0, sort_keys=True)
        (HERE / f"views-{version}.json").write_text(text + "\n")
        if version == "0.36.0":
            text = json.dumps(describe(importlib.import_module("tinker.types")), indent=0)
            (HERE / f"types-{version}.json").write_text(text + "\n")


def scrub(row: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from machine to machine, or from run to run."""
    body = base64.b64decode(row["body"])
    if not body.startswith(b"{"):
        return row
    fields = json.loads(body)
    if row["path"].endswith("/telemetry"):
        fields.update({k: "x" for k in ("platform", "process_uuid") if k in fields})
        if str(fields["session_id"]).startswith("sessionless"):
            fields["session_id"] = "sessionless-s"
        for event in fields["events"]:
            event.update(event_id="e", timestamp="2026-01-02T03:04:05Z")
            event.update({k: "x" for k in ("traceback", "duration") if k in event})
            if "event_data" in event:
                event["event_data"] = {}
    if row["path"].endswith("/create_session") and isinstance(fields.get("user_metadata"), dict):
        fields["user_metadata"] = {k: v for k, v in fields["user_metadata"].items() if k == "who"}
    if "request_id" in fields:  # "sample-12"
        fields["request_id"] = fields["request_id"].partition("-")[0]
    if fields.get("target", {}).get("cloned_sampler_id"):
        fields["target"]["cloned_sampler_id"] = 7
    return {**row, "body": base64.b64encode(json.dumps(fields).encode()).decode()}


def main() -> None:
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["encode"]:
        return encode()
    version = importlib.metadata.version("tinker")
    sys.path.insert(0, str(HERE))
    import flows

    recorder = Recorder()
    (flows.everything if version == "0.36.0" else flows.json_only)(recorder)
    time.sleep(11)  # a heartbeat, and telemetry
    recorder.save(version)
    sys.stdout.flush()
    os._exit(0)  # an SDK's background threads must not keep us here


if __name__ == "__main__":
    main()
