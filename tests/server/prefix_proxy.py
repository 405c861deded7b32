"""A reverse proxy that serves a server below a path, and forwards requests without that path."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_OWN = ("transfer-encoding", "connection", "content-length", "date", "server")


@contextmanager
def prefix_proxy(prefix: str, target: list[tuple[str, int]]) -> Iterator[int]:
    """Its port. `target` gets the server's address, which may be known later."""

    class Forward(BaseHTTPRequestHandler):
        def _forward(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection = http.client.HTTPConnection(*target[0], timeout=60)
            try:
                headers = {
                    name: value for name, value in self.headers.items() if name.lower() != "connection"
                }
                connection.request(self.command, self.path[len(prefix) :] or "/", body, headers)
                response = connection.getresponse()
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in _OWN:
                        self.send_header(name, value)
                self.end_headers()
                while piece := response.read1():  # streams, too
                    self.wfile.write(piece)
            except OSError:  # the browser left
                return
            finally:
                connection.close()

        do_GET = do_POST = _forward

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Forward)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
