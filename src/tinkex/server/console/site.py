"""What all pages share: templates, headers, errors, the login, and where files of the console are.

A page is a function of a request and a visitor. It loads nothing from elsewhere, and runs no inline script or
style. Whatever changes something must carry its session's form token. What takes long runs on threads of the
console's own, and a user's requests are limited, so that pages cannot hold up the API. Knows no run and no
metric.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tinkex.engine.protocol import EngineError
from tinkex.errors import InvalidInputError
from tinkex.server.console import formats
from tinkex.server.console.visitors import Visitor, Visitors
from tinkex.service.peers import Elsewhere
from tinkex.service.refusal import InUse, Refusal

log = logging.getLogger("tinkex.server")
HERE = Path(__file__).parent
MAX_FORM = 64 * 1024
THREADS = 4
OPEN, OPEN_IN_ALL = 64, 512  # requests that are answered at a time, of one user and of all; streams not
MAX_FORWARDED = 1024 * 1024
BIG = 2048  # bytes from which a page is worth compressing
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FORGED = "this request does not come from a page of this console: reload the page and try again"

Handler = Callable[[Request], Awaitable[Response]]
Page = Callable[[Request, Visitor], Awaitable[Response]]
Form = dict[str, str]
T = TypeVar("T")


async def _not_compressed(body: bytes, accept_encoding: str) -> tuple[str, bytes]:
    return "", body


async def _nothing(what: str = "") -> None:
    """For a console without a server."""


async def _nowhere(request: Request, body: bytes, there: Elsewhere) -> Response:
    raise there


@dataclass(eq=False)
class ConsoleSite:
    """The frame of all pages."""

    visitors: Visitors
    root: str = ""  # the path below which a proxy serves the console
    ready: Callable[[], bool] = lambda: True
    clean: Callable[[str], str] = str  # an error's text, as users may see it
    count: Callable[[int], None] = lambda status: None  # responses, by status
    compressed: Callable[[bytes, str], Awaitable[tuple[str, bytes]]] = _not_compressed
    synced: Callable[[], Awaitable[None]] = _nothing  # what was changed is on the disk
    check_here: Callable[[str], Awaitable[None]] = _nothing  # Elsewhere if another server has this run
    forward: Callable[[Request, bytes, Elsewhere], Awaitable[Response]] = _nowhere
    routes: list[Route] = field(default_factory=list[Route], init=False)

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "tinkex-console")
        self._in_use = InUse("open pages", OPEN, OPEN_IN_ALL)
        loader = FileSystemLoader(HERE / "templates")
        self._jinja = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self._files, self._version = _static_files()
        filters: dict[str, Any] = self._jinja.filters
        filters.update(formats.FILTERS)
        shared: dict[str, Any] = self._jinja.globals
        shared.update(root=self.root, asset=self.asset, read_only=self.visitors.read_only)
        self.routes += [
            Route("/", self._open(self._home), methods=["GET"]),
            Route("/console", self._open(self._home), methods=["GET"]),
            Route("/console/login", self._open(self._login), methods=["GET", "POST"]),
            Route("/console/static/{version}/{file:path}", self._open(self._static), methods=["GET"]),
        ]
        self.add("/console/logout", self._logout, "POST")

    # -- routes ------------------------------------------------------------------------------------------

    def add(self, path: str, page: Page, *methods: str) -> None:
        """Serve a page to those who are logged in."""

        async def admitted(request: Request) -> Response:
            visitor = self.visitors.find(request)
            if visitor is None:
                return self._to_login(request)
            changes = request.method not in ("GET", "HEAD")
            if changes:
                await self._check_token(request, visitor)
            self._in_use.take(visitor.name, 1)
            try:
                if run_id := request.path_params.get("run_id"):
                    await self.check_here(run_id)
                response = await page(request, visitor)
                if changes and not isinstance(response, StreamingResponse):
                    await self.synced()
                return response
            finally:
                self._in_use.give_back(visitor.name, 1)

        self.routes.append(Route(path, self._open(admitted), methods=list(methods) or ["GET"]))

    def _open(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                if not self.ready():
                    raise Refusal(503, "the server is starting, or stopping: reload in a moment")
                response = await self._answer(handler, request)
            except Exception as error:
                response = self._failure(request, error)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            await self._compress(request, response)
            self.count(response.status_code)
            return response

        return handle

    async def _answer(self, handler: Handler, request: Request) -> Response:
        try:
            return await handler(request)
        except Elsewhere as there:
            return await self.forward(request, await self.body(request, MAX_FORWARDED), there)

    async def _compress(self, request: Request, response: Response) -> None:
        """Compress a large page for a browser that takes it.

        A page has a secret, its form token, and text of its address. Other sites cannot guess the secret from
        sizes: what they request has no cookie.
        """
        accepted = request.headers.get("accept-encoding", "")
        if isinstance(response, StreamingResponse | FileResponse) or len(response.body) < BIG or not accepted:
            return
        encoding, body = await self.compressed(bytes(response.body), accepted)
        if encoding:
            response.body = body
            response.headers.update({"content-encoding": encoding, "content-length": str(len(body))})
            response.headers["vary"] = "accept-encoding"

    async def off_loop(self, work: Callable[..., T], *given: Any) -> T:
        """Do something on a thread of the console."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    async def _check_token(self, request: Request, visitor: Visitor) -> None:
        given = request.headers.get("x-form-token", "")
        if not given and "form" in request.headers.get("content-type", ""):
            given = (await self.form(request)).get("form_token", "")
        same_site = request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
        if not same_site or not hmac.compare_digest(given.encode(), visitor.form_token.encode()):
            raise Refusal(403, _FORGED)

    async def body(self, request: Request, most: int = MAX_FORM) -> bytes:
        """A request's body, which may be read again."""
        if not hasattr(request.state, "console_body"):
            read = bytearray()
            async for chunk in request.stream():
                read += chunk
                if len(read) > most:
                    raise Refusal(413, f"at most {most} bytes may be sent here")
            request.state.console_body = bytes(read)
        return request.state.console_body

    async def form(self, request: Request) -> Form:
        return dict(parse_qsl((await self.body(request)).decode(errors="replace"), keep_blank_values=True))

    async def chosen(self, request: Request, name: str) -> list[str]:
        """The values of a form's field that may be given several times, each once."""
        pairs = parse_qsl((await self.body(request)).decode(errors="replace"))
        return list(dict.fromkeys(value for key, value in pairs if key == name))

    # -- responses ---------------------------------------------------------------------------------------

    def render(
        self, template: str, visitor: Visitor | None = None, status: int = 200, **values: Any
    ) -> Response:
        return HTMLResponse(self.text(template, visitor, **values), status)

    def text(self, template: str, visitor: Visitor | None = None, **values: Any) -> str:
        return self._jinja.get_template(template).render(visitor=visitor, **values)

    def redirect(self, path: str, request: Request | None = None) -> Response:
        """Go to another page; htmx must be told in its own way."""
        if request is not None and "hx-request" in request.headers:
            return Response(status_code=204, headers={"hx-redirect": f"{self.root}{path}"})
        return RedirectResponse(f"{self.root}{path}", 303)

    def _failure(self, request: Request, error: Exception) -> Response:
        status = 500
        match error:
            case Refusal(status=status, message=message):
                pass
            case InvalidInputError():
                status, message = 422, str(error)
            case EngineError(category=category, message=message):
                status = 422 if category == "user" else 500
            case _:
                log.error("the page %s failed", request.url.path, exc_info=error)
                message = "the server failed; its log says why"
        message = self.clean(message)
        if "hx-request" in request.headers or "application/json" in request.headers.get("accept", ""):
            return self.render("_notice.html", None, status, message=message)
        return self.render("error.html", None, status, message=message, code=status)

    # -- login -------------------------------------------------------------------------------------------

    async def _home(self, request: Request) -> Response:
        return self.redirect("/console/runs")

    def _to_login(self, request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", "") and "hx-request" not in request.headers:
            raise Refusal(401, "log in first")
        if request.headers.get("sec-fetch-site") == "cross-site" and request.method == "GET":
            # A link on another site: the browser withholds the cookie until the page loads itself again.
            return self.render("again.html")
        wanted = f"?{request.url.query}" if request.url.query else ""
        return self.redirect(f"/console/login?next={quote(request.url.path + wanted)}", request)

    async def _login(self, request: Request) -> Response:
        """The page where a key is pasted; a link with `key` logs in at once, where that is offered."""
        wanted, key = next_page(request.query_params.get("next", "")), ""
        if request.method == "POST":
            form = await self.form(request)
            wanted, key = next_page(form.get("next", "")), form.get("key", "").strip()
            if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
                raise Refusal(403, _FORGED)
        elif self.visitors.read_only:
            key = request.query_params.get("key", "")
        problem = ""
        if key or request.method == "POST":
            response = self.redirect(wanted)
            try:
                self.visitors.log_in(response, key)
                return response
            except Refusal as refusal:
                problem = refusal.message
        status = 401 if problem else 200
        return self.render("login.html", None, status, next=wanted, problem=problem, hint=self.visitors.hint)

    async def _logout(self, request: Request, visitor: Visitor) -> Response:
        response = self.redirect("/console/login", request)
        self.visitors.log_out(response, request, visitor)
        return response

    # -- files -------------------------------------------------------------------------------------------

    def asset(self, file: str) -> str:
        """The address of a file of the console; it changes with its content."""
        assert file in self._files, file
        return f"{self.root}/console/static/{self._version}/{file}"

    async def _static(self, request: Request) -> Response:
        known = self._files.get(request.path_params["file"])
        if known is None or request.path_params["version"] != self._version:
            raise Refusal(404, "there is no such file")
        kind = _TYPES[Path(request.path_params["file"]).suffix]
        return Response(known, 200, {"cache-control": "public, max-age=31536000, immutable"}, kind)


def page_of(request: Request, size: int, name: str = "page") -> tuple[int, int]:
    """The number of the page that is asked for, from 1, and how many rows come before it."""
    given = request.query_params.get(name, "1")
    number = max(1, int(given)) if given.isdecimal() and len(given) < 9 else 1
    return number, (number - 1) * size


def as_json(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def _static_files() -> tuple[dict[str, bytes], str]:
    """The files that pages load, by name, and a version of them all: modules name each other by path."""
    found: dict[str, bytes] = {}
    for path in sorted((HERE / "static").rglob("*")):
        if path.suffix in _TYPES:
            found[path.relative_to(HERE / "static").as_posix()] = path.read_bytes()
    return found, hashlib.sha256(b"".join(found.values())).hexdigest()[:12]


def next_page(given: str) -> str:
    """Where to go after a login: a page of ours, whatever the link says."""
    ours = re.fullmatch(r"/console/[\w/:.,;=&?%~+-]*", given) and ".." not in given
    return given if ours else "/console/runs"
