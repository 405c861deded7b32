"""Kill `tinkex train sft` at random moments, many times: `python -m tests.recipes.kills --kills 20`.

Each time the same command goes on. When it comes to its end, the metrics must equal those of an undisturbed
run, and the next one begins. Exits with 1 if they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.recipes.harness import metrics

OPTIONS = (
    "--steps=200", "--batch-size=4", "--learning-rate=3e-3", "--save-every=9", "--eval-every=25",
    "--samples=1",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        where = Path(place)
        model = tiny_tokenizer(tiny_model(where / "models", "qwen3", eos_token_id=257))
        rows = [{"prompt": f"say {n}?", "completion": f"yes {n}"} for n in range(40)]
        (where / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "tinkex.cli", "train", "sft", str(where / "data.jsonl")]
        command += ["--model", str(model), *OPTIONS]
        environment = {**os.environ, "TINKEX_HOME": f"{place}/home", "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        run([*command, "--out", f"{place}/whole"], environment, None)
        whole = time.monotonic() - began
        done = runs = other = 0
        while done < options.kills:
            out = where / f"killed-{runs}"
            while run([*command, "--out", str(out)], environment, draw.random() * whole):
                done += 1
            runs += 1
            other += not equal(metrics(out), metrics(where / "whole"))
    print(f"{done} kills in {runs} runs: {f'{other} with OTHER LOSSES' if other else 'the same losses'}")
    return bool(other)


def run(command: list[str], environment: dict[str, str], seconds: float | None) -> bool:
    """Run it to its end, or kill it after so many seconds; was it killed?"""
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, said = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return True
    if child.returncode:
        sys.exit(said.decode()[-3000:])
    return False


def equal(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(
        mine.keys() == its.keys() and all(abs(mine[name] - its[name]) < 1e-5 for name in mine)
        for mine, its in zip(ours, theirs, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
