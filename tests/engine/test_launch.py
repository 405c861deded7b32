"""Launches after the first go straight to what was compiled, never to what was compiled for other kinds."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from tinkex.engine.cuda import launch
from tinkex.engine.cuda.launch import Launcher

WIDE = torch.zeros(64)


STREAM = 77


class Compiled:
    """What is there of a kernel that was compiled, as far as it is used."""

    function, packed_metadata = "function", ("warps", 1, "shared")

    def __init__(self, log: list[Any], together: list[int]) -> None:
        self.log, self.together = log, together

    def run(self, x: int, y: int, z: int, *args: Any) -> None:
        stream, function, metadata, launch_metadata, on_enter, on_exit, *given = args
        warps, together, shared = metadata
        assert (stream, function, warps, shared) == (STREAM, self.function, "warps", "shared")
        assert launch_metadata is on_enter is on_exit is None
        self.log.append(((x * together, y, z), given))
        self.together.append(together)


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_stream", lambda device: STREAM)


class Kernel:
    """Stands for a jitted kernel: counts what it is asked to compile."""

    params = tuple(SimpleNamespace(name=name) for name in ("x", "n", "eps", "BLOCK"))

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.launches: list[Any] = []
        self.together: list[int] = []  # programs of a cluster, by launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            self.compiled.append((args, constants))
            return Compiled(self.launches, self.together)

        return run


def test_the_second_launch_passes_everything_in_order() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    for n in (32, 48):
        launcher[(3,)](WIDE, n, 1e-5, num_warps=4, BLOCK=64)
    assert len(kernel.compiled) == 1
    assert kernel.launches == [((3, 1, 1), [WIDE.data_ptr(), 48, 1e-5, 64])]


@pytest.mark.parametrize(
    ("x", "n", "constants"),
    [
        (WIDE.to(torch.bfloat16), 32, {"BLOCK": 64}),
        (WIDE[1:], 32, {"BLOCK": 64}),  # not aligned to 16 bytes
        (WIDE, 1, {"BLOCK": 64}),
        (WIDE, 33, {"BLOCK": 64}),
        (WIDE, 1 << 40 | 1, {"BLOCK": 64}),
        (WIDE, 1 << 40, {"BLOCK": 64}),
        (WIDE, 32, {"BLOCK": 128}),
        (WIDE, 32, {"BLOCK": 64, "num_warps": 8}),
    ],
)
def test_other_kinds_are_compiled_anew(x: torch.Tensor, n: int, constants: dict[str, int]) -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    launcher[(1, 2)](WIDE, 32, 1e-5, BLOCK=64)
    launcher[(1, 2)](x, n, 1e-5, **constants)
    assert len(kernel.compiled) == 2
    assert not kernel.launches


def test_programs_come_in_clusters_where_asked() -> None:
    """Triton multiplies the first axis by how many belong together."""
    kernel = Kernel()
    launcher = Launcher(kernel)
    for clusters in (False, True, False, True):
        launcher[(4, 3)](WIDE, 32, 1e-5, BLOCK=64, clusters=clusters)
    assert len(kernel.compiled) == 2
    assert all("clusters" not in constants for _, constants in kernel.compiled)
    assert kernel.together == [1, 2]
    assert [grid for grid, _ in kernel.launches] == [(4, 3, 1)] * 2
