"""Settings of a process: every environment variable that a client reads, once, when it is made.

docs/reference.md lists them; `tinkex serve --help` names those of the server, which click reads. HTTP_PROXY,
HTTPS_PROXY, ALL_PROXY and NO_PROXY work as usual, except for loopback addresses, which need no proxy.
No other module reads the environment.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import InitVar, asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit, urlunsplit

from tinkex.errors import InvalidInputError
from tinkex.strict import check_seconds, strict

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
HOSTED_CONSOLE = "https://tinker.thinkingmachines.ai"
LOCAL = "local"  # as a base URL: models run in this process, even if there is a key
UNSET: Any = object()


@strict
class Timeouts:
    """Time limits in seconds. docs/client.md has the table."""

    connect: float = 4.0  # one TCP and TLS handshake; two fit within `unreachable`
    request: float = 60.0  # one HTTP request and its reply
    long_poll: float = 45.0  # one long poll for a result
    unreachable: float = 9.0  # a host that never replied: an error within 10 s, start-up included
    lost: float = 300.0  # a host that replied before and no longer does
    close: float = 5.0  # finishing a session at close() and at exit
    heartbeat_interval: float = 10.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_seconds(f"Timeouts.{name}", value)


@strict
class Timeout:
    """Time limits of one HTTP request in seconds, as the official package exports them; None: no limit.

    No call takes one, here or there: it is for programs that name it. Ours are `Timeouts`.

    >>> Timeout(60, connect=5)
    Timeout(connect=5, read=60, write=60, pool=60)
    """

    timeout: InitVar[float | None] = 60.0  # where no other field is given
    connect: float | None = field(default=UNSET, kw_only=True)
    read: float | None = field(default=UNSET, kw_only=True)
    write: float | None = field(default=UNSET, kw_only=True)
    pool: float | None = field(default=UNSET, kw_only=True)

    def __post_init__(self, timeout: float | None) -> None:
        for name, value in vars(self).copy().items():
            limit = timeout if value is UNSET else value
            if limit is not None:
                check_seconds(f"Timeout.{name}", limit)
            object.__setattr__(self, name, limit)


class RequestOptions(TypedDict, total=False):
    """Options of one HTTP request, as the official package exports them; no call takes them."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool


@dataclass(frozen=True)
class Settings:
    """The environment's settings when a client was made."""

    api_key: str | None = None  # without a key and a URL, the engine runs in this process
    base_url: str | None = None  # "local" is this process, even if there is a key
    credential_cmd: str | None = None
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    telemetry: bool = False
    log: str | None = None
    extra_headers: tuple[tuple[str, str], ...] = ()
    home: Path = Path("~/.tinkex")
    tokenizer_dir: Path | None = None
    credentials_file: Path = Path("~/.tinker/credentials.json")
    offline: bool = False
    quantize: str = "none"  # how models in this process keep their frozen matrices
    keep_rollouts: str = ""  # the share of prompts whose samples are kept by models in this process
    no_color: bool = False
    http_proxy: bool = False  # http:// goes through a proxy, which the HTTP library finds

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> Settings:
        """From the environment; an empty variable counts as unset."""
        given: Mapping[str, str] = os.environ if env is None else env

        def get(name: str) -> str | None:
            return given.get(name) or None

        def is_on(name: str) -> bool:
            return given.get(name, "").lower() in ("1", "true", "yes", "on")

        cloudflare = (
            ("CF-Access-Client-Id", get("CLOUDFLARE_ACCESS_CLIENT_ID")),
            ("CF-Access-Client-Secret", get("CLOUDFLARE_ACCESS_CLIENT_SECRET")),
        )
        tokenizer_dir = get("TINKEX_TOKENIZER_DIR")
        return cls(
            api_key=get("TINKER_API_KEY"),
            base_url=get("TINKER_BASE_URL"),
            credential_cmd=get("TINKER_CREDENTIAL_CMD"),
            project_id=get("TINKER_PROJECT_ID"),
            tags=tuple(t.strip() for t in (get("TINKER_TAGS") or "").split(",") if t.strip()),
            telemetry=is_on("TINKER_TELEMETRY"),
            log=get("TINKER_LOG"),
            extra_headers=tuple((name, value) for name, value in cloudflare if value),
            home=Path(get("TINKEX_HOME") or "~/.tinkex").expanduser(),
            tokenizer_dir=Path(tokenizer_dir).expanduser() if tokenizer_dir else None,
            credentials_file=Path("~/.tinker/credentials.json").expanduser(),
            http_proxy=any(map(get, ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"))),
            quantize=get("TINKEX_QUANTIZE") or "none",
            keep_rollouts=get("TINKEX_KEEP_ROLLOUTS") or "",
            no_color=get("NO_COLOR") is not None,
            offline=is_on("HF_HUB_OFFLINE"),
        )

    @property
    def embedded(self) -> bool:
        """Whether models run in this process: neither a key nor a server is set."""
        chosen = self.base_url or self.api_key or self.credential_cmd
        return self.base_url == LOCAL or (not chosen and not self._has_stored_key())

    @property
    def hosted(self) -> bool:
        """Whether the server is the hosted one: a key is set, and no URL or its URL."""
        return not self.embedded and (self.base_url or HOSTED_URL) == HOSTED_URL

    def _has_stored_key(self) -> bool:
        """True also if the file cannot be read: then the use of the key reports why."""
        try:
            return json.loads(self.credentials_file.read_bytes()).get("default") is not None
        except FileNotFoundError:
            return False
        except (OSError, ValueError, AttributeError):
            return True


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def normalize_url(url: str) -> str:
    """One spelling for one server: scheme and host in lower case, no default port, no trailing slash.

    >>> normalize_url("HTTP://LocalHost:80/api/")
    'http://localhost/api'
    """
    if not isinstance(url, str):
        raise InvalidInputError(f"base_url must be a string, got {url!r}")
    try:
        parts = urlsplit(url.strip())
        host, port = (parts.hostname or "").encode("idna").decode().lower(), parts.port
    except ValueError as error:
        raise InvalidInputError(f"base_url {url!r} has a bad host or port: {error}") from None
    scheme = parts.scheme.lower()
    if scheme not in ("http", "https") or not host:
        raise InvalidInputError(f"base_url must look like http://host:port or https://host/path, got {url!r}")
    if ":" in host:
        host = f"[{host}]"
    if port is not None and port != {"http": 80, "https": 443}[scheme]:
        host = f"{host}:{port}"
    return urlunsplit((scheme, host, parts.path.rstrip("/"), "", ""))


def is_loopback(url: str) -> bool:
    """Whether this URL is a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@lru_cache(maxsize=1024)
def is_loopback_host(host: str) -> bool:
    """Whether this host name or address is this machine's own."""
    return is_loopback(f"//[{host}]" if ":" in host else f"//{host}")


def console_url(base_url: str, page: str = "") -> str:
    """The URL of a page of the server's console."""
    root = HOSTED_CONSOLE if base_url == HOSTED_URL else base_url
    return f"{root}/{page}".rstrip("/")


def keep_compiled(home: Path) -> Path:
    """Where compiled kernels are kept: below `home`, unless the environment says where; returns the place."""
    return Path(os.environ.setdefault("TRITON_CACHE_DIR", str(home / "compiled")))


def prepare_ray(*, loopback: bool) -> None:
    """Set what Ray reads from the environment when it is imported.

    No usage reports. With `loopback`, neither Ray nor NCCL takes an address that others can reach.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def make_ray_token() -> None:
    """A token for a cluster that this process starts; its processes inherit it, and no file has it.

    Whatever the environment says: with authentication off, any user of this machine could use the cluster.
    """
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def has_ray_token() -> bool:
    """Does Ray show a token to the clusters that this process joins?"""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def environment_without_ray_token() -> dict[str, str]:
    """The environment of a process that is to be refused."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return {**kept, "RAY_AUTH_MODE": "disabled"}
