"""The peer's side of the engine benchmark: transformers with a peft adapter, written with care.

The same weights, data, threads, rank and adapted layers (every linear one and the head); torch's fused AdamW,
adapters in the model's dtype. Training comes in four forms, since padding is optional:
padded (one batch, as in most scripts), bucketed (sorted by length, cut into batches with little padding),
packed (one row, positions that restart) and single (a sequence at a time). Knows nothing of our code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import peft
import torch
import transformers
from engine_child import Figures, PeakMemory, Round, Task, Timer

BUCKET = 512  # tokens of a bucketed batch, padding included
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
MIXERS = ["in_proj_qkv", "in_proj_z", "out_proj"]  # of gated delta nets
Batch = dict[str, torch.Tensor]


def _base(task: Task) -> Any:
    if task.threads:
        torch.set_num_threads(task.threads)
    warnings.simplefilter("ignore")  # peft's, of adapters on a tied head
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = torch.bfloat16 if task.device == "cuda" else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype)
    return model.to(task.device)


def _with_adapter(model: Any, task: Task) -> Any:
    recurrent = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    targets = LINEARS + (MIXERS if recurrent else [])
    config = peft.LoraConfig(r=task.rank, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


# -- batches -------------------------------------------------------------------------------------------


def _padded(sequences: list[np.ndarray], left: bool = False) -> Batch:
    longest = max(map(len, sequences))
    ids = np.zeros((len(sequences), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, seen, sequence in zip(ids, mask, sequences, strict=True):
        place = slice(longest - len(sequence), None) if left else slice(len(sequence))
        row[place], seen[place] = sequence, 1
    batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    if not left:
        batch["labels"] = torch.from_numpy(np.where(mask == 1, ids, -100))
    return batch


def _packed(sequences: list[np.ndarray]) -> Batch:
    ids = np.concatenate(sequences).astype(np.int64)
    labels = np.concatenate([np.append(-100, s[1:]) for s in sequences])
    positions = np.concatenate([np.arange(len(s)) for s in sequences])
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {key: torch.from_numpy(array)[None] for key, array in arrays.items()}


def _buckets(sequences: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    group: list[np.ndarray] = []
    for sequence in sorted(sequences, key=len):
        if group and (len(group) + 1) * len(sequence) > BUCKET:
            yield group
            group = []
        group.append(sequence)
    yield group


def batches(way: str, sequences: list[np.ndarray]) -> list[Batch]:
    match way:
        case "padded" | "in turn" | "recomputed":
            return [_padded(sequences)]
        case "bucketed":
            return [_padded(group) for group in _buckets(sequences)]
        case "packed":
            return [_packed(sequences)]
        case "single":
            return [_padded([sequence]) for sequence in sequences]
    raise ValueError(f"there is no way {way!r}")


# -- measures ------------------------------------------------------------------------------------------


def _step(model: Any, optimizer: torch.optim.Optimizer, work: list[Batch], device: str) -> None:
    """Gradients of the mean loss over all batches, and an update."""
    targets = [int((batch["labels"][:, 1:] >= 0).sum()) for batch in work]
    for batch, count in zip(work, targets, strict=True):
        on_device = {key: value.to(device) for key, value in batch.items()}
        loss = model(**on_device, use_cache=False).loss
        (loss * (count / sum(targets))).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(task: Task) -> Round:
    """One run's batch and its step."""
    model = _with_adapter(_base(task), task).train()
    optimizer = _optimizer(model)

    def one(turn: int) -> Figures:
        work = batches(task.way, task.sequences(turn))
        with Timer(task.device) as timer:
            _step(model, optimizer, work, task.device)
        return timer.figures(sum(task.lengths))

    return one


def tenants(task: Task) -> Round:
    """Runs one after another. One adapter stands for all of them: nothing is spent on switching."""
    model = _with_adapter(_base(task), task).train()
    optimizer = _optimizer(model)
    share = len(task.lengths) // task.adapters

    def one(turn: int) -> Figures:
        sequences = task.sequences(turn)
        runs = [sequences[i * share : (i + 1) * share] for i in range(task.adapters)]
        work = [batches(task.way, run) for run in runs]
        with Timer(task.device) as timer:
            for each in work:
                _step(model, optimizer, each, task.device)
        return timer.figures(sum(task.lengths))

    return one


def memory(task: Task) -> Round:
    model = _base(task)
    if task.way == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    peak = PeakMemory(task.device)
    model = _with_adapter(model, task).train()
    optimizer = _optimizer(model)

    def one(turn: int) -> Figures:
        _step(model, optimizer, batches(task.way, task.sequences(turn)), task.device)
        return peak.figures()

    return one


def sample(task: Task) -> Round:
    """`generate` on a left-padded batch, drawing at temperature 1 and never stopping early.

    The way is the kind of KV cache, "dynamic" or "static".
    """
    model = _with_adapter(_base(task), task).eval()
    settings = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=task.new_tokens,
        pad_token_id=0,
        cache_implementation=task.way,
    )
    model.generation_config.eos_token_id = None

    def one(turn: int) -> Figures:
        batch = {
            key: value.to(task.device) for key, value in _padded(task.sequences(turn), left=True).items()
        }
        with Timer(task.device) as timer, torch.inference_mode():
            out = model.generate(**batch, generation_config=settings)
        new = out.shape[1] - batch["input_ids"].shape[1]
        assert new == task.new_tokens
        return timer.figures(new * len(task.lengths))

    return one


MEASURES = {"train": train, "tenants": tenants, "memory": memory, "sample": sample}
