"""A hub on loopback, as far as its own library talks to one that a folder is pushed to.

Small files come inside the commit, large ones beside it (git LFS): a commit only names them. Promises:
`files` holds what a clone would have; what is asked in another way is a 404, noted in `strange`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml


class Hub:
    """One user's hub; `commits` are the headers of what was committed, `repos` what was created."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.repos: list[dict[str, Any]] = []
        self.commits: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.strange: list[str] = []
        self._objects: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                allowed = self.headers.get("authorization") == f"Bearer {hub.token}"
                if self.path.startswith("/objects/"):  # whoever has the link may
                    status, reply = hub._store(self.path, body)
                elif not allowed:
                    status, reply = 401, {"error": "Invalid credentials"}
                else:
                    status, reply = hub._answer(self.command, self.path, body)
                content = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_HEAD = handle_any

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        match path.strip("/").split("/"):
            case ["api", "whoami-v2"]:
                return 200, {"type": "user", "name": "ann", "auth": {"type": "access_token"}}
            case ["api", "validate-yaml"]:
                front = yaml.safe_load(json.loads(body)["content"].split("---")[1])
                errors = [] if isinstance(front.get("base_model"), str) else [{"message": "base_model"}]
                return 200, {"errors": errors, "warnings": []}
            case ["api", "repos", "create"]:
                self.repos.append(json.loads(body))
                return 200, {"url": f"{self.url}/ann/{self.repos[-1]['name']}"}
            case ["api", "models", _, _, "preupload", _]:
                files = [file["path"] for file in json.loads(body)["files"]]
                return 200, {"files": [self._kept(name) for name in files]}
            case [_, git, "info", "lfs", "objects", "batch"] if git.endswith(".git"):
                return 200, {
                    "transfer": "basic",
                    "objects": list(map(self._upload, json.loads(body)["objects"])),
                }
            case ["api", "models", _, _, "commit", revision]:
                return self._commit([json.loads(line) for line in body.splitlines()], revision, query)
        self.strange.append(f"{method} {path}")
        return 404, {"error": "not here"}

    def _kept(self, name: str) -> dict[str, Any]:
        mode = "lfs" if name.endswith(".safetensors") else "regular"
        return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.url}/objects/{wanted['oid']}"
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": {"href": href}}}

    def _store(self, path: str, body: bytes) -> tuple[int, Any]:
        oid = path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            return 422, {"error": "not what it says it is"}
        self._objects[oid] = body
        return 200, {}

    def _commit(self, lines: list[dict[str, Any]], revision: str, query: str) -> tuple[int, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append({**value, "revision": revision, "query": query})
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self._objects[value["oid"]]
        oid = f"{len(self.commits):040x}"
        pull = {"pullRequestUrl": f"{self.url}/ann/adapter/discussions/1"} if "create_pr=1" in query else {}
        return 200, {"commitUrl": f"{self.url}/ann/adapter/commit/{oid}", "commitOid": oid, **pull}
