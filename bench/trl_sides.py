"""One recipe on one side, TRL's or ours, from the same PEFT adapter, data, order and AdamW settings.

    python bench/trl_sides.py '{"side": "trl", "recipe": "sft", "model": …, "adapter": …, …}'

prints a JSON object: of each step the loss, and from the second step on seconds, CPU seconds and tokens; how
far the peak of resident memory lies above that of this process with its libraries imported and a tokenizer
loaded. What both sides share is in `Job`; the learning rate falls linearly, gradients are clipped at 1, and a
batch is the next rows of the data.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
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
    """How it went. `seconds`, `cpu` and `tokens` are of the steps after the first; tokens without padding."""

    losses: list[float]
    seconds: float
    cpu: float  # of this process and its children, all threads
    tokens: int
    peak_mb: float  # above what the process had when its libraries were imported
    steady_mb: float  # the same, of the steps after the first alone


class Clock:
    """Notes the time at the end of each step, and what memory there was before anything was loaded."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float, int]] = []
        self._imported, self._early = memory("VmRSS"), 0.0

    def step(self, tokens: int) -> None:
        """A step has ended, in which so many tokens were computed."""
        self._ends.append((time.perf_counter(), cpu_seconds(), tokens))
        if len(self._ends) == 1:
            self._early = memory("VmHWM")
            Path("/proc/self/clear_refs").write_text("5")  # the kernel counts the peak anew from here

    def measured(self, losses: list[float]) -> Measured:
        (began, cpu, _), (ended, spent, _) = self._ends[0], self._ends[-1]
        steady = memory("VmHWM")
        peak, steady = max(self._early, steady) - self._imported, steady - self._imported
        tokens = sum(count for _, _, count in self._ends[1:])
        return Measured(losses, round(ended - began, 3), round(spent - cpu, 3), tokens, peak, steady)


def cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def memory(field: str) -> float:
    """MiB, by the kernel: VmRSS is now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def run(job: Job) -> Measured:
    return {"trl": trl_side, "ours": our_side}[job.side](job)


def rows_of(job: Job) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(job.data).read_text().splitlines()]
    return rows[: job.steps * job.batch]


# -- TRL ---------------------------------------------------------------------------------------------------


def trl_side(job: Job) -> Measured:
    import peft
    import torch
    import transformers
    import trl
    from datasets import Dataset

    _ = trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer  # imported when they are named
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
    clock = Clock()
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(model, job.adapter, is_trainable=True)
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

        class Ends(transformers.TrainerCallback):
            before = 0

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if "loss" in (logs or {}):
                    tokens = int(logs.get("num_tokens", 0))
                    clock.step(tokens - self.before)
                    self.before = tokens

        trainer.add_callback(Ends())
        trainer.train()
        history = trainer.state.log_history
    return clock.measured([row["loss"] for row in history if "loss" in row])


def reward(completions: list[Any], **_: Any) -> list[float]:
    """How much of an answer is the letter e; both sides use it."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [score(text, {}) for text in texts]


def score(text: str, row: Any) -> float:
    return text.count("e") / max(1, len(text))


# -- ours --------------------------------------------------------------------------------------------------


def our_side(job: Job) -> Measured:
    import torch
    import transformers

    import tinkex
    from tinkex.recipes.dpo import DpoConfig, train_dpo
    from tinkex.recipes.grpo import GrpoConfig, train_grpo
    from tinkex.recipes.progress import Progress
    from tinkex.recipes.sft import SftConfig, train_sft

    _ = torch.nn, import_module("tinkex.engine.torch.engine")
    transformers.AutoTokenizer.from_pretrained(job.model)  # as on the other side: it imports much
    clock = Clock()

    class Ends(Progress):
        def row(self, row: Mapping[str, float]) -> None:
            if "loss" in row:
                clock.step(int(row["tokens"]))

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

        shown = Ends(quiet=True)
        if job.recipe == "sft":
            train_sft(SftConfig(**common, shuffle=False, eval_share=0.0), service, shown)
        elif job.recipe == "dpo":
            train_dpo(DpoConfig(**common, shuffle=False, eval_share=0.0), service, shown)
        else:
            more = {"group_size": job.group, "max_tokens": job.max_tokens, "reward": "trl_reward:score"}
            train_grpo(GrpoConfig(**common, **more), service, shown)
        rows = [json.loads(line) for line in Path(place, "run", "metrics.jsonl").read_text().splitlines()]
    return clock.measured([row["loss"] for row in rows if "loss" in row])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result = run(Job(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(result)))
