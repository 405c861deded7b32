"""Metric files as columns: what is read while they are written, and what a picture of them keeps."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tinkex.service.run_series import (
    LOGGED,
    STEPS,
    Axis,
    Mark,
    RunSeries,
    View,
    last_step,
    merged,
    thinned,
)


def write(directory: Path, file: str, *lines: dict[str, float], end: str = "\n") -> None:
    directory.mkdir(exist_ok=True)
    with open(directory / file, "a") as out:
        out.write("\n".join(map(json.dumps, lines)) + end)


def test_a_reader_sees_each_line_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    series = RunSeries()
    assert series.read(tmp_path)[0] == {}
    write(tmp_path, STEPS, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "kl": 0.5})
    curves, mark, anew = series.read(tmp_path)
    assert anew
    assert (curves["loss"].x.tolist(), curves["loss"].y.tolist()) == ([1, 2], [3, 2])
    assert (curves["kl"].x.tolist(), curves["kl"].y.tolist()) == ([2], [0.5])
    write(tmp_path, STEPS, {"step": 3, "loss": 1.0}, end="")
    curves, mark, anew = series.read(tmp_path, mark)
    assert (curves, anew) == ({}, False)
    write(tmp_path, STEPS, end="\n")
    curves, mark, anew = series.read(tmp_path, mark)
    assert not anew
    assert curves["loss"].y.tolist() == [1.0]
    assert series.read(tmp_path, mark)[0] == {}


def test_a_file_that_was_thinned_out_is_read_anew(tmp_path: Path) -> None:
    series = RunSeries()
    write(tmp_path, STEPS, *({"step": n, "loss": float(n)} for n in range(10)))
    _, mark, _ = series.read(tmp_path)
    part = tmp_path / "part"
    part.write_text("".join(f'{{"step": {n}, "loss": {n}.0}}\n' for n in range(1, 10, 2)))
    part.replace(tmp_path / STEPS)
    write(tmp_path, STEPS, {"step": 10, "loss": 10.0})
    curves, _, anew = series.read(tmp_path, mark)
    assert anew
    assert curves["loss"].x.tolist() == [1, 3, 5, 7, 9, 10]


def test_what_is_damaged_or_skipped_or_no_number_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, STEPS, {"step": 1, "loss": 1.0}, {"step": 1, "skipped": 1.0, "loss": 9.0})
    with open(tmp_path / STEPS, "a") as out:
        out.write('nonsense\n[1]\n{"step": 2, "loss": "high", "kl": 1}\n')
    curves = RunSeries().read(tmp_path)[0]
    assert curves["loss"].x.tolist() == [1]
    assert curves["kl"].x.tolist() == [2]


def test_what_a_client_logged_is_a_curve_too(tmp_path: Path) -> None:
    write(tmp_path, STEPS, {"step": 1, "time": 5.0, "loss": 1.0}, {"step": 2, "time": 6.0, "loss": 0.5})
    write(tmp_path, LOGGED, {"step": 2, "time": 6.5, "reward": 0.7}, {"step": 9, "time": 7.0, "reward": 0.8})
    series = RunSeries()
    curves = series.read(tmp_path, by_time=True)[0]
    assert curves["reward"].x.tolist() == [6.5, 7.0]
    assert series.last(tmp_path) == {"step": 2, "time": 7.0, "loss": 0.5, "reward": 0.8}
    lines = [json.loads(line) for line in merged(tmp_path).splitlines()]
    assert lines[1] == {"step": 2, "time": 6.0, "loss": 0.5, "reward": 0.7}
    assert lines[2] == {"step": 9, "time": 7.0, "reward": 0.8}
    assert last_step(tmp_path) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_picture_keeps_the_least_and_the_greatest_of_every_pixel(seed: int) -> None:
    rng = random.Random(seed)
    count, pixels = rng.randrange(2000, 5000), 100
    x = np.sort(np.array([rng.uniform(0, 1000) for _ in range(count)]))
    y = np.array([rng.gauss(0, 1) for _ in range(count)])
    y[rng.randrange(count)] = 1e6  # a spike of one step
    curve = Axis(x, View(pixels=pixels)).curve(y)
    assert len(curve.x) <= 2 * pixels
    for pixel in range(pixels):
        low = x[0] + (x[-1] - x[0]) * pixel / pixels
        high = x[0] + (x[-1] - x[0]) * (pixel + 1) / pixels
        high = math.inf if pixel == pixels - 1 else high
        inside = [v for u, v in zip(x, y, strict=True) if low <= u < high]
        shown = sorted(float(v) for u, v in zip(curve.x, curve.y, strict=True) if low <= u < high)
        assert shown == pytest.approx([min(inside), max(inside)], rel=1e-6)


def test_a_part_of_a_curve_is_shown_as_finely_as_it_is(tmp_path: Path) -> None:
    x = np.arange(100_000.0)
    part = Axis(x, View(500, 599)).curve(np.sin(x))
    assert part.x.tolist() == list(range(500, 600))
    back = Axis(np.array([1.0, 2, 3, 2, 3]), View()).curve(np.array([1.0, 2, 3, math.nan, 5]))
    assert (back.x.tolist(), back.y.tolist()) == ([1, 2, 3, 3], [1, 2, 3, 5])


def test_many_readers_may_be_at_different_places(tmp_path: Path) -> None:
    series = RunSeries()
    write(tmp_path, STEPS, {"step": 1, "loss": 1.0})
    _, early, _ = series.read(tmp_path)
    write(tmp_path, STEPS, {"step": 2, "loss": 2.0})
    series.read(tmp_path, early)
    assert series.read(tmp_path, early)[0]["loss"].y.tolist() == [2.0]
    assert series.read(tmp_path, Mark())[0]["loss"].y.tolist() == [1.0, 2.0]


def test_a_file_takes_as_much_memory_as_it_has_values_whatever_they_are_called(tmp_path: Path) -> None:
    write(tmp_path, LOGGED, *({"step": n, "time": n, f"metric {n}": 1.0} for n in range(4000)))
    series = RunSeries()
    tracemalloc.start()
    curves, _, _ = series.read(tmp_path)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 3_000_000
    assert (len(curves), series.left_out(tmp_path)) == (60, 440)  # of 500, all that a run may log
    assert curves["metric 7"].x.tolist() == [7]


def test_runs_that_were_not_looked_at_lately_leave_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.service.run_series.KEPT_BYTES", 30_000)
    series, marks = RunSeries(), list[Mark]()
    for run in range(9):
        write(tmp_path / str(run), STEPS, *({"step": n, "loss": 1.0} for n in range(1000)))
        marks.append(series.read(tmp_path / str(run))[1])
    assert len(series._files) <= 3
    write(tmp_path / "0", STEPS, {"step": 1000, "loss": 2.0})
    curves, _, anew = series.read(tmp_path / "0", marks[0])
    assert (curves["loss"].y.tolist(), anew) == ([2.0], False)


def test_what_is_logged_under_a_name_of_ours_is_told_apart(tmp_path: Path) -> None:
    series = RunSeries()
    write(tmp_path, LOGGED, {"step": 1, "time": 1.0, "loss": 7.0})
    curves, mark, _ = series.read(tmp_path)
    assert curves["loss"].y.tolist() == [7.0], "nothing else is called so"
    write(tmp_path, STEPS, {"step": 1, "time": 1.0, "loss": 0.5})
    curves, mark, anew = series.read(tmp_path, mark)
    assert anew
    assert {name: curve.y.tolist() for name, curve in curves.items()} == {"loss": [0.5], "loss (logged)": [7]}
    write(tmp_path, LOGGED, {"step": 2, "time": 2.0, "loss": 8.0})
    curves, mark, anew = series.read(tmp_path, mark)
    assert {name: curve.y.tolist() for name, curve in curves.items()} == {"loss (logged)": [8]}
    assert not anew
    last = series.last(tmp_path)
    assert (last["loss"], last["loss (logged)"]) == (0.5, 8)
    first, second = (json.loads(line) for line in merged(tmp_path).splitlines())
    assert (first["loss"], first["loss (logged)"], second["loss (logged)"]) == (0.5, 7.0, 8.0)


def test_thinning_out_keeps_spikes_and_is_as_dense_everywhere(tmp_path: Path) -> None:
    lines = [{"step": n, "time": float(n), "loss": 1.0, "kl": n % 7 / 7} for n in range(1, 8001)]
    for step, value in ((1234, 99.0), (4321, -99.0), (7999, 50.0)):
        lines[step - 1]["loss"] = value
    data = b""
    for line in lines:  # as it grows, ten times thinned out
        data += json.dumps(line).encode() + b"\n"
        if len(data) > 60_000:
            data = thinned(data)
    kept = [json.loads(line) for line in thinned(data).splitlines()]
    assert {99.0, -99.0, 50.0} <= {line["loss"] for line in kept}
    assert kept[-1] == lines[-1]
    steps = [line["step"] for line in kept]
    assert steps == sorted(steps)
    quarters = [sum(q * 2000 < step <= (q + 1) * 2000 for step in steps) for q in range(4)]
    assert max(quarters) < 3 * min(quarters), quarters
    back = [*range(1, 400), *range(200, 400)]  # a run that was set back
    again = thinned(b"".join(b'{"step": %d, "loss": 1}\n' % n for n in back))
    assert [json.loads(again.splitlines()[k])["step"] for k in (0, -1)] == [1, 399]


def test_a_curve_that_falls_is_drawn_falling() -> None:
    y = Axis(np.arange(1000.0), View(pixels=10)).curve(np.exp(-np.arange(1000.0) / 300)).y
    assert (np.diff(y) < 0).all()


def test_columns_that_begin_late_or_have_gaps_keep_their_places(tmp_path: Path) -> None:
    lines = [{"step": n, "time": n, "loss": n / 7} | ({"late": n} if n >= 5 else {}) for n in range(10)]
    series = RunSeries()
    write(tmp_path, STEPS, *lines)
    write(tmp_path, STEPS, {"step": 10, "time": 10, "loss": 1.0}, {"step": 11, "time": 11, "late": 11})
    curves, mark, _ = series.read(tmp_path)
    assert curves["late"].x.tolist() == curves["late"].y.tolist() == [5, 6, 7, 8, 9, 11]
    assert curves["loss"].x.tolist() == list(range(11))
    write(tmp_path, STEPS, {"step": 12, "time": 12, "late": "?", "loss": 1 / 3})
    write(tmp_path, STEPS, {"step": 13, "time": 13, "late": 13, "loss": 1 / 3})
    curves, _, anew = series.read(tmp_path, mark)
    assert ({name: one.x.tolist() for name, one in curves.items()}, anew) == (
        {"late": [13], "loss": [12, 13]}, False,
    )  # fmt: skip
    assert series.last(tmp_path)["loss"] == 1 / 3
