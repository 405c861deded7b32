"""Adapter directories as values: moves files between the server's disk and actors on other nodes.

An actor sees the server's disk only on the server's own node; on others it works in a temporary directory.
Values are byte arrays, which Ray's object store neither copies nor pickles.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import ray

Files = dict[str, np.ndarray]  # by relative name, each file as uint8


def this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def read_files(directory: Path) -> Files:
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): np.fromfile(path, np.uint8) for path in found}


def write_files(files: Files, directory: Path) -> None:
    for name, content in files.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        content.tofile(target)
