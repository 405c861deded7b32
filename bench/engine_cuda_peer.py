"""Plain transformers on the GPU, beside `bench/engine.py --device cuda`: `engine_cuda_peer.py SHAPE MEASURE…`

Random weights made on the device. A peft adapter of rank 32 on every linear layer but the head: experts,
which are stacked, have none. Training: 8 sequences of 1,024 tokens, recomputing, logits of all tokens, fused
AdamW. Decoding: `generate` with its default cache, the adapter active, prompts of 128 tokens; a token's time
is what more tokens take more. A line of JSON for each measure, null where it fails.
Knows nothing of our code.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import warnings
from typing import Any

import peft
import torch
import transformers
from shapes import RANK, SHAPES

PROMPT, FEW, MORE = 128, 4, 20  # tokens of a prompt, and of two answers whose times are compared
BATCH, LENGTH = 8, 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def random_model(shape: str) -> Any:
    fields = {key: value for key, value in SHAPES[shape].items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(SHAPES[shape]["model_type"], **fields)
    with torch.device("meta"):
        model: Any = getattr(transformers, fields["architectures"][0])._from_config(config, dtype=DTYPE)
    model.to_empty(device=DEVICE)
    for name, module in list(model.named_modules()):
        if "RotaryEmbedding" in type(module).__name__:  # computes its buffers when it is made
            model.set_submodule(name, type(module)(config).to(DEVICE))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        weight.data.fill_(1.0) if name.endswith("norm.weight") else weight.data.normal_(std=0.02)
    model.tie_weights()
    return model


def with_adapter(model: Any) -> Any:
    lora = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False)


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def ids(shape: str, rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, SHAPES[shape]["vocab_size"], (rows, length), device=DEVICE)


def train(model: Any, shape: str) -> float:
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    for _ in range(3):  # the last counts
        given = ids(shape, BATCH, LENGTH)
        begin = now()
        model(input_ids=given, labels=given, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = now() - begin
    model.gradient_checkpointing_disable()
    return BATCH * LENGTH / seconds


@torch.inference_mode()
def decode(model: Any, shape: str, requests: int) -> float:
    model.eval()
    took = {}
    for tokens in (FEW, FEW, MORE):  # the first compiles what there is to compile
        given = ids(shape, requests, PROMPT)
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "pad_token_id": 0}
        begin = now()
        model.generate(input_ids=given, attention_mask=torch.ones_like(given), **settings)
        took[tokens] = now() - begin
    return requests * (MORE - FEW) / (took[MORE] - took[FEW])


def main() -> None:
    shape, names = sys.argv[1], sys.argv[2:]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    model = with_adapter(random_model(shape))
    for name in names:
        value = None
        try:
            value = train(model, shape) if name == "train" else decode(model, shape, int(name.split()[1]))
        except Exception:
            traceback.print_exc()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps({"measure": name, "value": value}), flush=True)


if __name__ == "__main__":
    main()
