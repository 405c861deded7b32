"""Looks at the console as a browser does: cookies, forms, pages, streams of events, curves."""

from __future__ import annotations

import re
from contextlib import closing
from html.parser import HTMLParser
from itertools import accumulate
from typing import Any
from urllib.parse import urlencode

from tests.server.conftest import Answer, Running

HTML = {"accept": "text/html"}


class Browser:
    """Keeps a cookie, as a browser does; follows nothing by itself."""

    def __init__(self, server: Running, key: str | None = None) -> None:
        self.server, self.cookie, self.token = server, "", ""
        if key is not None:
            self.log_in(key)

    def get(self, path: str, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.server.ask("GET", path, headers={**HTML, "cookie": self.cookie, **named}, key=None)

    def post(self, path: str, form: dict[str, str], **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {**HTML, "cookie": self.cookie, "content-type": "application/x-www-form-urlencoded", **named}
        return self.server.ask("POST", path, urlencode(form).encode(), headers=sent, key=None)

    def log_in(self, key: str) -> Answer:
        answer = self.post("/console/login", {"key": key})
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        found = re.search(rb'data-form-token="(\w+)"', self.get("/console/runs").body)
        self.token = found[1].decode() if found else ""
        return answer


class Page(HTMLParser):
    """A page's text, tags and links."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.text, self.tags, self.links = "", list[str](), list[str]()
        self.attributes: set[str] = set()
        self.feed(body.decode())

    def handle_data(self, data: str) -> None:
        self.text += f" {data.strip()}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name in ("href", "src", "action") and value]


def drawn(told: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """The curves of a page as x and y: the differences of the x axes added up."""
    axes = [[round(x, 2) for x in accumulate(steps)] for steps in told["x"]]
    return {key: (axes[number], y) for key, (number, y) in told["curves"].items()}


def read_events(server: Running, path: str, cookie: str, count: int) -> list[tuple[str, str]]:
    """The first events of a stream: their names and data."""
    connection = server.connect()
    with closing(connection):
        connection.request("GET", path, headers={"accept": "text/event-stream", "cookie": cookie})
        response, found, name = connection.getresponse(), list[tuple[str, str]](), ""
        assert response.status == 200, response.read()
        while len(found) < count:
            line = response.readline().decode().rstrip("\n")
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, line.removeprefix("data: ")))
        return found
