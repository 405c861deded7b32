"""Print the pip options with which `make` installs torch, and say on stderr what will be downloaded.

On Linux, torch on PyPI is the CUDA build: gigabytes that a machine without an NVIDIA GPU cannot use. So:

1. TORCH_INDEX=URL is used as given; TORCH_INDEX=none means whatever pip is configured for.
2. With an NVIDIA GPU, on macOS, or if pip already finds a CPU build, pip needs no options.
3. Otherwise PyTorch's public CPU index is added, if it answers within three seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_SIZE, CPU_SIZE = "about 3 GB with the CUDA libraries", "about 200 MB"


def choose(
    asked: str, gpu: bool, found: Callable[[], str | None], reachable: Callable[[str], bool]
) -> tuple[str, str]:
    """(pip options, what to tell the user). `found` is the version that pip would take by itself."""
    if asked and asked != "none":
        return f"--extra-index-url {asked}", f"torch from {asked}, as TORCH_INDEX says"
    if gpu:
        return "", f"torch for CUDA, since this machine has an NVIDIA GPU ({CUDA_SIZE})"
    if sys.platform != "linux":
        return "", f"torch from pip's index ({CPU_SIZE})"
    version = found()
    if version is not None and "+cpu" in version:
        return "", f"torch {version}, the CPU build that pip is configured to find ({CPU_SIZE})"
    if asked != "none" and reachable(CPU_INDEX):
        return (
            f"--extra-index-url {CPU_INDEX}",
            f"the CPU build of torch from {CPU_INDEX} ({CPU_SIZE}); TORCH_INDEX=none takes pip's default",
        )
    return "", (
        f"torch from pip's index: on Linux that is the CUDA build, {CUDA_SIZE}, which also runs on the CPU. "
        f"For the CPU build alone ({CPU_SIZE}): make setup TORCH_INDEX={CPU_INDEX}"
    )


def version_that_pip_finds() -> str | None:
    """What `pip install torch` would install, by its configuration; None if pip cannot say."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--dry-run",
        "--no-deps",
    ]
    command += ["--ignore-installed", "--quiet", "--report", "-", TORCH]
    try:
        report = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
        return report["install"][0]["metadata"]["version"]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return None


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=3):
            return True
    except (OSError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    options, said = choose(
        os.environ.get("TORCH_INDEX", ""), Path("/dev/nvidiactl").exists(), version_that_pip_finds, answers
    )
    sys.stderr.write(f"make: {said}\n")
    sys.stdout.write(options)
