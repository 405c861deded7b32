"""On-policy distillation of the student's most likely words: no chance, and still something to learn.

    python greedy_distillation.py LOG_DIRECTORY START

The recipe's own command line has a temperature and does not pass it on.
"""

import asyncio
import sys

from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDatasetBuilder,
    TeacherConfig,
)

STUDENT, TEACHER, RENDERER = "Qwen/Qwen3.5-4B", "Qwen/Qwen3-8B", "role_colon"

prompts = PromptOnlyDatasetBuilder(
    dataset_name="deepmath", groups_per_batch=8, group_size=1, model_name_for_tokenizer=STUDENT,
    renderer_name=RENDERER,
)  # fmt: skip
lesson = DistillationDatasetConfig(
    dataset_builder=prompts, teacher_config=TeacherConfig(base_model=TEACHER), groups_per_batch=8
)
config = train_on_policy.Config(
    recipe_name="greedy_distillation", model_name=STUDENT, renderer_name=RENDERER, dataset_configs=[lesson],
    log_path=sys.argv[1], load_checkpoint_path=sys.argv[2], temperature=0.0, max_tokens=4, lora_rank=8,
    learning_rate=1e-3, max_steps=4, eval_every=0, save_every=0,
)  # fmt: skip
asyncio.run(train_on_policy.main(config))
