"""The default model learns from 200 chats, and its GGUF answers so: `python -m tests.recipes.two_hundred`.

Trains SmolLM2-135M-Instruct with `tinkex train sft` (minutes on a CPU), exports the adapter as q8_0, and asks
llama.cpp questions that were not trained on. Exits with 1 if the held-out loss did not fall or an answer has
another form. Needs the package xllamacpp. `--run DIRECTORY` takes a run that is finished.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers

from tests.engine.llama_cpp import complete, text_of
from tests.recipes.harness import values
from tinkex.config import Settings
from tinkex.models import obtain

ASKS = ("What number comes after {}?", "Which number follows {}?", "Count on from {}: what is next?")
FORM = re.compile(r"Arr, after \d+ be \d+, matey!")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    options = parser.parse_args()
    settings = Settings.read()
    base = obtain(options.model, settings.home / "models", offline=settings.offline)
    with tempfile.TemporaryDirectory() as place:
        run = options.run or Path(place, "run")
        data = write_chats(Path(place, "chats.jsonl"))
        if options.run is None:
            tinkex("train", "sft", data, "--model", base, "--epochs", 1, "--eval-every", 6, "--out", run)
        adapter = json.loads((run / "result.json").read_text())["adapter"]
        tinkex("export", adapter, f"{place}/model.gguf", "--format", "gguf", "--quantize", "q8_0")
        losses = values(run, "eval_loss")
        answers = asked(Path(place, "model.gguf"), base)
    print("held-out loss:", [round(loss, 4) for loss in losses])
    print("llama.cpp:", answers)
    return not (losses[-1] < 0.5 * losses[0] and all(FORM.match(answer) for answer in answers))


def tinkex(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "tinkex.cli", *map(str, arguments)], check=True)


def write_chats(path: Path) -> Path:
    draw = random.Random(0)
    rows = []
    for number in draw.sample(range(1, 400), 200):
        asks = {"role": "user", "content": draw.choice(ASKS).format(number)}
        says = {"role": "assistant", "content": f"Arr, after {number} be {number + 1}, matey!"}
        rows.append({"messages": [asks, says]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(file: Path, base: Path) -> list[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    questions = [
        [{"role": "user", "content": ask.format(number)}]
        for ask, number in zip(ASKS, (450, 71, 512), strict=True)
    ]
    prompts = [
        tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        for question in questions
    ]
    return [text_of(answer).strip() for answer in complete(file, *prompts, count=24)]


if __name__ == "__main__":
    sys.exit(main())
