"""Mirrors of metrics: a tracker that fails, hangs or dies costs nothing but its own lines.

tests/compat/test_mirrors.py has wandb and trackio themselves.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from tinkex.service import mirrors
from tinkex.service.mirrors import MetricMirror, MetricMirrors
from tinkex.service.rows import RunRow
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow
ROW = RunRow("aaaa:train:0", "aaaa", 0, "alice", "tiny", LoraConfig(4, 1), 1.0, 1.0, name="first")
BROKEN = {
    "refuses": "def init(**given): raise RuntimeError('no login')",
    "dies": "import os\ndef init(**given): os._exit(3)",
    "hangs": "import time\ndef init(**given): time.sleep(600)",
    "fails later": (
        "class Run:\n"
        "    def define_metric(self, *given, **more): pass\n"
        "    def log(self, row): raise OSError('no network')\n"
        "    def finish(self): pass\n"
        "def init(**given): return Run()\n"
    ),
}


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Have the processes of mirrors find this package as wandb."""
    (directory / "wandb.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("how", ["refuses", "fails later"])
def test_a_tracker_that_fails_says_so_once(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, BROKEN[how])
    all_of = MetricMirrors(["wandb"], tmp_path)
    for step in range(5):
        all_of.put(ROW, {"step": step, "loss": 1.0})
    all_of.stop()
    assert capfd.readouterr().err.count("metrics are not mirrored to wandb") == 1


def test_a_process_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, BROKEN["dies"])
    mirror = MetricMirror("wandb", tmp_path, pause=0.1)
    line = b'{"run": "a:train:0", "name": "", "config": {}, "metrics": {"step": 1, "loss": 1.0}}\n'
    deadline = time.monotonic() + 60
    with caplog.at_level(logging.WARNING):
        while mirror.starts < 3:
            mirror.put(line)
            time.sleep(0.05)
            assert time.monotonic() < deadline
        mirror.stop()
    assert caplog.text.count("its process is gone") == 1


def test_a_tracker_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, BROKEN["hangs"])
    monkeypatch.setattr(mirrors, "PATIENCE", 0.5)
    monkeypatch.setattr(mirrors, "WAITING", 100)
    all_of = MetricMirrors(["wandb"], tmp_path)
    wide = {f"metric {n}": 1.0 for n in range(1000)}
    began = time.process_time()
    for step in range(300):  # much more than a pipe and the queue hold
        all_of.put(ROW, {"step": step, **wide})
    assert time.process_time() - began < 5
    began = time.monotonic()
    all_of.stop()
    assert time.monotonic() - began < 10
    assert "did not take the last metrics" in caplog.text
