"""llama.cpp through the wheel `xllamacpp`: greedy tokens and logprobs of a GGUF file. Knows nothing of us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import transformers

_CHILD = """
import json, sys
import xllamacpp
path, requests = sys.argv[1], json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 512, 1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
answers = [server.handle_completions(request) for request in requests]
print("ANSWERS" + json.dumps(answers), flush=True)
import os
os._exit(0)
"""


def complete(file: Path, *prompts: list[int] | str, count: int = 12, **settings: Any) -> list[Any]:
    """llama.cpp's answers to prompts, as its server gives them; in a process of its own, which may abort."""
    asked = {"n_predict": count, "temperature": 0, "return_tokens": True, "n_probs": 1, "cache_prompt": False}
    requests = [{"prompt": prompt, **asked, **settings} for prompt in prompts]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(file), json.dumps(requests)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert found, done.stderr[-2000:]
    return json.loads(found[0].removeprefix("ANSWERS"))


def drawn(answer: Any) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and their logprobs."""
    content = answer["choices"][0]["logprobs"]["content"]
    return [one["id"] for one in content], [one["logprob"] for one in content]


def text_of(answer: Any) -> str:
    return answer["choices"][0]["text"]


def merging_tokenizer(directory: Path, size: int = 320) -> Path:
    """Write a byte-level BPE tokenizer of `size` ids with merges and a ChatML template.

    Every token is a text of its own: llama.cpp reports no token that is a part of a character.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the quick brown fox jumps over the lazy dog, and then the other thing happened there"] * 4
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    ascii = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ", "ĉ"]
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=marks, initial_alphabet=ascii, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    saved = json.loads(tokenizer.to_str())
    vocab = saved["model"]["vocab"]
    vocab |= {f"word{i}": i for i in range(len(vocab), size)}
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=marks[0],
        eos_token=marks[2],
        additional_special_tokens=[marks[1]],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(directory)
    return directory
