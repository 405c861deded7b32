"""Run any of these examples, unchanged, against a server that this script starts.

    python examples/served.py --model tiny=path/to/model -- examples/sft.py data.jsonl --model tiny

Usually the server runs on another machine and only the environment differs:

    tinkex serve --model SmolLM2-135M-Instruct --host 0.0.0.0            # there, with a key made by
    tinkex server keys add me                                            # …
    TINKER_BASE_URL=http://there:8000 TINKER_API_KEY=tml-… python examples/sft.py data.jsonl    # here
"""

import argparse
import os
import re
import subprocess
import sys


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="as `tinkex serve` takes it")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script and its arguments, after --")
    options = parser.parse_args()
    script = [word for word in options.script if word != "--"]
    if not script:
        parser.error("which script? e.g. -- examples/rl.py --steps 3")

    server = subprocess.Popen(
        [sys.executable, "-m", "tinkex.cli", "serve", "--model", options.model, "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        for line in server.stdout:
            print("server:", line, end="")
            if found := re.search(r" serves (http://\S+)", line):
                break
        else:
            sys.exit("the server did not start")
        where = {"TINKER_BASE_URL": found[1], "TINKER_API_KEY": "tml-any-key-will-do-on-loopback"}
        done = subprocess.run([sys.executable, *script], env={**os.environ, **where})
    finally:
        server.terminate()
        server.communicate()
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
