"""How the command line behaves as a program: in a terminal, in a pipe, interrupted, misused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.processes import in_terminal, interruptible
from tests.stub import Stub, delay
from tests.stub.api import Run
from tinkex.cli import COMMANDS, main
from tinkex.cli.output import ago, gather, size

pytestmark = pytest.mark.slow

TINKEX = [sys.executable, "-m", "tinkex.cli"]


def clean_env(home: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKE", "COLUMNS", "NO_COLOR"))}
    return {**kept, "HOME": str(home), "TERM": "xterm-256color", **more}


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        yield listening


def every_command() -> Iterator[tuple[list[str], click.Command]]:
    def walk(path: list[str], command: Any) -> Iterator[tuple[list[str], click.Command]]:
        yield path, command
        for name, below in getattr(command, "commands", {}).items():
            yield from walk([*path, name], below)

    for name in COMMANDS:
        yield from walk([name], main.get_command(None, name))  # type: ignore[arg-type]


def test_every_command_has_help_of_80_columns() -> None:
    seen = 0
    for path, _ in every_command():
        done = CliRunner().invoke(main, [*path, "--help"], terminal_width=80)
        assert done.exit_code == 0
        assert max(map(len, done.stdout.splitlines())) <= 80
        seen += 1
    assert seen > 25


def test_no_help_shows_a_range_without_bounds() -> None:
    for path, _ in every_command():
        assert "None" not in CliRunner().invoke(main, [*path, "--help"]).stdout, path


NUMBERS = [
    (path, command, option)
    for path, command in every_command()
    for option in command.params
    if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
]


@pytest.mark.parametrize(("path", "command", "option"), NUMBERS, ids=lambda x: getattr(x, "name", None))
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "9" * 30, "-" + "9" * 30])
def test_a_number_that_cannot_be_is_refused_by_every_option(
    path: list[str], command: click.Command, option: click.Parameter, number: str
) -> None:
    needed = [word for p in command.params if p.required for word in _given(p)]
    done = CliRunner().invoke(main, [*path, *needed, option.opts[0], number])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"Error: Invalid value for '{option.opts[0]}': ")


def _given(needed: click.Parameter) -> list[str]:
    return ["x"] if isinstance(needed, click.Argument) else [needed.opts[0], "x"]


def test_the_options_that_take_numbers_are_known() -> None:
    assert len(NUMBERS) >= 10


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chekpoint"], "No such command 'chekpoint'. Did you mean 'checkpoint'? See `tinkex --help`."),
        (["run", "list", "--limt", "3"], "Did you mean '--limit'? See `tinkex run list --help`."),
        (["run", "list", "--limit", "some"], "See `tinkex run list --help`."),
        (["run", "info"], "Missing argument 'RUN_ID'. See `tinkex run info --help`."),
        (["--format", "yaml", "version"], "'yaml' is not one of 'table', 'json'. See `tinkex --help`."),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line_and_exits_with_2(
    arguments: list[str], says: str
) -> None:
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert line.endswith(says)


def test_a_group_without_a_command_shows_its_help() -> None:
    done = CliRunner().invoke(main, ["run"])
    assert done.exit_code == 2
    assert "plot" in done.output


def test_the_format_can_stand_before_or_after_the_command() -> None:
    before = CliRunner().invoke(main, ["-f", "json", "version"])
    after = CliRunner().invoke(main, ["version", "--format", "json"])
    assert before.stdout == after.stdout != CliRunner().invoke(main, ["version"]).stdout


def test_ctrl_c_exits_with_130_and_says_nothing(silent: socket.socket, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    process = subprocess.Popen(
        interruptible([*TINKEX, "run", "list"]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=clean_env(tmp_path, TINKER_BASE_URL=url), start_new_session=True,
    )  # fmt: skip
    with silent.accept()[0]:  # it waits for an answer
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=60)
    assert (process.returncode, said, complained.strip()) == (130, "", "")


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    env = clean_env(tmp_path, TINKER_BASE_URL=url)
    done = subprocess.run([*TINKEX, "run", "list"], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.strip().splitlines()
    assert url in line
    assert "is the server running?" in line


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    program = f"{sys.executable} -m tinkex.cli completion bash | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=clean_env(tmp_path))
    assert done.returncode in (0, 141)  # all was written before it was noticed, or not
    assert done.stderr == ""
    reading, writing = os.pipe()
    os.close(reading)  # nobody reads from the start
    gone = subprocess.run(
        [*TINKEX, "version"], stdout=writing, stderr=subprocess.PIPE, env=clean_env(tmp_path)
    )
    os.close(writing)
    assert (gone.returncode, gone.stderr) == (141, b"")


def test_a_stream_that_is_closed_or_not_utf8_is_no_error(tmp_path: Path) -> None:
    def tinkex(line: str, **more: str) -> tuple[int, str, str]:
        program, env = f"{sys.executable} -m tinkex.cli {line}", clean_env(tmp_path, **more)
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=env)
        return done.returncode, done.stdout, done.stderr

    assert tinkex("version >&-") == (0, "", "")
    code, _, complaint = tinkex("checkpoint delete tinker://a/weights/b <&-")
    assert (code, complaint.splitlines()[-1]) == (1, "Error: nobody answered; --yes deletes without asking")
    code, said, complaint = tinkex("chat --help", PYTHONIOENCODING="latin-1")  # which has no ellipsis
    assert (code, complaint) == (0, "")
    assert "tinker://?" in said


def test_json_for_programs_says_every_character_whatever_the_encoding(tmp_path: Path) -> None:
    program = "from tinkex.cli.output import show_json; show_json({'name': 'Käse 🧀'})"
    for encoding in ("ascii", "latin-1", "utf-8"):
        env = clean_env(tmp_path, PYTHONIOENCODING=encoding)
        said = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env).stdout
        assert json.loads(said.decode(encoding)) == {"name": "Käse 🧀"}


def test_the_shell_completes(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_TINKEX_COMPLETE" in CliRunner().invoke(main, ["completion", shell]).stdout
    env = clean_env(
        tmp_path, _TINKEX_COMPLETE="bash_complete", COMP_WORDS="tinkex checkpoint un", COMP_CWORD="2"
    )
    done = subprocess.run(TINKEX, capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["plain,unpublish"]


# -- tables ----------------------------------------------------------------------------------------------

TABLE = """
from tinkex.cli.output import *
show(None, "2 things", [{"Name": "x" * 76, "Size": 5}, {"Name": "y", "Size": None}])
show(None, "1 thing", [{"Name": "z", "Good": True}])
show(None, "A thing", {"Short": "1", "Long": "w" * 76})
import time
with bar("Waiting") as told:
    time.sleep(0.4)
    told(1, 2)
"""


def test_a_table_too_wide_for_the_terminal_becomes_paragraphs(tmp_path: Path) -> None:
    said = in_terminal([sys.executable, "-c", TABLE], clean_env(tmp_path))
    shown, _, waiting = said.partition("w" * 76 + "\n")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines()]
    assert lines[:5] == ["2 things", "x" * 76, "    size 5", "y", "    size -"]
    assert lines[5:8] == ["1 thing", "Name  Good", "z     yes"]
    assert lines[8:] == ["A thing", "  Short  1", "  Long", "    "]
    assert "Waiting" in waiting  # the bar


def test_what_is_piped_is_neither_cut_nor_coloured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TABLE], capture_output=True, text=True, env=clean_env(tmp_path)
    )
    assert done.stdout.splitlines() == [
        "2 things", "Name" + " " * 74 + "Size", "x" * 76 + "     5", "y" + " " * 80 + "-",
        "1 thing", "Name  Good", "z     yes", "A thing", "  Short  1", "  Long   " + "w" * 76,
    ]  # fmt: skip
    assert done.stderr == ""


def test_no_color_is_honoured_by_the_bar(tmp_path: Path) -> None:
    code = "import time\nfrom tinkex.cli.output import bar\n"
    code += "with bar('Waiting') as told:\n time.sleep(0.4)\n told(1, 2)"
    said = in_terminal([sys.executable, "-c", code], clean_env(tmp_path, NO_COLOR="1"))
    assert "Waiting" in said
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", said)  # a foreground colour


BAR = r"{what} [━╸╺ ]*.*?{counts}"


def test_a_listing_of_many_pages_has_a_bar(tmp_path: Path) -> None:
    """Two pages of runs: 100 of 150, then all; in a pipe there is none."""
    with Stub() as stub:
        stub.runs |= {f"s:train:{n}": Run(f"s:train:{n}", "stub/base", 8) for n in range(150)}
        env = clean_env(tmp_path, TINKER_BASE_URL=stub.url, NO_COLOR="1")
        stub.script("training_runs", delay(0.5), delay(0.5))
        said = in_terminal([*TINKEX, "run", "list", "--limit", "0"], env)
        assert re.search(BAR.format(what="Runs", counts=r"\b100/150\b"), said), said[:400]
        assert len(re.findall(r"s:train:\d+", said)) == 150
        assert stub.count("training_runs") == 2
        stub.script("training_runs", delay(0.5), delay(0.5))
        piped = subprocess.run(
            [*TINKEX, "run", "list", "--limit", "0"], capture_output=True, text=True, env=env, timeout=60
        )
        assert (piped.returncode, piped.stderr) == (0, "")


def test_a_download_has_a_bar_of_bytes(tmp_path: Path) -> None:
    with Stub() as stub:
        env = clean_env(tmp_path, TINKER_BASE_URL=stub.url, NO_COLOR="1")
        path = "tinker://s:train:0/external_weights/final"
        stub.script("files/*", delay(0.5))
        said = in_terminal([*TINKEX, "checkpoint", "download", path, "-o", str(tmp_path)], env)
        assert re.search(BAR.format(what="Downloading", counts=r"\b9/\? bytes"), said), said
        assert (
            tmp_path / "s:train:0_external_weights_final" / "adapter_config.json"
        ).read_bytes() == b"stub file"


def test_no_color_is_honoured_by_every_command(tmp_path: Path) -> None:
    listing = [*TINKEX, "run", "list"]
    assert "\x1b[1m" in in_terminal(listing, clean_env(tmp_path))
    assert "\x1b" not in in_terminal(listing, clean_env(tmp_path, NO_COLOR="1"))


def test_words_for_times_and_sizes() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    spans = {
        timedelta(0): "just now", timedelta(minutes=1): "1 minute ago", timedelta(hours=-2): "in 2 hours",
        timedelta(days=8): "1 week ago", timedelta(days=800): "2 years ago",
    }  # fmt: skip
    assert {span: ago(now - span, now) for span in spans} == spans
    assert [size(n) for n in (0, 1023, 1024, 1024**2, 5 * 1024**4)] == [
        "0 B", "1023 B", "1.0 KB", "1.0 MB", "5.0 TB"
    ]  # fmt: skip


def test_gathering_stops_at_the_limit() -> None:
    class Listing:
        total = 10

        def __iter__(self) -> Iterator[int]:
            for n in range(10):
                assert n < 4, "more was fetched than asked for"
                yield n

    shown = "3 things here (7 more: --limit 0 shows all)"
    assert gather(Listing(), 3, "thing", "here") == ([0, 1, 2], shown)
