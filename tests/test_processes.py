"""Children that Ctrl-C can end, although their parent ignores it."""

import signal
import subprocess
import sys

from tests.processes import interruptible


def test_ctrl_c_ends_a_child_of_a_process_that_ignores_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    try:
        kill = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
        plain, ended = (
            subprocess.run(command, capture_output=True, text=True)
            for command in ([sys.executable, "-c", kill], interruptible([sys.executable, "-c", kill]))
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert plain.stdout == "alive\n"
    assert ended.returncode == -signal.SIGINT
    assert not ended.stdout
    assert "KeyboardInterrupt" in ended.stderr
