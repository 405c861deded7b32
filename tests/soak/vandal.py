"""Somebody who knows the address and nothing else: garbage, half a body, bombs, polls hung up on."""

from __future__ import annotations

import random
import socket
import threading
import zlib
from collections import Counter
from urllib.parse import urlsplit

from tinkex.wire import ops

PATHS = [(op.method, op.path) for op in ops.OPS.values()]
STATUSES_SEEN_LIMIT = 500  # a 5xx would be the server's fault


class Vandal(threading.Thread):
    """Throws things until it is told to stop; `faults` are answers that blame the server."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(name="vandal", daemon=True)
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._random = random.Random(seed)
        self._over = threading.Event()
        self.happened, self.faults = Counter[str](), list[str]()

    def stop(self) -> None:
        self._over.set()
        self.join(30)

    def run(self) -> None:
        while not self._over.wait(self._random.uniform(0.0, 0.03)):
            try:
                self._throw()
            except OSError:  # the server is being restarted
                self._over.wait(0.2)

    def _throw(self) -> None:
        method, path = self._random.choice(PATHS)
        body, encoding = self._body()
        claimed = len(body) + self._random.choice([0, 0, 0, 5, 10**7])
        head = (
            f"{method} {path.replace('{', '').replace('}', '')} HTTP/1.1\r\nHost: x\r\n"
            f"X-API-Key: tml-vandal\r\nContent-Type: {self._random.choice(KINDS)}\r\n"
            f"{encoding}Content-Length: {claimed}\r\nConnection: close\r\n\r\n"
        )
        with socket.create_connection(self._address, timeout=5) as connection:
            connection.settimeout(self._random.choice([0.01, 0.5]))  # some hang up before the answer
            connection.sendall(head.encode() + body)
            self.happened["garbage"] += 1
            if claimed != len(body):
                self.happened["disconnects"] += 1
                return  # half a body, and gone
            try:
                said = connection.recv(4096)
            except TimeoutError:
                self.happened["disconnects"] += 1
                return
        status = int(said.split(b" ")[1]) if said.startswith(b"HTTP/1.1 ") else 0
        if status >= STATUSES_SEEN_LIMIT and status != 503:  # 503: it is stopping, and says so
            self.faults.append(f"{method} {path}: {said[:300]!r}")

    def _body(self) -> tuple[bytes, str]:
        match self._random.randrange(5):
            case 0:
                return b"", ""
            case 1:
                return self._random.randbytes(self._random.randrange(400)), ""
            case 2:
                return self._random.choice(JSONS), ""
            case 3:
                return zlib.compress(bytes(30_000_000), 9, wbits=31), "Content-Encoding: gzip\r\n"
            case _:
                return b"\x28\xb5\x2f\xfd" + self._random.randbytes(40), "Content-Encoding: zstd\r\n"


KINDS = ["application/json", "application/x-protobuf", "text/plain"]
JSONS = [
    b"{", b"[]", b"null", b'{"model_id": "x", "seq_id": 1}', b'{"session_id": "nobody", "seq_id": -1}',
    b'{"sampling_session_id": "x", "prompt": {"chunks": [{"type": "encoded_text"}]}}',
    b'{"request_id": "a#1"}', b"[" * 5000,
]  # fmt: skip
