"""A package index on loopback, for pip: one wheel, served whole, slowly, or not at all."""

from __future__ import annotations

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Index:
    """`requests` counts the fetches of the wheel; half of it is sent while `open` is not set."""

    def __init__(self, project: str, file: str, body: bytes) -> None:
        self.requests = 0
        self.open = threading.Event()
        self.open.set()
        self.halfway = threading.Event()  # half of the wheel is on its way
        index, page = self, f"<!DOCTYPE html><html><body><a href='/{file}'>{file}</a></body></html>".encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == f"/simple/{project}/":
                    self._send("text/html", page)
                elif self.path == f"/{file}":
                    index.requests += 1
                    self._send("application/octet-stream", body)
                else:
                    self.send_error(404)

            def _send(self, kind: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if kind == "text/html" or index.open.is_set():
                    self.wfile.write(body)
                    return
                self.wfile.write(body[: len(body) // 2])
                index.halfway.set()
                index.open.wait(60)  # a test lets it go, or is over
                with suppress(OSError):
                    self.wfile.write(body[len(body) // 2 :])

            def log_message(self, format: str, *args: object) -> None:
                """Not needed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/simple"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
