"""Our recipes beside TRL's SFTTrainer, DPOTrainer and GRPOTrainer: `make bench-trl`, or --help.

Both sides start from one adapter that PEFT wrote, on the same weights, data, order and AdamW settings, each
in a child process (bench/trl_sides.py) on the CPU. The table has tokens per second, peak memory, and how far
the losses of SFT and DPO are apart. Trust ratios; on a busy machine the figures are noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--recipes", nargs="+", default=["sft", "dpo", "grpo"])
    options = parser.parse_args()

    from tinkex.config import Settings
    from tinkex.models import obtain

    settings = Settings.read()
    model = str(obtain(options.model, settings.home / "models", offline=settings.offline))
    print("| recipe | tokens/s TRL | ours | ratio | peak MiB TRL | ours | ratio | losses apart |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        adapter = write_adapter(model, Path(place, "adapter"))
        for recipe in options.recipes:
            data = write_data(recipe, Path(place, f"{recipe}.jsonl"), options.steps * options.batch)
            job = {
                "side": "trl", "recipe": recipe, "model": model, "adapter": str(adapter), "data": str(data),
                "steps": options.steps, "batch": options.batch, "learning_rate": 2e-4,
            }  # fmt: skip
            theirs, ours = measured(job, place), measured({**job, "side": "ours"}, place)
            print(line(recipe, theirs, ours), flush=True)


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


def write_data(recipe: str, place: Path, count: int) -> Path:
    """Sums in words: prompts of a few tokens, answers of about sixty."""
    rows = []
    for n in range(count):
        row = {"prompt": [{"role": "user", "content": f"Count up from {n}."}]}
        good = [{"role": "assistant", "content": ", ".join(str(n + k) for k in range(12))}]
        poor = [{"role": "assistant", "content": ", ".join(str(n - k) for k in range(12))}]
        row |= {"sft": {"completion": good}, "dpo": {"chosen": good, "rejected": poor}}.get(recipe, {})
        rows.append(row)
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def measured(job: dict[str, object], place: str) -> dict[str, object]:
    environment = {**os.environ, "TINKEX_HOME": f"{place}/home", "HF_HUB_OFFLINE": "1"}
    child = [sys.executable, str(HERE / "trl_sides.py"), json.dumps(job)]
    done = subprocess.run(child, capture_output=True, text=True, env=environment, cwd=place)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def line(recipe: str, theirs: dict, ours: dict) -> str:
    speeds = [side["tokens"] / side["seconds"] if side["tokens"] else 0.0 for side in (theirs, ours)]
    ratio = speeds[1] / speeds[0] if speeds[0] else float("nan")
    apart = max(abs(a - b) for a, b in zip(theirs["losses"], ours["losses"], strict=True))
    told = f"{apart:.1e}" if recipe != "grpo" else "other draws"
    memory = ours["peak_mb"] / theirs["peak_mb"]
    return (
        f"| {recipe} | {speeds[0]:.0f} | {speeds[1]:.0f} | {ratio:.2f} | {theirs['peak_mb']:.0f} | "
        f"{ours['peak_mb']:.0f} | {memory:.2f} | {told} |"
    )


if __name__ == "__main__":
    main()
