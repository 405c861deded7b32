"""Embedded mode: with no key and no server, models run in this very process."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.gguf_files import write_gguf
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.processes import interruptible
from tinkex import RateLimitError, RetryConfig, local
from tinkex.client.transport import CallContext
from tinkex.config import Settings
from tinkex.engine.protocol import EngineConfig
from tinkex.engine_exit import ENDING
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Refusal
from tinkex.service.served_models import ServedModels
from tinkex.service.service import Service
from tinkex.types.futures import CancelFutureRequest
from tinkex.wire import ops

pytestmark = pytest.mark.slow


def python(code: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, as a user has it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER", "TINKEX"))}
    env = {**clean, "TINKEX_HOME": str(home), "HOME": str(home), **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


TRAIN = """
import sys, tinkex
service = tinkex.ServiceClient()
run = service.create_lora_training_client(sys.argv[1] if len(sys.argv) > 1 else NAME, rank=4, seed=1)
data = [tinkex.Datum(tinkex.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
for _ in range(3):
    passed = run.forward_backward(data, "cross_entropy")
    run.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result(30)
    print(passed.result(30).metrics["loss:sum"])
sampler = run.save_weights_and_get_sampling_client()
params = tinkex.SamplingParams(max_tokens=3, stop=[])
response = sampler.sample(tinkex.ModelInput.from_ints([5]), 1, params).result(30)
print(len(response.sequences[0].tokens))
print(run.get_tokenizer().decode([72]))
path = run.save_state("c").result(30).path
print(path)
print(run.get_console_url(), tinkex.ServiceClient().get_console_url())
"""


def test_a_script_trains_and_samples_with_no_server(tmp_path: Path):
    model = tiny_model(tmp_path, "llama3")
    tiny_tokenizer(model)
    home = tmp_path / "home"
    done = python(f"NAME = {str(model)!r}\n{TRAIN}", home)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert float(lines[0]) > float(lines[1]) > float(lines[2])
    assert lines[3] == "3"
    says = [line for line in done.stderr.splitlines() if line.startswith("tinkex:")]
    assert says == [
        f"tinkex: no API key and no server are set, so models run in this process (state: {home})",
        "tinkex: `tinkex console` shows its runs at http://127.0.0.1:8265",
    ]
    assert lines[6].split() == [home.as_uri()] * 2, "there is no console, and the place is real"
    # State lives in the home: another process goes on from it.
    resumed = python(
        f"""
import tinkex
run = tinkex.ServiceClient().create_training_client_from_state_with_optimizer({lines[5]!r})
data = [tinkex.Datum(tinkex.ModelInput.from_ints([5, 6, 7]), {{"target_tokens": [6, 7, 8]}})]
print(run.forward(data, "cross_entropy").result(30).metrics["loss:sum"])
""",
        home,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert float(resumed.stdout) < float(lines[2])


LOSS = """
import tinkex
run = tinkex.ServiceClient().create_lora_training_client(NAME, rank=4, seed=1)
data = [tinkex.Datum(tinkex.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})]
print(run.forward(data, "cross_entropy").result(30).metrics["loss:sum"])
"""


def test_a_gguf_file_and_a_name_in_the_hubs_cache_are_base_models(tmp_path: Path):
    model = tiny_model(tmp_path, "smollm2")
    write_gguf(tmp_path / "small.gguf", "llama", model)
    cache = tmp_path / "hf" / "hub" / "models--org--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, cache / "snapshots" / ("0" * 40))
    found = {}
    for name in (str(model), str(tmp_path / "small.gguf"), "org/name"):
        done = python(
            f"NAME = {name!r}\n{LOSS}", tmp_path / "home", HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1"
        )
        assert done.returncode == 0, done.stderr
        found[name] = float(done.stdout)
    directory, *others = found.values()
    assert others == pytest.approx([directory] * 2, rel=1e-5)


LEAVE = """
import tinkex
sampler = tinkex.ServiceClient().create_sampling_client(base_model=NAME)
prompt, params = tinkex.ModelInput.from_ints([5]), tinkex.SamplingParams(max_tokens=4000, stop=[])
stream = sampler.sample_stream(prompt, params, 4)
samples = [sampler.sample(prompt, 4, params) for _ in range(4)]
next(stream)
"""


def test_a_script_may_end_while_the_engine_computes(tmp_path: Path):
    """Promise 2: it ends, and well; the work that nobody waits for is given up."""
    model = tiny_model(tmp_path, "llama3", max_position_embeddings=4096)
    done = python(f"NAME = {str(model)!r}\n{LEAVE}", tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


BUSY = """
import time, tinkex
from tinkex import local
run = tinkex.ServiceClient().create_lora_training_client(NAME, rank=4)
((engine,),) = [transport.service.models.engines() for transport in local._transports.values()]
end, engine.close = engine.close, lambda: (time.sleep(PAUSE), end())  # a micro-batch takes its time
print("trained")
"""


def test_an_engine_that_takes_long_to_end_is_waited_for_and_said(tmp_path: Path):
    """The process used to wait in silence, and to abort in the end."""
    model = tiny_model(tmp_path, "llama3")
    done = python(f"NAME, PAUSE = {str(model)!r}, 1.0\n{BUSY}", tmp_path / "home")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.splitlines()[-1] == ENDING


def test_ctrl_c_leaves_an_engine_that_takes_long_to_end(tmp_path: Path):
    model = tiny_model(tmp_path, "llama3")
    code = f"NAME, PAUSE = {str(model)!r}, 1000.0\n{BUSY}"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER", "TINKEX"))}
    process = subprocess.Popen(
        interruptible([sys.executable, "-c", code]), env={**clean, "TINKEX_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    next(line for line in process.stderr if line.strip() == ENDING)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGINT, "trained\n"), "as Ctrl-C ends any other"
    assert "Exception ignored" not in err


def test_without_the_engine_the_two_ways_out_are_named(tmp_path: Path):
    hide_torch = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
import tinkex
try:
    tinkex.ServiceClient()
except tinkex.TinkerError as error:
    print(error)
"""
    done = python(hide_torch, tmp_path)
    assert "pip install 'tinkex[engine]'" in done.stdout, done.stderr
    assert "TINKER_API_KEY" in done.stdout


def test_a_home_in_use_says_so(tmp_path: Path):
    code = """
import tinkex, subprocess, sys, os
service = tinkex.ServiceClient()
service.get_server_capabilities()
if len(sys.argv) == 1:
    command = [sys.executable, "-c", os.environ["CODE"], "child"]
    child = subprocess.run(command, capture_output=True, text=True)
    print(child.stderr.splitlines()[-1])
"""
    done = python(code, tmp_path, CODE=code)
    assert "is in use by another process; end it, or use another home (TINKEX_HOME)" in done.stdout, (
        done.stderr
    )


def test_clients_of_one_home_share_one_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = Settings(home=tmp_path / "home")
    first, second = local.connection(settings), local.connection(settings)
    assert first.transport is second.transport
    assert capsys.readouterr().err.count("tinkex: no API key") == 1


# -- which models there are ------------------------------------------------------------------------------


@pytest.fixture
def engines(tmp_path: Path) -> ServedModels:
    directory = tmp_path / "models"
    for place in ("org--name", "org/other", "plain"):
        (directory / place).mkdir(parents=True)
        (directory / place / "config.json").write_text("{}")
    (directory / "org" / "small.gguf").write_bytes(b"GGUF")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("{}")
    config = ServiceConfig(tmp_path, models_directory=directory, engine=EngineConfig(model="", kind="fake"))
    return ServedModels(config)


def test_models_in_the_directory_are_found_by_name(engines: ServedModels, tmp_path: Path):
    for name, place in (
        ("org/name", "org--name"), ("org/other", "org/other"), ("plain", "plain"),
        ("org/small", "org/small.gguf"), ("org/name:variant", "org--name"),
    ):  # fmt: skip
        assert engines.find(name).source == str(tmp_path / "models" / place)
    assert {"org/name", "org/other", "plain"} <= {model.name for model in engines}


@pytest.mark.parametrize("name", ["../secret", "org/../../secret", "", "none", "org"])
def test_no_name_leads_out_of_the_models_directory(engines: ServedModels, name: str):
    with pytest.raises(Refusal) as refused:
        engines.find(name)
    assert refused.value.status == 404


def test_paths_are_names_in_ones_own_process_only(engines: ServedModels, tmp_path: Path):
    with pytest.raises(Refusal):
        engines.find(str(tmp_path / "secret"))
    own = ServedModels(local.service_config(Settings(home=tmp_path)))
    assert own.find(str(tmp_path / "secret")).source == str(tmp_path / "secret")
    with pytest.raises(Refusal, match=r"no base model is called 'none'.*can be named by its path"):
        own.find("none")


def test_clients_that_are_made_at_once_share_one_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = Settings(home=tmp_path / "home", base_url="local")
    look, together = importlib.util.find_spec, threading.Barrier(4)

    def slowly(name: str) -> object:
        time.sleep(0.1)
        return look(name)

    def make(_: int) -> object:
        together.wait()
        return local.connection(settings).transport

    monkeypatch.setattr(importlib.util, "find_spec", slowly)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(make, range(4)))) == 1


class BusyService(Service):
    """Refuses the first calls, however many it was made with."""

    ready = True

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    async def call(self, *_: Any) -> str:
        self.refusals -= 1
        if self.refusals >= 0:
            raise Refusal(429, "too many requests")
        return "done"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_429_is_waited_for_by_the_callers_retry_settings(enabled: bool) -> None:
    transport = local.LocalTransport(BusyService(2))
    states: list[str] = []
    retry = RetryConfig(retry_delay_base=0.01, enable_retry_logic=enabled)
    context = CallContext(retry=retry, observer=lambda state, reason: states.append(state))
    call = transport.call(ops.SAMPLE, None, context)
    if enabled:
        assert asyncio.run(call) == "done"
        assert states == ["paused_rate_limit", "paused_rate_limit", "active"]
    else:
        with pytest.raises(RateLimitError, match="too many requests"):
            asyncio.run(call)
        assert states == ["paused_rate_limit"]


def test_what_its_caller_repeats_is_refused_at_once() -> None:
    transport = local.LocalTransport(BusyService(1))
    with pytest.raises(RateLimitError):
        asyncio.run(transport.call(ops.CANCEL_FUTURE, CancelFutureRequest(request_id="r")))
