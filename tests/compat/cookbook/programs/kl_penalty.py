"""Arithmetic with a penalty for leaving the base model, which no recipe's command line can ask for.

python kl_penalty.py LOG_DIRECTORY
"""

import asyncio
import sys

from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train

MODEL, RENDERER = "Qwen/Qwen3-4B-Instruct-2507", "qwen3_instruct"

sums = ArithmeticDatasetBuilder(
    batch_size=16, group_size=8, model_name_for_tokenizer=MODEL, renderer_name=RENDERER, n_batches=6,
    include_fewshot=True,
)  # fmt: skip
config = train.Config(
    model_name=MODEL, renderer_name=RENDERER, recipe_name="kl_penalty", log_path=sys.argv[1],
    dataset_builder=sums, learning_rate=2e-3, max_tokens=4, lora_rank=8, max_steps=5, eval_every=0,
    save_every=0, kl_penalty_coef=0.1, kl_reference_config=train.KLReferenceConfig(base_model=MODEL),
)  # fmt: skip
asyncio.run(train.main(config))
