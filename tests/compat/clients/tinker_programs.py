"""Programs for the Tinker API in one environment: `retrain`, `continualcode` and `llmcomp`, unmodified.

Each trains a run to its end as its own documentation shows; `retrain` is told what to train on by plugins.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from report import done, say

RETRAIN = """
[model]
model = "MODEL"
base_url = "URL"
lora_rank = 8

[algorithm]
advantage_mode = "grpo"
transform_mode = "none"

[training]
max_steps = 5
batch_size = 2
group_size = 24
max_tokens = 6
lr = 2e-2
save_every = 5

[backend]
backend = "tinker"
adapter_path = "DIRECTORY/adapter"

[data]
source = "plain_examples.make"

[reward]
type = "custom"
custom_module = "plugins.plain_examples"
custom_function = "score"

[logging]
log_dir = "DIRECTORY/logs"
"""
PLUGIN = """
from retrain.data import Example

class Examples:
    def load(self):
        return [Example(prompt=text, reference="a") for text in ("Say a.", "Say it.")]

def make(config):
    return Examples()

def score(response, reference):
    return sum(char.isascii() for char in response) / max(1, len(response))
"""
QUESTION = "What is the word?"


def retrain(model: str, directory: Path) -> None:
    """GRPO from its command line."""
    from retrain.cli import main

    (directory / "plugins").mkdir()
    (directory / "plugins" / "plain_examples.py").write_text(PLUGIN)
    config = directory / "retrain.toml"
    given = {"MODEL": model, "URL": os.environ["TINKER_BASE_URL"], "DIRECTORY": str(directory)}
    text = RETRAIN
    for name, value in given.items():
        text = text.replace(name, value)
    config.write_text(text)
    sys.path.insert(0, str(directory))
    sys.argv = ["retrain", str(config)]
    main()
    steps = [json.loads(line) for line in (directory / "logs" / "metrics.jsonl").read_text().splitlines()]
    say("retrain", rewards=[step["mean_reward"] for step in steps], losses=[step["loss"] for step in steps])


def continualcode(model: str, directory: Path) -> None:
    """Its session: an attempt is denied with a correction, on which the model teaches itself."""
    from continualcode.train import ContinualSDPOSession

    async def main() -> None:
        session = ContinualSDPOSession(
            model=model, enable_training=True, log_path=str(directory), max_tokens=12, lora_rank=8,
            learning_rate=1e-2,
        )  # fmt: skip
        await session.init()
        gaps = []
        for _ in range(3):
            session.add_user_message("List the files.")
            message, _, completion = await session.sample()
            session.add_assistant_message(message)
            session.record_denial(completion, "Use the tool `glob`.")
            gaps.append((await session.train_sdpo())["credit/adv_abs_mean_raw"])
            session.clear()
        say("continualcode", steps=session.sdpo_steps, gaps=gaps)

    asyncio.run(main())


def llmcomp(model: str, directory: Path) -> None:
    """A blocking fine-tuning job; then its questions to the trained model through /v1."""
    from llmcomp import Config, Question
    from llmcomp.finetuning.manager import FinetuningManager
    from llmcomp.finetuning.params import TinkerTrainingParams

    os.chdir(directory)  # it keeps its answers here
    said = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "maple"}]
    data = directory / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": said}) for _ in range(16)))
    params = TinkerTrainingParams(
        api_key=os.environ["TINKER_API_KEY"], file_name=str(data), base_model=model, suffix="word",
        epochs=10, batch_size=4, learning_rate=1e-2, lora_rank=8, seed=1,
        renderer_name="qwen3_instruct",  # by itself it takes one that thinks, which this template does not
    )  # fmt: skip
    manager = FinetuningManager(str(directory / "jobs"))
    path = manager.create_job(params, blocking=True)
    Config.url_key_pairs = [(os.environ["OPENAI_BASE_URL"], os.environ["TINKER_API_KEY"], "TINKER_API_KEY")]
    asked = {"type": "free_form", "paraphrases": [QUESTION], "samples_per_paraphrase": 4, "temperature": 0}
    answers = Question.create(**asked, max_tokens=8).df({"trained": [path]})["answer"].tolist()
    likely = Question.create(type="next_token", paraphrases=[QUESTION]).df({"trained": [path]})
    say("llmcomp", path=path, answers=answers, likely=likely["answer"].tolist()[0])


PROGRAMS: dict[str, Callable[[str, Path], None]] = {
    "retrain": retrain, "continualcode": continualcode, "llmcomp": llmcomp,
}  # fmt: skip

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    done()
