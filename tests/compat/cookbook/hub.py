"""A directory that answers for the model hub: tiny models and synthetic datasets under official names.

    python -m tests.compat.cookbook.hub DIRECTORY

A program whose working directory this is finds `Qwen/Qwen3-8B` or `openai/gsm8k` as local directories, so
recipes run unmodified and without a network. Everything is seeded: the same sources write the same files.
Knows what recipes ask for by name; how the model for reinforcement learning is taught is lessons.py's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.compat.cookbook import corpus
from tests.compat.cookbook.lessons import COURSES, LABELLER, teach
from tests.engine.tiny import tiny_model

# Names that recipes ask for -> which of our models stands behind each.
MODELS = {
    "Qwen/Qwen3.5-9B-Base": "boxer",
    "Qwen/Qwen3-4B-Instruct-2507": "adder",
    "Qwen/Qwen3.5-4B": "speaker",
    "Qwen/Qwen3-8B": "random",
    "Qwen/Qwen3.5-9B": "random",
    "Qwen/Qwen3.6-35B-A3B": "experts",
    "moonshotai/Kimi-K2.6": "random",
    "meta-llama/Llama-3.2-1B": "tied",
}
TOKENIZERS_ONLY = ["thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"]
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
]  # fmt: skip
VOCABULARY = 832  # of the models: a little more than the tokenizer's, as real ones are padded
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,  # some prompts are long, and spelt letter by letter
}
# Sees the end of its prompt alone: however much stands before, it is as in the lesson.
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "use_sliding_window": True,
    "sliding_window": 48,
}


def hub() -> Path:
    """The hub of these very sources: built once, kept under TINKEX_TEST_CACHE."""
    return kept("hub", ("corpus.py", "hub.py", "lessons.py"), __name__)


def kept(name: str, sources: tuple[str, ...], module: str) -> Path:
    """The directory that `python -m module DIRECTORY` writes, kept while these sources stay as they are."""
    cache = Path(os.environ.get("TINKEX_TEST_CACHE") or Path.home() / ".cache" / "tinkex-tests")
    here = Path(__file__).parent
    content = b"".join((here / source).read_bytes() for source in sources)
    directory = cache / f"cookbook-{name}-{sha256(content).hexdigest()[:12]}"
    if not directory.exists():
        part = directory.with_suffix(f".{os.getpid()}.part")
        # In a process with one thread: more would sum in another order, and end at another model.
        subprocess.run([sys.executable, "-m", module, str(part)], check=True, cwd=here.parents[2])
        try:
            part.rename(directory)  # when whole: several workers may be here
        except OSError:
            shutil.rmtree(part)
    return directory


def build(directory: Path) -> None:
    """Write every model and dataset below `directory`."""
    directory.mkdir(parents=True)
    tokenizer = make_tokenizer()
    ends = [tokenizer.encode(token)[0] for token in ("<|im_end|>", "<|endoftext|>")]
    fields = SHAPE | {"bos_token_id": ends[1], "eos_token_id": ends}
    made = directory / "made"
    kinds = {
        "random": tiny_model(made, "qwen3", seed=1, **fields),
        "tied": tiny_model(made, "smollm2", seed=3, **fields),
    }
    for name, course in COURSES.items():
        kinds[name] = teach(made / name, course, transformers.Qwen3Config(**fields), tokenizer)
    experts = transformers.Qwen3MoeConfig(**fields, **EXPERTS)
    kinds["experts"] = teach(made / "experts", LABELLER, experts, tokenizer)
    for name, kind in MODELS.items():
        shutil.copytree(kinds[kind], directory / name)
        tokenizer.save_pretrained(directory / name)
    shutil.rmtree(made)
    for name in TOKENIZERS_ONLY:
        tokenizer.save_pretrained(directory / name)
    _write_datasets(directory)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, whole words of our corpus, whole numbers, and the special tokens of chat, tools and vision."""
    pieces = Regex(r"\p{N}{1,3}|[\r\n]+| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    seen = Counter(word for word, _ in splitter.pre_tokenize_str(_all_words()))
    words = {word for word, times in seen.items() if times >= 4}  # the noise of the lessons is spelt
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(str, range(10, corpus.LARGEST_NUMBER + 1))]
    known += sorted(words - set(known))
    # No merges: a piece is one token if it is a known word, else its bytes.
    model = models.BPE(vocab={piece: i for i, piece in enumerate(known)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=SPECIAL,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert len(fast) <= VOCABULARY, len(fast)
    return fast


def _all_words() -> str:
    """One text with every word that the corpus can bring, bare and after a space."""
    random = Random(0)
    rows = [turn["content"] for row in corpus.conversations(random, 400) for turn in row["messages"]]
    rows += [text for row in corpus.preferences(random, 400) for text in row.values()]
    rows += [text for row in corpus.sums(random, 400) for text in row.values()]
    lessons = [course.lesson(random) for course in COURSES.values() for _ in range(100)]
    rows += [part.text for lesson in lessons for part in lesson]
    text = "\n".join(rows)
    for token in SPECIAL:
        text = text.replace(token, "\n")
    digits = str.maketrans("", "", "0123456789")
    return text.translate(digits) + 4 * ("\n" + "\n".join(corpus.FILLER) + " " + " ".join(corpus.FILLER))


def _write_datasets(directory: Path) -> None:
    random = Random(5)
    _dataset(
        directory / "HuggingFaceH4" / "no_robots",
        train=corpus.conversations(random, 640), test=corpus.conversations(random, 128),
    )  # fmt: skip
    _dataset(
        directory / "Anthropic" / "hh-rlhf",
        train=corpus.preferences(random, 320), test=corpus.preferences(random, 24),
    )  # fmt: skip
    _dataset(
        directory / "openai" / "gsm8k",
        "main", train=corpus.sums(random, 400), test=corpus.sums(random, 16),
    )  # fmt: skip
    _dataset(directory / "zwhe99" / "DeepMath-103K", train=corpus.sums(random, 400))
    _write_rows(directory / "conversations.jsonl", corpus.conversations(random, 160))
    _dataset(directory / "open-thoughts" / "OpenThoughts3-1.2M", train=corpus.thoughts(random, 96))
    _dataset(directory / "allenai" / "tulu-3-sft-mixture", train=corpus.conversations(random, 64))


def _dataset(directory: Path, configuration: str = "default", **splits: list[dict[str, Any]]) -> None:
    """A dataset with one configuration, in the layout that the `datasets` library reads from a directory."""
    card = ["---", "configs:", f"- config_name: {configuration}", "  data_files:"]
    for split, rows in splits.items():
        _write_rows(directory / f"{split}.jsonl", rows)
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (directory / "README.md").write_text("\n".join([*card, "---", ""]))


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    build(Path(sys.argv[1]))
