"""`tinkex …` as a person uses it: through a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkex.cli.serve import read_model, read_size
from tinkex.cli.serve import serve as serve_command
from tinkex.errors import InvalidInputError
from tinkex.models import DEFAULT

pytestmark = pytest.mark.slow

TINKEX = [sys.executable, "-m", "tinkex.cli"]
SERVE = [*TINKEX, "serve", "--model", "m/base=anything", "--engine", "fake", "--port", "0"]


def clean_env(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("TINKEX_", "TINKER_"))} | more


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TINKEX, *args], capture_output=True, text=True, timeout=60, env=clean_env(**env))


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def serve(processes: list[Any], home: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    """A running server, and its URL as it says it."""
    process = subprocess.Popen(
        [*SERVE, "--home", str(home), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env(),
    )  # fmt: skip
    processes.append(process)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"export TINKER_BASE_URL=(\S+)", line):
            return process, found[1]
    raise AssertionError(process.stderr.read() if process.stderr else "")


def get(url: str, path: str, key: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request("GET", path, headers={"x-api-key": key})
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, click\nfrom tinkex.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('starlette', 'uvicorn', 'numpy', 'pydantic', 'torch', 'sqlite3')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "serve" in done.stdout
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_help_of_every_command() -> None:
    for command in (["serve"], ["server"], ["server", "keys"], ["server", "keys", "add"]):
        assert "--help" in run(*command, "--help").stdout
    assert "No such command" in run("serv").stderr


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    home = ["--home", str(tmp_path)]
    assert "no keys yet" in run("server", "keys", "list", *home).stdout
    made = run("server", "keys", "add", "laptop", "--owner", "ada", "--note", "for tests", *home)
    key = made.stdout.strip()
    assert re.fullmatch(r"tml-[\w-]{40,}", key)
    assert key not in made.stderr
    listed = run("server", "keys", "list", *home).stdout
    assert "laptop" in listed
    assert "ada" in listed
    assert key not in listed
    again = run("server", "keys", "add", "laptop", *home)
    assert (again.returncode, again.stdout) == (1, "")
    assert "is revoked" in run("server", "keys", "revoke", "laptop", *home).stdout
    missing = run("server", "keys", "revoke", "laptop", *home)
    assert missing.returncode == 1
    assert "no key has the id or name 'laptop'" in missing.stderr


def test_a_number_that_is_one_keys_id_and_anothers_name_revokes_neither(tmp_path: Path) -> None:
    home = ["--home", str(tmp_path)]
    for name in ("laptop", "desk", "1"):
        run("server", "keys", "add", name, *home)
    unclear = run("server", "keys", "revoke", "1", *home)
    assert (unclear.returncode, unclear.stdout) == (1, "")
    assert "'laptop' (id 1)" in unclear.stderr
    assert "'1' (id 3)" in unclear.stderr
    assert "'1' (id 3) is revoked" in run("server", "keys", "revoke", "3", *home).stdout
    assert "'laptop' (id 1) is revoked" in run("server", "keys", "revoke", "1", *home).stdout


def test_serving_with_keys_that_change_meanwhile(tmp_path: Path, processes: list[Any]) -> None:
    home = ["--home", str(tmp_path)]
    key = run("server", "keys", "add", "laptop", *home).stdout.strip()
    process, url = serve(processes, tmp_path)
    assert get(url, "/api/v1/sessions", key) == 200
    assert get(url, "/api/v1/sessions", "tml-other") == 401
    run("server", "keys", "revoke", "laptop", *home)
    deadline = time.monotonic() + 10
    while (status := get(url, "/api/v1/sessions", key)) == 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert status == 401
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_ctrl_c_ends_it_with_success_and_frees_the_home(tmp_path: Path, processes: list[Any]) -> None:
    first, _ = serve(processes, tmp_path)
    locked = subprocess.run([*SERVE, "--home", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert locked.returncode == 1
    assert "in use by another process" in locked.stderr
    assert len(locked.stderr.strip().splitlines()) == 1
    first.send_signal(signal.SIGINT)
    assert first.wait(20) == 0
    _, url = serve(processes, tmp_path)
    assert get(url, "/api/v1/healthz", "tml-x") == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_models_are_loaded_ends_it_and_frees_the_home(
    tmp_path: Path, processes: list[Any], number: signal.Signals
) -> None:
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "config.json")  # nobody writes to it: loading never ends
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["serve", "--model", f"m={tmp_path / 'model'}", "--home", str(tmp_path / "home"), "--port"]
    process = subprocess.Popen(
        [*TINKEX, *command, str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=clean_env(),
    )  # fmt: skip
    processes.append(process)
    deadline, status = time.monotonic() + 30, 0
    while status != 503 and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            status = get(f"http://127.0.0.1:{port}", "/api/v1/healthz", "tml-x")
        time.sleep(0.05)
    assert status == 503  # it answers, and says that it is not ready
    process.send_signal(number)
    said, complained = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "")
    assert "Traceback" not in complained
    serve(processes, tmp_path / "home")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "SmolLM2-135M"], "did you mean 'SmolLM2-135M-Instruct'?"),
        (["--device", "gpu"], "'gpu' is not a device: an NVIDIA GPU is called cuda. Give auto, cpu, cuda"),
        (["--device", "mps"], "'mps' is not a device: Apple's GPU is not supported, cpu is. Give auto"),
        (["--device", "cuda:x"], "'cuda:x' is not a device. Give auto, cpu, cuda or cuda:N."),
        (["--drain", "nan"], "Invalid value for '--drain'"),
        (["--model", "m=/no/such/place"], "there is no directory or file /no/such/place"),
        (["--model", "m=./none.gguf"], "there is no directory or file ./none.gguf"),
        (["--model", "a:b=."], "must have no colon"),
        (["--model", "m=.", "--model", "m=.."], "two models are called 'm'"),
        (["--model", "m=.", "--engine", "fake", "--host", "0.0.0.0"], "tinkex server keys add"),
        (["--model", "m=.", "--engine", "fake", "--host", "nohost.invalid"], "is no address of this machine"),
        (["--model", "m=.", "--engine", "fake", "--public-url", "nowhere"], "must look like"),
        (
            ["--model", "m=.", "--engine", "fake", "--public-url", "https://t.org"],
            "without --public-url https",
        ),
        (["--model", "m=.", "--engine", "fake", "--public-url", "https://t.org"], "tinkex server keys add"),
        (["--model", "m=.", "--engine", "fake", "--disk-quota", "9" * 400], "is no size"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, args: list[str], says: str) -> None:
    done = run("serve", "--home", str(tmp_path), "--port", "0", *args)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("Error: ")


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", "--model", "m=.", "--engine", "fake", "--home", str(tmp_path), "--port", port)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == f"Error: port {port} of 127.0.0.1 is in use: stop what uses it, or give another --port"
    )


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = run("serve", "--home", str(tmp_path / "home"), "--port", "0", "--model", f"m={tmp_path / 'model'}")
    assert done.returncode == 1
    assert "the base model m could not be loaded" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_without_a_model_it_serves_the_default_one(tmp_path: Path, processes: list[Any]) -> None:
    command = [*TINKEX, "serve", "--engine", "fake", "--port", "0", "--home", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env()
    )
    processes.append(process)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(2)]
    assert f"  {DEFAULT}: " in said[1]


def test_options_come_from_the_environment_too(tmp_path: Path) -> None:
    done = run("serve", TINKEX_MODELS="m=/none/here", TINKEX_HOME=str(tmp_path), TINKEX_PORT="0")
    assert "/none/here" in done.stderr


def test_every_option_of_serve_has_a_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "TINKEX_MODELS": ("a=/x b=/y", "models", ("a=/x", "b=/y")),
        "TINKEX_HOST": ("::1", "host", "::1"),
        "TINKEX_PORT": ("7", "port", 7),
        "TINKEX_HOME": ("/h", "home", Path("/h")),
        "TINKEX_STORE": ("s3://b/p", "store", "s3://b/p"),
        "TINKEX_LEDGER": ("postgresql://h/d", "ledger", "postgresql://h/d"),
        "TINKEX_LEASE": ("4", "lease", 4.0),
        "TINKEX_PEER_URL": ("http://me:1", "peer_url", "http://me:1"),
        "TINKEX_DEVICE": ("cuda:1", "device", "cuda:1"),
        "TINKEX_DTYPE": ("bfloat16", "dtype", "bfloat16"),
        "TINKEX_QUANTIZE": ("nf4", "quantize", "nf4"),
        "TINKEX_DETERMINISTIC": ("1", "deterministic", True),
        "TINKEX_PUBLIC_URL": ("https://t", "public_url", "https://t"),
        "TINKEX_MAX_CONTEXT": ("99", "max_context", 99),
        "TINKEX_DISK_QUOTA": ("5GB", "disk_quota", 5 * 10**9),
        "TINKEX_DISK_PER_USER": ("1GB", "disk_per_user", 10**9),
        "TINKEX_RUNS_PER_USER": ("9", "runs_per_user", 9),
        "TINKEX_MAX_CONNECTIONS": ("77", "max_connections", 77),
        "TINKEX_REQUESTS_PER_USER": ("66", "requests_per_user", 66),
        "TINKEX_BODY_MEMORY": ("3GB", "body_memory", 3 * 10**9),
        "TINKEX_BODY_MEMORY_PER_USER": ("1GB", "body_memory_per_user", 10**9),
        "TINKEX_QUEUE_MEMORY": ("4GB", "queue_memory", 4 * 10**9),
        "TINKEX_QUEUE_MEMORY_PER_USER": ("2GB", "queue_memory_per_user", 2 * 10**9),
        "TINKEX_CORS_ORIGINS": ("https://a https://b", "cors_origins", ("https://a", "https://b")),
        "TINKEX_KEEP_ROLLOUTS": ("0.5", "keep_rollouts", 0.5),
        "TINKEX_ROLLOUT_BYTES": ("1MiB", "rollout_bytes", 2**20),
        "TINKEX_PRELOAD": ("0", "preload", False),
        "TINKEX_WARM_UP": ("0", "warm_up", False),
        "TINKEX_MIRRORS": ("wandb trackio", "mirrors", ("wandb", "trackio")),
        "TINKEX_CLUSTER": ("auto", "cluster", "auto"),
        "TINKEX_DRAIN": ("2.5", "drain", 2.5),
        "TINKEX_DURABILITY": ("process", "durability", "process"),
        "TINKEX_LOG_LEVEL": ("error", "log_level", "error"),
    }
    for variable, (value, _, _) in given.items():
        monkeypatch.setenv(variable, value)
    read = serve_command.make_context("serve", []).params
    assert {name: read[name] for _, name, _ in given.values()} == {n: v for _, n, v in given.values()}
    shown = {option.name for option in serve_command.params if not getattr(option, "hidden", False)}
    assert shown == {name for _, name, _ in given.values()}
    assert serve_command.make_context("serve", ["--port", "8"]).params["port"] == 8  # what is said there wins


def test_a_quota_is_set_by_its_size(tmp_path: Path) -> None:
    assert [read_size(text) for text in ("5000", "1.5kb", "2 MiB", "3TB")] == [
        5000,
        1500,
        2 * 2**20,
        3 * 10**12,
    ]
    for wrong in ("", "much", "5 apples", "1.2.3GB", "-1GB"):
        with pytest.raises(InvalidInputError, match="is no size"):
            read_size(wrong)
    done = run("serve", "--model", "m=x", "--engine", "fake", "--home", str(tmp_path), "--disk-quota", "lots")
    assert done.returncode == 1
    assert "'lots' is no size" in done.stderr


def test_models_are_named(tmp_path: Path) -> None:
    assert read_model(f"org/name={tmp_path}") == ("org/name", str(tmp_path.resolve()))
    assert read_model(str(tmp_path)) == (str(tmp_path), str(tmp_path.resolve()))
    assert read_model("m=org/on-the-hub") == ("m", "org/on-the-hub")
    assert read_model("org/on-the-hub") == ("org/on-the-hub", "org/on-the-hub")
    with pytest.raises(InvalidInputError, match="there is no directory or file"):
        read_model("m=neither/here/nor/there")
