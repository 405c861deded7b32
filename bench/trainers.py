"""Our recipes beside TRL's SFTTrainer, DPOTrainer and GRPOTrainer: `make bench-trl`, or --help.

Both sides start from one adapter that PEFT wrote, on the same weights, data, order and AdamW settings, each
in a child process (bench/trl_sides.py) on the CPU, in turn. The table has medians over the rounds of tokens
per second and per CPU second, from the second step on; of peak memory above that of a process that has
imported the same libraries; and how far the losses of SFT and DPO are apart. On a busy machine look at CPU
seconds, with `--cores 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--recipes", nargs="+", default=["sft", "dpo", "grpo"])
    parser.add_argument("--answers", choices=["mixed", "equal"], default="mixed", help="lengths of answers")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", type=int, help="use so many cores alone")
    options = parser.parse_args()

    from tinkex.config import Settings
    from tinkex.models import obtain

    settings = Settings.read()
    model = str(obtain(options.model, settings.home / "models", offline=settings.offline))
    print("| recipe | tokens/s TRL | ours | ratio | tokens/CPU s TRL | ours | ratio ", end="")
    print("| peak MiB TRL | ours | ratio | from step 2 | losses apart |")
    print("|---" * 12 + "|")
    with tempfile.TemporaryDirectory() as place:
        adapter = write_adapter(model, Path(place, "adapter"))
        for recipe in options.recipes:
            rows = data_of(recipe, options.steps * options.batch, mixed=options.answers == "mixed")
            data = Path(place, f"{recipe}.jsonl")
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            job = {
                "side": "trl", "recipe": recipe, "model": model, "adapter": str(adapter), "data": str(data),
                "steps": options.steps, "batch": options.batch, "learning_rate": 2e-4,
            }  # fmt: skip
            sides: dict[str, list[dict[str, Any]]] = {"trl": [], "ours": []}
            for _ in range(options.rounds):
                for side, done in sides.items():
                    done.append(measured({**job, "side": side}, place, options.cores))
            print(line(recipe, sides["trl"], sides["ours"]), flush=True)


def write_adapter(model: str, place: Path) -> Path:
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=layers, task_type="CAUSAL_LM")
    peft.get_peft_model(loaded, lora).save_pretrained(place)
    return place


def data_of(recipe: str, count: int, *, mixed: bool) -> list[dict[str, Any]]:
    """Sums in words: prompts of a few tokens. Answers of about sixty, or as mixed as those of chats are."""
    rows, draw = [], random.Random(0)
    for n in range(count):
        numbers = min(60, int(draw.lognormvariate(2.3, 0.9)) + 2) if mixed else 12
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": f"Count up from {n}."}]}
        good = [{"role": "assistant", "content": ", ".join(str(n + k) for k in range(numbers))}]
        poor = [{"role": "assistant", "content": ", ".join(str(n - k) for k in range(numbers))}]
        row |= {"sft": {"completion": good}, "dpo": {"chosen": good, "rejected": poor}}.get(recipe, {})
        rows.append(row)
    return rows


def measured(job: dict[str, Any], place: str, cores: int | None) -> dict[str, Any]:
    environment = {**os.environ, "TINKEX_HOME": f"{place}/home", "HF_HUB_OFFLINE": "1"}
    child = [sys.executable, str(HERE / "trl_sides.py"), json.dumps(job)]
    if cores:
        mine = sorted(os.sched_getaffinity(0))[-cores:]
        child = ["taskset", "-c", ",".join(map(str, mine)), *child]
    done = subprocess.run(child, capture_output=True, text=True, env=environment, cwd=place)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def line(recipe: str, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    def pair(key: str, per: str = "") -> tuple[float, float]:
        of = lambda side: [each[key] / (each[per] if per else 1) for each in side]  # noqa: E731
        return statistics.median(of(theirs)), statistics.median(of(ours))

    cells = [recipe]
    for trl, own in (pair("tokens", "seconds"), pair("tokens", "cpu"), pair("peak_mb")):
        cells += [f"{trl:.0f}", f"{own:.0f}", f"{own / trl:.2f}"]
    steady = pair("steady_mb")
    apart = max(abs(a - b) for a, b in zip(theirs[0]["losses"], ours[0]["losses"], strict=True))
    cells += [f"{steady[1] / steady[0]:.2f}", f"{apart:.1e}" if recipe != "grpo" else "other draws"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
