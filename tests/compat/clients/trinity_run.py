"""`trinity-rft[tinker]`: GRPO from its command line, in a Ray of its own.

Its explorer, trainer, buffers and synchroniser are Ray actors. A plugin brings the reward.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tinker
from report import done, say

BIN = Path(sys.executable).parent
STEPS = 4
CONFIG = """
mode: both
project: compat
name: plain
checkpoint_root_dir: DIRECTORY/checkpoints
algorithm:
  algorithm_type: grpo
  repeat_times: 16
  kl_loss_fn: none
  optimizer:
    lr: 0.02
model:
  model_path: MODEL
  max_model_len: 256
  max_response_tokens: 6
  tinker:
    enable: true
    rank: 8
    base_url: URL
cluster:
  node_num: 1
  gpu_per_node: 1
buffer:
  batch_size: 2
  total_steps: STEPS
  explorer_input:
    taskset:
      name: plain
      storage_type: file
      path: DIRECTORY/tasks
      format:
        prompt_key: question
        response_key: answer
      rollout_args:
        temperature: 1.0
    default_workflow_type: simple_workflow
    default_reward_fn_type: plain_reward
  trainer_input:
    experience_buffer:
      name: plain_buffer
      storage_type: queue
explorer:
  runner_per_model: 1
  eval_interval: 1000
  eval_on_startup: false
trainer:
  save_interval: 2
synchronizer:
  sync_method: checkpoint
  sync_interval: 1
  sync_timeout: 300
"""
PLUGIN = """
from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn

@REWARD_FUNCTIONS.register_module("plain_reward")
class PlainReward(RewardFn):
    def __init__(self, **kwargs):
        pass

    def __call__(self, response, **kwargs):
        return {"plain": sum(char.isascii() for char in response) / max(1, len(response))}
"""


def ray_head(place: str) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """A Ray on this machine alone, without dashboard, and what leads programs to it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # It reports nothing, and starts processes only when they are needed.
    environment = os.environ | {
        "RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0",
    }  # fmt: skip
    command = [
        str(BIN / "ray"), "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1",
        "--num-cpus=8", "--num-gpus=0", "--include-dashboard=false", "--disable-usage-stats",
        f"--temp-dir={place}", "--object-store-memory=200000000",
    ]  # fmt: skip
    starting = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    head = subprocess.Popen(
        command, env=starting, start_new_session=True, stdout=sys.stderr, stderr=sys.stderr
    )
    deadline = time.monotonic() + 120
    while subprocess.run([str(BIN / "ray"), "status"], env=environment, capture_output=True).returncode:
        assert head.poll() is None, "its Ray ended"
        assert time.monotonic() < deadline, "its Ray did not start"
        time.sleep(1)
    return head, environment


def main(model: str, directory: Path) -> None:
    (directory / "plugins").mkdir()
    (directory / "plugins" / "plain_reward.py").write_text(PLUGIN)
    (directory / "tasks").mkdir()
    tasks = [{"question": text, "answer": "a"} for text in ("Say a.", "Say it.") * STEPS]
    (directory / "tasks" / "train.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    given = {
        "MODEL": model, "URL": os.environ["TINKER_BASE_URL"], "DIRECTORY": str(directory),
        "STEPS": str(STEPS),
    }  # fmt: skip
    text = CONFIG
    for name, value in given.items():
        text = text.replace(name, value)
    config = directory / "trinity.yaml"
    config.write_text(text)
    with tempfile.TemporaryDirectory(
        prefix="ray", ignore_cleanup_errors=True
    ) as place:  # sockets need a short path
        head, environment = ray_head(place)
        try:
            run = ["run", "--config", str(config), "--plugin-dir", str(directory / "plugins")]
            subprocess.run(
                [str(BIN / "trinity"), *run], env=environment, check=True, timeout=450, stdout=sys.stderr
            )
        finally:
            os.killpg(head.pid, signal.SIGKILL)  # nothing of it is kept; asked kindly, it takes half a minute
            head.wait(60)
    rows = directory / "checkpoints" / "compat" / "plain" / "buffer" / "plain_buffer.jsonl"
    rewards: dict[int, list[float]] = {}
    for row in map(json.loads, rows.read_text().splitlines()):
        rewards.setdefault(row["eid"]["batch"], []).append(row["reward"])
    saved = tinker.RestClient().list_user_checkpoints().result().checkpoints
    say(
        "trinity",
        rewards=[sum(group) / len(group) for _, group in sorted(rewards.items())],
        saved=sorted(one.checkpoint_id for one in saved),
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    done()
