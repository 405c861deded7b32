"""One recipe on one side, TRL's or ours, from the same PEFT adapter, data, order and AdamW settings.

    python bench/trl_sides.py '{"side": "trl", "recipe": "sft", "model": …, "adapter": …, …}'

prints a JSON object: the loss of each step, seconds, tokens, peak memory. What both sides share is in
`Job`; the learning rate falls linearly, gradients are clipped at 1, and a batch is the next rows of the data.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BETA2, EPS, CLIP = 0.95, 1e-8, 1.0


@dataclass(frozen=True)
class Job:
    """What is trained, on which side."""

    side: str  # "trl" or "ours"
    recipe: str  # "sft", "dpo" or "grpo"
    model: str
    adapter: str  # a directory of PEFT's
    data: str
    steps: int = 5
    batch: int = 4
    learning_rate: float = 1e-3
    group: int = 4
    max_tokens: int = 32


@dataclass(frozen=True)
class Measured:
    """How it went; `tokens` are those of the training passes."""

    losses: list[float]
    seconds: float
    tokens: int
    peak_mb: float


def run(job: Job) -> Measured:
    work = {"trl": trl_side, "ours": our_side}[job.side]
    losses, seconds, tokens = work(job)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured(losses, round(seconds, 3), tokens, round(peak, 1))


def rows_of(job: Job) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(job.data).read_text().splitlines()]
    return rows[: job.steps * job.batch]


# -- TRL ---------------------------------------------------------------------------------------------------


def trl_side(job: Job) -> tuple[list[float], float, int]:
    import peft
    import torch
    import transformers
    import trl
    from datasets import Dataset

    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(model, job.adapter, is_trainable=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    common: dict[str, Any] = {
        "per_device_train_batch_size": job.batch, "max_steps": job.steps, "learning_rate": job.learning_rate,
        "lr_scheduler_type": "linear", "warmup_steps": 0, "adam_beta2": BETA2, "adam_epsilon": EPS,
        "weight_decay": 0.0, "max_grad_norm": CLIP, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True,
        "seed": 0,
    }  # fmt: skip
    data = Dataset.from_list(rows_of(job))
    with tempfile.TemporaryDirectory() as out:
        common["output_dir"] = out
        if job.recipe == "sft":
            settings = trl.SFTConfig(**common, train_sampling_strategy="sequential")
            trainer = trl.SFTTrainer(tuned, settings, train_dataset=data, processing_class=tokenizer)
        elif job.recipe == "dpo":
            settings = trl.DPOConfig(**common, train_sampling_strategy="sequential", beta=0.1)
            trainer = trl.DPOTrainer(tuned, args=settings, train_dataset=data, processing_class=tokenizer)
        else:
            common["per_device_train_batch_size"] = job.batch * job.group
            settings = trl.GRPOConfig(
                **common,
                num_generations=job.group,
                max_completion_length=job.max_tokens,
                shuffle_dataset=False,
            )
            trainer = trl.GRPOTrainer(
                tuned, reward, args=settings, train_dataset=data, processing_class=tokenizer
            )
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        history = trainer.state.log_history
    losses = [row["loss"] for row in history if "loss" in row]
    tokens = [row["num_tokens"] for row in history if "num_tokens" in row]
    return losses, seconds, int(tokens[-1]) if tokens else 0


def reward(completions: list[Any], **_: Any) -> list[float]:
    """How much of an answer is the letter e; both sides use it."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [score(text, {}) for text in texts]


def score(text: str, row: Any) -> float:
    return text.count("e") / max(1, len(text))


# -- ours --------------------------------------------------------------------------------------------------


def our_side(job: Job) -> tuple[list[float], float, int]:
    import tinkex
    from tinkex.recipes.dpo import DpoConfig, train_dpo
    from tinkex.recipes.grpo import GrpoConfig, train_grpo
    from tinkex.recipes.sft import SftConfig, train_sft

    with tempfile.TemporaryDirectory() as place, tinkex.ServiceClient(base_url="local") as service:
        data = Path(place, "data.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(job)))
        start = service.create_rest_client().import_checkpoint(job.adapter, job.model, "start").result()
        common: dict[str, Any] = {
            "model": job.model, "start_from": start, "data": str(data), "out": f"{place}/run",
            "steps": job.steps, "batch_size": job.batch, "learning_rate": job.learning_rate,
            "save_every": 10**6,
            "adam": tinkex.AdamParams(beta2=BETA2, eps=EPS, grad_clip_norm=CLIP),
        }  # fmt: skip
        Path("trl_reward.py").write_text(
            "def score(text, row):\n    return text.count('e') / max(1, len(text))\n"
        )

        def train(**changed: Any) -> None:
            settings = {**common, **changed}
            if job.recipe == "sft":
                train_sft(SftConfig(**settings, shuffle=False, eval_share=0.0), service)
            elif job.recipe == "dpo":
                train_dpo(DpoConfig(**settings, shuffle=False, eval_share=0.0), service)
            else:
                more = {"group_size": job.group, "max_tokens": job.max_tokens, "reward": "trl_reward:score"}
                train_grpo(GrpoConfig(**settings, **more), service)

        train(steps=1, out=f"{place}/warm")  # TRL's clock starts after its model is loaded, too
        began = time.perf_counter()
        train()
        seconds = time.perf_counter() - began
        rows = [json.loads(line) for line in Path(place, "run", "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "loss" in row]
    return [row["loss"] for row in trained], seconds, int(sum(row.get("tokens", 0) for row in trained))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result = run(Job(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(result)))
