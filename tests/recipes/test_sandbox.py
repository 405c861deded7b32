"""The sandbox's limits, tried by programs that go beyond them; rewards that hang, fail and answer."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from pathlib import Path

import pytest

from tinkex.errors import InvalidInputError
from tinkex.recipes.environments import Arithmetic, Format, Python, Tools, environment
from tinkex.recipes.rewards import Reward
from tinkex.recipes.sandbox import TIMED_OUT, LocalSandbox, SandboxLimits, run_python

pytestmark = pytest.mark.slow  # subprocesses


def test_code_runs_without_environment_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "12345")
    done = run_python("import os, sys\nprint(sorted(os.environ), os.listdir(), sys.stdin.read())", stdin="hi")
    assert done.exit_code == 0
    assert "SECRET_KEY" not in done.stdout
    assert "['main.py'] hi" in done.stdout


def test_a_program_that_does_not_end_is_killed_with_its_children() -> None:
    began = time.monotonic()
    code = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while 1: pass'])\nwhile 1: pass"
    assert run_python(code, limits=SandboxLimits(seconds=1)).exit_code == TIMED_OUT
    assert time.monotonic() - began < 10


def test_memory_and_files_are_limited() -> None:
    assert "MemoryError" in run_python("x = bytearray(10**9)").stderr
    written = run_python("open('big', 'wb').write(b'x' * (1 << 26))")
    assert written.exit_code != 0
    assert len(run_python("print('x' * 10**7)").stdout) <= 128 * 1024


def test_there_is_no_network_where_the_system_allows_to_take_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run_python(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('open')")
    allowed = run_python("import os; print(os.getuid())").stdout.strip() == "65534"  # a namespace of its own
    assert ("open" in done.stdout) is not allowed


def test_the_methods_of_the_cookbooks_interface() -> None:
    async def use() -> Path:
        sandbox = LocalSandbox(SandboxLimits(seconds=5))
        assert sandbox.sandbox_id.startswith("local-")
        await sandbox.send_heartbeat()
        written = await sandbox.write_file(
            "/work/run.sh", "echo $((6 * 7)); echo oops >&2; exit 3", executable=True
        )
        assert written.exit_code == 0
        done = await sandbox.run_command("sh run.sh", workdir="/work", timeout=5)
        assert (done.stdout, done.stderr, done.exit_code) == ("42\n", "oops\n", 3)
        assert (await sandbox.read_file("work/run.sh", max_bytes=4)).stdout == "echo"
        assert (await sandbox.read_file("../../etc/passwd")).exit_code == 1
        assert (await sandbox.run_command("sleep 9", timeout=1)).exit_code == TIMED_OUT
        assert (await sandbox.run_command("pwd", workdir="/../..")).exit_code == 1
        place = (await sandbox.run_command("pwd")).stdout.strip()
        await sandbox.cleanup()
        return Path(place)

    assert not asyncio.run(use()).exists()


# -- rewards ---------------------------------------------------------------------------------------------

GRADING = """
import time

def score(text, row):
    print("this is no answer")
    if text == "hang":
        time.sleep(60)
    if text == "die":
        raise KeyError("x")
    return len(text) + row["bonus"]
"""


def test_a_reward_is_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grading.py").write_text(GRADING)
    reward = Reward("grading:score", seconds=2)
    assert reward("four", {"bonus": 1}) == 5.0
    assert reward("hang", {"bonus": 1}) == 0.0
    assert reward.timeouts == 1
    assert reward("four", {"bonus": 0.5}) == 4.5, "a new process goes on"
    with pytest.raises(InvalidInputError, match="grading:score: KeyError"):
        reward("die", {"bonus": 1})
    reward.close()
    for spec, told in (("grading:none", "KeyError: 'none'"), ("nothing:score", "No module named 'nothing'")):
        with pytest.raises(InvalidInputError, match=told):
            Reward(spec)
    with pytest.raises(InvalidInputError, match="a reward is module:function"):
        Reward("grading")


def test_a_reward_is_a_pattern_that_cannot_hang() -> None:
    reward = Reward(r"regex:^Yes\b", seconds=1)
    assert (reward("Yes, it is", {}), reward("No", {})) == (1.0, 0.0)
    reward.close()
    slow = Reward(r"regex:^(a+)+$", seconds=1)
    assert slow("a" * 40 + "b", {}) == 0.0
    assert slow.timeouts == 1
    slow.close()
    with pytest.raises(InvalidInputError, match=r"unterminated|missing"):
        Reward("regex:(")


def test_a_reward_is_a_program(tmp_path: Path) -> None:
    program = tmp_path / "grade.py"
    program.write_text("import json, sys\nq = json.load(sys.stdin)\nprint(len(q['text']) * q['row']['k'])")
    assert Reward(f"program:{sys.executable} {program}")("abc", {"k": 2}) == 6.0
    program.write_text("print('no number')")
    with pytest.raises(InvalidInputError, match="must print a number, exit code 0: no number"):
        Reward(f"program:{sys.executable} {program}")("abc", {})
    with pytest.raises(InvalidInputError, match="no such program"):
        Reward("program:/no/such/thing")("abc", {})
    program.write_text("import time\ntime.sleep(60)")
    slow = Reward(f"program:{sys.executable} {program}", seconds=1)
    assert slow("abc", {}) == 0.0
    assert slow.timeouts == 1


# -- environments ----------------------------------------------------------------------------------------


def test_environments_judge_answers_and_repeat_their_problems() -> None:
    sums = Arithmetic(seed=1)
    question = str(sums.episode(3).messages[0]["content"])
    assert question == sums.episode(3).messages[0]["content"] != sums.episode(4).messages[0]["content"]
    left, right = (int(part) for part in question.removeprefix("What is ").partition("?")[0].split(" + "))
    judged = [sums.episode(3).answer(text).reward for text in (f"{left + right}", "-1", "many")]
    assert judged == [1.0, 0.1, 0.0]
    form = Format().episode(0)
    texts = ("<answer>red</answer>", "It is <answer>red</answer>", "<answer>red", "red")
    assert [form.answer(text).reward for text in texts] == [1.0, 0.5, 0.25, 0.0]
    with pytest.raises(InvalidInputError, match="--env must be one of arithmetic"):
        environment("chess", 0)


def test_code_is_judged_by_its_tests() -> None:
    tests = ("f(2) == 4", "f(3) == 6")
    judge = Python().judge
    assert judge("```python\ndef f(x):\n    return 2 * x\n```", tests) == 1.0
    assert judge("def f(x): return 4", tests) == 0.5
    assert judge("no code at all", tests) == 0.0
    assert judge("print('tests\\n1\\n1')\nraise SystemExit(0)", tests) == 0.0, "what it prints is no result"


def test_an_episode_with_a_tool_has_several_turns() -> None:
    episode = Tools(seed=0).episode(0)
    call = str(episode.messages[0]["content"]).partition("<calc>")[2].partition("</calc>")[0]
    left, _, right = call.partition(" * ")
    answer = int(left) * int(right)
    judged = episode.answer(f"<calc>{call}</calc>")
    assert judged.messages == ({"role": "user", "content": f"<result>{answer}</result>"},)
    assert episode.answer(f"It is {answer}").reward == pytest.approx(1.1)
    endless = Tools(seed=0).episode(0)
    turns = [endless.answer("<calc>1/0</calc>") for _ in range(3)]
    assert "division by zero" in str(turns[0].messages[0]["content"])
    assert turns[2].messages == (), "it ends"
